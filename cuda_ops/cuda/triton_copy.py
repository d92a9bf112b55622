"""Copy kernel in Triton: a few programs that share a job's segments. Imported on first use."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PROGRAMS = 16
"""Each occupies one multiprocessor, of more than a hundred; the rest computes."""
CHUNK_BYTES = 8192
"""Bytes in flight per program: for all programs together, bus bandwidth times round-trip time."""
WARPS = 8


# One binary per word size: specialization on arguments would compile another while jobs wait.
@triton.jit(do_not_specialize=["targets", "sources", "sizes", "count"])  # type: ignore[untyped-decorator]
def copy_segments(targets, sources, sizes, count, WORD_BYTES: tl.constexpr, CHUNK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
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
    for i in range(tl.program_id(0), count, tl.num_programs(0)):
        target = tl.load(targets.to(table) + i).to(pointer)
        source = tl.load(sources.to(table) + i).to(pointer)
        words = tl.load(sizes.to(table) + i) // min(WORD_BYTES, 8)
        if WORD_BYTES == 16:
            # Two words per instruction, which requires that no pair straddles.
            target, source, words = tl.multiple_of(target, 16), tl.multiple_of(source, 16), tl.multiple_of(words, 2)
        for start in range(0, words, CHUNK):
            at = start + tl.arange(0, CHUNK)
            inside = at < words
            tl.store(target + at, tl.load(source + at, mask=inside), mask=inside)


def launch(targets: int, sources: int, sizes: int, count: int, word_bytes: int, stream: int, device: int) -> None:
    """Queue the kernel on a stream. `targets`, `sources` and `sizes` are device addresses of the arrays."""
    other = torch.cuda.ExternalStream(stream, device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(other):
        run(targets, sources, sizes, count, word_bytes)


def run(targets: int, sources: int, sizes: int, count: int, word_bytes: int) -> None:
    """Queue the kernel on the current stream."""
    programs = min(PROGRAMS, count)
    copy_segments[(programs,)](
        targets, sources, sizes, count, WORD_BYTES=word_bytes, CHUNK=CHUNK_BYTES // min(word_bytes, 8), num_warps=WARPS
    )
