"""Job queue of a threaded tier: splits jobs into batches of blocks for its threads, and combines their results.

Loads are served before look-ups, and these before stores, because requests wait for them; one thread serves no stores,
so that a look-up does not wait for large ones. The number of blocks that wait to be stored is bounded, and blocks
beyond it are dropped; those to be loaded have slots of the pool, which bounds them. All state is in memory under one
lock, held briefly, and acquired under the manager lock: under it no other is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.app.tiers.block_store import BlockResult, Outcome
from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.tiers.base import TierJob, TierResetResult, TierResult


class JobKind(IntEnum):
    """Kind of a job, in the order in which jobs are served."""

    LOAD = 0
    LOOK_UP = 1
    STORE = 2

    @property
    def text(self) -> str:
        """Name for operators."""
        return self.name.lower().replace("_", "-")


@dataclass(slots=True, eq=False)
class OpenJob:
    """A job without a result yet. A look-up is one piece of work; other jobs are done in batches of blocks.

    No thread begins to access the slots of a job that is `canceled`. One that is `copied` when it is canceled has a
    result, with no for every key, once its threads have ended.
    """

    kind: JobKind
    number: int
    keys: Sequence[Key]
    blocks: TierJob | None = None
    started_s: float = field(default_factory=time.monotonic)
    todo: deque[int] = field(default_factory=deque)
    num_left: int = 0
    ok: NDArray[np.bool_] = field(init=False)
    origins: list[RequestIdentity | None] = field(init=False)
    canceled: bool = False
    copied: bool = False
    dropped: set[Key] = field(default_factory=set)
    """Keys that were dropped since the job was submitted, or before it and not removed yet when it was.

    None of them is kept, found or loaded: what a call reads may be older than the drop, and end after the removal.
    """

    def __post_init__(self) -> None:
        self.ok = np.zeros(len(self.keys), dtype=np.bool_)
        self.origins = [None] * len(self.keys) if self.kind is JobKind.LOAD else []


Work = tuple[OpenJob, list[int]]
"""One piece of work: the blocks at these places of a job, or a whole look-up, whose only place is 0."""

COPY_S = 0.05
"""Longest wait for copies of parts of slots. One that takes longer is a page fault of a pool whose disk hangs."""
MIN_SHARE_BYTES = 1 << 20
"""Blocks of a job are not divided between idle threads below this size: a round trip would cost more than it saves."""


_SUCCESSFUL = {
    JobKind.LOAD: (Outcome.LOADED,),
    JobKind.LOOK_UP: (Outcome.PRESENT,),
    JobKind.STORE: (Outcome.STORED, Outcome.PRESENT),
}


@dataclass(slots=True, eq=False)
class Worker:
    """The work of a thread and when that began, and the guard that it holds while it accesses a slot."""

    guard: threading.Lock = field(default_factory=threading.Lock)
    work: Work | None = None
    since_s: float = 0.0


class Reset(NamedTuple):
    """A reset that is not done yet."""

    number: int
    match: RequestFilter | None
    asked_s: float


class Drop(NamedTuple):
    """Keys whose removal has not succeeded yet. Without a number there is no result."""

    number: int | None
    keys: Sequence[Key]


class JobQueue:
    """Jobs between the callers that submit and poll, and the threads that take and finish work."""

    def __init__(self, max_waiting_blocks: int, num_workers: int, batch_blocks: int, batch_bytes: int) -> None:
        """`max_waiting_blocks` bounds the blocks that wait to be stored; of `num_workers`, 2 or more, stores leave one.

        One piece of work has at most `batch_blocks` blocks of `batch_bytes` together, or one longer block.
        """
        self.workers = [Worker() for _ in range(num_workers)]
        self._batch_blocks = batch_blocks
        self._batch_bytes = batch_bytes
        self._max_waiting = max_waiting_blocks
        self._changed = threading.Condition()
        self._open: dict[int, OpenJob] = {}
        self._lanes: tuple[deque[OpenJob], ...] = tuple(deque() for _ in JobKind)
        self._num_waiting = [0] * len(JobKind)
        self._resets: deque[Reset] = deque()
        self._drops: list[Drop] = []
        self._dropped: dict[Key, Drop] = {}
        """The keys of open drops, and the latest drop of each."""
        self._closed = False
        self._results: list[TierResult | TierResetResult] = []

    @property
    def is_closed(self) -> bool:
        """Whether threads must stop."""
        return self._closed

    @property
    def next_reset(self) -> Reset | None:
        """The oldest reset that is not done. While there is one, no work is handed out and no job is accepted."""
        with self._changed:
            return self._resets[0] if self._resets else None

    def max_workers(self, kind: JobKind) -> int:
        """Return how many threads serve jobs of a kind at once."""
        return len(self.workers) - (kind is JobKind.STORE)

    def submit(self, job: OpenJob, *, is_shut: bool) -> int:
        """Open a job, or end it if the tier `is_shut`, and return how many blocks were accepted.

        The last ones are dropped: a block is of little use without those before it.
        """
        todo = range(len(job.keys) if job.blocks is not None else min(len(job.keys), 1))
        with self._changed:
            room = 0 if is_shut or self._resets or self._closed else len(todo)
            if job.kind is JobKind.STORE:
                room = min(room, max(self._max_waiting - self._num_waiting[JobKind.STORE], 0))
            job.todo.extend(todo[:room])
            job.num_left = num_taken = len(job.todo)
            if num_taken:
                if self._dropped:
                    job.dropped.update(filter(self._dropped.__contains__, job.keys))
                self._open[job.number] = job
                self._lanes[job.kind].append(job)
                self._num_waiting[job.kind] += num_taken
                # Only threads that wait for work wait now, as no reset is open.
                self._changed.notify(num_taken)
            else:
                self._end(job)
            return num_taken

    def take(self, worker: Worker, timeout_s: float) -> Work | None:
        """Wait for the next piece of work; it is the worker's until `finish`. None after `timeout_s`."""
        with self._changed:
            if worker.work is not None:
                # An exception kept the thread from finishing it.
                self.finish(worker, {})
            work = self._pop()
            if work is None and not self._closed:
                self._changed.wait(timeout_s)
                work = self._pop()
            worker.since_s, worker.work = time.monotonic(), work
            return work

    def finish(self, worker: Worker, results: Mapping[int, BlockResult]) -> bool:
        """Record the results of a worker's work; return True if it completes a job that a request may wait for.

        They are by place in the job, as is `PRESENT` of keys that were found. What is missing has failed.
        """
        with self._changed:
            if worker.work is None:
                raise RuntimeError("a worker without work finished")
            (job, places), worker.work = worker.work, None
            if self._resets:
                self._changed.notify_all()
            if job.canceled:
                if not job.copied or job in self._running_jobs():
                    return False
            else:
                for place, result in results.items():
                    job.ok[place] = result.outcome in _SUCCESSFUL[job.kind]
                    if job.kind is JobKind.LOAD:
                        job.origins[place] = result.origin
                job.num_left -= len(places)
                if job.num_left:
                    return False
                del self._open[job.number]
            self._end(job)
            return job.kind is not JobKind.STORE

    def cancel(self, number: int) -> bool:
        """Cancel a job if it is open; no thread accesses its slots any more.

        Returns False if one does, after `COPY_S`: the job has a result later.
        """
        with self._changed:
            jobs = {job for job in self._running_jobs() if job.number == number}
            job = self._open.pop(number, None)
            if job is not None:
                self._cancel(job)
        return not self._await_copies(jobs)

    def drop(self, number: int | None, keys: Sequence[Key]) -> None:
        """Open a drop: until it has ended, no job finds, loads or keeps these keys, nor do those that are open now."""
        drop = Drop(number, keys)
        with self._changed:
            self._drops.append(drop)
            self._dropped.update(dict.fromkeys(keys, drop))
            for job in (*self._open.values(), *self._running_jobs()):
                job.dropped.update(keys)

    def open_drops(self) -> list[tuple[Drop, bool]]:
        """Return the open drops, and whether a removal that begins now is the last: no store of their keys runs."""
        with self._changed:
            drops = list(self._drops)
            stores = [job.dropped for job in self._running_jobs() if job.kind is JobKind.STORE]
        return [(drop, all(dropped.isdisjoint(drop.keys) for dropped in stores)) for drop in drops]

    def end_drop(self, drop: Drop) -> None:
        """End a drop whose keys are removed."""
        with self._changed:
            self._drops.remove(drop)
            for key in drop.keys:
                if self._dropped.get(key) is drop:
                    del self._dropped[key]
            if drop.number is not None:
                self._results.append(TierResetResult(drop.number))

    def begin_reset(self, number: int, match: RequestFilter | None) -> None:
        """Accept nothing until the reset is done, and end all jobs: none of their keys is found, kept or loaded.

        Jobs with copies that take longer than `COPY_S` end with these.
        """
        with self._changed:
            self._resets.append(Reset(number, match, time.monotonic()))
            jobs = self._cancel_all()
        copied = self._await_copies(jobs)
        with self._changed:
            for job in jobs:
                if job not in copied:
                    self._end(job)

    def wait_idle(self, timeout_s: float) -> bool:
        """Wait until no thread has work; return False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: all(worker.work is None for worker in self.workers), timeout_s)

    def end_reset(self, dropped_blocks: int, dropped_bytes: int) -> None:
        """End the oldest reset with what was dropped; with the last one, work continues."""
        with self._changed:
            reset = self._resets.popleft()
            self._results.append(TierResetResult(reset.number, dropped_blocks, dropped_bytes))
            self._changed.notify_all()

    def results(self) -> list[TierResult | TierResetResult]:
        """Return the results since the last call."""
        with self._changed:
            results, self._results = self._results, []
            return results

    def close(self) -> None:
        """Cancel all jobs, and stop the threads; no thread accesses a slot any more."""
        with self._changed:
            self._closed = True
            self._cancel_all()
            self._changed.notify_all()
        for worker in self.workers:
            with worker.guard:
                continue

    def _running_jobs(self) -> list[OpenJob]:
        return [worker.work[0] for worker in self.workers if worker.work is not None]

    def _await_copies(self, jobs: Collection[OpenJob]) -> set[OpenJob]:
        """Wait for the copies of canceled jobs, `COPY_S` at most, and return the jobs that have not ended them."""
        deadline_s = time.monotonic() + COPY_S
        copied: set[OpenJob] = set()
        for worker in self.workers:
            work = worker.work
            if work is None or work[0] not in jobs:
                continue
            if worker.guard.acquire(timeout=max(deadline_s - time.monotonic(), 0.0)):
                worker.guard.release()
            else:
                copied.add(work[0])
        with self._changed:
            copied.intersection_update(self._running_jobs())
            for job in copied:
                job.copied = True
        return copied

    def _pop(self) -> Work | None:
        for kind, lane in zip(JobKind, self._lanes, strict=True):
            if sum(job.kind is kind for job in self._running_jobs()) >= self.max_workers(kind):
                continue
            while lane:
                job = lane[0]
                if job.todo:
                    places = self._pop_batch(job)
                    self._num_waiting[job.kind] -= len(places)
                    return job, places
                lane.popleft()
        return None

    def _pop_batch(self, job: OpenJob) -> list[int]:
        """Remove and return the next blocks of a job: this worker's share of what the idle workers divide."""
        places = [job.todo.popleft()]
        if job.blocks is None or self._batch_blocks == 1 or not job.todo:
            return places
        num_idle = sum(worker.work is None for worker in self.workers)
        share = min(-(-(len(job.todo) + 1) // num_idle), self._batch_blocks)
        num_bytes = job.blocks.num_bytes
        total = int(num_bytes[places[0]])
        while job.todo and len(places) < self._batch_blocks:
            total += int(num_bytes[job.todo[0]])
            if total > self._batch_bytes or (len(places) >= share and total > MIN_SHARE_BYTES):
                break
            places.append(job.todo.popleft())
        return places

    def _cancel_all(self) -> list[OpenJob]:
        jobs = list(self._open.values())
        self._open.clear()
        for job in jobs:
            self._cancel(job)
        return jobs

    def _cancel(self, job: OpenJob) -> None:
        job.canceled = True
        self._num_waiting[job.kind] -= len(job.todo)
        job.todo.clear()

    def _end(self, job: OpenJob) -> None:
        if job.canceled:
            job.ok[:] = False
        elif job.dropped:
            job.ok &= [key not in job.dropped for key in job.keys]
        num_bytes = 0 if job.blocks is None else int(job.blocks.num_bytes[job.ok].sum())
        seconds = time.monotonic() - job.started_s
        self._results.append(TierResult(job.number, job.ok, job.origins, num_bytes, seconds))
