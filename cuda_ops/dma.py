"""Copies by the device's DMA engines: one driver call a job, or one a segment where the driver is older."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.core.transfers import Direction
from kvferry.cuda_ops.driver import CudaDriver
from kvferry.cuda_ops.segments import Segments


class Mover(Protocol):
    """Queues the copies of a job on a stream."""

    def move(self, direction: Direction, segments: Segments, stream: int) -> None:
        """Queue them all, and return without waiting. `segments`, of which there is at least one, stays as it is until
        the stream has done them. Raises `CudaError` when some may be queued and others are not."""

    def close(self) -> None:
        """Give back what it took of the device, on which nothing of it runs any more. Raises `CudaError`."""


class DmaMover:
    """A `Mover` of segments of any size. A batch is for host memory that the device has at the host's address, which
    `is_reachable` tells of; single copies go anywhere."""

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
        """Nothing was taken."""
