"""Links: a tier as core holds it. Whatever it does is no error of the engine's, and each of its jobs has a limit."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import NamedTuple, TypeVar

from kvferry.core.cost_model import LoadOrCompute, Rate
from kvferry.core.keys import Key, RequestFilter
from kvferry.core.policy import Level, RequestPolicy
from kvferry.core.tier_stats import TierUse
from kvferry.core.tiers import Tier, TierCounts, TierJob, TierRequest, TierResetResult, TierResult
from kvferry.core.transfers import NO_SLOTS, Slots

T = TypeVar("T")

RETRY_RESET_S = 1.0
"""How often a reset is asked for again that a tier would not even take."""
TROUBLE_S = 60.0
"""How long a failed call is told of, unless the same call succeeds before."""


@dataclass(slots=True, eq=False)
class OpenTierJob:
    """A look-up, cascade or promotion that a tier works on, and the slots that it may touch.

    `end` is told its result, or None when it was given up. The slots of one that cannot be given up stay with it.
    """

    number: int
    num_keys: int
    opened_s: float
    end: Callable[[TierResult | None, float], None]
    slots: Slots = field(default_factory=lambda: NO_SLOTS)


@dataclass(slots=True, eq=False)
class OpenReset:
    """A reset that a tier has not carried out. `ticket` is the number that its asker knows; asking again has others."""

    ticket: int
    match: RequestFilter | None
    asked_s: float
    taken: bool


@dataclass(slots=True, eq=False)
class TierInquiry:
    """What somebody asked a tier who only looks: which of some keys it has. `found` stays None if it does not say."""

    is_over: bool = False
    found: Sequence[bool] | None = None


class _Trouble(NamedTuple):
    """What went wrong, and when that was first seen at a poll."""

    text: str
    at_s: float | None = None


class TierLink:
    """One tier. Called under the manager's lock, but for `fetch*`; what it has to say in the log is in `complaints`.

    A tier that does not let go of a job when it is told to keeps that job's slots, since nobody knows what it touches,
    and is given no other until its result comes.
    """

    def __init__(self, name: str, tier: Tier, choice: LoadOrCompute, new_number: Callable[[], int]) -> None:
        """`choice` says how fast computing is; how fast the tier is, is measured here."""
        self.name = name
        self.complaints: list[str] = []
        self.choice = LoadOrCompute()
        self.choice.tokens_rate = choice.tokens_rate
        self.look_up_rate = Rate()
        self.num_unawaited = 0
        """Look-ups open that nobody waits for any more."""
        self.bytes_in_flight = 0
        self.use = TierUse()
        self.timeout_s = float(tier.timeout_s)
        self._tier = tier
        self._new_number = new_number
        self._open: dict[int, OpenTierJob] = {}
        self._stuck: dict[int, OpenTierJob] = {}
        self._resets: dict[int, OpenReset] = {}
        self._reset_results: dict[int, TierResetResult] = {}
        self._troubles: dict[str, _Trouble] = {}
        self._closed = False
        self._polling = Lock()
        self._asking = Lock()
        self._fetched: deque[Sequence[TierResult | TierResetResult] | Exception] = deque()
        self._fetched_counts: TierCounts | Exception | None = None
        self._fetched_health: Sequence[str] | Exception = ()
        self._counts = TierCounts()

    @property
    def is_usable(self) -> bool:
        """Whether it may be given jobs: it lets go of those that it has, and every reset got through to it."""
        return not (self._closed or self._stuck or (self._resets and any(not one.taken for one in self.open_resets)))

    @property
    def open_jobs(self) -> Sequence[OpenTierJob]:
        """Everything that it works on, and what it did not let go of."""
        return [*self._open.values(), *self._stuck.values()]

    @property
    def open_resets(self) -> Sequence[OpenReset]:
        """The resets that it has not carried out."""
        return list(self._resets.values())

    # --- what it is asked for -----------------------------------------------------------------------------------

    def announce(self, request: TierRequest) -> Level | None:
        """What it needs of a request; None if it cannot be asked, and then it hears no more of that request."""
        return self._try("on_new_request", lambda: Level(self._tier.on_new_request(request)), None)

    def finish(self, request_id: str) -> None:
        """Nothing more will be submitted for a request."""
        self._try("on_request_finished", lambda: self._tier.on_request_finished(request_id), None)

    def look_up(self, job: OpenTierJob, keys: Sequence[Key]) -> None:
        """Ask which keys it has."""
        self.use.looked_up += len(keys)
        self._submit("look_up", job, lambda: self._tier.look_up(job.number, keys))

    def inquire(self, keys: Sequence[Key], now_s: float) -> TierInquiry:
        """Ask which keys it has on nobody's behalf: it counts as no use of the tier."""
        inquiry = TierInquiry()

        def end(result: TierResult | None, now_s: float) -> None:
            inquiry.is_over = True
            inquiry.found = None if result is None else result.ok.tolist()

        job = OpenTierJob(self._new_number(), len(keys), now_s, end)
        self._submit("look_up", job, lambda: self._tier.look_up(job.number, keys))
        return inquiry

    def store(self, job: OpenTierJob, blocks: TierJob) -> None:
        """Have it keep blocks."""
        self.use.cascaded += len(blocks)
        self._submit("store", job, lambda: self._tier.store(blocks))

    def load(self, job: OpenTierJob, blocks: TierJob) -> None:
        """Have it bring blocks into their slots."""
        self._submit("load", job, lambda: self._tier.load(blocks))

    def drop(self, key: Key) -> None:
        """Have it forget a key."""
        self._try("drop", lambda: self._tier.drop([key]), None)

    def reset(self, match: RequestFilter | None, now_s: float) -> int:
        """Have it forget everything, or what matching requests stored; a number that stays open until it has."""
        number = self._new_number()
        self._ask_reset(OpenReset(number, match, now_s, taken=False), number, now_s)
        return number

    def reset_result(self, ticket: int) -> TierResetResult | None:
        """What a reset dropped, once it is carried out; the latest hundred are remembered."""
        return self._reset_results.get(ticket)

    def fetch(self) -> None:
        """Get the tier's results for the next `poll`. Any thread, without the manager lock."""
        if self._polling.acquire(blocking=False):
            try:
                self._fetched.append(_tried(lambda: list(self._tier.poll())))
            finally:
                self._polling.release()

    def fetch_counts(self) -> None:
        """Get what the tier holds and did, for the next `counts`. Any thread, without the manager lock."""
        with self._asking:
            self._fetched_counts = _tried(self._tier.counts)

    def fetch_health(self) -> None:
        """Get what the tier reports of itself, for the next `health`. Any thread, without the manager lock."""
        with self._asking:
            self._fetched_health = _tried(lambda: list(self._tier.health()))

    def poll(self, now_s: float) -> None:
        """Take the results that were fetched, and give up what the tier has had for too long."""
        for subject, trouble in list(self._troubles.items()):
            if trouble.at_s is None:
                self._troubles[subject] = _Trouble(trouble.text, now_s)
            elif abs(now_s - trouble.at_s) > TROUBLE_S:
                del self._troubles[subject]
        while self._fetched:
            fetched = self._fetched.popleft()
            if isinstance(fetched, Exception):
                self.ask_again()
            for result in self._settle("poll", fetched, []):
                self._take(result, now_s)
        # All jobs have the same time, so the oldest is the first to be late.
        while self._open:
            oldest = next(iter(self._open.values()))
            if now_s - oldest.opened_s <= self.timeout_s:
                break
            self.use.timed_out += 1
            self._trouble("jobs", f"gave no answer to a job within {self.timeout_s:g} s")
            self._give_up(oldest, now_s)
        if self._resets:
            for number, reset in list(self._resets.items()):
                if not reset.taken and abs(now_s - reset.asked_s) >= RETRY_RESET_S:
                    del self._resets[number]
                    self._ask_reset(reset, self._new_number(), now_s)

    def ask_again(self) -> None:
        """Ask for the open resets again, since an exception may have cost their results. Jobs time out."""
        for reset in self._resets.values():
            reset.taken = False

    def close(self, now_s: float) -> None:
        """Use it no more, and give up what it has."""
        self._closed = True
        for job in list(self._open.values()):
            self._give_up(job, now_s)

    # --- what operators see -------------------------------------------------------------------------------------

    def health(self) -> list[str]:
        """Why it does less than it should, one reason an item."""
        told = self._settle("health", self._fetched_health, [])
        reasons = [f"tier {self.name}: {reason}" for reason in (*told, *(one.text for one in self._troubles.values()))]
        if self._stuck:
            num_slots = sum(len(job.slots) for job in self._stuck.values())
            reasons.append(
                f"tier {self.name}: it did not let go of {len(self._stuck)} jobs, so it is not used any more, "
                f"and {num_slots} slots are lost to it"
            )
        unheard = sum(not reset.taken for reset in self._resets.values())
        if unheard:
            reasons.append(f"tier {self.name}: {unheard} resets did not get through to it, so it is not used")
        return reasons

    def counts(self) -> tuple[TierCounts, TierUse]:
        """What it holds and did, by its own account, and what it was used for."""
        fetched, self._fetched_counts = self._fetched_counts, None
        if fetched is not None:
            self._counts = self._settle("counts", fetched, TierCounts())
        return self._counts, replace(self.use, open_jobs=len(self._open) + len(self._stuck) + len(self._resets))

    # --- inside -------------------------------------------------------------------------------------------------

    def _submit(self, method: str, job: OpenTierJob, send: Callable[[], None]) -> None:
        self._open[job.number] = job
        if not self._try(method, lambda: _done(send), False):
            # Nobody knows whether it took the job.
            self._give_up(job, job.opened_s)

    def _give_up(self, job: OpenTierJob, now_s: float) -> None:
        """Make sure that a job touches its slots no more, and end it. Otherwise it keeps them."""
        del self._open[job.number]
        if len(job.slots) and not self._try("cancel", lambda: _done(lambda: self._tier.cancel(job.number)), False):
            self._stuck[job.number] = job
            return
        if not len(job.slots):
            self._try("cancel", lambda: self._tier.cancel(job.number), None)
        job.end(None, now_s)

    def _take(self, result: TierResult | TierResetResult, now_s: float) -> None:
        if isinstance(result, TierResetResult):
            reset = self._resets.pop(result.number, None)
            if reset is not None:
                self._reset_results[reset.ticket] = result
                if len(self._reset_results) > 100:
                    del self._reset_results[next(iter(self._reset_results))]
            return
        stuck = self._stuck.pop(result.number, None)
        if stuck is not None:
            stuck.end(None, now_s)
            return
        job = self._open.pop(result.number, None)
        if job is not None:
            self._troubles.pop("jobs", None)
            job.end(result if len(result.ok) == job.num_keys else None, now_s)

    def _ask_reset(self, reset: OpenReset, number: int, now_s: float) -> None:
        reset.asked_s = now_s
        self._resets[number] = reset
        reset.taken = self._try("reset", lambda: _done(lambda: self._tier.reset(number, reset.match)), False)

    def _try(self, method: str, call: Callable[[], T], otherwise: T) -> T:
        """A call of the tier, which must not raise and may."""
        return self._settle(method, _tried(call), otherwise)

    def _settle(self, method: str, answer: T | Exception, otherwise: T) -> T:
        """Note whether a call of the tier failed; its answer, or another one if it did."""
        if isinstance(answer, Exception):
            self.use.errors += 1
            self._trouble(method, f"{method} failed: {type(answer).__name__}: {answer}")
            return otherwise
        if self._troubles:
            self._troubles.pop(method, None)
        return answer

    def _trouble(self, subject: str, text: str) -> None:
        if subject not in self._troubles:
            self.complaints.append(f"tier {self.name}: {text}")
        self._troubles[subject] = _Trouble(text)


def _tried(call: Callable[[], T]) -> T | Exception:
    try:
        return call()
    except Exception as error:  # noqa: BLE001 - a tier's trouble is not the engine's
        return error


def _done(call: Callable[[], object]) -> bool:
    call()
    return True


def allowed_links(links: Sequence[TierLink], policy: RequestPolicy) -> list[TierLink]:
    """The tiers that may be used now for a request with this policy."""
    names = policy.tiers
    return [link for link in links if link.is_usable and (names is None or link.name in names)]
