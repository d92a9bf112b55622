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

import numpy as np
from numpy.typing import NDArray

_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE`, from Linux 5.14 on; Python has no constant for it."""
_SYNC = 4
"""`MS_SYNC`. Python has it only within `mmap.flush`, which holds the interpreter lock."""
_MAP_FAILED = ctypes.c_void_p(-1).value


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
    address = _mmap()(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, file, offset)
    if address == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    memory = (ctypes.c_ubyte * num_bytes).from_address(address)
    # Not at exit, when a thread may still be copying: the process's end unmaps it.
    weakref.finalize(memory, _munmap(), address, num_bytes).atexit = False
    return np.ctypeslib.as_array(memory)


def advise(address: int, num_bytes: int, advice: int) -> None:
    """Call `madvise` on all pages that hold a byte of this range. Raises `OSError`."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if _madvise()(start, address + num_bytes - start, advice) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def flush(memory: NDArray[np.uint8]) -> None:
    """Wait until the changed pages of a file mapping are on the disk, without the interpreter lock. Raises `OSError`.

    Requires: memory that starts on a page.
    """
    if _msync()(memory.ctypes.data, memory.nbytes, _SYNC) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


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


@functools.cache
def _mmap() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    function.restype = ctypes.c_void_p
    return function


@functools.cache
def _munmap() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).munmap
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    function.restype = ctypes.c_int
    return function


@functools.cache
def _msync() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).msync
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function


@functools.cache
def _madvise() -> ctypes._NamedFuncPointer:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    function.restype = ctypes.c_int
    return function
