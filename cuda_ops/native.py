"""Copying a batch of segments of host memory in one native call that runs without the interpreter's lock.

Compiled once a process, when a copy engine first needs it. Blocks that have to come from and go to main memory anyway
are written past the caches, as the C library does for large copies only, and several pages are copied at a time, so
that small blocks keep the memory as busy as one large copy does.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.int64]

LINE_BYTES = 64
PAGE_BYTES = 4096
LONG_BYTES = 64 << 10
"""From this size on a segment alone keeps the memory busy."""
PAGES_AT_ONCE = 8


@functools.cache
def segment_copier() -> Callable[[Addresses, Addresses, Addresses], None]:
    """A function of (targets, sources, sizes): int64 arrays of one length, addresses and bytes. Any thread.

    Nothing is checked: wrong addresses end the process. Segments may not overlap.
    """
    from numba import njit, types

    stream_line, fence = _intrinsics()
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    memcpy.restype = ctypes.c_void_p
    addresses = types.int64[::1]

    @njit([types.void(addresses, addresses, addresses)], nogil=True)  # type: ignore[untyped-decorator]
    def copy_segments(targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        page_targets, page_sources = np.empty(PAGES_AT_ONCE, np.int64), np.empty(PAGES_AT_ONCE, np.int64)
        waiting = 0
        for i in range(len(targets)):
            target, source, size = targets[i], sources[i], sizes[i]
            if size < PAGE_BYTES:
                memcpy(target, source, size)
                continue
            done = -target % LINE_BYTES
            memcpy(target, source, done)
            while size < LONG_BYTES and done + PAGE_BYTES <= size:
                page_targets[waiting], page_sources[waiting] = target + done, source + done
                done += PAGE_BYTES
                waiting += 1
                if waiting == PAGES_AT_ONCE:
                    for at in range(0, PAGE_BYTES, 2 * LINE_BYTES):
                        for page in range(PAGES_AT_ONCE):
                            stream_line(page_targets[page] + at, page_sources[page] + at)
                            stream_line(page_targets[page] + at + LINE_BYTES, page_sources[page] + at + LINE_BYTES)
                    waiting = 0
            while done + LINE_BYTES <= size:
                stream_line(target + done, source + done)
                done += LINE_BYTES
            memcpy(target + done, source + done, size - done)
        for page in range(waiting):
            memcpy(page_targets[page], page_sources[page], PAGE_BYTES)
        fence()

    copier: Callable[[Addresses, Addresses, Addresses], None] = copy_segments
    return copier


def _intrinsics() -> tuple[Any, Any]:
    """Two instructions that NumPy and Numba have no name for."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    one = ir.Constant(ir.IntType(32), 1)
    line = ir.VectorType(ir.IntType(64), LINE_BYTES // 8)

    @intrinsic  # type: ignore[untyped-decorator]
    def stream_line(_typing: Any, _target: Any, _source: Any) -> Any:
        """Copy one line to an aligned address, past the caches."""

        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            target, source = (builder.inttoptr(address, line.as_pointer()) for address in args)
            store = builder.store(builder.load(source, align=1), target, align=LINE_BYTES)
            store.set_metadata("nontemporal", builder.module.add_metadata([one]))
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), generate

    @intrinsic  # type: ignore[untyped-decorator]
    def fence(_typing: Any) -> Any:
        """Have everything written by now, also past the caches, seen before whatever comes next."""

        def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return types.void(), generate

    return stream_line, fence
