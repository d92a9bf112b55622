"""Copy kernel in Triton: one or a few programs that share a job's segments. Imported on first use."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvferry.core.transfers import Direction

PROGRAMS = {Direction.STORE: 1, Direction.LOAD: 3}
"""Programs per direction, each on a multiprocessor that computes nothing meanwhile.

Two programs fill the bus with stores, but the bus then delays everything else: loads beside them are half as fast. One
store program takes 0.6 to 0.8 of the bus. Loads need more bytes in flight because they wait for the host's memory.
Measured on an H200.
"""
ROWS = 16
"""Segments that a program copies at a time, so that small ones fill the bus too."""
CHUNK_BYTES = 4096
"""Bytes of a segment that a program copies at a time."""
WARPS = 16


# One binary per word size: specialization on arguments would compile another while jobs wait.
@triton.jit(do_not_specialize=["targets", "sources", "sizes", "count"])  # type: ignore[untyped-decorator]
def copy_segments(targets, sources, sizes, count, WORD_BYTES: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Copy segment i, of `sizes[i]` bytes, from `sources[i]` to `targets[i]`.

    The arrays are int64, given by address; every address and size is a multiple of the word.
    """
    if WORD_BYTES >= 8:
        word = tl.int64
    elif WORD_BYTES == 4:
        word = tl.int32
    else:
        word = tl.int8
    pointer = tl.pointer_type(word)
    table = tl.pointer_type(tl.int64)
    for first in range(tl.program_id(0) * ROWS, count, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        exists = row < count
        target = tl.load(targets.to(table) + row, mask=exists, other=0).to(pointer)[:, None]
        source = tl.load(sources.to(table) + row, mask=exists, other=0).to(pointer)[:, None]
        words = tl.load(sizes.to(table) + row, mask=exists, other=0) // min(WORD_BYTES, 8)
        ends = words[:, None]
        if WORD_BYTES == 16:
            # Two words per instruction, which requires that no pair straddles.
            target, source = tl.multiple_of(target, [16, 16]), tl.multiple_of(source, [16, 16])
            ends = tl.multiple_of(ends, [2, 2])
        for start in range(0, tl.max(words), CHUNK):
            at = (start + tl.arange(0, CHUNK))[None, :]
            inside = at < ends
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


def launch(
    targets: int, sources: int, sizes: int, count: int, word_bytes: int, direction: Direction, stream: int, device: int
) -> None:
    """Queue the kernel on a stream. `targets`, `sources` and `sizes` are device addresses of the arrays."""
    # This makes the device current, too.
    with torch.cuda.stream(torch.cuda.ExternalStream(stream, device)):  # type: ignore[no-untyped-call]
        run(targets, sources, sizes, count, word_bytes, direction)


def run(targets: int, sources: int, sizes: int, count: int, word_bytes: int, direction: Direction) -> None:
    """Queue the kernel on the current stream."""
    programs = min(PROGRAMS[direction], triton.cdiv(count, ROWS))
    chunk = CHUNK_BYTES // min(word_bytes, 8)
    copy_segments[(programs,)](
        targets, sources, sizes, count, WORD_BYTES=word_bytes, ROWS=ROWS, CHUNK=chunk, num_warps=WARPS
    )
