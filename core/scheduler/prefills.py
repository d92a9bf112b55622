"""Prompts that were computed: what served their tokens, also by tenant, and how fast the engine computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.counters import copy_counts
from kvferry.core.groups import GroupLayout
from kvferry.core.scheduler.requests import FoundTokens, RequestState
from kvferry.core.stats import MissCause, Misses, PromptSource, PromptTokens, Snapshot

_MIN_MEASURED_TOKENS = 16
"""Steps with fewer prefill tokens are not used to measure the rate of computing."""
MAX_TENANTS = 10_000
"""Tenants with counts; those that were not active for longest lose theirs to others."""


@dataclass(slots=True)
class TenantCounts:
    """Counts of the requests of one tenant since the start, or since it was last active among so many."""

    prompt_tokens: PromptTokens = field(default_factory=PromptTokens)
    stored_blocks: int = 0
    stored_bytes: int = 0


class TenantUsage:
    """Counts by tenant; None stands for requests without one. Requires: manager lock held."""

    def __init__(self) -> None:
        self._counts: dict[str | None, TenantCounts] = {}

    def of(self, tenant: str | None) -> TenantCounts:
        """Return the counts of a tenant that is active now."""
        counts = self._counts.pop(tenant, None)
        if counts is None:
            counts = TenantCounts()
            if len(self._counts) >= MAX_TENANTS:
                del self._counts[next(iter(self._counts))]
        self._counts[tenant] = counts
        return counts

    def tenants(self) -> list[str | None]:
        """Return the tenants that have counts."""
        return list(self._counts)

    def copies(self, tenants: Iterable[str | None]) -> list[TenantCounts]:
        """Return copies of the counts of these tenants."""
        return [copy_counts(self._counts.get(tenant) or TenantCounts()) for tenant in tenants]


class Prefills:
    """Counts the source of each prompt's tokens once, and measures the rate of computing. Requires: manager lock held.

    An engine plans a step after it has computed the previous one, so a planned prefill is done at the next step. If it
    plans `steps_in_flight`, a step begins when as many more are planned, and has ended when the next one is.
    """

    def __init__(
        self,
        layout: GroupLayout,
        cost_model: LoadOrCompute,
        counters: Snapshot,
        steps_in_flight: int,
        tenants: TenantUsage,
    ) -> None:
        """`counters` are those of all requests together; `cost_model` receives the measured rate."""
        self.planned: list[RequestState] = []
        """Requests whose prompt ends with the step that is being planned."""
        self.last_step: tuple[float, int] | None = None
        """Start and number of tokens of the step that ends next, if it is to be measured."""
        self._in_flight = deque([0] * steps_in_flight)
        """Tokens of the steps planned after that, 0 for those that are not to be measured."""
        self._layout = layout
        self._cost_model = cost_model
        self._counters = counters
        self._tenants = tenants

    def begin_step(self, num_prefill_tokens: int, num_tokens: int, now_s: float) -> None:
        """Start to measure a step if most of its tokens are prefill."""
        is_prefill = num_prefill_tokens >= max(_MIN_MEASURED_TOKENS, num_tokens // 2)
        self._in_flight.append(num_tokens if is_prefill else 0)
        num_measured = self._in_flight.popleft()
        if num_measured:
            self.last_step = (now_s, num_measured)

    def end_step(self, now_s: float) -> None:
        """Count the prompts that ended with the previous step, and measure that step."""
        for state in self.planned:
            self.count(state, now_s)
        self.planned.clear()
        if self.last_step is not None:
            then_s, num_tokens = self.last_step
            self._cost_model.tokens_rate.observe(num_tokens, now_s - then_s)
            self.last_step = None

    def cancel_step(self) -> None:
        """Do not measure the steps that have not ended, as one failed."""
        self.last_step = None
        self._in_flight = deque([0] * len(self._in_flight))

    def count(self, state: RequestState, now_s: float) -> None:
        """Count the prompt of a request once, if all of it was computed or loaded."""
        if not state.prefill.planned or state.prefill.counted:
            return
        total = state.request.num_prompt_tokens
        hit = self._least_found(state)
        device_hit = min(hit.device_tokens, total)
        loaded = min(hit.loaded_tokens, total - device_hit)
        served = device_hit + loaded
        tier_hit = self.tier_hit(state, device_hit, served)
        host_hit = loaded - sum(tier_hit.values())
        unused = MissCause.DECLINED if state.policy.policy.load else MissCause.LOAD_DISABLED
        lost_cause = MissCause.LOAD_FAILED if state.load.failed else unused
        # Nothing below may raise, or some counts would be missing.
        state.prefill.counted = True
        state.times.computed_s = now_s
        source = PromptSource.LOADED if loaded else PromptSource.DEVICE if device_hit else PromptSource.NONE
        times, counters = state.times, self._counters
        counters.latencies.count(source, total, times.load_s, times.tier_s, max(0.0, now_s - times.arrived_s))
        counters.balance.add(times.load_s + times.later_s, loaded, self._cost_model.tokens_rate)
        of_tenant = self._tenants.of(state.origin.tenant).prompt_tokens
        tokens = PromptTokens(
            total=total, device_hit=device_hit, host_hit=host_hit, tier_hit=tier_hit, recomputed=total - served
        )
        for counts in (counters.prompt_tokens, state.prefill.prompt_tokens, of_tenant):
            counts.add(tokens)
        unknown = MissCause.LOAD_DISABLED if state.unhashed is not None else MissCause.UNEXAMINED
        unknown = unknown if state.error is None else MissCause.ERROR
        alignment = self._layout.alignment_tokens
        misses = hit.misses or Misses(0, [((total - 1) // alignment * alignment, unknown)])
        misses.count(served, total, lost_cause, (counters.missed_tokens, state.prefill.missed_tokens))
        state.prefill.evicted_between_s = misses.evicted_between_s
        state.tiers.promoted = {}

    def record_preemption(self, state: RequestState) -> None:
        """Record what a running request has found so far, if its prompt is not counted yet."""
        if not state.prefill.counted:
            state.prefill.least = self._least_found(state)

    @staticmethod
    def _least_found(state: RequestState) -> FoundTokens:
        """Return the least that an attempt has found: later ones may find what the request itself has computed."""
        load, least = state.load, state.prefill.least
        latest = FoundTokens(load.device_tokens, load.loaded_tokens, load.misses)
        return latest if least is None or latest.total < least.total else least

    def tier_hit(self, state: RequestState, first_token: int, end_token: int) -> dict[str, int]:
        """Return, by tier, how many of these loaded tokens were promoted from it for this request."""
        tiers, step = state.tiers.promoted, self._layout.alignment_tokens
        hits: dict[str, int] = {}
        for start in range(first_token // step * step, end_token if tiers else 0, step):
            name = tiers.get(start // step)
            if name is not None:
                hits[name] = hits.get(name, 0) + min(start + step, end_token) - max(start, first_token)
        return hits
