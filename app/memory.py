"""Memory allocation of the C library."""

from __future__ import annotations

import ctypes
import logging

_log = logging.getLogger(__name__)
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
LARGE_BYTES = 1 << 20


def return_large_allocations() -> None:
    """Have glibc return memory of large allocations to the system once they are freed.

    By default it raises the size from which it does so to that of the largest allocation freed, so that the memory of
    request bodies stays with the process.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        # Another C library.
        return
    if not (mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES) and mallopt(_M_TRIM_THRESHOLD, 8 * LARGE_BYTES)):
        _log.debug("mallopt refused a threshold of %d bytes", LARGE_BYTES)
