"""Tier that runs a block store on threads, so that a call that blocks delays no other thread.

Each thread moves one batch of blocks at a time through a buffer of its own. It copies between buffer and slots under a
guard, in small pieces; calls of the store use the buffer alone and may hang. Canceling a job acquires the guards of its
threads once, after which none accesses the job's slots. A copy may hang too, in a page fault of a pool on a disk: then
the job keeps its slots until that has ended. One thread more than `threads` is never taken by stores.

A call that fails for a moment is repeated within its job's time limit. After several failed calls in a row the tier
stops: lookups miss, stores are dropped, and the housekeeping thread probes the store until it answers. A tier whose
store is unavailable when it is opened starts in this state. A call that hangs is none of these: `TierClient` ends its
job at the time limit.
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

from kvferry.app.settings.tiers import TierSettings
from kvferry.app.telemetry.logs import RateLimitedLogger
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
from kvferry.app.tiers.job_queue import Drop, JobKind, JobQueue, OpenJob, Worker
from kvferry.core.keys import Key, RequestFilter
from kvferry.core.policy import Level
from kvferry.core.tiers.base import TierCounts, TierJob, TierResetResult, TierResult

_log = logging.getLogger(__name__)

MAINTAIN_S = 1.0
_COPY_BYTES = 1 << 20
"""Most bytes of a slot copied under a guard at once, in some 0.1 to 0.2 ms."""
_IDLE_S = 5.0
PROBE_S = 5.0
"""Longest time, and half of `timeout_s`, that opening a tier waits for the first probe of its store."""
_FIRST_RETRY_S = 0.05
_MAX_RETRY_S = 1.0
_DROPS_AT_ONCE = 1000

_FAILED = BlockResult(Outcome.FAILED)
_DROPPED = BlockResult(Outcome.DROPPED)
_PRESENT = BlockResult(Outcome.PRESENT)
T = TypeVar("T")


class CopyHangs(RuntimeError):
    """A job to cancel uses its slots until its result: a copy of it hangs."""


class _NotUsed(Exception):
    """The tier does not use its store now."""


@dataclass(slots=True, eq=False)
class _Staged:
    """A block of a batch: its place in the job, its key, the parts of its slot, and its part of the buffer."""

    place: int
    key: Key
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
        maintain_s: float = MAINTAIN_S,
    ) -> None:
        """Start the threads and wait for the first probe. Raises `TierRefused` if the probe finds wrong settings.

        `on_finished` is called from any thread once `poll` has a new result, but for those of stores. `maintain_s` is
        the time between rounds of housekeeping.
        """
        self.timeout_s = settings.timeout_s
        self.level: Level = settings.level
        self.drops_matching = isinstance(store, FilteringStore)
        self._store = store
        self._name = context.name
        self._slot_bytes = context.slot_bytes
        self._slots = slots
        self._on_finished = on_finished
        self._maintain_s = maintain_s
        batch_blocks, batch_bytes = store.batch_blocks, settings.batch_bytes
        self._queue = JobQueue(settings.queue_blocks, settings.threads + 1, batch_blocks, batch_bytes)
        self._buffer_bytes = max(self._slot_bytes, min(batch_blocks * self._slot_bytes, batch_bytes))
        self._counting = threading.Lock()
        self._counts = dict.fromkeys(Outcome, 0)
        self._bytes = dict.fromkeys(Outcome, 0)
        self._breaker = CircuitBreaker()
        self._size, self._store_health, self._shared_epoch = TierCounts(), list[str](), b""
        """What the store's methods returned when housekeeping called them last."""
        self._probed = threading.Event()
        self._refusal: TierRefused | None = None
        self._stopped = threading.Event()
        self._maintain_requested = threading.Event()
        self._limited_log = RateLimitedLogger(_log)
        self._threads: list[threading.Thread] = []
        for run in (*(self._serving(worker) for worker in self._queue.workers), self._do_housekeeping):
            thread = threading.Thread(target=self._run, args=(run,), name=f"kvferry-tier-{self._name}", daemon=True)
            thread.start()
            self._threads.append(thread)
        self._closer = threading.Thread(target=self._close_store, name=f"kvferry-close-{self._name}", daemon=True)
        self._wait_for_probe()

    # --- jobs ---------------------------------------------------------------------------------------------------

    def look_up(self, number: int, keys: Sequence[Key]) -> None:
        """See `Tier`."""
        self._queue.submit(OpenJob(JobKind.LOOK_UP, number, keys), is_shut=self._is_shut(JobKind.LOOK_UP))

    def store(self, job: TierJob) -> None:
        """See `Tier`. Drops blocks while the threads for stores hang or the store is unavailable."""
        self._submit(JobKind.STORE, job, Outcome.DROPPED)

    def load(self, job: TierJob) -> None:
        """See `Tier`."""
        self._submit(JobKind.LOAD, job, Outcome.FAILED)

    def _submit(self, kind: JobKind, job: TierJob, refused: Outcome) -> None:
        """Submit the blocks of a job; `refused` is the outcome of those that are not accepted."""
        num_taken = self._queue.submit(OpenJob(kind, job.number, job.keys, job), is_shut=self._is_shut(kind))
        with self._counting:
            self._counts[refused] += len(job) - num_taken

    def cancel(self, number: int) -> None:
        """See `Tier`. Raises `CopyHangs`."""
        if not self._queue.cancel(number):
            raise CopyHangs(f"a copy of job {number} hangs; its slots are in use until it ends")

    def drop(self, number: int | None, keys: Sequence[Key]) -> None:
        """See `Tier`. Without a number there is no result."""
        self._queue.drop(number, keys)
        self._maintain_requested.set()

    def reset(self, number: int, match: RequestFilter | None) -> None:
        """See `Tier`. Nothing is accepted until the store has carried it out, with no other call running."""
        self._queue.begin_reset(number, match if self.drops_matching else None)
        self._maintain_requested.set()

    def poll(self) -> Sequence[TierResult | TierResetResult]:
        """See `Tier`."""
        return self._queue.results()

    def _is_shut(self, kind: JobKind) -> bool:
        """Return whether the store is unavailable, or the threads for a kind of job hang."""
        return self._breaker.reason is not None or len(self._hung_s()) >= self._queue.max_workers(kind)

    def _hung_s(self) -> list[float]:
        """Return for how long each thread hangs that has been in one call for longer than a job may take."""
        now_s = time.monotonic()
        busy_s = [now_s - worker.since_s for worker in self._queue.workers if worker.work is not None]
        return [seconds for seconds in busy_s if seconds > self.timeout_s]

    # --- what operators see -------------------------------------------------------------------------------------

    def health(self) -> Sequence[str]:
        """See `Tier`."""
        reasons: list[str] = []
        hung_s, num_threads = self._hung_s(), len(self._queue.workers)
        if hung_s:
            reasons.append(f"{len(hung_s)} of {num_threads} threads have waited {max(hung_s):.0f} s for an answer")
        reset = self._queue.next_reset
        reset_s = 0.0 if reset is None else time.monotonic() - reset.asked_s
        if reset_s > self.timeout_s:
            reasons.append(f"a reset has been under way for {reset_s:.0f} s, and nothing is served")
        return [*reasons, *self._breaker.problems(), *self._store_health]

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

        A copy that hangs is waited for: after this the pool may be unmapped. May be called again, to wait longer.
        """
        self._queue.close()
        self._stopped.set()
        self._maintain_requested.set()
        if self._closer.ident is None:
            self._closer.start()
        self._closer.join(timeout_s)
        if self._closer.is_alive():
            num_alive = sum(thread.is_alive() for thread in self._threads)
            _log.warning("tier %s: threads that did not end at shutdown: %d", self._name, num_alive)

    def _close_store(self) -> None:
        """Close the store once all threads have ended."""
        for thread in self._threads:
            thread.join()
        try:
            self._store.close()
        except Exception as error:  # noqa: BLE001 - nothing is left to be done with it
            self._log_error("closing failed", error)

    # --- jobs, on the threads -----------------------------------------------------------------------------------

    def _run(self, work: Callable[[], None]) -> None:
        """Repeat work until the tier is closed."""
        while not self._queue.is_closed:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - a thread that ends would take its part of the tier with it
                self._log_error("a thread failed and goes on", error)
                self._stopped.wait(_FIRST_RETRY_S)

    def _serving(self, worker: Worker) -> Callable[[], None]:
        """Return the work of a thread for jobs, with a buffer of its own."""
        buffer = new_buffer(self._buffer_bytes)
        return lambda: self._serve(worker, buffer)

    def _serve(self, worker: Worker, buffer: NDArray[np.uint8]) -> None:
        """Carry out one piece of work."""
        work = self._queue.take(worker, _IDLE_S)
        if work is None:
            return
        job, places = work
        try:
            if job.blocks is None:
                results = self._find(job)
            elif job.kind is JobKind.STORE:
                results = self._put(job, job.blocks, places, worker.guard, buffer)
            else:
                results = self._get(job, job.blocks, places, worker.guard, buffer)
        except _NotUsed:
            results = dict.fromkeys(places, _DROPPED if job.kind is JobKind.STORE else _FAILED)
        except BaseException as error:  # noqa: BLE001 - these blocks failed, the tier continues
            self._log_error(f"a {job.kind.text} failed", error)
            results = dict.fromkeys(places, _FAILED)
        if job.blocks is not None and not job.canceled:
            self._count(job.blocks, results)
        if self._queue.finish(worker, results):
            self._on_finished()

    def _find(self, job: OpenJob) -> dict[int, BlockResult]:
        exist = self._call(job, job.keys, self._store.find_many)
        return {place: BlockResult(Outcome.PRESENT if one else Outcome.MISSING) for place, one in enumerate(exist)}

    def _put(
        self, job: OpenJob, blocks: TierJob, places: list[int], guard: threading.Lock, buffer: NDArray[np.uint8]
    ) -> dict[int, BlockResult]:
        """Store the blocks of a batch that the store does not have."""
        results = dict.fromkeys(places, _FAILED)
        keys = [job.keys[place] for place in places]
        # Blocks of a batch follow each other in prompts: behind a missing one there are rarely others.
        exist = self._call(job, keys[:1], self._store.find_many)
        if exist[0] and len(keys) > 1:
            exist += self._call(job, keys[1:], self._store.find_many)
        results.update(dict.fromkeys((place for place, one in zip(places, exist, strict=False) if one), _PRESENT))
        staged = self._stage(blocks, [place for place in places if results[place] is _FAILED], buffer)
        if not all(_copy(job, guard, one.views, one.own) for one in staged):
            return results
        staged = [one for one in staged if one.key not in job.dropped]
        data, origins = [one.own.data for one in staged], [blocks.origins[one.place] for one in staged]
        put = self._call(job, [one.key for one in staged], lambda keys: self._store.put_many(keys, data, origins))
        results.update((one.place, BlockResult(outcome)) for one, outcome in zip(staged, put, strict=True))
        # Dropped before or during this: they are removed once it has ended.
        results.update(dict.fromkeys((place for place in places if job.keys[place] in job.dropped), _DROPPED))
        return results

    def _get(
        self, job: OpenJob, blocks: TierJob, places: list[int], guard: threading.Lock, buffer: NDArray[np.uint8]
    ) -> dict[int, BlockResult]:
        """Load the blocks of a batch."""
        results = dict.fromkeys(places, _FAILED)
        staged = self._stage(blocks, places, buffer)
        into = [one.own.data for one in staged]
        loaded = self._call(job, [one.key for one in staged], lambda keys: self._store.get_many(keys, into))
        corrupt = [one.key for one, result in zip(staged, loaded, strict=True) if result.outcome == Outcome.CORRUPT]
        if corrupt:
            self.drop(None, corrupt)
        for one, result in zip(staged, loaded, strict=True):
            if result.outcome == Outcome.LOADED and not _copy(
                job, guard, one.views, _bytes_of(result, one), to_slot=True
            ):
                break
            results[one.place] = result
        return results

    def _stage(self, blocks: TierJob, places: list[int], buffer: NDArray[np.uint8]) -> list[_Staged]:
        """Return the slots of a batch, and the parts of the buffer for them, without blocks that cannot be accessed."""
        staged: list[_Staged] = []
        start = 0
        for place in places:
            num_bytes = int(blocks.num_bytes[place])
            try:
                if not 0 < num_bytes <= min(self._slot_bytes, len(buffer) - start):
                    raise ValueError(f"a block of {num_bytes} bytes, where a slot has {self._slot_bytes}")
                views = self._slots.views(int(blocks.slots[place]), num_bytes)
            except Exception as error:  # noqa: BLE001 - this block failed, the others continue
                self._log_error("access to a slot failed", error)
                continue
            staged.append(_Staged(place, blocks.keys[place], views, buffer[start : start + num_bytes]))
            start += num_bytes
        return staged

    def _call(self, job: OpenJob, keys: Sequence[Key], call: Callable[[Sequence[Key]], Sequence[T]]) -> list[T]:
        """Return the store's answers, one for each key. Raises `_NotUsed`.

        Repeats a call that raises a transient `StoreUnavailable`, until the job ends.
        """
        deadline_s = job.started_s + self.timeout_s
        pause_s = _FIRST_RETRY_S
        while keys:
            if self._breaker.reason is not None:
                raise _NotUsed
            try:
                answers = list(call(keys))
                if len(answers) != len(keys):
                    raise ValueError(f"{len(answers)} answers for {len(keys)} keys")
            except BaseException as error:
                self._record_failure(error, job.kind.text)
                may_repeat = isinstance(error, StoreUnavailable) and error.is_transient and not job.canceled
                if not may_repeat or time.monotonic() + pause_s > deadline_s:
                    raise
            else:
                self._breaker.record_success(job.kind.text)
                return answers
            if self._stopped.wait(random.uniform(0, pause_s)):
                raise _NotUsed
            self._breaker.record_retry()
            pause_s = min(2 * pause_s, _MAX_RETRY_S)
        return []

    def _count(self, blocks: TierJob, results: dict[int, BlockResult]) -> None:
        with self._counting:
            for place, result in results.items():
                self._counts[result.outcome] += 1
                self._bytes[result.outcome] += int(blocks.num_bytes[place])

    # --- housekeeping -------------------------------------------------------------------------------------------

    def _do_housekeeping(self) -> None:
        """Run one round of housekeeping, with the drops and resets that were requested, and wait for the next one."""
        is_available = self._probe()
        if not is_available or not self._probed.is_set():
            self._attempt("housekeeping", self._refresh)
        self._probed.set()
        if not is_available:
            self._stopped.wait(random.uniform(0.5, 1.0) * self._maintain_s)
            return
        self._attempt("a drop", self._do_drops)
        self._attempt("housekeeping", lambda: self._store.maintain(self._is_interrupted))
        self._attempt("a reset", self._do_resets)
        self._attempt("housekeeping", self._refresh)
        self._maintain_requested.wait(self._maintain_s)
        self._maintain_requested.clear()

    def _attempt(self, what: str, chore: Callable[[], None]) -> None:
        try:
            chore()
        except Interrupted:
            return
        except BaseException as error:  # noqa: BLE001 - tried again; the store's health has the reason
            self._record_failure(error)
            self._log_error(f"{what} failed and is tried again", error)

    def _is_interrupted(self) -> bool:
        return self._queue.is_closed or self._queue.next_reset is not None

    def _refresh(self) -> None:
        """Cache size, health and shared epoch of the store, whose calls may block."""
        self._size = self._store.size()
        # A path may have characters that cannot be encoded.
        self._store_health = [reason.encode(errors="replace").decode() for reason in self._store.health()]
        self._shared_epoch = self._store.shared_epoch() if isinstance(self._store, SharedStore) else b""

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
            self._breaker.close()
            if self._probed.is_set():
                _log.warning("tier %s: its store answers again", self._name)
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
            _log.warning("tier %s: starts without its store: %s", self._name, self._breaker.reason)

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
        while not self._queue.is_closed and (reset := self._queue.next_reset) is not None:
            if not self._queue.wait_idle(self._maintain_s):
                return
            match, store = reset.match, self._store
            if match is not None and isinstance(store, FilteringStore):
                dropped = store.drop_matching(match, lambda: self._queue.is_closed)
            else:
                dropped = store.reset(lambda: self._queue.is_closed)
            self._attempt("housekeeping", self._refresh)
            self._queue.end_reset(*dropped)
            self._on_finished()

    # --- errors -------------------------------------------------------------------------------------------------

    def _record_failure(self, error: BaseException, what: str | None = None) -> None:
        if self._breaker.record_failure(error, what):
            _log.error("tier %s: not used until a probe succeeds: %s", self._name, self._breaker.reason)

    def _log_error(self, what: str, error: BaseException) -> None:
        """Log an exception without its message, which a client library may have made of an address or a password."""
        text = text_of(error)
        shown = None if isinstance(error, StoreUnavailable) else RuntimeError(text).with_traceback(error.__traceback__)
        key = f"{what} {type(error).__name__}"
        self._limited_log.log(logging.ERROR, key, "tier %s: %s: %s", self._name, what, text, exc_info=shown)


def new_buffer(num_bytes: int) -> NDArray[np.uint8]:
    """Return memory that begins with a page, for blocks on their way.

    Some processors copy several times slower where the last 12 bits of both addresses differ by a few bytes, as with a
    buffer behind the header of `malloc` and a block behind its head in a file.
    """
    return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)


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
