"""Copies by a GPU kernel, for segments too small for the DMA engines, which have a fixed cost per segment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvferry.core.transfers import Direction
from kvferry.cuda_ops.driver import CudaDriver
from kvferry.cuda_ops.segments import Segments

TABLE_ROWS = 16_384
WORDS_BYTES = (16, 8, 4, 1)


class LaunchCopy(Protocol):
    """Queues a kernel that copies segments, from arrays of int64 in device memory."""

    def __call__(self, targets: int, sources: int, sizes: int, count: int, word_bytes: int, stream: int) -> None:
        """Launch the kernel. Every address and size is a multiple of `word_bytes`."""


class KernelMover:
    """A `Mover` between device memory and registered host memory; other host memory crashes the device.

    Addresses and sizes are copied to the device first, into a table per stream. Later work of the stream may overwrite
    the table, because it is ordered after the kernel that reads it.
    """

    def __init__(self, driver: CudaDriver, launch: LaunchCopy, table_rows: int = TABLE_ROWS) -> None:
        self._driver = driver
        self._launch = launch
        self._table_rows = table_rows
        self._tables: dict[int, int] = {}

    def move(self, direction: Direction, segments: Segments, stream: int) -> None:
        """See `Mover`."""
        device, host, sizes = segments
        arrays = (host, device, sizes) if direction is Direction.STORE else (device, host, sizes)
        word_bytes = word_of(segments)
        if stream not in self._tables:
            self._tables[stream] = self._driver.allocate(3 * 8 * self._table_rows)
        targets, sources, sizes_at = (self._tables[stream] + 8 * self._table_rows * i for i in range(3))
        for start in range(0, len(sizes), self._table_rows):
            count = min(self._table_rows, len(sizes) - start)
            for column, array in zip((targets, sources, sizes_at), arrays, strict=True):
                self._driver.copy(column, array[start:].ctypes.data, 8 * count, stream)
            self._launch(targets, sources, sizes_at, count, word_bytes, stream)

    def close(self) -> None:
        """See `Mover`."""
        while self._tables:
            self._driver.free(self._tables.popitem()[1])


def word_of(segments: Segments) -> int:
    """Return the largest word size that divides every address and every size."""
    seen = 0
    for array in segments:
        seen |= int(np.bitwise_or.reduce(array))
    return next(word for word in WORDS_BYTES if seen % word == 0)


def triton_launch(device: int) -> LaunchCopy:
    """Return a launcher of the Triton kernel. Raises `ImportError` without Triton."""
    from kvferry.cuda_ops import triton_copy

    compiled: Callable[..., None] = triton_copy.launch

    def launch(targets: int, sources: int, sizes: int, count: int, word_bytes: int, stream: int) -> None:
        compiled(targets, sources, sizes, count, word_bytes, stream, device)

    return launch
