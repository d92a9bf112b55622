"""Compiled copying of segments of host memory, a batch per call, without the interpreter lock.

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
from numba import njit, types
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


@njit(nogil=True)  # type: ignore[untyped-decorator]
def copy_one(target: int, source: int, size: int) -> None:
    """Copy one segment."""
    done = 0
    if size >= PAGE_BYTES:
        done = -target % LINE_BYTES
        memcpy(target, source, done)
        while done + LINE_BYTES <= size:
            fetch(source + done + AHEAD_ALONE_BYTES)
            stream_line(target + done, source + done)
            done += LINE_BYTES
    if done < size:
        memcpy(target + done, source + done, size - done)


@njit(nogil=True)  # type: ignore[untyped-decorator]
def copy_in_turns(to: Addresses, at: Addresses, next_to: Addresses, next_at: Addresses, size: int) -> None:
    """Copy `size` bytes of each segment, in whole turns, and prefetch the next segments at the end."""
    body = max(size - AHEAD_BYTES, 0)
    for page in range(0, size, PAGE_BYTES):
        end = page + PAGE_BYTES
        for i in range(AT_ONCE):
            # Prefetching also resolves the page's address early, which takes long for pages that are only written.
            fetch(to[i] + end if end < size else next_to[i])
            fetch(at[i] + end if end < size else next_at[i])
        for turn in range(page, min(end, body), TURN_BYTES):
            for i in range(AT_ONCE):
                for line in range(turn, turn + TURN_BYTES, LINE_BYTES):
                    fetch(at[i] + line + AHEAD_BYTES)
                    stream_line(to[i] + line, at[i] + line)
    for turn in range(body, size, TURN_BYTES):
        for i in range(AT_ONCE):
            for line in range(turn, turn + TURN_BYTES, LINE_BYTES):
                fetch(next_at[i] + line - body)
                stream_line(to[i] + line, at[i] + line)


@compiled(types.void(types.int64[::1], types.int64[::1], types.int64[::1]), nogil=True)
def copy_segments(targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
    """Copy segments between arrays of addresses and sizes in bytes, of equal length. Any thread.

    Arguments are not checked: wrong addresses crash the process. Segments must not overlap.
    """
    to, at = np.empty(AT_ONCE, np.int64), np.empty(AT_ONCE, np.int64)
    count, first = len(targets), 0
    while first + AT_ONCE <= count:
        shortest = sizes[first]
        for i in range(AT_ONCE):
            to[i], at[i] = targets[first + i], sources[first + i]
            head = min(-to[i] % LINE_BYTES, sizes[first + i])
            if head:
                memcpy(to[i], at[i], head)
                to[i], at[i] = to[i] + head, at[i] + head
            shortest = min(shortest, sizes[first + i] - head)
        common = shortest // TURN_BYTES * TURN_BYTES if shortest >= LEAST_BYTES else 0
        coming = first + AT_ONCE if first + 2 * AT_ONCE <= count else first
        copy_in_turns(to, at, targets[coming : coming + AT_ONCE], sources[coming : coming + AT_ONCE], common)
        for i in range(AT_ONCE):
            left = targets[first + i] + sizes[first + i] - to[i] - common
            copy_one(to[i] + common, at[i] + common, left)
        first += AT_ONCE
    for i in range(first, count):
        copy_one(targets[i], sources[i], sizes[i])
    fence()
