"""Open jobs: what a transfer under way touches, who reports on it, and when it has ended.

A job is complete when every worker has reported it; any failure fails it; late and repeated reports are harmless.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvferry.core.engine_api import DeviceView
from kvferry.core.groups import Group
from kvferry.core.hits import PrefixHit
from kvferry.core.keys import Key
from kvferry.core.pool.pins import Pin
from kvferry.core.requests import GroupProgress, RequestState
from kvferry.core.transfers import Direction, Slots, StepPlan, TransferJob, TransferResult


@dataclass(slots=True)
class StorePart:
    """One request's share of a store job, in one group. A reset by match may disown it while the job goes on.

    `block_ids` has the slots' blocks one after the other; the last slot ends with the request's token `end_token`.
    `groups` are the request's, which are needed for as long as the job is open. `leaving`
    blocks are about to be reused; those copied `ahead` of a step are in use again and not held. `others` had the same
    blocks, and let more tiers have them. `followers` are requests whose tiers want blocks of it once they are ready.
    """

    request: RequestState
    groups: tuple[GroupProgress, ...]
    group: Group
    epoch: int
    slots: Slots
    block_ids: list[int]
    end_token: int
    leaving: bool = False
    ahead: bool = False
    others: Sequence[RequestState] = ()
    disowned: bool = False
    followers: list[tuple[RequestState, list[Key]]] = field(default_factory=list)


@dataclass(slots=True)
class OpenJob:
    """A job from the moment it is decided until its last worker has reported.

    A store has `parts`; a load has a `pin`, what it reads (`hit`), and its `request`, which is None once the request
    went away or was preempted. `corrupt` slots failed verification, and `only_corrupt` says that nothing else failed.
    `is_sent` once the job was part of a plan that the engine received. A load `is_abandoned` that was open when the
    scheduler recovered from an exception: it counts as failed, and its slots do not.
    """

    job: TransferJob
    opened_s: float
    slots: Slots
    parts: list[StorePart] = field(default_factory=list)
    request: RequestState | None = None
    pin: Pin | None = None
    hit: PrefixHit | None = None
    reported: set[int] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    corrupt: set[int] = field(default_factory=set)
    only_corrupt: bool = True
    num_bytes: int = 0
    seconds: float = 0.0
    is_sent: bool = False
    is_abandoned: bool = False

    @property
    def is_store(self) -> bool:
        """Whether bytes go to the host."""
        return self.job.direction is Direction.STORE


class JobTable:
    """The open jobs by number."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._open: dict[int, OpenJob] = {}
        self._ended: list[OpenJob] = []
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenJob]:
        return iter(self._open.values())

    def new_id(self) -> int:
        """A number that no job had before."""
        self._last_id += 1
        return self._last_id

    def open(self, job: OpenJob) -> None:
        """Remember a job until it ends."""
        self._open[job.job.job_id] = job

    def note_sent(self, plan: StepPlan) -> None:
        """Mark the jobs of a plan that is about to be returned to the engine."""
        for job in plan.jobs:
            self._open[job.job_id].is_sent = True

    def drop_unsent(self, last_sent: int | None) -> list[OpenJob]:
        """Remove and return the jobs that no worker touches: those that were never sent, or have ended.

        Jobs with a number above `last_sent` (None: no limit) were in a plan that the engine did not receive.
        """
        limit = self._last_id if last_sent is None else last_sent
        sent = {number: job for number, job in self._open.items() if job.is_sent and number <= limit}
        dropped = [*self._ended, *(job for number, job in self._open.items() if number not in sent)]
        self._ended, self._open = [], sent
        return dropped

    def report(self, result: TransferResult) -> None:
        """Take one worker's report. A job that has all of its reports is queued for `take_ended`."""
        job = self._open.get(result.job_id)
        if job is None or result.worker in job.reported or not 0 <= result.worker < self._num_workers:
            return
        job.reported.add(result.worker)
        job.num_bytes += result.num_bytes
        job.seconds = max(job.seconds, result.seconds)
        if result.error is not None:
            job.errors.append(result.error)
            job.corrupt.update(result.corrupt)
            job.only_corrupt &= bool(result.corrupt)
        if len(job.reported) == self._num_workers:
            self._ended.append(self._open.pop(result.job_id))

    def take_ended(self) -> Iterator[OpenJob]:
        """The jobs that have ended, in order. One stays queued until the caller asks for the next."""
        while self._ended:
            yield self._ended[0]
            del self._ended[0]

    def count_open(self, job_ids: Iterable[int]) -> int:
        """How many of these jobs have not ended."""
        return sum(job_id in self._open for job_id in job_ids)


class DeviceHolds:
    """Holds on device blocks by the part or job that they are for, so that an exception cannot leave one behind."""

    def __init__(self, device: DeviceView) -> None:
        self._device = device
        self._by_owner: dict[int, tuple[object, list[int]]] = {}
        self._orphans: list[list[int]] = []

    def hold(self, owner: object, block_ids: list[int]) -> None:
        """Hold device blocks for an owner that holds none yet. Thread: engine."""
        self._device.hold(block_ids)
        self._by_owner[id(owner)] = owner, block_ids

    def release(self, owner: object, *, reuse_first: bool = False) -> None:
        """Release all that an owner holds, if anything. Thread: engine."""
        held = self._by_owner.get(id(owner))
        if held is not None:
            self._device.release(held[1], reuse_first=reuse_first)
            del self._by_owner[id(owner)]

    def keep(self, owners: Iterable[object]) -> None:
        """Queue the blocks of all other owners for `release_orphans`. Any thread."""
        kept = {id(owner) for owner in owners}
        self._orphans += [block_ids for owner, (_, block_ids) in self._by_owner.items() if owner not in kept]
        self._by_owner = {owner: held for owner, held in self._by_owner.items() if owner in kept}

    def has_orphans(self) -> bool:
        """Whether blocks wait for `release_orphans`."""
        return bool(self._orphans)

    def release_orphans(self) -> None:
        """Release the queued blocks. A batch whose release raises stays queued. Thread: engine."""
        while self._orphans:
            self._device.release(self._orphans[-1])
            self._orphans.pop()
