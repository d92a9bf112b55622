"""The oracle of `bench.vllm_oracle`: it records every block ever computed in an engine, and judges kvferry's counts.

It needs an engine of `tests.vllm.engines`, and none to compare the results of two runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kvferry.core.groups import GroupKind
from kvferry.core.keys import Key
from kvferry.core.pool.events import CacheEvent, EventSink, StoreBatch
from kvferry.core.scheduler.requests import RequestView
from kvferry.core.stats import EvictionReason, MissCause, Misses, MissReason, NotStored

if TYPE_CHECKING:
    from tests.vllm.engines import InProcess

LOST_HIT = (MissCause.LOAD_FAILED, MissCause.DECLINED, MissCause.LOAD_DISABLED)
MIN_LAZY_SHARE = 0.98
"""Lazy mode finds at least this share of the tokens that eager mode finds for the same requests."""


@dataclass(slots=True)
class LookUp:
    """The state at a request's last look-up before it was scheduled.

    `first_end` and `last_end` are where the computed prefix ended at the first and the last look-up. `present` are the
    keys of the request that were in the pool, `stored` those that had been at any time; both of the first full group.
    """

    request: Any
    first_end: int
    last_end: int = 0
    num_tokens: int = 0
    misses: Misses | None = None
    keys: tuple[Key, ...] = ()
    present: frozenset[Key] = frozenset()
    stored: frozenset[Key] = frozenset()
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Finding:
    """Tokens of one request that were counted under a wrong cause."""

    kind: str
    request: str
    first_token: int
    end_token: int
    cause: str

    def __str__(self) -> str:
        span = f"tokens {self.first_token} to {self.end_token}"
        return f"{self.kind}: {span} of {self.request} are counted as {self.cause}"


@dataclass(slots=True)
class Result:
    """Result of one run of a case, in tokens, over all requests whose prompts were computed completely."""

    prompt: int = 0
    oracle: int = 0
    served: dict[str, int] = field(default_factory=dict)
    """The cached tokens of each of these requests, by the name that the workload gave it."""
    shortfall: int = 0
    beyond: int = 0
    causes: Counter[str] = field(default_factory=Counter)
    explained: Counter[str] = field(default_factory=Counter)
    """The shortfall by cause."""
    findings: list[Finding] = field(default_factory=list)
    different: int = 0
    near_ties: int = 0

    @property
    def cached(self) -> int:
        """Return the cached tokens of all requests."""
        return sum(self.served.values())

    def tokens(self, kind: str) -> int:
        """Return the tokens of all findings of this kind."""
        return sum(one.end_token - one.first_token for one in self.findings if one.kind == kind)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Cached tokens of two store modes, over the `num_requests` requests that both runs have computed completely.

    Which ones these are differs where requests are aborted after a number of steps. `behind` are the requests for which
    lazy mode found fewer tokens, with the tokens of eager and lazy mode, the largest difference first.
    """

    eager: int
    lazy: int
    num_requests: int
    behind: tuple[tuple[str, int, int], ...]

    @property
    def ratio(self) -> float:
        """Return lazy mode's share of eager mode's tokens; 1 if neither found any."""
        return self.lazy / self.eager if self.eager else 1.0

    @property
    def is_finding(self) -> bool:
        """Return whether lazy mode found too little."""
        return self.ratio < MIN_LAZY_SHARE

    def __str__(self) -> str:
        text = f"lazy/eager {self.ratio:.3f}: {self.lazy:,} of {self.eager:,}, {self.num_requests} requests in both"
        if not self.is_finding:
            return text
        listed = ", ".join(f"{name} {lazy:,} of {eager:,}" for name, eager, lazy in self.behind[:12])
        return f"{text}; less than {MIN_LAZY_SHARE}: {listed}"


def compare(eager: Result, lazy: Result) -> Comparison:
    """Compare the cached tokens of one workload in both store modes."""
    both = [(name, tokens, lazy.served[name]) for name, tokens in eager.served.items() if name in lazy.served]
    behind = sorted((one for one in both if one[2] < one[1]), key=lambda one: one[2] - one[1])
    total = (sum(one[1] for one in both), sum(one[2] for one in both))
    return Comparison(*total, len(both), tuple(behind))


class StoredKeys:
    """An event sink that forwards all events and remembers every published key."""

    def __init__(self, sink: EventSink) -> None:
        self.keys: set[Key] = set()
        self._sink = sink

    def __call__(self, event: CacheEvent) -> None:
        if isinstance(event, StoreBatch):
            self.keys.update(event.keys)
        self._sink(event)


class Oracle:
    """Observes an engine with kvferry, and records every block ever computed in it."""

    def __init__(self, engine: InProcess) -> None:
        self.engine = engine
        self.look_ups: dict[str, LookUp] = {}
        self._retries: dict[str, LookUp] = {}
        """Look-ups of requests that were preempted before the end of their prompts: what found least counts."""
        self._computed: set[bytes] = set()
        self._manager = engine.core.manager
        self._sink = StoredKeys(self._manager.sink)
        self._manager.sink = self._sink
        self._block_size = engine.core.layout.hash_block_size
        self._full = next((g for g in engine.core.layout.groups if g.spec.kind is GroupKind.FULL), None)
        connector = engine.vllm_scheduler.connector
        self._match: Callable[..., Any] = connector.get_num_new_matched_tokens
        connector.get_num_new_matched_tokens = self._look_up
        self._commit: Callable[..., Any] = connector.update_state_after_alloc
        connector.update_state_after_alloc = self._note_commit

    def note_progress(self) -> None:
        """Record what the last step computed. Must be called after every step."""
        for look_up in self.look_ups.values():
            if look_up.is_open:
                request = look_up.request
                self._computed.update(request.block_hashes[: request.num_computed_tokens // self._block_size])
                look_up.is_open = not request.is_finished()

    def _look_up(self, request: Any, num_computed_tokens: int) -> Any:
        state = self.engine.core.requests.live.get(request.request_id)
        if state is None or state.prefill.counted or state.prefill.planned:
            return self._match(request, num_computed_tokens)
        end = self._computed_end(request)
        look_up = self.look_ups.get(request.request_id)
        if look_up is None:
            look_up = self.look_ups[request.request_id] = LookUp(request, end)
        if state.prefill.least is not None:
            look_up = self._retries[request.request_id] = replace(look_up)
        look_up.last_end, look_up.num_tokens = end, request.num_tokens
        if self._full is not None:
            state.keys.extend_loadable()
            look_up.keys = tuple(state.keys.by_group[self._full.index])
            slots = self._manager.lookup_each(look_up.keys)
            look_up.present = frozenset(key for key, slot in zip(look_up.keys, slots, strict=True) if slot >= 0)
            look_up.stored = frozenset(self._sink.keys.intersection(look_up.keys))
        return self._match(request, num_computed_tokens)

    def _note_commit(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._commit(request, blocks, num_external_tokens)
        state = self.engine.core.requests.live.get(request.request_id)
        retry, look_up = self._retries.pop(request.request_id, None), self.look_ups.get(request.request_id)
        if state is None or look_up is None or state.prefill.counted or state.prefill.planned:
            return
        least = state.prefill.least
        if least is None:
            look_up.misses = state.load.misses
        elif retry is not None and state.load.device_tokens + num_external_tokens < least.total:
            retry.misses = state.load.misses
            self.look_ups[request.request_id] = retry

    def _computed_end(self, request: Any) -> int:
        """Return the end of the prefix of computed blocks that a hit may use."""
        count = 0
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // self._block_size]:
            if block_hash not in self._computed:
                break
            count += 1
        step = self.engine.core.layout.alignment_tokens
        return count * self._block_size // step * step

    def judge(self) -> Result:
        """Compare kvferry's counts of each request with the recorded facts."""
        result = Result()
        for request_id, look_up in self.look_ups.items():
            state = self.engine.core.requests.find(request_id, 0.0)
            if state is not None and state.prompt_tokens.total:
                self._judge_request(result, request_id, look_up, state)
        total = self.engine.snapshot()
        causes = {label: tokens for label, tokens in total.missed_tokens.flat().items() if tokens}
        if (total.prompt_tokens.total, causes) != (result.prompt, dict(+result.causes)):
            result.findings.append(Finding("wrong", "the totals", 0, total.prompt_tokens.total, str(causes)))
        return result

    def _judge_request(self, result: Result, request_id: str, look_up: LookUp, view: RequestView) -> None:
        counts, total = view.prompt_tokens, view.prompt_tokens.total
        served = total - counts.recomputed
        oracle = min(look_up.last_end, total)
        whole = min(self._whole_end(look_up), total)
        result.prompt += total
        result.oracle += oracle
        # vLLM appends a random suffix to the name.
        result.served[request_id.rpartition("-")[0]] = served
        result.shortfall += max(oracle - served, 0)
        result.beyond += max(served - oracle, 0)
        result.causes.update(view.missed_tokens.flat())
        by_cause: Counter[MissReason] = Counter()
        for start, end, cause in _spans(look_up.misses or Misses(0), served, total, view):
            by_cause[cause] += end - start
            result.explained[_label(cause)] += max(min(end, oracle) - start, 0)
            for kind, first, stop in self._contradictions(look_up, start, end, cause, oracle, whole):
                result.findings.append(Finding(kind, request_id, first, stop, _label(cause)))
        counted = {label: tokens for label, tokens in view.missed_tokens.flat().items() if tokens}
        spanned = {_label(cause): tokens for cause, tokens in by_cause.items() if tokens}
        if counted != spanned:
            result.findings.append(Finding("wrong", request_id, served, total, f"{counted} instead of {spanned}"))

    def _whole_end(self, look_up: LookUp) -> int:
        """Return the end of the request's whole blocks before its last token."""
        alignment = self.engine.core.layout.alignment_tokens
        return (look_up.num_tokens - 1) // alignment * alignment

    def _contradictions(
        self, look_up: LookUp, start: int, end: int, cause: MissReason, oracle: int, whole: int
    ) -> Iterator[tuple[str, int, int]]:
        """Yield token ranges that cannot have their recorded cause, with the kind of contradiction."""
        if cause is MissCause.TAIL:
            if start < min(whole, end):
                yield ("lost" if start < oracle else "invented"), start, min(whole, end)
            return
        if cause is MissCause.NEW:
            if start < oracle:
                yield "lost", start, min(oracle, end)
            return
        if end > max(start, oracle):
            yield "invented", max(start, oracle), end
        if self._full is None or cause is MissCause.UNEXAMINED:
            return
        size = self._full.slot_tokens
        for number in range(start // size, min(-(-end // size), len(look_up.keys))):
            key = look_up.keys[number]
            is_present, was_stored = key in look_up.present, key in look_up.stored
            if isinstance(cause, EvictionReason):
                fits = was_stored and not is_present
            elif isinstance(cause, NotStored):
                fits = not was_stored or cause is NotStored.PART_OF_SLOT
            elif cause is MissCause.GAP:
                # The device may have the block.
                fits = True
            else:
                fits = is_present == (cause is not MissCause.IN_FLIGHT)
            if not fits:
                yield "wrong", max(start, number * size), min(end, (number + 1) * size)


def _spans(misses: Misses, served: int, total: int, view: RequestView) -> Iterator[tuple[int, int, MissReason]]:
    """Yield the ranges of a prompt's computed tokens with kvferry's recorded causes."""
    lost = next((cause for cause in LOST_HIT if view.missed_tokens.causes[cause]), MissCause.DECLINED)
    return misses.spans(served, total, lost)


def _label(cause: MissReason) -> str:
    if isinstance(cause, EvictionReason):
        return f"evicted:{cause}"
    return f"not_stored:{cause}" if isinstance(cause, NotStored) else str(cause)
