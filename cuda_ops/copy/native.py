"""Native copying of segments of host memory, a batch per call, without the interpreter lock.

Compiled once per process, when a copy engine first needs it. Blocks are written past the caches (non-temporal stores),
since they come from main memory and go to it; the C library does this for large copies only. Several segments are
copied in turns, and the next lines are prefetched across pages and segments, which hardware prefetchers cannot do:
small blocks would otherwise wait for memory latency.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.pool.native import compiled

Words = NDArray[np.int64]
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


@functools.cache
def segment_copier() -> Callable[[Addresses, Addresses, Addresses], None]:
    """Return a function of (targets, sources, sizes): int64 arrays of equal length, addresses and bytes. Any thread.

    Arguments are not checked: wrong addresses crash the process. Segments must not overlap.
    """
    from numba import njit, types

    stream_line, fetch, fence = _intrinsics()
    memcpy = ctypes.CDLL(None).memcpy
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    memcpy.restype = ctypes.c_void_p
    addresses = types.int64[::1]

    @njit(nogil=True)  # type: ignore[untyped-decorator]
    def copy_one(target: int, source: int, size: int) -> None:
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

    @njit([types.void(addresses, addresses, addresses)], nogil=True)  # type: ignore[untyped-decorator]
    def copy_segments(targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
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

    copier: Callable[[Addresses, Addresses, Addresses], None] = copy_segments
    return copier


def _intrinsics() -> tuple[Any, Any, Any]:
    """Return three instructions that NumPy and Numba lack."""
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
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

    return stream_line, fetch, fence


class WordCopies(NamedTuple):
    """Functions over mapped int64 words that run without the interpreter lock.

    A page fault on a file mapping can take milliseconds when the disk is busy; NumPy would hold the lock meanwhile.
    """

    scatter: Callable[[Words, Words, Words], None]
    """`scatter(words, places, values)`: `words[places[i]] = values[i]`."""
    gather_rows: Callable[[Words, Words, Words], None]
    """`gather_rows(rows, places, found)`: `found[i, :] = rows[places[i], :]`."""
    scatter_columns: Callable[[Words, Words, Words, Words], None]
    """`scatter_columns(rows, places, columns, values)`: `rows[places[i], c] = values[i, c]`, `columns` in order."""


@functools.cache
def word_copies() -> WordCopies:
    """Return the functions; compiled once per machine."""
    from numba import types

    words, rows = types.int64[::1], types.int64[:, ::1]
    given, given_rows = types.Array(types.int64, 1, "C", readonly=True), types.Array(types.int64, 2, "C", readonly=True)

    @compiled(types.void(words, given, given), nogil=True)
    def scatter(words: Words, places: Words, values: Words) -> None:
        for i in range(len(places)):
            words[places[i]] = values[i]

    @compiled(types.void(given_rows, given, rows), nogil=True)
    def gather_rows(rows: Words, places: Words, found: Words) -> None:
        for i in range(len(places)):
            for column in range(rows.shape[1]):
                found[i, column] = rows[places[i], column]

    @compiled(types.void(rows, given, given, given_rows), nogil=True)
    def scatter_columns(rows: Words, places: Words, columns: Words, values: Words) -> None:
        for i in range(len(places)):
            for column in columns:
                rows[places[i], column] = values[i, column]

    return WordCopies(scatter, gather_rows, scatter_columns)


Int64s = NDArray[np.int64]


@functools.cache
def run_planner() -> Callable[..., int]:
    """Return a function that appends the segments of one run to a buffer.

    Args of the function, all arrays int64:
        block_ids, slots, parts: the run's columns.
        regions: rows: address, stride, bytes of a block's piece, offset of the piece within the block.
        num_blocks, slot_blocks, block_bytes: blocks of the group, blocks per slot, bytes per block.
        extents: rows: first slot, address of that slot's bytes.
        num_slots, row_bytes: slots of the pool, bytes per row.
        out: rows: device address, host address, bytes.
        start: index of the first segment in `out`.
        merge: whether to merge adjacent segments, if the group has one region.

    Returns of the function:
        Index behind the last segment; -1, -2 or -3 for a block, slot or part out of range, with nothing written.
    """
    from numba import types

    column = types.Array(types.int64, 1, "C", readonly=True)
    table = types.int64[:, ::1]
    number = types.int64

    # The interpreter lock is held: reacquiring it in a computing engine takes longer than this function.
    arguments = [column] * 3 + [table] + [number] * 3 + [table] + [number] * 2 + [table, number, types.bool_]

    @compiled(number(*arguments))
    def plan_run(
        block_ids: Int64s,
        slots: Int64s,
        parts: Int64s,
        regions: Int64s,
        num_blocks: int,
        slot_blocks: int,
        block_bytes: int,
        extents: Int64s,
        num_slots: int,
        row_bytes: int,
        out: Int64s,
        start: int,
        merge: bool,
    ) -> int:
        wrong_blocks = wrong_slots = wrong_parts = 0
        for i in range(len(block_ids)):
            # Without branches, so that the loop is vectorized.
            wrong_blocks += (block_ids[i] < 0) | (block_ids[i] >= num_blocks)
            wrong_slots += (slots[i] < 0) | (slots[i] >= num_slots)
            wrong_parts += (parts[i] < 0) | (parts[i] >= slot_blocks)
        if wrong_blocks:
            return -1
        if wrong_slots:
            return -2
        if wrong_parts:
            return -3
        device_at, host_at, sizes = out[0], out[1], out[2]
        firsts, addresses = extents[0], extents[1]
        bases, strides, lengths, offsets = regions[0], regions[1], regions[2], regions[3]
        # All extents have as many slots as the first, except some added later.
        extent_slots = firsts[1] if len(firsts) > 1 else num_slots
        last_extent, end = -1, start
        for i in range(len(block_ids)):
            slot, extent = slots[i], 0
            if len(firsts) > 1:
                extent = min(slot // extent_slots, len(firsts) - 1)
                while slot < firsts[extent]:
                    extent -= 1
                while extent + 1 < len(firsts) and slot >= firsts[extent + 1]:
                    extent += 1
            host = addresses[extent] + (slot - firsts[extent]) * row_bytes + parts[i] * block_bytes
            if merge and len(bases) == 1 and extent == last_extent:
                device, size, last = bases[0] + block_ids[i] * strides[0], lengths[0], end - 1
                is_behind = device == device_at[last] + sizes[last] and host == host_at[last] + sizes[last]
                is_before = device + size == device_at[last] and host + size == host_at[last]
                if is_behind or is_before:
                    device_at[last], host_at[last] = min(device, device_at[last]), min(host, host_at[last])
                    sizes[last] += size
                    continue
            last_extent = extent
            for region in range(len(bases)):
                device_at[end] = bases[region] + block_ids[i] * strides[region]
                host_at[end] = host + offsets[region]
                sizes[end] = lengths[region]
                end += 1
        return end

    return plan_run
