"""Copies by the device's DMA engines: one driver call per job, or one per segment with older drivers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.core.transfers import Direction
from kvferry.cuda_ops.driver import CudaDriver
from kvferry.cuda_ops.segments import Segments


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
    """A `Mover` for segments of any size.

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
