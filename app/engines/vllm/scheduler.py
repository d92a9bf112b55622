"""vLLM's scheduler hooks as calls of core's `OffloadScheduler`.

It makes no offload decisions, but supplies what vLLM has no hook for: a preemption is detected in the next call about
the request (`_detect_preemption`), and a load that core reports as failed is removed from the worker ranks' reports.
Calls go through `OffloadGuard`, which never raises. Exceptions of vLLM's own objects are reported to the guard.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from kvferry.app.engines.vllm.device import VllmDevice
from kvferry.app.engines.vllm.exclusions import KeyRules
from kvferry.app.engines.vllm.extents import EngineExtents
from kvferry.app.engines.vllm.kv_events import KVEventSink
from kvferry.app.engines.vllm.layout import NULL_BLOCK, VllmLayout
from kvferry.app.engines.vllm.metadata import IDLE_WAIT_S, StepMetadata, WorkerReports
from kvferry.app.engines.vllm.requests import VllmRequest
from kvferry.app.guard import OffloadGuard
from kvferry.core.engine_api import BlockTables, StepProgress
from kvferry.core.groups import GroupKind
from kvferry.core.scheduler.requests import PlainRequest
from kvferry.core.scheduler.scheduler import Hit, Later
from kvferry.core.transfers import TransferResult

if TYPE_CHECKING:
    from kvferry.app.telemetry.traces import Traces

SLOW_STEP_S = 10.0
"""Duration of a step after which `/readyz` reports it."""

Match = tuple[int | None, bool]
_MISS: Match = (0, False)
_LATER: Match = (None, False)


@dataclass
class StepSignals:
    """State of the engine's steps that is shared between the engine thread and other threads.

    `tier_ready` is set when a tier has a result for a waiting request; None without tiers. `step_requested` is set by
    threads that need a step, in which vLLM collects metrics and events; an idle engine takes one with the next request.
    """

    tier_ready: threading.Event | None = None
    step_requested: threading.Event = field(default_factory=threading.Event)
    clock: Callable[[], float] = time.time
    started_s: float | None = None
    """Start of the current step."""

    def wake(self) -> None:
        """Wake an engine thread that waits for tiers."""
        if self.tier_ready is not None:
            self.tier_ready.set()

    def reasons(self) -> list[str]:
        """Return why the engine is not ready: the current step takes too long."""
        started_s = self.started_s
        elapsed_s = 0.0 if started_s is None else self.clock() - started_s
        return [f"an engine step has been running for {elapsed_s:.0f} s"] if elapsed_s > SLOW_STEP_S else []


_Result = TypeVar("_Result")
_Params = ParamSpec("_Params")


def _timed(
    hook: Callable[Concatenate[ConnectorScheduler, _Params], _Result],
) -> Callable[Concatenate[ConnectorScheduler, _Params], _Result]:
    """Decorate a method to count its time as that of a hook."""

    @wraps(hook)
    def timed(self: ConnectorScheduler, /, *args: _Params.args, **kwargs: _Params.kwargs) -> _Result:
        with self.offload.hook_timer:
            return hook(self, *args, **kwargs)

    return timed


class LoadEnds:
    """Ends of loads that vLLM does not know, and results that an interrupted hook has not processed. Thread: engine.

    vLLM waits for each load until it learns its end, and must learn it once: from the output in which all ranks have
    reported it, or else as one of the failed loads that the ranks report for a later step.
    """

    def __init__(self, offload: OffloadGuard) -> None:
        self.failed: list[str] = []
        """Requests whose failed loads the ranks will report in the next step."""
        self._offload = offload
        self._results: list[TransferResult] = []
        self._known: set[str] = set()
        """Requests whose loads ended in an unprocessed output: vLLM knows these ends, or they are in `failed`."""

    def __bool__(self) -> bool:
        return bool(self.failed or self._results)

    def process(self, results: Sequence[TransferResult], output: Any, now_s: float) -> None:
        """Pass the results of an output to core, and remove loads from it that vLLM must not use."""
        known_failures = output.failed_recving or ()
        for outcome in self._offload.on_transfers_finished(results, now_s):
            if outcome.ok or outcome.request_id in known_failures:
                continue
            # The bytes were copied, but after a reset or with a failure in another job.
            if output.finished_recving:
                output.finished_recving.discard(outcome.request_id)
            self.failed.append(outcome.request_id)

    def put_off(self, results: Sequence[TransferResult], output: Any) -> None:
        """Keep the results of an output for `collect`. Its loads fail, as one may have ended after a reset."""
        self._results += results
        received = output.finished_recving or set()
        self._known |= received
        ended = received - (output.failed_recving or set())
        # In place, as vLLM reads the output after this hook.
        received -= ended
        self.failed += ended

    def collect(self, now_s: float) -> None:
        """Process what was put off, and add loads to which vLLM has committed and that could not start."""
        results, self._results = self._results, []
        known, self._known = self._known, set()
        outcomes = self._offload.on_transfers_finished(results, now_s)
        self.failed += [one.request_id for one in outcomes if one.request_id not in known]

    def end_aborted(self, request_id: str) -> None:
        """End the load of an aborted request if no worker will: until a load ends vLLM keeps its device blocks."""
        if request_id not in self._known and self._offload.waits_without_job(request_id):
            self.failed.append(request_id)

    def take_failed(self) -> list[str]:
        """Return the failed loads, which the caller sends to the ranks."""
        failed, self.failed = self.failed, []
        return failed


class ConnectorScheduler:
    """vLLM's scheduler hooks on an `OffloadGuard`. Thread: engine."""

    def __init__(
        self,
        offload: OffloadGuard,
        device: VllmDevice,
        layout: VllmLayout,
        events: KVEventSink | None = None,
        signals: StepSignals | None = None,
        extents: EngineExtents | None = None,
        traces: Traces | None = None,
        key_rules: KeyRules | None = None,
    ) -> None:
        """Create a scheduler without requests.

        Args:
            offload: Guard of the `OffloadScheduler`.
            device: vLLM's block pool.
            layout: Layout of the KV cache.
            events: vLLM's KV events of the pool, if vLLM publishes events.
            signals: Signals from other threads.
            extents: Resize commands for the ranks.
            traces: Sampling of traces, if they are on.
            key_rules: Which requests have block hashes that do not identify their KV; without, none has.
        """
        self.offload = offload
        self.device = device
        self._events = events
        self._signals = signals or StepSignals()
        self._clock = self._signals.clock
        self._extents = extents
        self._traces = traces
        self._key_rules = key_rules
        self._has_boundary_states = [group.has_boundary_states for group in layout.groups]
        self._has_only_full_groups = all(group.spec.kind is GroupKind.FULL for group in layout.groups)
        self._has_recurrent_groups = any(group.spec.kind is GroupKind.RECURRENT for group in layout.groups)
        self._block_sizes = [group.spec.block_size for group in layout.groups]
        self._requests: dict[str, VllmRequest] = {}
        self._tables: dict[str, BlockTables] = {}
        # Prompt tokens that the device had at the last match; removed when vLLM commits to it.
        self._device_hits: dict[str, int] = {}
        self._load_ends = LoadEnds(offload)
        self.planned: StepMetadata | None = None
        """Metadata of a step that the connector has not returned to vLLM yet."""
        self.num_changes = 0
        """Number of steps that started or ended a transfer or were requested by another thread."""

    # --- requests ------------------------------------------------------------------------------------------------

    @_timed
    def on_new_request(self, request: Any) -> None:
        """Add a request; vLLM's object is kept until `finish`."""
        now_s = self._clock()
        try:
            unhashed = None if self._key_rules is None else self._key_rules.unhashed(request)
            state = VllmRequest(request, self.device.adapters, unhashed)
            if self._traces is not None:
                call = self._traces.begin(request.trace_headers, request.arrival_time)
                state.trace = None if call is None else call.request()
        except Exception as error:  # noqa: BLE001 - only this request is computed without offloading
            self.offload.on_new_request(PlainRequest(request.request_id), now_s)
            self.offload.fail_request(request.request_id, "on_new_request", error, now_s)
            return
        self._requests[state.request_id] = state
        self.offload.on_new_request(state, now_s)

    @_timed
    def match(self, request: Any, num_computed_tokens: int) -> Match:
        """Return how many tokens can be loaded (None: call again later), and that loads are asynchronous."""
        now_s = self._clock()
        self._detect_preemption(request.request_id, now_s)
        if self._events is not None:
            self._device_hits[request.request_id] = num_computed_tokens
        found = self.offload.match(request.request_id, num_computed_tokens, now_s)
        if not self._has_only_full_groups:
            self._set_shared_prefix_boundary(request, self.offload.boundary(request.request_id, now_s))
        if isinstance(found, Hit):
            return found.num_tokens, True
        return _LATER if isinstance(found, Later) else _MISS

    @_timed
    def commit(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Load a request's tokens into allocated blocks; with 0 tokens after a load, the call has no effect."""
        request_id = request.request_id
        try:
            tables: BlockTables = blocks.get_block_ids()
        except Exception as error:  # noqa: BLE001 - the request recomputes
            self.offload.fail("update_state_after_alloc", error, self._clock())
            tables = ()
        self.offload.commit(request_id, tables, num_external_tokens, self._clock())
        self._report_hit(request, num_external_tokens)

    def match_failed(self, request: Any, error: Exception) -> Match:
        """Handle an exception in `match`: the request is computed without offloading."""
        self.offload.fail_request(request.request_id, "get_num_new_matched_tokens", error, self._clock())
        return _MISS

    def commit_failed(self, request: Any, num_external_tokens: int, error: Exception) -> None:
        """Handle an exception in `commit`: the load fails, so that the request recomputes."""
        now_s = self._clock()
        self.offload.fail("update_state_after_alloc", error, now_s)
        # Core has removed the request, so that this records a failed load.
        self.offload.commit(request.request_id, (), num_external_tokens, now_s)

    @_timed
    def finish(self, request_id: str, *, is_aborted: bool = False) -> None:
        """Remove a request in any state; device blocks with open transfers stay held."""
        now_s = self._clock()
        try:
            self._detect_preemption(request_id, now_s)
        except Exception as error:  # noqa: BLE001 - its tables may be out of date, so nothing of it may be stored
            self.offload.fail("request_finished", error, now_s)
        state = self._requests.pop(request_id, None)
        self._load_ends.end_aborted(request_id)
        num_computed_tokens = None
        if state is not None:
            num_computed_tokens = state.num_computed_tokens
            if self._events is not None:
                self._events.record(state, num_computed_tokens)
        self.offload.on_request_finished(request_id, now_s, num_computed_tokens, is_aborted=is_aborted)
        self._tables.pop(request_id, None)
        if not self._requests:
            self._signals.started_s = None
        if self._events is not None:
            self._device_hits.pop(request_id, None)
            self._events.finish_request(request_id)

    def finish_failed(self, request_id: str, error: Exception) -> None:
        """Handle an exception in `finish`: remove the request and store nothing more of it."""
        now_s = self._clock()
        self._requests.pop(request_id, None)
        self._tables.pop(request_id, None)
        self._device_hits.pop(request_id, None)
        self._load_ends.end_aborted(request_id)
        self.offload.fail("request_finished", error, now_s)
        self.offload.on_request_finished(request_id, now_s, is_aborted=True)

    # --- steps ---------------------------------------------------------------------------------------------------

    def plan(self, output: Any) -> StepMetadata:
        """Return the jobs of a step, given vLLM's `SchedulerOutput`."""
        step = self._plan(output)
        if step.is_idle and not (step.loads or step.stores or step.stores_ahead or step.failed_loads):
            self._wait_for_tiers()
        if self._extents is not None:
            step.resizes += self._extents.take_commands()
        return step

    @_timed
    def _plan(self, output: Any) -> StepMetadata:
        now_s = self._clock()
        self._signals.started_s = now_s if output.total_num_scheduled_tokens else None
        try:
            for request_id in output.preempted_req_ids or ():
                self._detect_preemption(request_id, now_s)
            for request_id in output.finished_req_ids:
                state = self._requests.get(request_id)
                if state is not None and state.request.is_finished():
                    # Its `request_finished` hook raised before it was removed.
                    self.finish(request_id, is_aborted=True)
            if self.device.writes_early:
                self._mark_overwritten(output)
            progress = list(self._progress(output))
        except Exception as error:  # noqa: BLE001 - tables may be out of date, so nothing of them may be stored
            self.offload.fail("build_connector_meta", error, now_s)
            progress = []
        self._load_ends.collect(now_s)
        is_idle = output.total_num_scheduled_tokens == 0
        plan = self.offload.plan_step(progress, now_s)
        # Saved at once, so that an exception below loses neither the jobs nor the failed loads.
        failed_loads = self._load_ends.take_failed()
        step = self.planned = StepMetadata(
            plan.loads, plan.stores, failed_loads, is_idle, stores_ahead=plan.stores_ahead
        )
        is_requested = self._signals.step_requested.is_set()
        self._signals.step_requested.clear()
        self.num_changes += bool(plan) or is_requested
        return step

    def plan_failed(self, error: Exception) -> StepMetadata:
        """Handle an exception in `plan`: its jobs fail, but failed loads are still sent to the worker ranks."""
        now_s = self._clock()
        # None if the exception came before this step's plan: the workers have the jobs of earlier plans.
        planned, self.planned = self.planned or StepMetadata(), None
        self.offload.fail("build_connector_meta", error, now_s)
        self.offload.fail_plan([*planned.loads, *planned.stores_ahead, *planned.stores], now_s)
        self._load_ends.collect(now_s)
        failed_loads = [*planned.failed_loads, *self._load_ends.take_failed()]
        return StepMetadata(failed_loads=failed_loads, resizes=planned.resizes)

    @_timed
    def process_output(self, output: Any) -> None:
        """Process vLLM's `KVConnectorOutput`: ended jobs, errors and resize results of the worker ranks."""
        if output.invalid_block_ids:
            self._fail_stores(output.invalid_block_ids)
        reports = output.kv_connector_worker_meta
        results: list[TransferResult] = []
        if isinstance(reports, WorkerReports):
            results = reports.results
            self.offload.hook_timer.add(reports.hook_s)
            if self._extents is not None:
                self._extents.add_results(reports.resizes)
            for text in reports.errors:
                self.offload.count_error(text)
        self._load_ends.process(results, output, self._clock())
        self.num_changes += bool(results)

    def process_output_failed(self, output: Any, error: Exception) -> None:
        """Handle an exception in `process_output`: the results are processed again in the next `plan`."""
        self.offload.record_error("update_connector_output", error)
        reports = output.kv_connector_worker_meta
        self._load_ends.put_off(reports.results if isinstance(reports, WorkerReports) else (), output)
        if output.invalid_block_ids:
            self.offload.fail("update_connector_output", error, self._clock())

    def has_open_work(self) -> bool:
        """Return whether the engine must take steps even without requests."""
        return (
            bool(self._load_ends)
            or (self._extents is not None and self._extents.is_waiting)
            or self._signals.step_requested.is_set()
            or (self._events is not None and self._events.has_events)
            or self.offload.has_open_work()
        )

    def reset(self) -> None:
        """Drop all blocks; open transfers end without publishing blocks."""
        self.offload.reset(self._clock())
        self.num_changes += 1

    # --- inside --------------------------------------------------------------------------------------------------

    def _wait_for_tiers(self) -> None:
        """Wait if requests may be waiting for a tier and nothing else is open; vLLM would otherwise poll in a loop."""
        tier_ready = self._signals.tier_ready
        if tier_ready is not None and self._requests and not self.offload.has_open_work():
            tier_ready.wait(IDLE_WAIT_S)
            tier_ready.clear()

    def _progress(self, output: Any) -> Iterable[StepProgress]:
        """Return each scheduled request's computed tokens after the step and its current block tables."""
        block_state = output.kv_connector_block_state
        num_new = output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        boundary_states = block_state.boundary_state_offloads
        has_boundaries = any(self._has_boundary_states)
        for request_id, num_computed, has_new_blocks in _scheduled(output):
            state = self._requests.get(request_id)
            if state is None:
                continue
            # vLLM builds the tables at each call. Without new blocks, only windows and states can have changed.
            tables = None if has_new_blocks or not self._has_only_full_groups else self._tables.get(request_id)
            if tables is None:
                tables = self._tables[request_id] = block_state.get_block_ids(request_id)
            end = num_computed + num_new[request_id] - len(drafts.get(request_id, ()))
            if self._events is not None:
                self._events.record(state, end)
            if has_boundaries:
                yield from self._boundary_progress(request_id, tables, end, boundary_states.get(request_id, ()))
            else:
                yield StepProgress(request_id, tables, end)

    def _mark_overwritten(self, output: Any) -> None:
        """Exclude blocks that vLLM zeroes or copies to before `handle_preemptions` from stores ahead of the step."""
        copied = [copy.dst_block_id for copy in output.kv_cache_block_copies or ()]
        zeroed = output.new_block_ids_to_zero or ()
        # The output does not contain the blocks that recurrent states are moved to.
        self.device.mark_overwritten(None if self._has_recurrent_groups else [*zeroed, *copied])

    def _boundary_progress(
        self, request_id: str, tables: Sequence[Sequence[int]], end: int, states: Iterable[tuple[int, int, int]]
    ) -> Iterable[StepProgress]:
        """Return a request's progress at each boundary with recurrent states, whose blocks are only in `states`.

        `states` are (group, block, boundary in tokens).
        """
        blocks: dict[int, dict[int, int]] = {}
        for group, block, boundary in states:
            if self._has_boundary_states[group] and boundary <= end and boundary % self._block_sizes[group] == 0:
                blocks.setdefault(boundary, {})[group] = block
        for boundary in sorted({*blocks, end}):
            at_boundary = blocks.get(boundary, {})
            yield StepProgress(
                request_id,
                [
                    self._state_table(len(table), group, boundary, at_boundary.get(group)) if has_states else table
                    for group, (table, has_states) in enumerate(zip(tables, self._has_boundary_states, strict=True))
                ],
                boundary,
            )

    def _state_table(self, length: int, group: int, boundary: int, block: int | None) -> list[int]:
        """Return a block table that contains only the state at a boundary."""
        number = boundary // self._block_sizes[group] - 1
        if block is None or number < 0:
            return [NULL_BLOCK] * length
        table = [NULL_BLOCK] * max(length, number + 1)
        table[number] = block
        return table

    def _set_shared_prefix_boundary(self, request: Any, boundary: int) -> None:
        """Make vLLM keep windows and states at a boundary that only the pool knows, as at boundaries of its own.

        vLLM ends a chunk at the boundary for recurrent states and passes them to the connector. Blocks of windows get a
        hash there, by which lazy mode identifies their content.
        """
        current = getattr(request, "shared_prefix_boundary", None)
        if current is not None and boundary > current:
            request.shared_prefix_boundary = boundary

    def _report_hit(self, request: Any, num_external_tokens: int) -> None:
        """Report the blocks of a request's hit in KV events if the request asks for full reports."""
        num_device_tokens = self._device_hits.pop(request.request_id, None)
        state = self._requests.get(request.request_id)
        if self._events is None or state is None or num_device_tokens is None:
            return
        if getattr(request, "kv_cache_report_mode", None) == "full":
            self._events.report(state, num_device_tokens + num_external_tokens)

    def _detect_preemption(self, request_id: str, now_s: float) -> None:
        """Report a preemption to core: vLLM has no hook for it and may resume the request within the same step."""
        state = self._requests.get(request_id)
        if state is not None and state.num_preemptions != state.request.num_preemptions:
            state.num_preemptions = state.request.num_preemptions
            self._tables.pop(request_id, None)
            self.offload.on_preempted(request_id, now_s)

    def _fail_stores(self, invalid: set[int]) -> None:
        """Fail open stores after another connector's load into these blocks failed and steps have computed on them."""
        affected = [
            request_id
            for request_id, tables in self._tables.items()
            if any(not invalid.isdisjoint(table) for table in tables)
        ]
        self.offload.on_step_failed(affected, self._clock(), fails_stores=True)


def _scheduled(output: Any) -> Iterable[tuple[str, int, bool]]:
    """Return each scheduled request, its computed tokens before the step, and whether it got new blocks."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, True
    cached = output.scheduled_cached_reqs
    has_new_blocks = (blocks is not None for blocks in cached.new_block_ids)
    yield from zip(cached.req_ids, cached.num_computed_tokens, has_new_blocks, strict=True)
