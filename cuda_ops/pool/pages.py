"""File mappings and page advice through the C library.

Python's `mmap` duplicates the file descriptor for the life of the mapping, so that a pool of a thousand extents would
exceed the limit of open files; its `madvise` holds the interpreter lock.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import weakref
from collections.abc import Callable
from ctypes import c_int, c_int64, c_size_t, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE`, from Linux 5.14 on; Python has no constant for it."""
_SYNC = 4
"""`MS_SYNC`. Python has it only within `mmap.flush`, which holds the interpreter lock."""
_FAILURES = (-1, ctypes.c_void_p(-1).value)
"""Results of a call that failed: of an integer and of an address."""


def _raise_errno(result: Any, function: object, arguments: object) -> Any:
    """Raise `OSError` for a call that failed."""
    if result in _FAILURES:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _import(name: str, result: type[Any], *arguments: type[Any]) -> Callable[..., Any]:
    """Return a function of the C library that raises `OSError`."""
    function = ctypes.CFUNCTYPE(result, *arguments, use_errno=True)((name, ctypes.CDLL(None)))
    function.errcheck = _raise_errno
    return function


_mmap = _import("mmap", c_void_p, c_void_p, c_size_t, c_int, c_int, c_int, c_int64)
_munmap = _import("munmap", c_int, c_void_p, c_size_t)
_msync = _import("msync", c_int, c_void_p, c_size_t, c_int)
_madvise = _import("madvise", c_int, c_void_p, c_size_t, c_int)


def whole_pages(num_bytes: int) -> int:
    """Round bytes up to whole pages."""
    return -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


def map_file(file: int, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    """Map a part of an open file, shared, until its last view is gone. The file may be closed afterwards.

    Raises:
        OSError: mapping failed, or the file is shorter.
    """
    size = os.fstat(file).st_size
    if size < offset + num_bytes:
        raise OSError(errno.EINVAL, f"file has {size:,} bytes: cannot map up to {offset + num_bytes:,}")
    address = _mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, offset)
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    # Not at exit, when a thread may still be copying: the process's end unmaps it.
    weakref.finalize(memory, _munmap, address, num_bytes).atexit = False
    return np.ctypeslib.as_array(memory)


def advise(address: int, num_bytes: int, advice: int) -> None:
    """Call `madvise` on all pages that hold a byte of this range. Raises `OSError`."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    _madvise(start, address + num_bytes - start, advice)


def flush(memory: NDArray[np.uint8]) -> None:
    """Wait until the changed pages of a file mapping are on the disk, without the interpreter lock. Raises `OSError`.

    Requires: memory that starts on a page.
    """
    _msync(memory.ctypes.data, memory.nbytes, _SYNC)


def populate(address: int, num_bytes: int) -> None:
    """Allocate the page behind every byte, without changing any.

    Raises:
        OSError: with `EFAULT` where accessing the memory would be a bus error, as on a full file system.
    """
    advise(address, num_bytes, _POPULATE_WRITE)


@functools.cache
def can_populate() -> bool:
    """Return whether this kernel supports `populate`."""
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
