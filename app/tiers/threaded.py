"""Tier that runs a block store on threads, so that a call that blocks delays no other thread.

Each thread moves one batch of blocks at a time through a buffer of its own. It copies between buffer and slots under a
guard, in small pieces; calls of the store use the buffer alone and may hang. Canceling a job acquires the guards of its
threads once, after which none accesses the job's slots. A copy may hang too, in a page fault of a pool on a disk: then
the job keeps its slots until that has ended.

A call that fails for a moment is repeated within its job's time limit. After several failed calls in a row the tier
stops: lookups miss, stores are dropped, and the housekeeping thread probes the store until it answers. A tier whose
store is unavailable when it is opened starts in this state.
"""

from __future__ import annotations

import logging
import mmap
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.app.logs import RateLimitedLogger
from kvferry.app.settings.tiers import TierSettings
from kvferry.app.tiers.block_store import (
    BlockResult,
    BlockStore,
    FilteringStore,
    Interrupted,
    Outcome,
    SharedStore,
    SlotBytes,
    StoreUnavailable,
    TierContext,
    TierRefused,
)
from kvferry.app.tiers.breaker import CircuitBreaker, text_of
from kvferry.app.tiers.job_queue import BatchLimits, Drop, JobKind, JobQueue, OpenJob, Worker
from kvferry.core.errors import Failure, FailureCause
from kvferry.core.keys import Key, RequestFilter
from kvferry.core.policy import Level
from kvferry.core.tiers.base import TierCounts, TierJob, TierResetResult, TierResult

_log = logging.getLogger(__name__)

TEND_S = 1.0
FAILURE_S = 60.0
"""How long `health` shows a failed call, unless the same call succeeds before."""
_COPY_BYTES = 1 << 20
"""Most bytes of a slot copied under a guard at once, in some 0.1 to 0.2 ms."""
_IDLE_S = 5.0
_DROPS_AT_ONCE = 1000
_CHECK_S = 1.0
PROBE_S = 5.0
"""Longest time, and half of `timeout_s`, that opening a tier waits for the first probe of its store."""
_FIRST_RETRY_S = 0.05
_MAX_RETRY_S = 1.0

_SUCCESSFUL = (Outcome.STORED, Outcome.PRESENT, Outcome.LOADED)
_NOT_MOVED = BlockResult(Outcome.FAILED)
T = TypeVar("T")


class CopyHangs(RuntimeError):
    """A job to cancel uses its slots until its result: a copy of it hangs."""


@dataclass(slots=True, eq=False)
class _Staged:
    """A block of a batch: its index there, its place in the job, the parts of its slot, and its part of the buffer."""

    index: int
    place: int
    views: Sequence[NDArray[np.uint8]]
    own: NDArray[np.uint8]


class ThreadedTier:
    """A `Tier` of a `BlockStore`, which it owns."""

    def __init__(
        self,
        store: BlockStore,
        settings: TierSettings,
        context: TierContext,
        slots: SlotBytes,
        on_finished: Callable[[], None],
    ) -> None:
        """Start the threads and wait for the first probe. Raises `TierRefused` if the probe finds wrong settings.

        `on_finished` is called from any thread once `poll` has a new result that a request waits for.
        """
        self._store = store
        self._settings = settings
        self._context = context
        self._slots = slots
        self._on_finished = on_finished
        batch = BatchLimits(store.batch_blocks, settings.batch_bytes)
        self._queue = JobQueue(settings.queue_blocks, settings.threads, batch)
        self._buffer_bytes = max(context.slot_bytes, min(batch.blocks * context.slot_bytes, batch.bytes))
        self._counting = threading.Lock()
        self._counts = dict.fromkeys(Outcome, 0)
        self._bytes = dict.fromkeys(Outcome, 0)
        self._breaker = CircuitBreaker()
        self._failing: dict[JobKind, Failure] = {}
        """The latest failure of each kind of call that has not succeeded since."""
        self._size, self._store_health, self._shared_epoch = TierCounts(), list[str](), b""
        """What the store's methods returned when housekeeping called them last."""
        self._probed = threading.Event()
        self._refusal: TierRefused | None = None
        self._stopped = threading.Event()
        self._tend_asked = threading.Event()
        self._seldom = RateLimitedLogger(_log)
        self._starting = threading.Lock()
        self._workers = self._queue.workers
        self._housekeeper = Worker()
        self._check_s = time.monotonic() + _CHECK_S
        """When to look for dead threads again."""
        try:
            self._start_threads(again=False)
        except RuntimeError:
            # A limit on threads. `close` would need another one; those that run are idle.
            self._queue.close()
            self._close_store([worker.thread for worker in self._workers if worker.thread and worker.is_alive()])
            raise
        self._wait_for_probe()

    @property
    def timeout_s(self) -> float:
        """See `Tier`."""
        return self._settings.timeout_s

    @property
    def level(self) -> Level:
        """See `Tier`."""
        return self._settings.level

    # --- jobs ---------------------------------------------------------------------------------------------------

    def look_up(self, number: int, keys: Sequence[Key]) -> None:
        """See `Tier`."""
        ok = np.zeros(len(keys), dtype=np.bool_)
        self._queue.submit(OpenJob(JobKind.LOOK_UP, number, keys, ok), [0] if len(keys) and not self._is_shut() else [])

    def store(self, job: TierJob) -> None:
        """See `Tier`. Drops blocks while all threads hang or the store is unavailable."""
        self._count(Outcome.DROPPED, self._submit(JobKind.STORE, job))

    def load(self, job: TierJob) -> None:
        """See `Tier`."""
        self._count(Outcome.FAILED, self._submit(JobKind.LOAD, job))

    def _submit(self, kind: JobKind, job: TierJob) -> int:
        """Submit the blocks of a job, and return how many were not accepted."""
        todo = [] if self._is_shut() else list(range(len(job)))
        ok = np.zeros(len(job), dtype=np.bool_)
        return len(job) - len(todo) + self._queue.submit(OpenJob(kind, job.number, job.keys, ok, job), todo)

    def cancel(self, number: int) -> None:
        """See `Tier`. Raises `CopyHangs`."""
        if not self._queue.cancel(number):
            raise CopyHangs(f"a copy of job {number} hangs; its slots are in use until it ends")

    def drop(self, number: int, keys: Sequence[Key]) -> None:
        """See `Tier`."""
        self._drop(number, keys)

    def _drop(self, number: int | None, keys: Sequence[Key]) -> None:
        self._queue.drop(number, keys)
        self._tend_asked.set()

    @property
    def drops_matching(self) -> bool:
        """See `Tier`."""
        return isinstance(self._store, FilteringStore)

    def reset(self, number: int, match: RequestFilter | None) -> None:
        """See `Tier`. Nothing is accepted until the store has carried it out, with no other call running."""
        self._queue.begin_reset(number, match if self.drops_matching else None)
        self._tend_asked.set()

    def poll(self) -> Sequence[TierResult | TierResetResult]:
        """See `Tier`. Called every step of the engine: the threads are looked at once a second."""
        now_s = time.monotonic()
        if now_s >= self._check_s and not self._queue.is_closed:
            self._check_s = now_s + _CHECK_S
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
        if self._breaker.reason is not None:
            reasons.append(f"{self._breaker.reason}; no block is kept or found")
        else:
            recent = {kind: one.text for kind, one in self._failing.copy().items() if now_s - one.since_s < FAILURE_S}
            reasons += [f"the latest {kind.text} failed: {text}" for kind, text in recent.items()]
        return [*reasons, *self._store_health]

    def shared_epoch(self) -> bytes:
        """Return the epoch that engines share in this tier; empty if they do not, or if it was not read yet."""
        return self._shared_epoch

    def counts(self) -> TierCounts:
        """See `Tier`."""
        with self._counting:
            return replace(
                self._size,
                stored_bytes=self._bytes[Outcome.STORED],
                loaded_bytes=self._bytes[Outcome.LOADED],
                unavailable=int(self._breaker.reason is not None),
                outages=self._breaker.num_outages,
                retries=self._breaker.num_retries,
                **{outcome.value: count for outcome, count in self._counts.items()},
            )

    def close(self, timeout_s: float) -> None:
        """See `Tier`. A thread that hangs is abandoned, and the store is closed once it has ended.

        A copy that hangs is waited for: after this the pool may be unmapped.
        """
        self._queue.close()
        self._stopped.set()
        self._tend_asked.set()
        threads = [worker.thread for worker in (*self._workers, self._housekeeper) if worker.thread is not None]
        closer = threading.Thread(
            target=self._close_store, args=(threads,), name=f"kvferry-close-{self._context.name}", daemon=True
        )
        closer.start()
        closer.join(timeout_s)
        if closer.is_alive():
            num_alive = sum(thread.is_alive() for thread in threads)
            _log.warning("tier %s: threads that did not end at shutdown: %d", self._context.name, num_alive)

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
                    self._count(Outcome.FAILED, len(work[1]))
                worker.thread = threading.Thread(
                    target=self._run_housekeeping if worker is self._housekeeper else self._serve,
                    args=(worker, again),
                    name=f"kvferry-tier-{self._context.name}",
                    daemon=True,
                )
                worker.thread.start()
        finally:
            self._starting.release()

    def _close_store(self, threads: Sequence[threading.Thread]) -> None:
        """Close the store once these threads have ended."""
        for thread in threads:
            thread.join()
        try:
            self._store.close()
        except Exception as error:  # noqa: BLE001 - nothing is left to be done with it
            self._log_error("closing failed", error)

    def _serve(self, worker: Worker, again: bool) -> None:
        """Carry out one piece of work after another."""
        self._log_restart(again)
        buffer = new_buffer(self._buffer_bytes)
        while not self._queue.is_closed:
            work = self._queue.take(worker, _IDLE_S)
            if work is None:
                continue
            job, places = work
            if job.blocks is None:
                ended = self._queue.finish(worker, self._find(job))
            else:
                results = self._move(job, job.blocks, places, worker.guard, buffer)
                num_bytes = 0 if job.canceled else self._count_moved(job.blocks, places, results)
                ok = [result.outcome in _SUCCESSFUL for result in results]
                ended = self._queue.finish(worker, ok, num_bytes, [result.origin for result in results])
            if ended:
                self._on_finished()

    def _find(self, job: OpenJob) -> list[bool]:
        try:
            return self._call(job, len(job.keys), lambda: self._store.find_many(job.keys)) or [False] * len(job.keys)
        except Exception as error:  # noqa: BLE001 - nothing was found, the tier continues
            self._log_error("a look-up failed", error)
            return [False] * len(job.keys)

    def _move(
        self, job: OpenJob, blocks: TierJob, places: list[int], guard: threading.Lock, buffer: NDArray[np.uint8]
    ) -> list[BlockResult]:
        """Store or load a batch of blocks, and return their results, unless the job is canceled meanwhile."""
        results = [_NOT_MOVED] * len(places)
        try:
            staged = self._stage(blocks, places, buffer)
            if job.kind is JobKind.STORE and not all(_copy(job, guard, one.views, one.own) for one in staged):
                return results
            if job.kind is JobKind.STORE:
                results = [BlockResult(Outcome.DROPPED) if job.keys[i] in job.dropped else _NOT_MOVED for i in places]
                staged = [one for one in staged if job.keys[one.place] not in job.dropped]
            answers = self._call_store(job, blocks, staged)
            corrupt = [
                job.keys[one.place]
                for one, answer in zip(staged, answers, strict=True)
                if answer.outcome is Outcome.CORRUPT
            ]
            if corrupt:
                self._drop(None, corrupt)
            for one, result in zip(staged, answers, strict=True):
                is_loaded = result.outcome is Outcome.LOADED
                if is_loaded and not _copy(job, guard, one.views, _bytes_of(result, one), to_slot=True):
                    return results
                results[one.index] = result
        except Exception as error:  # noqa: BLE001 - these blocks failed, the tier continues
            self._log_error(f"a {job.kind.text} failed", error)
            results = [_NOT_MOVED] * len(places)
        return results

    def _stage(self, blocks: TierJob, places: list[int], buffer: NDArray[np.uint8]) -> list[_Staged]:
        """Return the slots of a batch, and the parts of the buffer for them, without blocks that cannot be accessed."""
        staged: list[_Staged] = []
        start = 0
        for index, place in enumerate(places):
            num_bytes = int(blocks.num_bytes[place])
            try:
                if not 0 < num_bytes <= min(self._context.slot_bytes, len(buffer) - start):
                    raise ValueError(f"a block of {num_bytes} bytes, where a slot has {self._context.slot_bytes}")
                views = self._slots.views(int(blocks.slots[place]), num_bytes)
            except Exception as error:  # noqa: BLE001 - this block failed, the others continue
                self._log_error("access to a slot failed", error)
                continue
            staged.append(_Staged(index, place, views, buffer[start : start + num_bytes]))
            start += num_bytes
        return staged

    def _call_store(self, job: OpenJob, blocks: TierJob, staged: list[_Staged]) -> list[BlockResult]:
        """Put or get the blocks of a batch; stores are dropped and loads fail while the store is unavailable."""
        keys, data = [job.keys[one.place] for one in staged], [one.own.data for one in staged]
        if job.kind is JobKind.LOAD:
            answers = self._call(job, len(keys), lambda: self._store.get_many(keys, data))
            return [_NOT_MOVED] * len(keys) if answers is None else answers
        origins = [blocks.origins[one.place] for one in staged]
        outcomes = self._call(job, len(keys), lambda: self._store.put_many(keys, data, origins))
        return [
            BlockResult(Outcome.DROPPED if key in job.dropped else outcome)
            for key, outcome in zip(keys, outcomes or [Outcome.DROPPED] * len(keys), strict=True)
        ]

    def _call(self, job: OpenJob, count: int, call: Callable[[], Sequence[T]]) -> list[T] | None:
        """Return the store's answers, `count` of them; None while it is unavailable.

        Repeats a call that raises a transient `StoreUnavailable`, until the job ends.
        """
        deadline_s = job.started_s + self.timeout_s
        pause_s = _FIRST_RETRY_S
        while count and self._breaker.reason is None:
            try:
                answers = call()
                if len(answers) != count:
                    raise ValueError(f"{len(answers)} answers for {count} keys")
            except Exception as error:
                self._failing[job.kind] = Failure(FailureCause.BROKEN, text_of(error), time.monotonic())
                self._record_failure(error)
                may_repeat = isinstance(error, StoreUnavailable) and error.is_transient and not job.canceled
                if not may_repeat or time.monotonic() + pause_s > deadline_s:
                    raise
            else:
                self._failing.pop(job.kind, None)
                self._breaker.record_success()
                return list(answers)
            if self._stopped.wait(random.uniform(0, pause_s)):
                return None
            self._breaker.record_retry()
            pause_s = min(2 * pause_s, _MAX_RETRY_S)
        return None

    def _run_housekeeping(self, worker: Worker, again: bool) -> None:
        """Run the store's housekeeping every second, and resets when requested."""
        self._log_restart(again)
        while not self._queue.is_closed:
            is_available = self._probe()
            if not is_available or not self._probed.is_set():
                self._attempt("housekeeping", self._refresh)
            self._probed.set()
            if not is_available:
                self._stopped.wait(random.uniform(0.5, 1.0) * TEND_S)
                continue
            self._attempt("a drop", self._do_drops)
            self._attempt("housekeeping", self._tend)
            self._attempt("a reset", self._do_resets)
            self._attempt("housekeeping", self._refresh)
            self._tend_asked.wait(TEND_S)
            self._tend_asked.clear()

    def _attempt(self, what: str, chore: Callable[[], None]) -> None:
        try:
            chore()
        except Interrupted:
            return
        except Exception as error:  # noqa: BLE001 - tried again; the store's health has the reason
            self._record_failure(error)
            self._log_error(f"{what} failed and is tried again", error)

    def _probe(self) -> bool:
        """Return whether the store is available, after a probe if it was not."""
        if self._breaker.reason is None:
            return True
        try:
            self._store.probe()
        except Exception as error:  # noqa: BLE001 - tried again
            if isinstance(error, TierRefused) and not self._probed.is_set():
                self._refusal = error
            self._breaker.record_failure(error)
        else:
            self._failing.clear()
            self._breaker.close()
            if self._probed.is_set():
                _log.warning("tier %s: its store answers again", self._context.name)
        return self._breaker.reason is None

    def _wait_for_probe(self) -> None:
        """Wait for the first probe, for a limited time. Raises `TierRefused` if it found wrong settings."""
        self._probed.wait(min(PROBE_S, self.timeout_s / 2))
        # A later answer is logged as the end of a start without the store.
        self._probed.set()
        if self._refusal is not None:
            self.close(PROBE_S)
            raise self._refusal
        if self._breaker.reason is not None:
            _log.warning("tier %s: starts without its store: %s", self._context.name, self._breaker.reason)

    def _tend(self) -> None:
        self._store.maintain(lambda: self._queue.is_closed or self._queue.next_reset is not None)

    def _refresh(self) -> None:
        """Call what the engine's thread may not."""
        self._size, self._store_health = self._store.size(), list(self._store.health())
        self._shared_epoch = self._store.shared_epoch() if isinstance(self._store, SharedStore) else b""

    def _do_drops(self) -> None:
        drops = self._queue.open_drops()
        for start in range(0, len(drops), _DROPS_AT_ONCE):
            self._remove(drops[start : start + _DROPS_AT_ONCE])

    def _remove(self, drops: Sequence[tuple[Drop, bool]]) -> None:
        """Remove the keys of drops from the store, and end those for which this removal is the last."""
        try:
            self._store.drop(list(dict.fromkeys(key for drop, _ in drops for key in drop.keys)))
        except StoreUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - tried again
            self._log_error("a drop failed and is tried again", error)
            # It may concern one key only.
            for one in drops if len(drops) > 1 else ():
                self._remove([one])
            return
        for drop, is_last in drops:
            if is_last:
                self._queue.end_drop(drop)
        self._on_finished()

    def _do_resets(self) -> None:
        while self._queue.next_reset is not None and not self._queue.is_closed:
            if not self._queue.wait_idle(TEND_S):
                return
            resets = self._queue.next_resets()
            match, store = resets[0].match, self._store
            if match is not None and isinstance(store, FilteringStore):
                dropped = store.drop_matching(match, lambda: self._queue.is_closed)
            else:
                dropped = store.reset(lambda: self._queue.is_closed)
            self._attempt("housekeeping", self._refresh)
            self._queue.end_resets(resets, *dropped)
            self._on_finished()

    # --- inside -------------------------------------------------------------------------------------------------

    def _is_shut(self) -> bool:
        """Return whether no job is accepted: a reset is open, the store is unavailable, or all threads hang."""
        if self._queue.next_reset is not None or self._breaker.reason is not None:
            return True
        now_s = time.monotonic()
        return all(self._hung_s(worker, now_s) for worker in self._workers)

    def _hung_s(self, worker: Worker, now_s: float) -> float:
        """Return for how long a thread has hung in one call, 0 if it does not."""
        busy_s = now_s - worker.since_s if worker.work is not None else 0.0
        return busy_s if busy_s > self.timeout_s else 0.0

    def _count(self, outcome: Outcome, count: int) -> None:
        with self._counting:
            self._counts[outcome] += count

    def _count_moved(self, blocks: TierJob, places: list[int], results: list[BlockResult]) -> int:
        """Count the results of a batch, and return the bytes of blocks that were stored or loaded."""
        total = 0
        with self._counting:
            for place, result in zip(places, results, strict=True):
                num_bytes = int(blocks.num_bytes[place]) if result.outcome in _SUCCESSFUL else 0
                self._counts[result.outcome] += 1
                self._bytes[result.outcome] += num_bytes
                total += num_bytes
        return total

    def _log_restart(self, again: bool) -> None:
        if again:
            _log.error("tier %s: dead thread was started again", self._context.name)

    def _record_failure(self, error: Exception) -> None:
        if self._breaker.record_failure(error):
            _log.error("tier %s: not used until a probe succeeds: %s", self._context.name, self._breaker.reason)

    def _log_error(self, what: str, error: Exception) -> None:
        """Log an exception without its message, which a client library may have made of an address or a password."""
        text = text_of(error)
        shown = None if isinstance(error, StoreUnavailable) else RuntimeError(text).with_traceback(error.__traceback__)
        key = f"{what} {type(error).__name__}"
        self._seldom.log(logging.ERROR, key, "tier %s: %s: %s", self._context.name, what, text, exc_info=shown)


def new_buffer(num_bytes: int) -> NDArray[np.uint8]:
    """Return memory that begins with a page, for blocks on their way.

    Some processors copy several times slower where the last 12 bits of both addresses differ by a few bytes, as with a
    buffer behind the header of `malloc` and a block behind its head in a file.
    """
    spare = np.empty(num_bytes + mmap.PAGESIZE, dtype=np.uint8)
    start = -spare.ctypes.data % mmap.PAGESIZE
    return spare[start : start + num_bytes]


def _bytes_of(result: BlockResult, staged: _Staged) -> NDArray[np.uint8]:
    """Return the bytes of a loaded block. Raises `ValueError` if they are more or fewer than its slot's."""
    loaded = np.frombuffer(result.data or b"", dtype=np.uint8)
    if len(loaded) != len(staged.own):
        raise ValueError(f"a store returned a block of {len(loaded)} bytes for one of {len(staged.own)}")
    return loaded


def _copy(
    job: OpenJob,
    guard: threading.Lock,
    views: Sequence[NDArray[np.uint8]],
    own: NDArray[np.uint8],
    *,
    to_slot: bool = False,
) -> bool:
    """Copy between the parts of a slot and other memory, piece by piece; return False if the job was canceled."""
    start = 0
    for view in views:
        # Pieces of equal size, because NumPy holds the GIL during copies of less than 500 bytes.
        num_pieces = -(-len(view) // _COPY_BYTES)
        for piece in range(num_pieces):
            slot_piece = view[len(view) * piece // num_pieces : len(view) * (piece + 1) // num_pieces]
            own_piece = own[start : start + len(slot_piece)]
            with guard:
                if job.canceled:
                    return False
                if to_slot:
                    np.copyto(slot_piece, own_piece)
                else:
                    np.copyto(own_piece, slot_piece)
            start += len(slot_piece)
    return True
