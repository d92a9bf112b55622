"""The offload scheduler: decides which blocks are stored and loaded for which request, one engine step at a time.

It mirrors an engine's own scheduler and is engine-neutral. For each request the engine calls, in this order:
`on_new_request`, `match` (any number of times), `commit`, every step `plan_step` and `on_transfers_finished`, on
preemption `on_preempted` (after which it matches and commits again), and finally `on_request_finished`, once.

The scheduler keeps the order of these calls and of their holds of the lock. Its parts decide:

    StorePlanner, LazyPlanner, StoreJobs   which slots are stored, and when; their jobs
    LoadPlanner                            hits, pins and load jobs; whether loading is worth it
    InflightPrefixes, Demands              waits for what other requests load, or only the device has
    Promotions                             look-ups in tiers, and promotions of what they find
    Tiering                                open jobs of tiers; cascades, flushes and prefetches
    Prefills                               sources of prompt tokens, and the rate of computing
    Resets                                 drops by operators and engine
    Retention                              leases of requests that have ended
    SessionTable                           counters and block hashes of the latest sessions

An exception that may have left a change incomplete replaces all but the last five: see `abandon_all`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.counters import copy_counts
from kvferry.core.engine_api import BlockTables, DeviceView, EngineRequest, StepProgress, StoreMode
from kvferry.core.errors import RequestFailed
from kvferry.core.groups import GroupKind, GroupLayout
from kvferry.core.keys import Key, SessionKey
from kvferry.core.policy import REQUEST_FIELDS_DEFAULT, PolicyResolver, parse_request_fields
from kvferry.core.pool.events import RequestBlocks, RequestEnd
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.recovery import recover
from kvferry.core.scheduler.demands import Demands
from kvferry.core.scheduler.inflight import InflightPrefixes
from kvferry.core.scheduler.jobs import JobTable, OpenJob
from kvferry.core.scheduler.lazy import Batches, LazyPlanner
from kvferry.core.scheduler.loads import Hit, HitSource, Later, LoadPlanner, MatchResult, Miss
from kvferry.core.scheduler.lookup import PrefixLookup, RequestKeys, in_order
from kvferry.core.scheduler.prefills import Prefills, TenantUsage
from kvferry.core.scheduler.prefix_query import PrefixQuery
from kvferry.core.scheduler.promotions import Promotions
from kvferry.core.scheduler.requests import RequestPhase, RequestState, RequestTable
from kvferry.core.scheduler.resets import Resets
from kvferry.core.scheduler.retention import Retention
from kvferry.core.scheduler.sessions import SessionTable
from kvferry.core.scheduler.store_planner import StorePlanner
from kvferry.core.scheduler.stores import StoreJobs
from kvferry.core.scheduler.tiering import Tiering
from kvferry.core.stats import LeaseEnd, PromptTokens, Snapshot
from kvferry.core.tiers.base import Tier
from kvferry.core.transfers import Direction, LoadOutcome, StepPlan, TransferResult

__all__ = ["Hit", "Later", "MatchResult", "Miss", "OffloadScheduler", "SchedulerOptions"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

_WARN_EVERY_S = 60.0
_STEP_BATCHES = 2
"""Batches of slots of one request that are decided in one step; the rest follows in the next."""
_BATCH_KEYS = 512
"""Keys recorded for the eviction policy under one hold of the manager lock."""


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Options of a scheduler.

    `request_fields` are the policy fields that `kv_transfer_params` may set. In lazy mode `watermark_blocks` at the
    head of the device's free queue are kept stored: as many as a step may take. A step is planned when up to
    `steps_in_flight` steps before it have not ended.
    """

    request_fields: Sequence[str] = REQUEST_FIELDS_DEFAULT
    num_workers: int = 1
    num_recent_requests: int = 1000
    store_mode: StoreMode = StoreMode.EAGER
    watermark_blocks: int = 64
    steps_in_flight: int = 0


class OffloadScheduler:
    """Decides stores and loads for an engine. Every method acquires the manager lock.

    The hooks are called on the engine thread, methods for operators on any thread.
    """

    def __init__(
        self,
        manager: OffloadManager,
        policies: PolicyResolver,
        device: DeviceView,
        layout: GroupLayout,
        options: SchedulerOptions | None = None,
        *,
        cost_model: LoadOrCompute | None = None,
        tiers: Mapping[str, Tier] | None = None,
    ) -> None:
        """`tiers` are those below the pool by name, the fastest first; the caller closes them after `tiers.close`.

        Raises `ValueError` if the manager's slots are too small for the layout.
        """
        if layout.slot_bytes > manager.slot_bytes:
            raise ValueError(
                f"a slot of this layout takes {layout.slot_bytes:,} bytes, the pool's {manager.slot_bytes:,}"
            )
        options = options or SchedulerOptions()
        self.manager = manager
        self.layout = layout
        self.cost_model = cost_model = cost_model or LoadOrCompute()
        self.policies = policies
        self._options = options
        self._device = device
        self._request_fields = tuple(options.request_fields)
        self.requests = RequestTable(options.num_recent_requests, policies, manager.lock)
        self._jobs = JobTable(options.num_workers, device)
        self.tiers = Tiering(manager, layout, tiers or {}, self._jobs.new_id, cost_model)
        self.resets = Resets(manager, self._jobs, self.tiers, lambda: self._stores, lambda: self._lazy)
        self.retention = Retention(manager, layout, self.requests, lambda: self._lazy)
        self.sessions = SessionTable(manager.lock)
        self.tenants = TenantUsage()
        prompt_tokens = PromptTokens(tier_hit=dict.fromkeys(tiers or (), 0))
        self._counters = Snapshot(manager.counts(), manager.evictions, manager.leases.counts, prompt_tokens)
        self.balance, self._counts = self._counters.balance, self._counters.requests
        self._last_warned_s: dict[str, float] = {}
        self.emits_token_ids = False
        """Whether `RequestBlocks` have the token ids of prompt and answer."""
        self._lookup = PrefixLookup(manager, layout, device)
        if options.store_mode is StoreMode.LAZY:
            self._lookup.start_recording()
        with manager.lock:
            self._build_planners(options.store_mode, is_paused=False)

    def _build_planners(self, mode: StoreMode, *, is_paused: bool) -> None:
        """Make all that an exception discards: what is known of device blocks, and the decisions that have not ended.

        Requires: manager lock held.
        """
        manager, layout, counters, cost_model = self.manager, self.layout, self._counters, self.cost_model
        inflight = InflightPrefixes(layout, self._lookup, cost_model, self.tiers.clients)
        self._promotions = Promotions(
            manager, layout, self.tiers, self._lookup, inflight, cost_model, counters.tier_waits
        )
        self._stores = stores = StoreJobs(
            manager, self._jobs, layout, self.tiers.cascades, self.tenants, counters.store, is_paused
        )
        self._eager = StorePlanner(manager, stores, layout, self.policies)
        watermark = self._options.watermark_blocks
        self._lazy = LazyPlanner(manager, stores, layout, self.policies, self._device, watermark)
        self._demands = Demands(manager, layout, self._lazy, self._lookup, inflight, self.tiers.loads, cost_model)
        sources: list[HitSource] = [self._demands, self._promotions]
        self._loads = LoadPlanner(
            manager, self._jobs, layout, cost_model, self._lookup, inflight, sources, counters.load
        )
        self._prefills = Prefills(layout, cost_model, counters, self._options.steps_in_flight, self.tenants)
        self._num_taken_blocks = 0
        """Device blocks that requests were allocated since the last step was planned."""
        self._hold_share = 0.0
        """Work of planning stores since the lock was released, as a share of what one hold may do."""
        self._use_planner(mode)

    def _use_planner(self, mode: StoreMode) -> None:
        self.store_mode, is_lazy = mode, mode is StoreMode.LAZY
        self._planner: StorePlanner = self._lazy if is_lazy else self._eager
        self.manager.evictor.residency = self._lazy.residency if is_lazy else None

    # --- engine hooks ---------------------------------------------------------------------------------------------

    def on_new_request(self, request: EngineRequest, now_s: float) -> None:
        """Announce a request and resolve its policy. An id may be announced again after its request has finished.

        Raises:
            RequestFailed: The request is computed without offloading; nothing else has changed.
        """
        if request.request_id in self.requests.live:
            with self.manager.lock:
                # The engine forgot it, so the contents of its blocks are unknown: none of them is stored.
                self.requests.live[request.request_id].num_computed_tokens = 0
                self._finish(request.request_id, now_s)
        try:
            patch, ignored = parse_request_fields(
                request.kv_transfer_params, self._request_fields, self.retention.max_retain_s
            )
            keys = RequestKeys(request, self.layout.groups)
            if self.tiers.clients and getattr(request, "unhashed", None) is None:
                keys.extend_loadable()
            with self.manager.lock:
                state = self.requests.new_state(request, keys, patch, self.layout.groups, now_s)
        except Exception as error:
            self._add_failed(request, "on_new_request", error, now_s)
            raise RequestFailed from error
        with self.manager.lock:
            self._add(state)
            if state.origin.session is None and getattr(request, "session", None):
                self._counts.ignored_sessions += 1
            if hints := getattr(request, "kv_hint_types", ()):
                self._counts.count_kv_hints(hints)
            if self.tiers.clients:
                self._promotions.begin_early(state, now_s)
            to_warn = [name for name in ignored if self._may_warn(name, now_s)]
        for name in to_warn:
            text = "kv_transfer_params.%s=%s of request %s was ignored: it has the wrong type or is out of range"
            _log.warning(text, name, ignored[name], request.request_id)

    def match(self, request_id: str, num_computed_tokens: int, now_s: float) -> MatchResult:
        """Return how many tokens after the first `num_computed_tokens` can be loaded.

        A hit is pinned until `commit`; another call replaces the pin. A hit ends before the last token of the request,
        which is always computed. An unknown request, or one that is loading, misses. While another request loads this
        prefix, or blocks of it are copied to the pool from the device or a tier, the result is `Later`, for a limited
        time: see "Waits" in docs/architecture.md.

        Raises:
            RequestFailed: The request is computed without offloading; nothing else has changed.
        """
        state = self.requests.live.get(request_id)
        if state is None or state.phase is RequestPhase.LOADING:
            return Miss()
        if not state.is_offloaded:
            state.load.matched_tokens = num_computed_tokens
            return Miss()
        try:
            # Only the engine thread adds keys. For a long prompt, making keys takes longer than finding them.
            state.keys.extend_loadable()
        except Exception as error:  # noqa: BLE001 - raised as `RequestFailed`
            self._fail_match(state, num_computed_tokens, error)
        with self.manager.lock:
            try:
                state.now_s = now_s
                if state.policy_version != self.policies.version:
                    state.update_policy(self.policies, now_s)
                if state.trace is not None:
                    state.trace.record_lookup(now_s)
                found = self._loads.find(state, num_computed_tokens)
            except Exception as error:  # noqa: BLE001 - raised as `RequestFailed`
                self._fail_match(state, num_computed_tokens, error)
            result = self._loads.match(state, found)
            is_later = isinstance(result, Later)
            if is_later or state.times.later_began_s is not None:
                state.times.record_match(now_s, is_later=is_later)
            return result

    def exclude(self, request_id: str, hook: str, error: Exception) -> None:
        """Compute a request without offloading from now on, after an exception in `hook` that concerns it alone."""
        with self.manager.lock:
            state = self.requests.live.get(request_id)
            if state is None or state.error is not None:
                return
            state.error = f"{hook}: {type(error).__name__}"
            self._counts.excluded += 1
            if state.phase is not RequestPhase.LOADING:
                self._loads.detach(state)

    def boundary(self, request_id: str) -> int:
        """Return where, by the latest `match`, a request leaves the prefixes of others, in tokens; 0 if nowhere.

        The window or state there is missing, and is stored if the engine has it when it has computed that far.
        """
        with self.manager.lock:
            state = self.requests.live.get(request_id)
            return state.load.boundary_tokens if state is not None and state.is_offloaded else 0

    def commit(self, request_id: str, block_ids: BlockTables, num_loaded_tokens: int, now_s: float) -> None:
        """Load the first `num_loaded_tokens` tokens of the hit into the request's allocated blocks.

        `block_ids` are the request's whole tables. With tokens to load, the request has to wait for its `LoadOutcome`.
        A load that is no longer possible, or does not consist of whole blocks of the hit, is a failed load. A second
        call for the same match only updates the tables.
        """
        # Only the engine thread adds and removes requests and hits.
        state = self.requests.live.get(request_id)
        if state is None:
            return
        # For a long hit, this takes longer than starting its load.
        copies = self._loads.plan_copies(state, block_ids, num_loaded_tokens)
        if self._planner is self._lazy or self.manager.is_learning:
            self._run_batches(self._record_uses(state, now_s))
        with self.manager.lock:
            matched = state.load.matched_tokens
            if matched is not None:
                state.num_blocks = sum(matched // group.spec.block_size for group in self.layout.groups)
            self._update_tables(state, block_ids)
            self._loads.commit(state, num_loaded_tokens, copies, now_s)
            state.times.record_schedule(now_s, is_loading=state.phase is RequestPhase.LOADING)
            session = state.origin.session_key
            if session is not None:
                self.manager.leases.end_session(session, LeaseEnd.NEXT_REQUEST, before=state.sequence)
            if state.trace is not None:
                state.trace.end_match(now_s, num_loaded_tokens)

    def plan_step(self, progress: Sequence[StepProgress], now_s: float) -> StepPlan:
        """Return the transfers to start with this step, after which the requests are as far as `progress` says.

        Called every step, also without requests, after the engine has allocated the step's blocks. The blocks of the
        plan are held until their job ends, except those that are copied ahead of the step. The manager lock is released
        between batches of blocks, where operators may act as they may between two steps.
        """
        # Also in eager mode, as the device keeps the blocks until they are taken.
        reused = self._device.take_allocated(self._lazy.recorded)
        with self.manager.lock:
            if self._jobs.unowned:
                self._jobs.release_unowned()
            self._expire(now_s)
            if self._prefills.planned or self._prefills.last_step is not None:
                self._prefills.end_step(now_s)
            if self._stores.parts:
                self._stores.end_disowned(now_s)
            if self._stores.reorderings:
                self._stores.continue_reordering()
        if reused:
            # Before the tables are updated: the contents of reused blocks were recorded by earlier steps.
            self._run_batches(self._lazy.store_reused(reused, now_s))
        if self._demands.open:
            self._run_batches(self._demands.submit(now_s))
        self._run_batches(self._update_progress(progress, now_s))
        if self._planner is self._lazy or self._lazy.recorded:
            self._run_batches(self._lazy.walk(self._num_taken_blocks, now_s))
        self._num_taken_blocks = 0
        with self.manager.lock:
            # Those that a reset has disowned since: their slots must not get headers of the new epoch.
            self._stores.end_disowned(now_s)
            if self.tiers.clients:
                self.tiers.cascades.submit_next_victims(now_s)
            loads = self._loads.take_jobs() if self._loads.pending else []
            stores, ahead = self._stores.take_jobs(now_s) if self._stores.parts else ([], [])
            return StepPlan(loads, stores, ahead)

    def on_step_failed(self, request_ids: Sequence[str], now_s: float, *, fails_stores: bool = False) -> None:
        """Store nothing of these requests from now on, since the compute of a step failed.

        The engine also reports the step's store jobs as failed. With `fails_stores`, no store in flight is published,
        whatever the engine reports, for steps that ended and have computed on wrong blocks.
        """
        with self.manager.lock:
            self._prefills.cancel_step()
            states = (self.requests.live.get(request_id) for request_id in request_ids)
            failed = [state for state in states if state is not None]
            for state in failed:
                state.num_computed_tokens = 0
                state.prefill.planned = False
            self._stores.end_failed(failed, now_s)
            if fails_stores:
                self._stores.fail_all("its blocks were found to be invalid", now_s)
            if self._lazy.recorded:
                self._lazy.forget_hidden()

    def on_transfers_finished(self, results: Sequence[TransferResult], now_s: float) -> list[LoadOutcome]:
        """Process the workers' reports, and return the outcomes of loads that ended. Called every step."""
        errors: list[str] = []
        outcomes: list[LoadOutcome] = []
        has_tiers = bool(self.tiers.clients)
        with self.manager.lock:
            for result in results:
                self._jobs.report(result)
            if self._jobs.unowned:
                self._jobs.release_unowned()
            if has_tiers:
                self.tiers.process_results(now_s)
                self._promotions.advance(now_s)
            if self._loads.lost:
                outcomes += self._loads.end_lost()
            for ended in self._jobs.take_ended():
                if ended.is_disowned:
                    self._end_disowned(ended)
                    continue
                direction = ended.job.direction
                if direction is Direction.STORE:
                    self._stores.end(ended, now_s)
                elif (outcome := self._loads.end(ended, now_s)) is not None:
                    outcomes.append(outcome)
                if not ended.errors:
                    transfers = self._counters.transfers
                    transfers[direction] = transfers[direction].counting(ended.num_bytes, ended.seconds)
                elif self._may_warn(f"{direction} failed", now_s):
                    errors.append(f"{direction} job {ended.job.job_id}: {ended.errors[0]}")
        if has_tiers:
            self.tiers.log_warnings()
        for error in errors:
            _log.error("%s; its blocks are dropped and will be recomputed", error)
        return outcomes

    def on_preempted(self, request_id: str, now_s: float) -> None:
        """Forget the device blocks of a request. Decisions about stores stand; open transfers keep their holds."""
        with self.manager.lock:
            state = self.requests.live.get(request_id)
            if state is None:
                return
            self._counts.preempted += 1
            state.times.end_load(now_s)
            self._prefills.count(state, now_s)
            if state.phase is RequestPhase.RUNNING and state.is_offloaded:
                self._prefills.record_preemption(state)
                self._record_computed(state)
                self._planner.record_lost(state)
            state.block_ids = ()
            state.num_blocks = state.num_computed_tokens = 0
            for progress in state.storing:
                progress.num_recorded = 0
            self._loads.detach(state)
            state.phase = RequestPhase.WAITING

    def on_request_finished(
        self, request_id: str, now_s: float, num_computed_tokens: int | None = None, *, is_aborted: bool = False
    ) -> None:
        """Finish a request, for whatever reason. Called before its blocks are freed: full blocks are stored.

        Args:
            request_id: The request.
            now_s: The time.
            num_computed_tokens: For engines with draft tokens: their latest progress has not counted those accepted
                since, and may have counted some that were rejected.
            is_aborted: Whether it ends without its answer, and so gets no lease.
        """
        state = self.requests.live.get(request_id)
        try:
            if state is not None and state.phase is RequestPhase.RUNNING and state.is_offloaded:
                if num_computed_tokens is not None:
                    self._correct_progress(state, num_computed_tokens)
                self._run_batches(self._plan_stores(state, now_s, math.inf))
                if not is_aborted:
                    self._begin_lease(state, now_s)
            if state is not None and state.has_recorded_uses:
                self._run_batches(self._record_end(state, now_s))
        finally:
            with self.manager.lock:
                self._finish(request_id, now_s)

    def has_open_work(self) -> bool:
        """Return whether transfers are open or waiting to be planned, so that an idle engine has to keep stepping."""
        with self.manager.lock:
            stores, loads, jobs = self._stores, self._loads, self._jobs
            is_pending = stores.parts or stores.reorderings or loads.lost or jobs.unowned
            return bool(is_pending) or len(jobs) > 0

    def abandon_all(self, now_s: float, last_sent: int) -> list[Exception]:
        """Return to a consistent state after an exception in any method, however incomplete its changes are.

        Requests that are alive are computed without offloading from now on. Blocks in the pool stay, unless the
        exception interrupted a change of the pool: then all are dropped. Jobs that the engine received keep their slots
        and device blocks until they are reported, and publish nothing; no load has an outcome. Device blocks of no open
        job are released in the engine's next call of `plan_step` or `on_transfers_finished`. Thread: engine.

        Args:
            now_s: The time.
            last_sent: The highest number of a job that the engine received.

        Returns:
            Further exceptions, which did not prevent the recovery.
        """
        with self.manager.lock:
            self._jobs.abandon(last_sent)
            self.tiers.abandon(now_s)
            for state in self.requests:
                state.discard()
            counters = self._counters
            for counts in (counters.store, *(request.store for request in self.requests.all_known())):
                counts.end_in_flight()
            counters.load.failed += counters.load.in_flight
            counters.load.in_flight = 0
            self._build_planners(self.store_mode, is_paused=self._stores.is_paused)
            loads = [job.pin for job in self._jobs if job.pin is not None]
            return recover(self.manager, self.resets.filled_slots(), loads, self.tiers.cascades.open_pins(), now_s)

    # --- operators ------------------------------------------------------------------------------------------------

    def tier_hit(self, request_id: str, num_loaded_tokens: int) -> dict[str, int]:
        """Return, by tier, how many tokens of the load just committed were promoted from it for this request."""
        with self.manager.lock:
            state = self.requests.live.get(request_id)
            if state is None:
                return {}
            first_token = state.load.device_tokens
            return self._prefills.tier_hit(state, first_token, first_token + num_loaded_tokens)

    def query_prefix(self, block_hashes: Sequence[bytes]) -> PrefixQuery:
        """Begin to find out how much of a prompt the device, the pool and the tiers hold. Thread: any."""
        return PrefixQuery(self.manager, self.layout, self._device, self.tiers.clients, block_hashes)

    def snapshot(self) -> Snapshot:
        """Return a consistent copy of all counters."""
        return self.read_counters(copy_counts)

    def read_counters(self, read: Callable[[Snapshot], T]) -> T:
        """Return what `read` makes of all counters at one moment; it may not keep them."""
        with self.manager.lock:
            counters, token_s = self._counters, self.cost_model.tokens_rate.estimate_s(1)
            counters.epoch = self.manager.epoch
            counters.pool = self.manager.counts()
            self._counts.running = len(self.requests.live)
            self._counts.waiting_for_load = sum(state.phase is RequestPhase.LOADING for state in self.requests)
            counters.open_jobs = len(self._jobs)
            counters.balance.prefill_tokens_per_s = None if token_s is None else 1 / token_s
            if self.tiers.clients or counters.tiers:
                counters.tiers = self.tiers.stats()
            return read(counters)

    def expire(self, now_s: float) -> None:
        """Remove what has expired (overrides, pins, jobs of tiers) as every step does, for an idle engine."""
        with self.manager.lock:
            self._expire(now_s)
        while self.manager.leases.next_s <= now_s:
            self.manager.leases.expire(now_s)
        self.tiers.poll(now_s)

    def overdue_jobs(self, now_s: float, limit_s: float) -> int:
        """Count the jobs open for longer than `limit_s`; they keep their blocks, because no device copy times out."""
        with self.manager.lock:
            return sum(now_s - job.opened_s > limit_s for job in self._jobs)

    def set_store_mode(self, mode: StoreMode) -> None:
        """Submit blocks as they fill, or before they leave the device. Blocks already recorded are still submitted."""
        if mode is StoreMode.LAZY:
            self._lookup.start_recording()
        with self.manager.lock:
            if mode is StoreMode.LAZY and self._planner is not self._lazy:
                self._lazy.restart()
            self._use_planner(mode)

    def pause_stores(self, is_paused: bool) -> None:
        """Skip all blocks from now on, or store them again. Stores in flight are published, and loads go on."""
        with self.manager.lock:
            self._stores.is_paused = is_paused
            # The walk of the free queue has passed blocks that were not stored.
            self._lazy.restart()

    # --- internals ------------------------------------------------------------------------------------------------

    def _add(self, state: RequestState) -> None:
        self.requests.add(state)
        self._counts.seen += 1

    def _add_failed(self, request: EngineRequest, hook: str, error: Exception, now_s: float) -> None:
        """Add a request that is computed without offloading, unless it cannot even be shown."""
        try:
            with self.manager.lock:
                sequence = self.requests.next_sequence()
            state = RequestState.without_offloading(sequence, request, self.layout.groups, now_s)
            state.view().bounded()
        except Exception as another:  # noqa: BLE001 - requests that are not known are computed
            _log.debug("request is not listed, it cannot be read: %s: %s", request.request_id, another)
            return
        with self.manager.lock:
            self._add(state)
            self.exclude(request.request_id, hook, error)

    def _fail_match(self, state: RequestState, num_computed_tokens: int, error: Exception) -> NoReturn:
        self.exclude(state.request.request_id, "match", error)
        state.load.matched_tokens = num_computed_tokens
        raise RequestFailed from error

    def _expire(self, now_s: float) -> None:
        if self.policies.expiries.next_s <= now_s:
            self.policies.expire(now_s)
        if self.manager.operator_pins.expiries.next_s <= now_s:
            self.manager.operator_pins.expire(now_s)
        if self.manager.leases.next_s <= now_s:
            self.manager.leases.expire(now_s)

    def _run_batches(self, batches: Batches) -> None:
        """Run each batch under a hold of the manager lock of its own."""
        end = object()
        while True:
            with self.manager.lock:
                if next(batches, end) is end:
                    return

    def _update_progress(self, progress: Sequence[StepProgress], now_s: float) -> Batches:
        """Update the requests of a step, and decide which of their blocks are stored."""
        prefills = self._prefills
        num_prefill_tokens = num_tokens = 0
        for step in progress:
            state = self.requests.live.get(step.request_id)
            if state is None or state.phase is RequestPhase.LOADING:
                continue
            new_tokens = step.num_computed_tokens - state.num_computed_tokens
            num_tokens += new_tokens
            if state.is_offloaded and self._lookup.seen is not None:
                self._lookup.record_computed(state.keys, state.num_computed_tokens, step.num_computed_tokens)
            state.phase = RequestPhase.RUNNING
            if state.times.load_began_s is not None:
                state.times.end_load(now_s)
            self._update_tables(state, step.block_ids)
            state.num_computed_tokens = step.num_computed_tokens
            if not state.prefill.counted:
                num_prefill_tokens += new_tokens
                if step.num_computed_tokens >= state.request.num_prompt_tokens:
                    state.prefill.planned = True
                    prefills.planned.append(state)
            if state.is_offloaded and self._planner.may_decide(state):
                is_refused = any(each.refused_version is not None for each in state.storing)
                yield from self._plan_stores(state, now_s, 1 if is_refused else _STEP_BATCHES)
        prefills.begin_step(num_prefill_tokens, num_tokens, now_s)

    def _plan_stores(self, state: RequestState, now_s: float, max_batches: float) -> Batches:
        """Decide full slots of a request in batches; see `StorePlanner.plan`."""
        for share in self._planner.plan(state, now_s, max_batches):
            self._hold_share += share
            if self._hold_share >= 1:
                # Not after each request: at every release the engine may have to wait for another thread's hold.
                self._hold_share = 0.0
                yield

    def _begin_lease(self, state: RequestState, now_s: float) -> None:
        """Begin the lease of a request that ends, if its policy says so."""
        with self.manager.lock:
            state.update_policy(self.policies, now_s)
        if not state.policy.policy.retain_s:
            return
        # Only the engine thread adds keys.
        storable, computed = self._planner.storable_tokens(state), state.num_computed_tokens
        groups, by_group = self.layout.groups, state.keys.by_group
        keys, rest = in_order(groups, by_group, 0, storable), in_order(groups, by_group, storable, computed)
        self._run_batches(self.retention.begin(state, [*keys, *rest], len(keys), now_s))

    def _correct_progress(self, state: RequestState, num_computed_tokens: int) -> None:
        """Set how far a request is at its end. The state behind accepted drafts may be in none of its blocks."""
        known_tokens = state.num_computed_tokens
        has_states = any(group.spec.kind is GroupKind.RECURRENT for group in self.layout.groups)
        # Without any, a step failed: the contents of its blocks are not known.
        if num_computed_tokens < known_tokens or (known_tokens and not has_states):
            with self.manager.lock:
                self._lookup.record_computed(state.keys, known_tokens, num_computed_tokens)
                state.num_computed_tokens = num_computed_tokens

    def _update_tables(self, state: RequestState, block_ids: BlockTables) -> None:
        """Replace a request's tables, and count the device blocks that they have grown by."""
        num_blocks = sum(map(len, block_ids))
        self._num_taken_blocks += max(num_blocks - state.num_blocks, 0)
        state.block_ids, state.num_blocks = block_ids, num_blocks

    def _record_uses(self, state: RequestState, now_s: float) -> Batches:
        """Record which blocks of a prompt the device has used, and for a policy that learns, all its uses."""
        on_device = state.load.matched_tokens or 0
        if self._planner is self._lazy:
            for keys in self._prompt_keys(state, 0, on_device):
                slots = self.manager.lookup_each(keys)
                self.manager.enter_device(slots[slots >= 0])
                yield
        if self.manager.is_learning and not state.has_recorded_uses:
            state.has_recorded_uses = True
            for keys in self._prompt_keys(state, 0, on_device):
                self.manager.record_uses(keys, now_s, on_device=True)
                yield
            for keys in self._prompt_keys(state, on_device, state.request.num_prompt_tokens):
                self.manager.record_uses(keys, now_s)
                yield

    def _record_end(self, state: RequestState, now_s: float) -> Batches:
        """Record the length of a request's answer for the eviction policy."""
        request = state.request
        for keys in self._prompt_keys(state, 0, request.num_prompt_tokens):
            self.manager.record_end(keys, request.num_tokens - request.num_prompt_tokens, now_s)
            yield
        self.manager.record_request(now_s)

    def _prompt_keys(self, state: RequestState, first_token: int, end_token: int) -> Iterator[Sequence[Key]]:
        """Yield the keys of a request's slots that end behind `first_token`, in batches; none of one with an error."""
        for group in self.layout.groups if state.is_offloaded else ():
            keys = state.keys.of(group, first_token // group.slot_tokens, end_token // group.slot_tokens)
            for start in range(0, len(keys), _BATCH_KEYS):
                yield keys[start : start + _BATCH_KEYS]

    def _end_disowned(self, job: OpenJob) -> None:
        """Free what a job holds that was open when its decision was discarded; no worker touches it any more."""
        if job.pin is None:
            self.manager.abort_store(job.slots)
        else:
            self.manager.complete_load(job.pin, is_done=False)
        for owner in (job, *job.parts):
            self._jobs.release(owner)

    def _finish(self, request_id: str, now_s: float) -> None:
        state = self.requests.live.get(request_id)
        if state is None:
            return
        try:
            self._prefills.count(state, now_s)
            session = state.origin.session_key
            if session is not None:
                self._record_session(session, state, now_s)
            if state.phase is RequestPhase.RUNNING and state.is_offloaded:
                self._record_computed(state)
                self._planner.plan_rest(state, now_s)
                if self.manager.sink is not None and state.prefill.counted:
                    self.manager.sink(self._blocks_of(state, now_s))
            self._loads.detach(state)
        finally:
            # Must end even after an exception, because the engine finishes a request only once.
            self._retire(state, now_s)

    def _record_session(self, session: SessionKey, state: RequestState, now_s: float) -> None:
        """Count a request that ends for its session. The last token of an answer is not computed."""
        request, hashes = state.request, None
        if state.prefill.counted and state.is_offloaded:
            num_tokens = max(request.num_tokens - 1, request.num_prompt_tokens)
            hashes = request.block_hashes[: num_tokens // self.layout.hash_block_size]
        self.sessions.record(session, state.prefill.prompt_tokens, hashes, now_s)

    def _record_computed(self, state: RequestState) -> None:
        """Record computed slots whose hashes the engine provided only after the step that computed them."""
        self._lookup.record_computed(state.keys, state.num_computed_tokens, state.num_computed_tokens)

    def _retire(self, state: RequestState, now_s: float) -> None:
        request = state.request
        state.times.end_load(now_s)
        state.times.finished_s = now_s
        view = self.requests.retire(state)
        self._counts.finished += 1
        num_output_tokens = request.num_tokens - request.num_prompt_tokens
        tokens = copy_counts(state.prefill.prompt_tokens)
        end = RequestEnd(now_s, state.origin, request.num_prompt_tokens, num_output_tokens, tokens)
        if self.manager.sink is not None:
            self.manager.sink(end)
        if state.trace is not None:
            state.trace.end_match(now_s)
            state.trace.receive(view)

    def _blocks_of(self, state: RequestState, now_s: float) -> RequestBlocks:
        """Return the blocks of a request that ends. The last token of an answer is not computed."""
        group, request, tokens = self.layout.prefix_group, state.request, state.prefill.prompt_tokens
        num_prompt, num_tokens = request.num_prompt_tokens, request.num_tokens
        keys = state.keys.of(group, 0, max(num_tokens - 1, num_prompt) // group.slot_tokens)
        num_storable = self._eager.count_storable(state, group, len(keys))
        num_served = tokens.total - tokens.recomputed
        num_output = num_tokens - num_prompt
        token_ids = getattr(request, "token_ids", None) if self.emits_token_ids else None
        return RequestBlocks(
            now_s,
            state.sequence,
            state.origin,
            keys,
            num_prompt,
            num_output,
            num_storable,
            num_served,
            token_ids,
            may_load=state.policy.policy.load,
        )

    def _may_warn(self, subject: str, now_s: float) -> bool:
        """Return whether a minute has passed since the last warning about a subject."""
        if now_s - self._last_warned_s.get(subject, -_WARN_EVERY_S) < _WARN_EVERY_S:
            return False
        self._last_warned_s[subject] = now_s
        return True
