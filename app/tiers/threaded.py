"""Tier that runs a block store on threads, so that a call that blocks delays no other thread.

Each thread moves one block at a time through a buffer of its own. It copies between buffer and slot under a guard, in
small pieces; calls of the store use the buffer alone and may hang. Canceling a job acquires every guard once, after
which no thread accesses the job's slots.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kvferry.app.logs import RateLimitedLogger
from kvferry.app.settings.tiers import ThreadedSettings
from kvferry.app.tiers.block_store import BlockStore, Interrupted, Outcome
from kvferry.app.tiers.job_queue import JobKind, JobQueue, OpenJob, Worker
from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.policy import Level
from kvferry.core.tiers.base import TierContext, TierCounts, TierJob, TierRequest, TierResetResult, TierResult

_log = logging.getLogger(__name__)

TEND_S = 1.0
_COPY_BYTES = 256 << 10
"""Bytes of a slot copied under a guard, in some 50 microseconds: `cancel` waits for one such piece at most."""
_IDLE_S = 5.0


_SUCCESSFUL = (Outcome.STORED, Outcome.PRESENT, Outcome.LOADED)


class ThreadedTier:
    """A `Tier` of a `BlockStore`, which it owns."""

    nonblocking: ClassVar[bool] = True
    """The engine thread calls it directly. A subclass whose own methods may block sets this to False."""

    def __init__(self, store: BlockStore, settings: ThreadedSettings, context: TierContext) -> None:
        self._store = store
        self._settings = settings
        self._context = context
        self._queue = JobQueue(settings.queue_blocks, settings.threads)
        self._counting = threading.Lock()
        self._counts = dict.fromkeys(Outcome, 0)
        self._bytes = dict.fromkeys(Outcome, 0)
        self._reset_asked = threading.Event()
        self._seldom = RateLimitedLogger(_log)
        self._starting = threading.Lock()
        self._workers = self._queue.workers
        self._housekeeper = Worker()
        self._start_threads(again=False)

    @property
    def timeout_s(self) -> float:
        """See `Tier`."""
        return self._settings.timeout_s

    # --- jobs ---------------------------------------------------------------------------------------------------

    def on_new_request(self, request: TierRequest) -> Level:
        """See `Tier`: the level of the settings, for every request."""
        return self._settings.level

    def on_request_finished(self, request_id: str) -> None:
        """Do nothing: the tier has no state of requests."""

    def look_up(self, number: int, keys: Sequence[Key]) -> None:
        """See `Tier`."""
        found = [False] * len(keys) if self._is_shut() else self._store.find_in_memory(keys)
        ok = np.array([False] * len(keys) if found is None else found, dtype=np.bool_)
        self._queue.submit(OpenJob(JobKind.LOOK_UP, number, keys, ok), [0] if found is None else [])

    def store(self, job: TierJob) -> None:
        """See `Tier`. Drops blocks while all threads hang or the store is not writable."""
        found = None if self._is_shut() else self._store.find_in_memory(job.keys)
        ok = np.array([False] * len(job) if found is None else found, dtype=np.bool_)
        wanted = np.flatnonzero(~ok).tolist()
        todo = [] if self._is_shut() or not self._store.is_writable() else wanted
        num_dropped = self._queue.submit(OpenJob(JobKind.STORE, job.number, job.keys, ok, job), todo)
        self._count(Outcome.PRESENT, len(job) - len(wanted))
        self._count(Outcome.DROPPED, len(wanted) - len(todo) + num_dropped)

    def load(self, job: TierJob) -> None:
        """See `Tier`."""
        todo = [] if self._is_shut() else list(range(len(job)))
        ok = np.zeros(len(job), dtype=np.bool_)
        num_refused = self._queue.submit(OpenJob(JobKind.LOAD, job.number, job.keys, ok, job), todo)
        self._count(Outcome.FAILED, len(job) - len(todo) + num_refused)

    def cancel(self, number: int) -> None:
        """See `Tier`."""
        self._queue.cancel(number)

    def drop(self, keys: Sequence[Key]) -> None:
        """See `Tier`."""
        self._store.drop(keys)

    def reset(self, number: int, match: RequestFilter | None) -> None:
        """See `Tier`. Nothing is accepted until the store has carried it out, with no other call running."""
        self._queue.begin_reset(number, match)
        self._reset_asked.set()

    def poll(self) -> Sequence[TierResult | TierResetResult]:
        """See `Tier`."""
        if not self._queue.is_closed:
            self._start_threads(again=True)
        return self._queue.results()

    # --- what operators see -------------------------------------------------------------------------------------

    def health(self) -> Sequence[str]:
        """See `Tier`."""
        reasons: list[str] = []
        num_dead = sum(not worker.is_alive() for worker in (*self._workers, self._housekeeper))
        if num_dead:
            reasons.append(f"{num_dead} of its threads do not run")
        now_s = time.monotonic()
        hung_s = [self._hung_s(worker, now_s) for worker in self._workers]
        if any(hung_s):
            reasons.append(
                f"{sum(map(bool, hung_s))} of {len(hung_s)} threads have waited {max(hung_s):.0f} s for an answer"
            )
        reset = self._queue.next_reset
        if reset is not None and now_s - reset.asked_s > self.timeout_s:
            reasons.append(f"a reset has been under way for {now_s - reset.asked_s:.0f} s, and nothing is served")
        return reasons + list(self._store.health())

    def counts(self) -> TierCounts:
        """See `Tier`."""
        size = self._store.size()
        with self._counting:
            return replace(
                size,
                stored_bytes=self._bytes[Outcome.STORED],
                loaded_bytes=self._bytes[Outcome.LOADED],
                **{outcome.value: count for outcome, count in self._counts.items()},
            )

    def close(self, timeout_s: float) -> None:
        """See `Tier`. A thread that hangs is abandoned, and the store is not closed then."""
        self._queue.close()
        self._reset_asked.set()
        deadline_s = time.monotonic() + timeout_s
        threads = [worker.thread for worker in (*self._workers, self._housekeeper) if worker.thread is not None]
        for thread in threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        num_alive = sum(thread.is_alive() for thread in threads)
        if num_alive:
            _log.warning("tier %s: threads that did not end at shutdown: %d", self._context.name, num_alive)
        else:
            self._store.close()

    # --- the threads --------------------------------------------------------------------------------------------

    def _start_threads(self, again: bool) -> None:
        """Start the threads that do not run, and fail the work of dead ones."""
        if not self._starting.acquire(blocking=False):
            return
        try:
            for worker in (*self._workers, self._housekeeper):
                if worker.is_alive():
                    continue
                work = self._queue.give_up(worker)
                if work is not None and work[0].kind is not JobKind.LOOK_UP:
                    self._count(Outcome.FAILED, 1)
                worker.thread = threading.Thread(
                    target=self._run_housekeeping if worker is self._housekeeper else self._serve,
                    args=(worker, again),
                    name=f"kvferry-tier-{self._context.name}",
                    daemon=True,
                )
                worker.thread.start()
        finally:
            self._starting.release()

    def _serve(self, worker: Worker, again: bool) -> None:
        """Carry out one piece of work after another."""
        self._log_restart(again)
        stage = np.empty(self._context.slot_bytes, dtype=np.uint8)
        while not self._queue.is_closed:
            work = self._queue.take(worker, _IDLE_S)
            if work is None:
                continue
            job, place = work
            origin, found = None, [False] * len(job.keys)
            outcome: Outcome | None = Outcome.FAILED
            try:
                if job.blocks is None:
                    found = self._find(job.keys)
                else:
                    outcome, origin = self._move(job, job.blocks, place, worker.guard, stage)
            except Exception as error:  # noqa: BLE001 - this block failed, the tier continues
                self._log_error(f"a {job.kind.name.lower().replace('_', '-')} failed", error)
            if job.blocks is None:
                ended = self._queue.finish(worker, found)
            else:
                num_bytes = int(job.blocks.num_bytes[place]) if outcome in _SUCCESSFUL else 0
                if outcome is not None:
                    self._count(outcome, 1, num_bytes)
                ended = self._queue.finish(worker, [outcome in _SUCCESSFUL], num_bytes, origin)
            if ended:
                self._context.on_finished()

    def _find(self, keys: Sequence[Key]) -> list[bool]:
        found = list(self._store.find(keys))
        if len(found) != len(keys):
            raise ValueError(f"{len(found)} answers for {len(keys)} keys")
        return found

    def _move(
        self, job: OpenJob, blocks: TierJob, place: int, guard: threading.Lock, stage: NDArray[np.uint8]
    ) -> tuple[Outcome | None, RequestIdentity | None]:
        """Store or load one block; return its outcome, None if the job was canceled, and the origin of a loaded one."""
        num_bytes = int(blocks.num_bytes[place])
        if not 0 < num_bytes <= len(stage):
            raise ValueError(f"a block of {num_bytes} bytes, where a slot has {len(stage)}")
        staged = stage[:num_bytes]
        views = self._context.slots.views(int(blocks.slots[place]), num_bytes)
        if job.kind is JobKind.STORE:
            if not _copy(job, guard, views, staged, to_slot=False):
                return None, None
            return self._store.put(job.keys[place], staged.data, blocks.origins[place]), None
        outcome, origin = self._store.get(job.keys[place], staged.data)
        if outcome is Outcome.LOADED and not _copy(job, guard, views, staged, to_slot=True):
            return None, None
        return outcome, origin

    def _run_housekeeping(self, worker: Worker, again: bool) -> None:
        """Run the store's housekeeping every second, and resets when requested."""
        self._log_restart(again)
        while not self._queue.is_closed:
            for what, chore in (("housekeeping", self._tend), ("a reset", self._do_resets)):
                try:
                    chore()
                except Interrupted:
                    continue
                except Exception as error:  # noqa: BLE001 - tried again; the store's health has the reason
                    self._log_error(f"{what} failed and is tried again", error)
            self._reset_asked.wait(TEND_S)
            self._reset_asked.clear()

    def _tend(self) -> None:
        self._store.maintain(lambda: self._queue.is_closed or self._queue.next_reset is not None)

    def _do_resets(self) -> None:
        while (reset := self._queue.next_reset) is not None and not self._queue.is_closed:
            if not self._queue.wait_idle(TEND_S):
                return
            blocks, num_bytes = self._store.reset(reset.match, lambda: self._queue.is_closed)
            self._queue.end_reset(TierResetResult(reset.number, blocks, num_bytes))
            self._context.on_finished()

    # --- inside -------------------------------------------------------------------------------------------------

    def _is_shut(self) -> bool:
        """Return whether no job is accepted: a reset is open, or all threads hang."""
        if self._queue.next_reset is not None:
            return True
        now_s = time.monotonic()
        return all(self._hung_s(worker, now_s) for worker in self._workers)

    def _hung_s(self, worker: Worker, now_s: float) -> float:
        """Return for how long a thread has hung in one call, 0 if it does not."""
        busy_s = now_s - worker.since_s if worker.work is not None else 0.0
        return busy_s if busy_s > self.timeout_s else 0.0

    def _count(self, outcome: Outcome, count: int, num_bytes: int = 0) -> None:
        with self._counting:
            self._counts[outcome] += count
            self._bytes[outcome] += num_bytes

    def _log_restart(self, again: bool) -> None:
        if again:
            _log.error("tier %s: dead thread was started again", self._context.name)

    def _log_error(self, what: str, error: Exception) -> None:
        key = f"{what} {type(error).__name__}"
        self._seldom.log(logging.ERROR, key, "tier %s: %s", self._context.name, what, exc_info=error)


def _copy(
    job: OpenJob, guard: threading.Lock, views: Sequence[NDArray[np.uint8]], staged: NDArray[np.uint8], *, to_slot: bool
) -> bool:
    """Copy between a slot and a thread's buffer, piece by piece; return False if the job was canceled meanwhile."""
    start = 0
    for view in views:
        for offset in range(0, len(view), _COPY_BYTES):
            slot_piece = view[offset : offset + _COPY_BYTES]
            own_piece = staged[start : start + len(slot_piece)]
            with guard:
                if job.canceled:
                    return False
                if to_slot:
                    np.copyto(slot_piece, own_piece)
                else:
                    np.copyto(own_piece, slot_piece)
            start += len(slot_piece)
    return True
