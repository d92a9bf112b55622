"""The offload scheduler: which blocks are stored and loaded for which request, one engine step at a time.

It mirrors an engine's own scheduler and is engine-neutral. Per request the engine calls, in this order:
`on_new_request`, `match` (any number of times), `commit`, every step `plan_step` and `on_transfers_finished`, on
preemption `on_preempted` (after which it matches and commits again), and in the end `on_request_finished`, once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.engine_api import BlockTables, DeviceView, EngineRequest, StepProgress, StoreMode
from kvferry.core.groups import GroupLayout
from kvferry.core.jobs import DeviceHolds, JobTable
from kvferry.core.keys import RequestIdentity
from kvferry.core.lazy import LazySide
from kvferry.core.leaders import Leaders
from kvferry.core.loads import Hit, Later, LoadSide, MatchResult, Miss
from kvferry.core.patience import Patience
from kvferry.core.policy import (
    REQUEST_FIELDS_DEFAULT,
    IgnoredField,
    PolicyResolver,
    parse_request_fields,
)
from kvferry.core.pool.events import RequestEnd
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.prefills import Prefills
from kvferry.core.prefixes import PrefixFinder
from kvferry.core.request_views import RequestViews
from kvferry.core.requests import GroupProgress, RequestPhase, RequestState, RequestTable, subject_of
from kvferry.core.resets import Resets
from kvferry.core.stats import PromptTokens, RequestCounts, Snapshot, by_direction
from kvferry.core.stores import StoreSide
from kvferry.core.tier_side import TierSide
from kvferry.core.tiers import Tier
from kvferry.core.transfers import LoadOutcome, StepPlan, TransferResult

__all__ = ["Hit", "Later", "MatchResult", "Miss", "OffloadScheduler"]

_log = logging.getLogger(__name__)

_WARN_EVERY_S = 60.0


class OffloadScheduler:
    """Decides stores and loads for an engine. Every method takes the manager's lock itself.

    The engine's hooks are called on one thread; what operators ask for may come from any.
    """

    def __init__(
        self,
        manager: OffloadManager,
        policies: PolicyResolver,
        device: DeviceView,
        layout: GroupLayout,
        *,
        choice: LoadOrCompute | None = None,
        request_fields: Sequence[str] = REQUEST_FIELDS_DEFAULT,
        num_workers: int = 1,
        num_recent_requests: int = 1000,
        null_block: int = -1,
        store_mode: StoreMode = StoreMode.EAGER,
        watermark_blocks: int = 64,
        tiers: Mapping[str, Tier] | None = None,
    ) -> None:
        """`request_fields` are the policy fields that `kv_transfer_params` may set.

        `null_block` is what stands in a block table where there is no block. In lazy mode `watermark_blocks` at the
        head of the device's free queue are kept stored: as many as a step may take. `tiers` are those below the pool,
        by name, the fastest first; whoever opened them closes them, behind `tiers.close`. Raises
        `ValueError` if the manager's slots are too small for the layout's.
        """
        if layout.slot_bytes > manager.slot_bytes:
            raise ValueError(
                f"a slot of this layout takes {layout.slot_bytes:,} bytes, the pool's {manager.slot_bytes:,}"
            )
        self.manager = manager
        self.layout = layout
        self.choice = choice if choice is not None else LoadOrCompute()
        self.policies = policies
        self._request_fields = tuple(request_fields)
        self._requests = RequestTable(num_recent_requests)
        self.requests = RequestViews(self._requests, policies, manager.lock)
        self._jobs = JobTable(num_workers)
        self._holds = DeviceHolds(device)
        self._stores = StoreSide(manager, self._holds, self._jobs, layout, null_block)
        self._lazy = LazySide(manager, device, self._stores, layout, null_block, watermark_blocks)
        finder, patience = PrefixFinder(manager, layout, device), Patience(self.choice)
        leaders = Leaders(layout, finder, patience)
        self._loads = LoadSide(manager, self._holds, self._jobs, layout, null_block, self.choice, finder, leaders)
        self.tiers = TierSide(manager, layout, tiers or {}, self._jobs.new_id, finder, leaders, patience, self.choice)
        if tiers:
            self._stores.cascades = self.tiers.cascades
            self._loads.promotions = self.tiers.promotions
        self.resets = Resets(manager, self._jobs, self._stores, self._lazy, self.tiers)
        self._counts = RequestCounts()
        prompt_tokens = PromptTokens(tier_hit=dict.fromkeys(tiers or (), 0))
        self._prefills = Prefills(layout, self.choice, prompt_tokens)
        self._transfers = by_direction()
        self._live = Snapshot(
            epoch=0,
            pool=manager.live_counts(),
            requests=self._counts,
            prompt_tokens=prompt_tokens,
            store=self._stores.counts,
            load=self._loads.counts,
            evictions=manager.evictions,
            missed_tokens=self._prefills.missed_tokens,
            open_jobs=0,
            transfers=self._transfers,
        )
        self._last_warned_s: dict[str, float] = {}
        self._num_taken_blocks = 0
        self.set_store_mode(store_mode)

    # --- the engine's hooks -------------------------------------------------------------------------------------

    def on_new_request(self, request: EngineRequest, now_s: float) -> None:
        """A request exists, and its policy is settled. An id may come again once the request before it has finished."""
        patch, ignored = parse_request_fields(request.kv_transfer_params, self._request_fields)
        with self.manager.lock:
            origin = RequestIdentity(request.request_id, request.tenant, request.lora, tuple(request.aliases))
            state = RequestState(
                sequence=self._requests.next_sequence(),
                request=request,
                groups=tuple(GroupProgress(group) for group in self.layout.groups),
                origin=origin,
                patch=patch,
                policy=self.policies.settle(subject_of(request, origin), patch, now_s),
                policy_version=self.policies.version,
            )
            unfinished = self._requests.get(request.request_id)
            if unfinished is not None:
                # Its engine forgot it, so nobody knows what its blocks hold by now: none of them is offered.
                unfinished.num_computed_tokens = 0
                self._finish(request.request_id, now_s)
            self.tiers.announce(state)
            self._requests.add(state)
            self._counts.seen += 1
            self._counts.running += 1
            to_warn = [one for one in ignored if self._may_warn(one.name, now_s)]
        for one in to_warn:
            _warn_ignored(one, request.request_id)

    def match(self, request_id: str, num_computed_tokens: int, now_s: float) -> MatchResult:
        """How many tokens after the first `num_computed_tokens` the host can serve.

        A hit is pinned until `commit`, and asking again replaces the pin. It ends before the last token of the request,
        which has to be computed in any case. An unknown request, or one that is loading, misses. While another request
        loads this very prefix the answer is `Later`, for at most as long as computing it would take.
        """
        # Only the engine's thread adds requests, and keys. For a long prompt this takes longer than to find them.
        known = self._requests.get(request_id)
        if known is not None:
            known.extend_keys()
        with self.manager.lock:
            state = self._requests.get(request_id)
            if state is None or state.phase is RequestPhase.LOADING:
                return Miss()
            state.settle(self.policies, now_s)
            return self._loads.match(state, num_computed_tokens)

    def boundary(self, request_id: str) -> int:
        """Return where the latest `match` found that a request leaves the prefixes of others, in tokens; 0 if nowhere.

        The window or state there is missing and will be stored, if the engine has it when it has computed that far.
        """
        with self.manager.lock:
            state = self._requests.get(request_id)
            return 0 if state is None else state.boundary_tokens

    def commit(self, request_id: str, block_ids: BlockTables, num_loaded_tokens: int, now_s: float) -> None:
        """The engine has allocated: `block_ids` are the request's whole tables; it took `num_loaded_tokens` of the hit.

        With tokens to load the request has to wait for its `LoadOutcome`. What turns out not to be loadable any more,
        or is no whole blocks of the hit, is a failed load, not an error. A second call for the same match only brings
        the table up to date.
        """
        with self.manager.lock:
            state = self._requests.get(request_id)
            if state is None:
                return
            if state.matched_tokens is not None:
                on_device = sum(state.matched_tokens // group.spec.block_size for group in self.layout.groups)
                state.num_blocks = on_device
            self._note_tables(state, block_ids)
            self._loads.commit(state, num_loaded_tokens, now_s)

    def plan_step(self, progress: Sequence[StepProgress], now_s: float) -> StepPlan:
        """The transfers to start with this step, whose requests will have come as far as `progress` says.

        Called every step, also one without requests, after the engine has given out the step's blocks. The blocks of
        the plan are held until their job ends, but for those copied ahead of the step.
        """
        with self.manager.lock:
            self._holds.release_orphans()
            self._expire(now_s)
            self._prefills.end_step(now_s)
            self._stores.drop_disowned(now_s)
            # Before the tables below are noted: what these blocks hold now was recorded by earlier steps.
            self._lazy.store_given_out(now_s)
            num_prefill_tokens = num_tokens = 0
            for step in progress:
                state = self._requests.get(step.request_id)
                if state is None or state.phase is RequestPhase.LOADING:
                    continue
                new_tokens = step.num_computed_tokens - state.num_computed_tokens
                num_tokens += new_tokens
                state.phase = RequestPhase.RUNNING
                self._note_tables(state, step.block_ids)
                state.num_computed_tokens = step.num_computed_tokens
                if not state.prefill_counted:
                    num_prefill_tokens += new_tokens
                    if step.num_computed_tokens >= state.request.num_prompt_tokens:
                        self._prefills.plan(state)
                self._stores.note_parts(state)
                if self._stores.has_unanswered(state):
                    state.settle(self.policies, now_s)
                    self._stores.offer_step(state)
            self._prefills.begin_step(num_prefill_tokens, num_tokens, now_s)
            self._stores.continue_reordering()
            self._lazy.walk(self._num_taken_blocks, now_s)
            self._num_taken_blocks = 0
            plan = StepPlan(
                loads=self._loads.take_jobs(),
                stores=self._stores.take_job(now_s),
                ahead=self._stores.take_job(now_s, ahead=True),
            )
            self._jobs.note_sent(plan)
            return plan

    def on_step_failed(self, request_ids: Sequence[str], now_s: float) -> None:
        """The compute of a step failed: nothing of what its requests hold may be stored from now on.

        The engine reports the step's store jobs as failed besides.
        """
        with self.manager.lock:
            self._prefills.fail_step()
            failed = [state for request_id in request_ids if (state := self._requests.get(request_id)) is not None]
            for state in failed:
                state.num_computed_tokens = 0
                state.prefill_planned = False
            self._stores.fail_decided(failed, now_s)
            self._lazy.forget_hidden()

    def on_transfers_finished(self, results: Sequence[TransferResult], now_s: float) -> list[LoadOutcome]:
        """Take the workers' reports, and say which requests' loads have ended and how. Called every step."""
        errors: list[str] = []
        self.tiers.fetch()
        with self.manager.lock:
            for result in results:
                self._jobs.report(result)
            self._holds.release_orphans()
            self.tiers.take_results(now_s)
            self._loads.end_lost()
            for ended in self._jobs.take_ended():
                if ended.is_store:
                    self._stores.end(ended, now_s)
                else:
                    self._loads.end(ended, now_s)
                if not ended.errors:
                    transfers = self._transfers[ended.job.direction]
                    self._transfers[ended.job.direction] = transfers.counting(ended.num_bytes, ended.seconds)
                elif self._may_warn(f"{ended.job.direction} failed", now_s):
                    errors.append(f"{ended.job.direction} job {ended.job.job_id}: {ended.errors[0]}")
        self.tiers.log_complaints()
        for error in errors:
            _log.error("%s; its blocks are dropped and will be recomputed", error)
        with self.manager.lock:
            return self._loads.take_outcomes()

    def on_preempted(self, request_id: str, now_s: float) -> None:
        """A request lost its device blocks. Answers already given stand; transfers under way keep their own hold."""
        with self.manager.lock:
            state = self._requests.get(request_id)
            if state is None:
                return
            self._counts.preempted += 1
            self._prefills.count(state)
            if state.phase is RequestPhase.RUNNING:
                self._stores.note_lost(state)
            state.load_failed = False
            state.block_ids = ()
            state.num_blocks = 0
            for progress in state.groups:
                progress.kept = 0
            state.num_computed_tokens = 0
            state.misses = None
            self._loads.detach(state)
            state.phase = RequestPhase.WAITING

    def on_request_finished(self, request_id: str, now_s: float) -> None:
        """A request is over, whatever became of it. Called before its blocks are freed: what was full is offered."""
        with self.manager.lock:
            self._finish(request_id, now_s)

    def is_loading(self, request_id: str) -> bool:
        """Whether a request waits for the outcome of its load."""
        with self.manager.lock:
            state = self._requests.get(request_id)
            return state is not None and state.phase is RequestPhase.LOADING

    def has_open_work(self) -> bool:
        """Whether transfers are open or waiting to be planned, so that an idle engine has to go on stepping."""
        with self.manager.lock:
            pending = self._stores.has_pending() or self._loads.has_outcomes() or self._holds.has_orphans()
            return pending or len(self._jobs) > 0

    def abandon_all(self, now_s: float, last_sent: int | None = None) -> list[Exception]:
        """Return to a consistent state after an exception in any method, whatever that method left half-changed.

        Nothing that is under way is published, and hits are gone. Blocks that can be found stay, unless the exception
        interrupted a change of the pool: then all are dropped. Jobs that the engine received stay open and keep their
        slots and device blocks until they are reported. Loads fail: the outcomes of those that the engine did not
        receive are returned by the next `on_transfers_finished`. Requests miss until the engine reports their blocks
        again, and are not offered to tiers any more.
        Any thread; device blocks of no open job are released in the engine's next call of `plan_step` or
        `on_transfers_finished`.

        Args:
            now_s: the time.
            last_sent: the engine received no job with a number above this; None: it received each that a plan named.

        Returns:
            Further exceptions, which did not prevent the recovery.
        """
        with self.manager.lock:
            dropped = self._jobs.drop_unsent(last_sent)
            live, known = list(self._requests), self._requests.all_known()
            self._loads.abandon(dropped, live)
            self._stores.abandon(known)
            self._lazy.abandon()
            self.tiers.abandon()
            self._prefills.abandon()
            for state in live:
                state.forget_progress()
            self._counts.running = len(live)
            self._holds.keep([job for job in self._jobs if not job.is_store] + [p for j in self._jobs for p in j.parts])
            loads = [job.pin for job in self._jobs if job.pin is not None]
            return self.manager.recover(self.resets.filled_slots(), loads, now_s)

    # --- what operators see and do ------------------------------------------------------------------------------

    def tier_hit(self, request_id: str, num_loaded_tokens: int) -> dict[str, int]:
        """Return, by tier, how many tokens of the load just committed it brought into the pool for this request."""
        with self.manager.lock:
            state = self._requests.get(request_id)
            if state is None:
                return {}
            return self._prefills.tier_hit(state, state.device_tokens, state.device_tokens + num_loaded_tokens)

    def snapshot(self) -> Snapshot:
        """All counters at one moment."""
        self.tiers.fetch_counts()
        with self.manager.lock:
            return self.live().copy()

    def live(self) -> Snapshot:
        """The counters themselves, which go on counting: of one moment while the caller holds the manager's lock.

        Those of tiers are what `tiers.fetch_counts` got last, which is to be called before, without the lock.
        """
        live = self._live
        live.epoch = self.manager.epoch
        live.pool = self.manager.live_counts()
        live.requests.waiting_for_load = self._loads.num_waiting
        live.open_jobs = len(self._jobs)
        if self.tiers.links:
            live.tiers = self.tiers.stats()
        return live

    def expire(self, now_s: float) -> None:
        """Let go of what is over (overrides, pins, jobs of tiers), as every step does: an idle engine takes none."""
        with self.manager.lock:
            self._expire(now_s)
        self.tiers.poll(now_s)

    def overdue_jobs(self, now_s: float, limit_s: float) -> int:
        """How many jobs have been open for longer than `limit_s`; they keep their blocks, for no copy times out."""
        with self.manager.lock:
            return sum(now_s - job.opened_s > limit_s for job in self._jobs)

    @property
    def store_mode(self) -> StoreMode:
        """When blocks are offered."""
        return StoreMode.EAGER if self._stores.keep is None else StoreMode.LAZY

    def set_store_mode(self, mode: StoreMode) -> None:
        """Offer blocks as they fill, or when they leave the device. What was kept for later is still offered then."""
        with self.manager.lock:
            self._stores.keep = self._lazy.record if mode is StoreMode.LAZY else None
            self.manager.evictor.residency = self._lazy.residency if mode is StoreMode.LAZY else None

    # --- inside -------------------------------------------------------------------------------------------------

    def _expire(self, now_s: float) -> None:
        self.policies.expire(now_s)
        self.manager.operator_pins.expire(now_s)

    def _note_tables(self, state: RequestState, block_ids: BlockTables) -> None:
        """Take over a request's tables, and count the device blocks that they have grown by."""
        num_blocks = sum(map(len, block_ids))
        self._num_taken_blocks += max(num_blocks - state.num_blocks, 0)
        state.block_ids, state.num_blocks = block_ids, num_blocks

    def _finish(self, request_id: str, now_s: float) -> None:
        state = self._requests.get(request_id)
        if state is None:
            return
        try:
            self._prefills.count(state)
            if state.phase is RequestPhase.RUNNING:
                state.settle(self.policies, now_s)
                self._stores.offer_rest(state)
            self._loads.detach(state)
        finally:
            # Announced once, finished once: an exception must not keep the request for ever.
            self._retire(state, now_s)

    def _retire(self, state: RequestState, now_s: float) -> None:
        self._requests.retire(state)
        self._counts.running -= 1
        self._counts.finished += 1
        if state.session is not None:
            state.session.let_go()
        request = state.request
        num_output_tokens = request.num_tokens - request.num_prompt_tokens
        tokens = state.prompt_tokens.copy()
        end = RequestEnd(now_s, state.origin, request.num_prompt_tokens, num_output_tokens, tokens)
        self.manager.sink.request_ended(end)

    def _may_warn(self, subject: str, now_s: float) -> bool:
        """Whether a minute has passed since this was last said."""
        if now_s - self._last_warned_s.get(subject, -_WARN_EVERY_S) < _WARN_EVERY_S:
            return False
        self._last_warned_s[subject] = now_s
        return True


def _warn_ignored(field: IgnoredField, request_id: str) -> None:
    _log.warning(
        "kv_transfer_params.%s=%s of request %s was ignored: it has the wrong type or is out of range",
        field.name,
        field.value,
        request_id,
    )
