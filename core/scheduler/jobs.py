"""Open transfer jobs: what each one touches, the reports of its workers, and the device blocks held for it.

A job is complete when every worker has reported; any failure fails it; late and repeated reports are ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvferry.core.engine_api import DeviceView
from kvferry.core.groups import Group
from kvferry.core.keys import Key
from kvferry.core.pool.pins import Pin
from kvferry.core.scheduler.lookup import PrefixHit
from kvferry.core.scheduler.requests import RequestState
from kvferry.core.transfers import Direction, Slots, TransferJob, TransferResult


class StoreCause(Enum):
    """Why device blocks are stored now.

    Eager mode stores blocks as they are `FILLED`. Lazy mode stores those that the device will reuse, those that the
    current step overwrites (`REUSED`), which are copied before its compute, and those that another request waits for.
    """

    FILLED = "filled"
    REUSED_SOON = "reused soon"
    REUSED = "reused"
    DEMANDED = "demanded"


@dataclass(slots=True)
class StorePart:
    """One request's slots of one group in a store job. A reset may disown the part while the job goes on.

    `block_ids` has the blocks of the slots one after another, which are held unless they are already reused; the last
    slot ends at the request's token `end_token`. `others` are requests with the same blocks whose policies allow more
    tiers. `followers` are requests whose tiers receive keys of the part once it is stored. If it `reorders`, its
    request is put in eviction order at its end. `dropped` has the slots whose blocks an operator deleted since then;
    those are not published.
    """

    request: RequestState
    group: Group
    epoch: int
    slots: Slots
    block_ids: list[int]
    end_token: int
    cause: StoreCause
    others: Sequence[RequestState] = ()
    disowned: bool = False
    reorders: bool = False
    dropped: set[int] = field(default_factory=set)
    followers: list[tuple[RequestState, list[Key]]] = field(default_factory=list)


@dataclass(slots=True)
class OpenJob:
    """A job from its decision until its last worker has reported.

    A store has `parts`. A load has a `pin`, the `hit` that it reads, and its `request`, which is None once the request
    has finished or was preempted. `corrupt` slots failed verification; `only_corrupt` is True if nothing else failed.
    One that was open when an exception was recovered from `is_disowned`: its end only frees what it holds.
    """

    job: TransferJob
    opened_s: float
    slots: Slots
    num_blocks: int
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
    is_disowned: bool = False

    @property
    def is_store(self) -> bool:
        """Whether the job copies from device to host."""
        return self.job.direction is Direction.STORE


class JobTable:
    """Open jobs by number, and the device blocks held for them and for parts that are in no job yet.

    Holds are stored by owner, so that an exception cannot leak one. `unowned` are batches of blocks without an owner,
    which the next engine call releases.
    """

    def __init__(self, num_workers: int, device: DeviceView) -> None:
        self.unowned: list[list[int]] = []
        self._device = device
        self._held: dict[int, tuple[object, list[int]]] = {}
        self._num_workers = num_workers
        self._open: dict[int, OpenJob] = {}
        self._ended: list[OpenJob] = []
        self._last_id = 0

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenJob]:
        return iter(self._open.values())

    def new_id(self) -> int:
        """Return a number that no job has had."""
        self._last_id += 1
        return self._last_id

    def open(self, job: OpenJob) -> None:
        """Add a job."""
        self._open[job.job.job_id] = job

    def abandon(self, last_sent: int) -> None:
        """Disown the jobs that workers have, and forget the others: those that have ended, or have a higher number.

        The blocks of open jobs and of their parts stay held, all others become `unowned`.
        """
        self._ended = []
        self._open = {number: job for number, job in self._open.items() if number <= last_sent}
        for job in self:
            job.is_disowned = True
        owners = {id(owner) for job in self for owner in (job, *job.parts)}
        self.unowned += [block_ids for owner, (_, block_ids) in self._held.items() if owner not in owners]
        self._held = {owner: held for owner, held in self._held.items() if owner in owners}

    def report(self, result: TransferResult) -> None:
        """Process one worker's report. A job with all of its reports is queued for `take_ended`."""
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
        """Yield the jobs that have ended, in order. Each stays queued until the caller requests the next."""
        while self._ended:
            yield self._ended[0]
            del self._ended[0]

    def count_open(self, job_ids: Iterable[int]) -> int:
        """Count those of these jobs that have not ended."""
        return sum(job_id in self._open for job_id in job_ids)

    def hold(self, owner: object, block_ids: list[int]) -> None:
        """Hold device blocks for a job or part without holds. Thread: engine."""
        self._device.hold(block_ids)
        self._held[id(owner)] = owner, block_ids

    def release(self, owner: object, *, reuse_first: bool = False) -> None:
        """Release the device blocks of a job or part, if it has any. Thread: engine."""
        held = self._held.get(id(owner))
        if held is not None:
            self._device.release(held[1], reuse_first=reuse_first)
            del self._held[id(owner)]

    def release_unowned(self) -> None:
        """Release the blocks without an owner. A batch whose release raises stays queued. Thread: engine."""
        while self.unowned:
            self._device.release(self.unowned[-1])
            self.unowned.pop()
