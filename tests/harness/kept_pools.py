"""A kept pool for tests: slots with known bytes, stored the way a copy engine stores them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvferry.core.transfers import SlotLabels
from kvferry.cuda_ops.copy.cpu_copy import CpuCopyEngine
from kvferry.cuda_ops.copy.layout import DeviceLayout
from kvferry.cuda_ops.persistent.format import PoolShape
from kvferry.cuda_ops.persistent.header_writer import HeaderWriter, recover_slots
from kvferry.cuda_ops.persistent.headers import SlotHeaders
from kvferry.cuda_ops.persistent.pool_file import KeptFile
from kvferry.cuda_ops.persistent.recovery import RecoveredSlots, read_slots
from kvferry.cuda_ops.persistent.sealing import CLOSE_S, KeptCopies
from kvferry.cuda_ops.pool.host_pool import HostPool
from tests.harness.waiting import wait_until

SHAPE = PoolShape(num_slots=12, slot_bytes=1000, num_ranks=1, extent_slots=4, max_slots=40)
FINGERPRINT = {"model": "m", "revision": "r", "layers": [1, 2]}


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big") + b"\0"


def bytes_of(number: int, length: int = SHAPE.slot_bytes) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, length, dtype=np.uint8)


def labels_of(file: KeptFile, numbers: list[int], slots: list[int], generation: int, length: int) -> SlotLabels:
    keys, count = [key_of(number) for number in numbers], len(slots)
    columns = (np.full(count, value) for value in (generation, file.min_epoch, length))
    return SlotLabels(np.array(slots), keys, *columns)


def map_pool(file: KeptFile, rank: int = 0) -> HostPool:
    shape = file.shape
    extent_bytes = shape.extent_slots * shape.row_bytes
    return HostPool(shape.num_slots, shape.slot_bytes, extent_bytes, backing=file, num_ranks=shape.num_ranks, rank=rank)


@dataclass
class Kept:
    """An attached pool. `found` is what was recovered when it was attached."""

    file: KeptFile
    pool: HostPool
    headers: SlotHeaders
    writer: HeaderWriter
    found: RecoveredSlots
    undo: ExitStack

    def copies(
        self,
        blocks: np.ndarray,
        on_finished: Callable[[], object] = lambda: None,
        *,
        close_s: float = CLOSE_S,
        **options: Any,
    ) -> KeptCopies:
        """A CPU engine that seals and verifies, and is closed with the pool."""
        engine = CpuCopyEngine(DeviceLayout.of_arrays([blocks]), self.pool, lambda: None, **options)
        copies = KeptCopies(engine, self.headers, on_finished, close_s=close_s)
        self.undo.callback(copies.close)
        return copies

    def label(self, numbers: list[int], slots: list[int], generation: int, length: int = 1000) -> SlotLabels:
        return labels_of(self.file, numbers, slots, generation, length)

    def store(self, numbers: list[int], slots: list[int], generation: int, length: int = 1000) -> None:
        labels = self.label(numbers, slots, generation, length)
        self.headers.begin(labels)
        for number, slot in zip(numbers, slots, strict=True):
            self.pool.slot(slot)[:length] = bytes_of(number, length)
        assert self.headers.seal(labels) == len(slots)

    def write_invalidations(self) -> None:
        """Wait until what was queued by now is written."""
        count = self.writer.num_invalidations()
        wait_until(lambda: self.writer.are_flushed(count), "invalidations are written", 30)

    def numbers(self) -> dict[int, int]:
        """What was recovered: slot to number."""
        return {
            int(slot): int.from_bytes(key[:-1], "big")
            for slot, key in zip(self.found.slots, self.found.keys, strict=True)
        }

    def good(self) -> dict[int, int]:
        """What was recovered and verifies, whose bytes have to be right."""
        bad = set(self.headers.verify(self.found.slots).tolist())
        good = {slot: number for slot, number in self.numbers().items() if slot not in bad}
        lengths = dict(zip(self.found.slots.tolist(), self.found.sizes.tolist(), strict=True))
        for slot, number in good.items():
            expected = bytes_of(number, lengths[slot])
            assert np.array_equal(self.pool.slot(slot)[: lengths[slot]], expected), "wrong bytes were verified"
        return good


@contextmanager
def attached(
    path: Path,
    shape: PoolShape = SHAPE,
    fingerprint: dict[str, object] | None = None,
    *,
    is_started: bool = True,
    recovers: bool = True,
) -> Iterator[Kept]:
    """A pool that is let go at the end, as if its process had died. What was invalidated is written then, unless the
    writer was never started. Unless it `recovers`, it is left as it was found, with nothing in `found`."""
    undo = ExitStack()
    file = KeptFile(path, shape, FINGERPRINT if fingerprint is None else fingerprint)
    try:
        pool = map_pool(file)
        writer = HeaderWriter(file)
        undo.callback(writer.close)
        found = recover_slots(file) if recovers else read_slots([file.headers(0)[:0]], file.shape, 0, 0)
        kept = Kept(file, pool, SlotHeaders(file, pool), writer, found, undo)
        if is_started:
            writer.start()
        yield kept
    finally:
        undo.close()
        file.close()
