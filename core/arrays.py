"""Arrays as the hot path wants them: zeros that start on a cache line, and the numbers from 0 on, made once."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_LINE_BYTES = 64
_KEPT = 1024

_COUNTING = np.arange(_KEPT)
_COUNTING.flags.writeable = False


def counting(count: int) -> NDArray[np.int64]:
    """0, 1, ..., count - 1, read-only."""
    return _COUNTING[:count] if count <= _KEPT else np.arange(count)


def zeros_on_lines(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Zeros of which the first starts a cache line; pages that are never touched cost no memory.

    Not for what is written at random places: there each new place may have two megabytes cleared first.
    """
    raw = np.zeros(count * dtype.itemsize + _LINE_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % _LINE_BYTES
    return raw[start : start + count * dtype.itemsize].view(dtype)


def touched_zeros(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Zeros whose memory is all there, for what is written at random places. To be made without any lock."""
    zeros = zeros_on_lines(count, dtype)
    zeros.view(np.uint8)[:] = 0
    return zeros
