"""Movers: queue the copies of a job on a stream, for the DMA engines or for a kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from kvferry.core.transfers import Direction
from kvferry.cuda_ops.copy.segments import Segments
from kvferry.cuda_ops.cuda.driver import CudaDriver


class Mover(Protocol):
    """Queues the copies of a job on a stream."""

    def move(self, direction: Direction, segments: Segments, stream: int) -> None:
        """Queue all copies of a job and return without waiting.

        Args:
            direction: store or load.
            segments: at least one segment; must stay unchanged until the stream has copied them.
            stream: handle of the stream.

        Raises:
            CudaError: some copies may be queued and others not.
        """

    def close(self) -> None:
        """Release device resources. Requires: none of its copies runs. Raises `CudaError`."""


class DmaMover:
    """A `Mover` for segments of any size: one driver call per job, or one per segment with older drivers.

    Batches need host memory that the device maps at the host's address: `is_reachable` returns whether it does. Single
    copies work for any memory.
    """

    def __init__(self, driver: CudaDriver, is_reachable: Callable[[], bool] = lambda: True) -> None:
        self._driver = driver
        self._is_reachable = is_reachable

    def move(self, direction: Direction, segments: Segments, stream: int) -> None:
        """See `Mover`."""
        device, host, sizes = segments
        targets, sources = (host, device) if direction is Direction.STORE else (device, host)
        if self._driver.has_batches and self._is_reachable():
            self._driver.copy_batch(targets, sources, sizes, stream)
            return
        for target, source, size in zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True):
            self._driver.copy(target, source, size, stream)

    def close(self) -> None:
        """Do nothing: no resources are held."""


TABLE_ROWS = 16_384
WORDS_BYTES = (16, 8, 4, 1)


LaunchCopy = Callable[[int, int, int, int, int, Direction, int], None]
"""Queues a kernel that copies segments: (targets, sources, sizes, count, word_bytes, direction, stream).

The first three are addresses of int64 arrays in device memory. Every address and size is a multiple of `word_bytes`.
"""


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
            self._launch(targets, sources, sizes_at, count, word_bytes, direction, stream)

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
    from kvferry.cuda_ops.cuda import triton_copy

    compiled: Callable[..., None] = triton_copy.launch

    def launch(
        targets: int, sources: int, sizes: int, count: int, word_bytes: int, direction: Direction, stream: int
    ) -> None:
        compiled(targets, sources, sizes, count, word_bytes, direction, stream, device)

    return launch
