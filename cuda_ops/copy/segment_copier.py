"""Compiled copying of segments of host memory, a batch per call, without the interpreter lock.

A call for each segment, such as `memmove`, would wait for the interpreter lock each time: beside a busy engine thread
that copies 0.02 GB/s of blocks of 16 KiB instead of 1.2 (bench/RESULTS.md).

Blocks are written past the caches (non-temporal stores), since they come from main memory and go to it; the C library
does this for large copies only. Several segments are copied in turns, and the next lines are prefetched across pages
and segments, which hardware prefetchers cannot do: small blocks would otherwise wait for memory latency.

Importing this module imports Numba and compiles the functions, or reads the stored code, which takes a tenth of a
second. The functions and instructions are globals, because Numba does not find stored code again if it refers to
objects that differ in each process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from kvferry.core.pool.native import compiled

Addresses = NDArray[np.int64]

LINE_BYTES = 64
TURN_BYTES = 2 * LINE_BYTES
"""Bytes copied of one segment before the next has its turn."""
LEAST_BYTES = 512
"""Smaller segments, and a single one below a page, are copied by the C library."""
PAGE_BYTES = 4096
AT_ONCE = 4
AHEAD_BYTES = 8 * LINE_BYTES
"""Distance between prefetching and copying while several segments take turns."""
AHEAD_ALONE_BYTES = 32 * LINE_BYTES

_ONE = ir.Constant(ir.IntType(32), 1)
_LINE = ir.VectorType(ir.IntType(64), LINE_BYTES // 8)


@intrinsic  # type: ignore[untyped-decorator]
def stream_line(_typing: Any, _target: Any, _source: Any) -> Any:
    """Copy one line to an aligned address, past the caches."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, source = (builder.inttoptr(address, _LINE.as_pointer()) for address in args)
        store = builder.store(builder.load(source, align=1), target, align=LINE_BYTES)
        store.set_metadata("nontemporal", builder.module.add_metadata([_ONE]))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def fetch(_typing: Any, _source: Any) -> Any:
    """Prefetch a line. Any address is allowed, also an unmapped one."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number, pointer = ir.IntType(32), ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [pointer, number, number, number])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # For reading, into all cache levels, as data.
        builder.call(prefetch, [builder.inttoptr(args[0], pointer), number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic  # type: ignore[untyped-decorator]
def fence(_typing: Any) -> Any:
    """Make all earlier writes, also those past the caches, visible before any later access."""

    def generate(context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic  # type: ignore[untyped-decorator]
def memcpy(_typing: Any, _target: Any, _source: Any, _size: Any) -> Any:
    """Copy bytes with the C library."""

    def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = ir.IntType(8).as_pointer()
        target, source = (builder.inttoptr(address, pointer) for address in args[:2])
        cgutils.raw_memcpy(builder, target, source, args[2], 1, align=1)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@compiled(types.void(types.int64[::1], types.int64[::1], types.int64[::1]), nogil=True)
def copy_segments(targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
    """Copy segments between arrays of addresses and sizes in bytes, of equal length. Any thread.

    The arrays are overwritten. Arguments are not checked: wrong addresses crash the process. Segments must not overlap.
    """
    count = len(targets)
    for first in range(0, count, AT_ONCE):
        end = min(first + AT_ONCE, count)
        common = 0
        if end - first == AT_ONCE:
            shortest = sizes[first]
            for i in range(first, end):
                head = min(-targets[i] & (LINE_BYTES - 1), sizes[i])
                memcpy(targets[i], sources[i], head)
                targets[i] += head
                sources[i] += head
                sizes[i] -= head
                shortest = min(shortest, sizes[i])
            if shortest >= LEAST_BYTES:
                common = shortest & -TURN_BYTES
        # The next segments are prefetched at the end of these.
        step = AT_ONCE if end + AT_ONCE <= count else 0
        for page in range(0, common, PAGE_BYTES):
            following = page + PAGE_BYTES
            for i in range(first, end):
                # Prefetching also resolves the page's address early, which takes long for pages that are only written.
                fetch(targets[i] + following if following < common else targets[i + step])
                fetch(sources[i] + following if following < common else sources[i + step])
            for turn in range(page, min(following, common), TURN_BYTES):
                for i in range(first, end):
                    for line in range(turn, turn + TURN_BYTES, LINE_BYTES):
                        coming = line + AHEAD_BYTES
                        fetch(sources[i] + coming if coming < common else sources[i + step] + coming - common)
                        stream_line(targets[i] + line, sources[i] + line)
        for i in range(first, end):
            target, source, size, done = targets[i] + common, sources[i] + common, sizes[i] - common, 0
            if size >= PAGE_BYTES:
                done = -target & (LINE_BYTES - 1)
                memcpy(target, source, done)
                while done + LINE_BYTES <= size:
                    fetch(source + done + AHEAD_ALONE_BYTES)
                    stream_line(target + done, source + done)
                    done += LINE_BYTES
            memcpy(target + done, source + done, size - done)
    fence()
