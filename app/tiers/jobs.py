"""The jobs that a threaded tier has open: taken apart into blocks for its threads, and put together into results.

Loads go before look-ups and those before stores, since a request waits for them. How many blocks wait of each kind is
bounded; what comes beyond is dropped. Everything here is memory under one lock, which nobody holds for long.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key
from kvferry.core.origins import Origin, OriginMatch
from kvferry.core.tiers import TierJob, TierResetResult, TierResult


class JobKind(IntEnum):
    """What a job does, in the order in which jobs are served."""

    LOAD = 0
    LOOK_UP = 1
    STORE = 2


@dataclass(slots=True, eq=False)
class OpenJob:
    """A job until its result is there. Of a look-up all keys are one piece of work; else each block is one.

    Once `canceled`, no thread begins to touch its slots any more.
    """

    kind: JobKind
    number: int
    keys: Sequence[Key]
    ok: NDArray[np.bool_]
    blocks: TierJob | None = None
    started_s: float = 0.0
    todo: deque[int] = field(default_factory=deque)
    num_left: int = 0
    origins: list[Origin | None] = field(default_factory=list)
    num_bytes: int = 0
    canceled: bool = False


class Work(NamedTuple):
    """One piece of work: the block at a place in its job, or a whole look-up."""

    job: OpenJob
    place: int


class Reset(NamedTuple):
    """A reset that was asked for and is not done."""

    number: int
    match: OriginMatch | None
    asked_s: float


class JobQueue:
    """Jobs between those who submit and poll, and the threads that take work and finish it."""

    def __init__(self, max_waiting_blocks: int, clock: Callable[[], float]) -> None:
        """`max_waiting_blocks` bounds each kind of job."""
        self._max_waiting = max_waiting_blocks
        self._clock = clock
        self._changed = threading.Condition(threading.Lock())
        self._open: dict[int, OpenJob] = {}
        self._lanes: tuple[deque[OpenJob], ...] = tuple(deque() for _ in JobKind)
        self._num_waiting = [0] * len(JobKind)
        self._running: dict[object, Work] = {}
        self._resets: deque[Reset] = deque()
        self._closed = False
        self._results: deque[TierResult | TierResetResult] = deque()

    @property
    def is_closed(self) -> bool:
        """Whether threads are to stop."""
        return self._closed

    @property
    def next_reset(self) -> Reset | None:
        """The oldest reset that is not done. While there is one, no work is given out and none is taken on."""
        with self._changed:
            return self._resets[0] if self._resets else None

    def submit(self, job: OpenJob, todo: Sequence[int]) -> int:
        """Open a job of which `todo` is still to be done, and say how much of that found no room to wait.

        What finds none is at the end: a block is of little use without the ones before it.
        """
        with self._changed:
            shut = bool(self._resets) or self._closed
            room = 0 if shut else max(self._max_waiting - self._num_waiting[job.kind], 0)
            job.started_s = self._clock()
            job.todo.extend(todo[:room])
            job.num_left = num_taken = len(job.todo)
            if job.kind is JobKind.LOAD:
                job.origins = [None] * len(job.keys)
            if num_taken:
                self._open[job.number] = job
                self._lanes[job.kind].append(job)
                self._num_waiting[job.kind] += num_taken
                self._changed.notify_all()
            else:
                self._end(job)
            return len(todo) - num_taken

    def take(self, thread: object, timeout_s: float) -> Work | None:
        """The next piece of work for a thread, waiting for it at most so long: until `finish` or `give_up`."""
        with self._changed:
            work = self._pop()
            if work is None and not self._closed:
                self._changed.wait(timeout_s)
                work = self._pop()
            if work is not None:
                self._running[thread] = work
            return work

    def finish(self, thread: object, ok: Sequence[bool], num_bytes: int = 0, origin: Origin | None = None) -> bool:
        """Take what became of a thread's work; True if that was the last of a job that a request may wait for.

        `ok` has one answer, or that of every key of a look-up.
        """
        with self._changed:
            return self._finish(thread, ok, num_bytes, origin)

    def give_up(self, thread: object) -> Work | None:
        """End the work that a dead thread took and did not finish, if any, as failed; returns that work."""
        with self._changed:
            work = self._running.get(thread)
            if work is not None:
                num_answers = len(work.job.keys) if work.job.kind is JobKind.LOOK_UP else 1
                self._finish(thread, [False] * num_answers, 0, None)
            return work

    def cancel(self, number: int) -> bool:
        """Mark a job so that no thread begins to touch its slots any more; False if it is not open."""
        with self._changed:
            job = self._open.pop(number, None)
            if job is not None:
                self._cancel(job)
            return job is not None

    def begin_reset(self, number: int, match: OriginMatch | None) -> list[OpenJob]:
        """Shut until the reset is done, and cancel every job; `fail` ends them once nothing copies any more."""
        with self._changed:
            self._resets.append(Reset(number, match, self._clock()))
            return self._cancel_all()

    def fail(self, jobs: Sequence[OpenJob]) -> None:
        """End canceled jobs: none of their keys is found, kept or loaded."""
        with self._changed:
            for job in jobs:
                job.ok[:] = False
                self._end(job)

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether no thread is at work any more, waiting for it at most so long."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, timeout_s)

    def end_reset(self, result: TierResetResult) -> None:
        """The oldest reset is done; with the last of them work goes on."""
        with self._changed:
            self._resets.popleft()
            self._results.append(result)
            self._changed.notify_all()

    def results(self) -> list[TierResult | TierResetResult]:
        """The results since the last call."""
        results: list[TierResult | TierResetResult] = []
        while self._results:
            results.append(self._results.popleft())
        return results

    def close(self) -> None:
        """Cancel every job, and have the threads stop."""
        with self._changed:
            self._closed = True
            self._cancel_all()
            self._changed.notify_all()

    def _finish(self, thread: object, ok: Sequence[bool], num_bytes: int, origin: Origin | None) -> bool:
        job, place = self._running.pop(thread)
        if self._resets:
            self._changed.notify_all()
        if job.canceled:
            return False
        if job.kind is JobKind.LOOK_UP:
            job.ok[:] = ok
        else:
            job.ok[place] = ok[0]
            job.num_bytes += num_bytes
        if job.kind is JobKind.LOAD:
            job.origins[place] = origin
        job.num_left -= 1
        if job.num_left:
            return False
        del self._open[job.number]
        self._end(job)
        return job.kind is not JobKind.STORE

    def _pop(self) -> Work | None:
        for lane in self._lanes:
            while lane:
                job = lane[0]
                if job.todo:
                    self._num_waiting[job.kind] -= 1
                    return Work(job, job.todo.popleft())
                lane.popleft()
        return None

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
        seconds = self._clock() - job.started_s
        self._results.append(TierResult(job.number, job.ok, job.origins, job.num_bytes, seconds))
