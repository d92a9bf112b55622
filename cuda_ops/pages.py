"""Advice to the kernel about pages, which Python's own calls give only while holding the interpreter's lock."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os

_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE`, from Linux 5.14 on; Python has no name for it."""


def advise(address: int, num_bytes: int, advice: int) -> None:
    """`madvise` on all pages that hold a byte of this range. Raises `OSError`."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if _madvise()(start, address + num_bytes - start, advice) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def populate(address: int, num_bytes: int) -> None:
    """Have a page behind every byte, without changing one. Raises `OSError`: `EFAULT` where using the memory would
    have been a bus error, for a file system is full."""
    advise(address, num_bytes, _POPULATE_WRITE)


@functools.cache
def can_populate() -> bool:
    """Whether this kernel has `populate`."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        view = (ctypes.c_char * mmap.PAGESIZE).from_buffer(page)
        try:
            populate(ctypes.addressof(view), mmap.PAGESIZE)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise
        finally:
            del view
    return True


@functools.cache
def _madvise() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
