"""A toy engine's copies: every rank carries its own bytes, at its own pace, well or badly, and reports in the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvferry.core.groups import Group
from kvferry.core.transfers import Direction, TransferJob, TransferResult
from tests.harness.toy_device import ToyDevice


def blocks_of(job: TransferJob) -> list[int]:
    return [block_id for run in job.runs for block_id in run.block_ids.tolist()]


def slots_of(job: TransferJob) -> list[int]:
    return [slot for run in job.runs for slot in run.slots.tolist()]


@dataclass
class OpenCopy:
    """A job that some rank has not reported yet. `moves` are device block, slot and part of each block.

    One `ahead` of a step reads its blocks at once, or never.
    """

    job: TransferJob
    moves: list[tuple[int, int, int]]
    num_bytes: int
    missing: set[int]
    moved: set[int]
    ahead: bool = False

    @property
    def is_store(self) -> bool:
        return self.job.direction is Direction.STORE


class ToyCopies:
    """`host[rank][slot]` holds the values of a slot's blocks. What ranks reported is summed up, to compare it.

    A rank has memory for `len(host[rank])` slots, and whoever touches another one finds nothing there.
    """

    def __init__(self, device: ToyDevice, groups: tuple[Group, ...], num_slots: int, num_ranks: int) -> None:
        self._device = device
        self._groups = groups
        self._slot_blocks = max(group.slot_blocks for group in groups)
        self.host: list[list[list[int]]] = [[] for _ in range(num_ranks)]
        for rank in range(num_ranks):
            self.set_memory(rank, num_slots)
        self.num_ranks = num_ranks
        self.open: dict[int, OpenCopy] = {}

    def set_memory(self, rank: int, num_slots: int) -> None:
        """A rank adds memory at the end, or frees some."""
        rows = self.host[rank]
        del rows[num_slots:]
        rows += [[self._device.junk.next()] * self._slot_blocks for _ in range(num_slots - len(rows))]

    def submit_ahead(self, job: TransferJob, ranks: Iterable[int]) -> None:
        """Take a job that these ranks copy at once, and the others never."""
        copy = self.submit(job)
        for rank in ranks:
            self.move(copy, rank)
        copy.ahead = True

    def submit(self, job: TransferJob) -> OpenCopy:
        """Take a job; every rank may copy it from now on."""
        moves: list[tuple[int, int, int]] = []
        for run in job.runs:
            moves += zip(run.block_ids.tolist(), run.slots.tolist(), run.numbers.tolist(), strict=True)
        num_bytes = sum(len(run) * self._groups[run.group].spec.block_bytes for run in job.runs)
        self._check_alone(job, moves)
        copy = self.open[job.job_id] = OpenCopy(job, moves, num_bytes, set(range(self.num_ranks)), set())
        return copy

    def _check_alone(self, job: TransferJob, moves: list[tuple[int, int, int]]) -> None:
        """What one job writes no other touches, and a place is named once."""
        blocks = {block_id for block_id, _, _ in moves}
        slots = {slot for _, slot, _ in moves}
        places = {(slot, part) for _, slot, part in moves}
        assert len(blocks) == len(places) == len(moves), "a job names a place twice"
        assert job.job_id not in self.open, "a job number came twice"
        for other in self.open.values():
            both_store = other.is_store and job.direction is Direction.STORE
            if not both_store and not other.ahead:
                assert blocks.isdisjoint(block_id for block_id, _, _ in other.moves), "a block is loaded and copied"
            if other.is_store or job.direction is Direction.STORE:
                assert slots.isdisjoint(slot for _, slot, _ in other.moves), "a slot is stored and copied at once"

    def move(self, copy: OpenCopy, rank: int) -> None:
        """Copy a rank's bytes now. It may report much later."""
        values, host = self._device.values[rank], self.host[rank]
        if copy.is_store:
            for block_id, slot, part in copy.moves:
                host[slot][part] = values[block_id]
        else:
            for block_id, slot, part in copy.moves:
                values[block_id] = host[slot][part]
        copy.moved.add(rank)

    def report(self, copy: OpenCopy, rank: int, error: str | None, seconds: float) -> TransferResult:
        """A rank is done. After an error nothing can be relied on in what it wrote."""
        if copy.ahead:
            error = error if rank in copy.moved else error or "overtaken"
        else:
            self._check_held(copy)
            if error is None and rank not in copy.moved:
                self._check_held(copy)
                self.move(copy, rank)
        if error is not None:
            self._spoil(copy, rank)
        copy.missing.discard(rank)
        if not copy.missing:
            del self.open[copy.job.job_id]
        return TransferResult(copy.job.job_id, rank, error, copy.num_bytes, seconds)

    def _spoil(self, copy: OpenCopy, rank: int) -> None:
        junk = self._device.junk
        for block_id, slot, part in copy.moves:
            if copy.is_store:
                self.host[rank][slot][part] = junk.next()
            else:
                self._device.values[rank][block_id] = junk.next()

    def _check_held(self, copy: OpenCopy) -> None:
        held = self._device.held
        assert all(held[block_id] > 0 for block_id, _, _ in copy.moves), "a block was freed under a copy"
