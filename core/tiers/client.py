"""Client of a tier: submits jobs, enforces their time limit, and counts exceptions of the tier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kvferry.core.cost_model import LoadOrCompute, Rate
from kvferry.core.errors import Failure, FailureCause
from kvferry.core.keys import Key, RequestFilter
from kvferry.core.policy import Level
from kvferry.core.tiers.base import (
    CascadeWhen,
    Tier,
    TierCounts,
    TierJob,
    TierResetResult,
    TierResult,
    TierUse,
)
from kvferry.core.tiers.known_missing import KnownMissing
from kvferry.core.transfers import NO_SLOTS, Slots

T = TypeVar("T")

FAILURE_S = 60.0
"""Time for which a failed call is reported, unless the same call succeeds earlier."""
_MAX_RESET_RESULTS = 100
_MAX_POLLED_KEYS = 4000
"""Keys of jobs after which a `poll` leaves further results to the next one: look-ups take some 0.6 us a key."""


EndOfJob = Callable[[TierResult | None, float], None]
"""Receives the result of a job, or None if it was canceled, and the time."""


@dataclass(slots=True, eq=False)
class OpenTierJob:
    """A look-up, cascade or promotion that a tier works on, and the slots that the tier may touch.

    A job that cannot be canceled keeps its slots.
    """

    number: int
    num_keys: int
    opened_s: float
    end: EndOfJob
    slots: Slots = field(default_factory=lambda: NO_SLOTS)


@dataclass(slots=True, eq=False)
class OpenReset:
    """A reset without a result: of all blocks, of those of matching origins, or of one key.

    `ticket` is its first job number, which the caller knows.
    """

    ticket: int
    match: RequestFilter | None = None
    key: Key | None = None


class TierClient:
    """One tier. Requires: manager lock held. New warnings for the log are added to `warnings`.

    If the tier fails to cancel a job, the job keeps its slots, because the tier may still touch them, and the tier
    receives no other job until the result arrives.
    """

    def __init__(
        self, name: str, tier: Tier, cost_model: LoadOrCompute, new_number: Callable[[], int], max_slots: int
    ) -> None:
        """`cost_model` provides the rate of computing; the tier's own rates are measured here."""
        self.name = name
        self.warnings: list[str] = []
        self.cost_model = LoadOrCompute()
        self.cost_model.tokens_rate = cost_model.tokens_rate
        self.look_up_rate = Rate()
        self.known_missing = KnownMissing()
        self.is_enabled = True
        """Whether an operator allows new jobs."""
        self.num_unawaited = 0
        """Open look-ups that no request waits for."""
        self.bytes_in_flight = 0
        self.use = TierUse()
        self.timeout_s = float(tier.timeout_s)
        self._tier = tier
        self._new_number = new_number
        self._open: dict[int, OpenTierJob] = {}
        self._stuck: dict[int, OpenTierJob] = {}
        self._resets: dict[int, OpenReset] = {}
        self._refused: set[int] = set()
        """Open resets that the tier has not accepted, so that it may serve what they were to drop."""
        self._reset_results: dict[int, TierResetResult] = {}
        self._failures: dict[str, Failure] = {}
        """By subject, each since the first `poll` after it."""
        self._closed = False
        self._unread: deque[TierResult | TierResetResult] = deque()
        self.when = CascadeWhen.STORE
        """When the tier receives blocks."""
        self._wanted_at = np.zeros(max_slots, dtype=np.int64)
        self._held_at = np.zeros(max_slots, dtype=np.int64)
        self.held_since = 1
        """Generation that a block was recorded with, or a higher one, if it is still known to be held."""

    @property
    def level(self) -> Level:
        """Which blocks of a request the tier receives, whatever the policy of the request says."""
        return self._tier.level

    @property
    def drops_matching(self) -> bool:
        """Whether a reset by match drops the blocks of matching origins only."""
        return self._tier.drops_matching

    @property
    def is_usable(self) -> bool:
        """Whether jobs may be submitted: it is enabled, every job could be canceled, and every reset was accepted."""
        return self.is_enabled and not (self._closed or self._stuck or self._refused)

    @property
    def open_jobs(self) -> Sequence[OpenTierJob]:
        """The jobs without a result, including those that could not be canceled."""
        return [*self._open.values(), *self._stuck.values()]

    def has_stuck_jobs(self) -> bool:
        """Whether jobs could not be canceled, so that the tier may still touch their slots."""
        return bool(self._stuck)

    @property
    def open_resets(self) -> Sequence[OpenReset]:
        """The resets without a result."""
        return list(self._resets.values())

    # --- calls of the tier ----------------------------------------------------------------------------------------

    def look_up(self, keys: Sequence[Key], now_s: float, end: EndOfJob) -> None:
        """Look up keys, all of them: see `known_missing` for those that need no look-up."""
        number = self._new_number()

        def end_look_up(result: TierResult | None, ended_s: float) -> None:
            if result is not None:
                self.known_missing.discard(key for key, ok in zip(keys, result.ok.tolist(), strict=True) if ok)
                missing = [key for key, ok in zip(keys, result.ok.tolist(), strict=True) if not ok]
                self.known_missing.add(missing, now_s, ended_s)
            end(result, ended_s)

        job = OpenTierJob(number, len(keys), now_s, end_look_up)
        self._submit("look_up", job, lambda: self._tier.look_up(number, keys))

    def store(self, job: TierJob, now_s: float, end: EndOfJob) -> None:
        """Submit a store."""
        self.use.cascaded += len(job)

        def end_store(result: TierResult | None, ended_s: float) -> None:
            # Blocks of a canceled store may be kept too.
            stored = job.keys if result is None else [job.keys[i] for i in np.flatnonzero(result.ok).tolist()]
            self.known_missing.record_stored(stored, ended_s)
            end(result, ended_s)

        opened = OpenTierJob(job.number, len(job), now_s, end_store, job.slots)
        self._submit("store", opened, lambda: self._tier.store(job))

    def load(self, job: TierJob, now_s: float, end: EndOfJob) -> None:
        """Submit a load."""
        self._submit("load", OpenTierJob(job.number, len(job), now_s, end, job.slots), lambda: self._tier.load(job))

    def reset(self, match: RequestFilter | None, key: Key | None = None) -> int:
        """Reset the tier, or drop blocks of matching origins or one key.

        Returns a ticket that is open until the result arrives. If the tier raises, it is not used any more.
        """
        number = self._new_number()
        self._resets[number] = OpenReset(number, match, key)
        # Until the tier has accepted it, whatever interrupts this.
        self._refused.add(number)
        self._submit_reset(number)
        return number

    def resubmit_resets(self) -> None:
        """Submit the resets again that an exception has kept from the tier, under other numbers."""
        for number in self._refused & self._resets.keys():
            again = self._new_number()
            self._refused.add(again)
            self._resets[again] = self._resets[number]
            del self._resets[number]
            self._refused.discard(number)
            self._submit_reset(again)

    def reset_result(self, ticket: int) -> TierResetResult | None:
        """Return the result of a reset if it has arrived; the latest hundred are kept."""
        return self._reset_results.get(ticket)

    def poll(self, now_s: float) -> None:
        """Process the tier's results, and cancel jobs that exceeded the time limit."""
        for subject, failure in list(self._failures.items()) if self._failures else ():
            if not failure.since_s:
                self._failures[subject] = replace(failure, since_s=now_s)
            elif abs(now_s - failure.since_s) > FAILURE_S:
                del self._failures[subject]
        self._call("poll", lambda: self._unread.extend(self._tier.poll()), None)
        num_keys = 0
        while self._unread and num_keys < _MAX_POLLED_KEYS:
            result = self._unread[0]
            num_keys += len(result.ok) if isinstance(result, TierResult) else 0
            self._process(result, now_s)
            # Not before: if an exception prevents the processing, the next call processes the result.
            self._unread.popleft()
        # All jobs have the same limit, so the oldest exceeds it first. If the clock was set back, it is of the future.
        while self._open:
            oldest = next(iter(self._open.values()))
            if abs(now_s - oldest.opened_s) <= self.timeout_s:
                break
            self.use.timed_out += 1
            self._record_failure("jobs", f"gave no answer to a job within {self.timeout_s:g} s")
            if not self._cancel(oldest, now_s):
                # It may have waited for a copy that hangs: the others follow in later calls.
                break

    def close(self, now_s: float) -> None:
        """Submit nothing from now on, and cancel all jobs."""
        self._closed = True
        self.cancel_all(now_s)

    def cancel_all(self, now_s: float) -> None:
        """Cancel all jobs."""
        for job in list(self._open.values()):
            self._cancel(job, now_s)

    # --- blocks of the pool that the tier is known to hold ----------------------------------------------------------

    def record_held(self, slots: Slots, last_generation: int) -> None:
        """Record that the tier holds the blocks of these slots; `last_generation` is the highest of any slot."""
        self._held_at[slots] = last_generation

    def record_wanted(self, slots: Slots, last_generation: int) -> None:
        """Record that the tier may receive the blocks of these slots before their eviction."""
        self._wanted_at[slots] = last_generation

    def record_given(self, slots: Slots) -> None:
        """Record that the blocks of these slots were given to the tier: each is given once."""
        self._wanted_at[slots] = 0

    def is_wanted(self, slots: Slots, generations: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which blocks the tier may receive and is not known to hold. A reset of the tier ends that."""
        wanted_at = self._wanted_at[slots]
        wanted: NDArray[np.bool_] = (wanted_at >= generations) & (wanted_at >= self.held_since)
        return wanted & ~self.is_held(slots, generations)

    def is_held(self, slots: Slots, generations: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which blocks are held; a slot that was reused since has a higher generation."""
        held_at = self._held_at[slots]
        held: NDArray[np.bool_] = (held_at >= generations) & (held_at >= self.held_since)
        return held

    # --- operators ------------------------------------------------------------------------------------------------

    def health(self) -> list[str]:
        """Return the reasons why the tier works with restrictions, one per item."""
        reported = self._call("health", lambda: list(self._tier.health()), list[str]())
        texts = [*reported, *(failure.text for failure in self._failures.values())]
        if not self.is_enabled:
            texts.append("is disabled by an operator")
        if self._stuck:
            num_slots = sum(len(job.slots) for job in self._stuck.values())
            texts.append(
                f"{len(self._stuck)} jobs could not be canceled: the tier is not used until their results arrive, "
                f"and {num_slots} slots are blocked"
            )
        if self._refused:
            texts.append(f"{len(self._refused)} resets were not accepted: the tier is not used before a restart")
        self.use.problems = len(texts)
        return [f"tier {self.name}: {text}" for text in texts]

    def counts(self) -> tuple[TierCounts, TierUse]:
        """Return the tier's counters, and the client's own."""
        num_resets, look_up_s = len(self._resets), self.look_up_rate.estimate_s(1)
        num_open = len(self._open) + len(self._stuck) + num_resets
        use = replace(self.use, open_jobs=num_open, open_resets=num_resets, look_up_s=look_up_s)
        return self._call("counts", self._tier.counts, TierCounts()), use

    # --- internals ------------------------------------------------------------------------------------------------

    def _submit(self, method: str, job: OpenTierJob, send: Callable[[], None]) -> None:
        self._open[job.number] = job
        if not self._succeeds(method, send):
            # The tier may have accepted the job before it raised.
            self._cancel(job, job.opened_s)

    def _cancel(self, job: OpenTierJob, now_s: float) -> bool:
        """Cancel and end a job; if the tier raises, return False, and a job with slots keeps them."""
        del self._open[job.number]
        is_canceled = self._succeeds("cancel", lambda: self._tier.cancel(job.number))
        if is_canceled or not len(job.slots):
            job.end(None, now_s)
        else:
            self._stuck[job.number] = job
        return is_canceled

    def _process(self, result: TierResult | TierResetResult, now_s: float) -> None:
        if isinstance(result, TierResetResult):
            reset = self._resets.pop(result.number, None)
            self._refused.discard(result.number)
            if reset is not None:
                self._reset_results[reset.ticket] = result
                if len(self._reset_results) > _MAX_RESET_RESULTS:
                    del self._reset_results[next(iter(self._reset_results))]
            return
        stuck = self._stuck.pop(result.number, None)
        if stuck is not None:
            stuck.end(None, now_s)
            return
        job = self._open.pop(result.number, None)
        if job is not None:
            self._failures.pop("jobs", None)
            job.end(result if len(result.ok) == job.num_keys else None, now_s)

    def _submit_reset(self, number: int) -> None:
        match, key = self._resets[number].match, self._resets[number].key
        if key is None:
            is_accepted = self._succeeds("reset", lambda: self._tier.reset(number, match))
        else:
            is_accepted = self._succeeds("drop", lambda: self._tier.drop(number, [key]))
        if is_accepted:
            self._refused.discard(number)

    def _succeeds(self, method: str, call: Callable[[], object]) -> bool:
        """Call the tier; return False if it raises."""
        return self._call(method, lambda: (call(), True)[1], False)

    def _call(self, method: str, call: Callable[[], T], default: T) -> T:
        """Return what the tier returns; if it raises, record the exception and return `default`."""
        try:
            answer = call()
        except Exception as error:  # noqa: BLE001 - an exception of a tier must not reach the engine
            self.use.errors += 1
            self._record_failure(method, f"{method} failed: {type(error).__name__}: {error}")
            return default
        if self._failures:
            self._failures.pop(method, None)
        return answer

    def _record_failure(self, subject: str, text: str) -> None:
        if subject not in self._failures:
            self.warnings.append(f"tier {self.name}: {text}")
        self._failures[subject] = Failure(FailureCause.BROKEN, text)
