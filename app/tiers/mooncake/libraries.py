"""Libraries of the system that the client of Mooncake Store is linked with."""

from __future__ import annotations

import ctypes

PACKAGES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""Names of libraries, and of the Debian packages that contain them."""


def missing_packages() -> list[str]:
    """Return the Debian packages of the libraries that cannot be loaded."""
    return [package for library, package in PACKAGES.items() if _is_missing(library)]


def _is_missing(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return True
    return False
