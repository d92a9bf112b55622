"""The scheduler's half: vLLM's hooks as calls of core's `OffloadScheduler`, and its answers in vLLM's words.

Nothing is decided here. What vLLM says late or not at all is made up for: a preemption shows when the request asks for
a match again, and a load that core calls failed after all is taken back from what the workers reported. The calls go
through `OffloadGuard`, which never raises; what may raise here is vLLM's own objects, and is reported to the guard.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from kvferry.app.engines.vllm.adapters import Adapters
from kvferry.app.engines.vllm.device import VllmDevice
from kvferry.app.engines.vllm.extents import EngineExtents
from kvferry.app.engines.vllm.layout import NULL_BLOCK, VllmLayout
from kvferry.app.engines.vllm.metadata import IDLE_WAIT_S, StepOrders, StepReports
from kvferry.app.engines.vllm.requests import VllmRequest
from kvferry.app.guard import OffloadGuard
from kvferry.core.engine_api import BlockTables, StepProgress
from kvferry.core.groups import GroupKind
from kvferry.core.scheduler.scheduler import Hit, Later
from kvferry.core.transfers import TransferResult

SLOW_STEP_S = 10.0
"""A step that takes longer is reported by `/readyz`."""

INVALID_BLOCKS = "its blocks were found to be invalid"

Match = tuple[int | None, bool]
_NOTHING: Match = (0, False)
_LATER: Match = (None, False)


class FillListener(Protocol):
    """Receives what fills the device's blocks, the hits of requests that ask for reports, and their ends.

    `is_behind` while it needs more steps to pass on what it received.
    """

    @property
    def is_behind(self) -> bool: ...
    def note(self, request: VllmRequest, num_computed_tokens: int) -> None: ...
    def report(self, request: VllmRequest, num_tokens: int) -> None: ...
    def forget(self, request_id: str) -> None: ...


class ConnectorScheduler:
    """On the engine's thread only."""

    def __init__(
        self,
        offload: OffloadGuard,
        device: VllmDevice,
        layout: VllmLayout,
        adapters: Adapters,
        num_workers: int = 1,
        events: FillListener | None = None,
        woken: threading.Event | None = None,
        extents: EngineExtents | None = None,
        step_wanted: threading.Event | None = None,
        writes_early: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`woken` is set by tiers that have something for a request that waits; None without tiers. `extents` has
        orders for the ranks while the pool's size changes; None where it does not. `step_wanted` is set by threads that
        wait for a step, in which vLLM takes metrics and events: an idle engine takes its next with the next request.
        The model runner `writes_early` if it zeroes or copies blocks before it calls `handle_preemptions`."""
        self.offload = offload
        self._woken = woken
        self._extents = extents
        self._step_wanted = step_wanted
        self._events = events
        self.device = device
        self._adapters = adapters
        self._by_offer = [group.by_offer for group in layout.groups]
        self._only_grow = all(group.spec.kind is GroupKind.FULL for group in layout.groups)
        self._writes_early = writes_early
        self._has_states = any(group.spec.kind is GroupKind.RECURRENT for group in layout.groups)
        self._block_sizes = [group.spec.block_size for group in layout.groups]
        self._num_workers = num_workers
        self._clock = clock
        self._requests: dict[str, VllmRequest] = {}
        self._tables: dict[str, BlockTables] = {}
        # Prompt tokens that the device had at the last match, until vLLM commits to it.
        self._device_hits: dict[str, int] = {}
        self._lost: list[str] = []
        self._unread: list[TransferResult] = []
        self._open_stores: dict[int, int] = {}
        self._distrusted: set[int] = set()
        self.planned: StepOrders | None = None
        """The orders of a plan that the connector has not returned yet."""
        self._step_since_s: float | None = None
        self.num_changes = 0
        """Raised with every step that started or ended a transfer, or that others wanted."""

    # --- the life of a request -----------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """A request was added. vLLM's object is kept until the request is over."""
        ours = VllmRequest(request, self._adapters)
        self._requests[ours.request_id] = ours
        self.offload.on_new_request(ours, self._clock())

    def match(self, request: Any, num_computed_tokens: int) -> Match:
        """How many tokens can be loaded (None: ask again), and whether the load runs beside the steps: always."""
        now_s = self._clock()
        self._note_preemption(request.request_id, now_s)
        if self._events is not None:
            self._device_hits[request.request_id] = num_computed_tokens
        found = self.offload.match(request.request_id, num_computed_tokens, now_s)
        if not self._only_grow:
            self._name_boundary(request, self.offload.boundary(request.request_id, now_s))
        if isinstance(found, Hit):
            return found.num_tokens, True
        return _LATER if isinstance(found, Later) else _NOTHING

    def commit(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """vLLM has allocated, and loads so many tokens; 0 also where it only says so once more after a load."""
        request_id = request.request_id
        try:
            tables: BlockTables = blocks.get_block_ids()
        except Exception as error:  # noqa: BLE001 - the request recomputes
            self.offload.fail("update_state_after_alloc", error, self._clock())
            tables = ()
        self.offload.commit(request_id, tables, num_external_tokens, self._clock())
        self._report_hit(request, num_external_tokens)

    def finish(self, request_id: str) -> None:
        """A request is over, in whatever state. Blocks that are still copied are held by themselves."""
        now_s = self._clock()
        try:
            self._note_preemption(request_id, now_s)
        except Exception as error:  # noqa: BLE001 - its tables may be out of date, so that nothing of it may be stored
            self.offload.fail("request_finished", error, now_s)
        if self._requests.pop(request_id, None) is not None:
            self.offload.on_request_finished(request_id, now_s)
        self._tables.pop(request_id, None)
        if not self._requests:
            self._step_since_s = None
        if self._events is not None:
            self._device_hits.pop(request_id, None)
            self._events.forget(request_id)

    def reasons(self) -> list[str]:
        """Why the engine should get no traffic: a step that hangs. Thread: any."""
        since_s = self._step_since_s
        elapsed_s = 0.0 if since_s is None else self._clock() - since_s
        return [f"a step of the engine has taken {elapsed_s:.0f} s so far"] if elapsed_s > SLOW_STEP_S else []

    # --- the step ------------------------------------------------------------------------------------------------

    def plan(self, output: Any) -> StepOrders:
        """This step's jobs, given what vLLM has scheduled."""
        now_s = self._clock()
        self._step_since_s = now_s if output.total_num_scheduled_tokens else None
        self._take_unread(now_s)
        try:
            for request_id in output.preempted_req_ids or ():
                self._note_preemption(request_id, now_s)
            for request_id in output.finished_req_ids:
                ours = self._requests.get(request_id)
                if ours is not None and ours.request.is_finished():
                    # An exception kept it from being finished here when it ended.
                    self.finish(request_id)
            if self._writes_early:
                self._note_early_writes(output)
            progress = list(self._progress(output))
        except Exception as error:  # noqa: BLE001 - tables may be out of date, so that nothing of them may be stored
            self.offload.fail("build_connector_meta", error, now_s)
            progress = []
        self._take_lost(now_s)
        plan = self.offload.plan_step(progress, now_s)
        self._open_stores.update((job.job_id, self._num_workers) for job in (*plan.ahead, *plan.stores))
        is_idle = output.total_num_scheduled_tokens == 0
        # Kept at once, so that no exception below can lose what the workers have to be told.
        orders = self.planned = StepOrders(plan.loads, plan.stores, self._lost, is_idle, ahead=plan.ahead)
        self._lost = []
        is_wanted = self._step_wanted is not None and self._step_wanted.is_set()
        if self._step_wanted is not None:
            self._step_wanted.clear()
        self.num_changes += bool(plan) or is_wanted
        if is_idle and not plan and not orders.lost:
            self._wait_for_tiers()
        if self._extents is not None:
            orders.sizes += self._extents.take_orders()
        return orders

    def take_reports(self, output: Any) -> None:
        """What the workers report after a step."""
        if output.invalid_block_ids:
            self._distrust(output.invalid_block_ids)
        reports = output.kv_connector_worker_meta
        results: list[TransferResult] = []
        if isinstance(reports, StepReports):
            results = reports.results
            if self._extents is not None:
                self._extents.report(reports.sizes)
            for text in reports.errors:
                self.offload.count_error(text)
        failed = output.failed_recving or ()
        for outcome in self.offload.on_transfers_finished(self._checked(results), self._clock()):
            if outcome.ok or outcome.request_id in failed:
                continue
            # The bytes came, but under a reset or beside a failure: vLLM must not take them for good.
            if output.finished_recving:
                output.finished_recving.discard(outcome.request_id)
            self._lost.append(outcome.request_id)
        self.num_changes += bool(results)

    def commit_failed(self, request: Any, num_external_tokens: int, error: Exception) -> None:
        """`commit` raised: the request recomputes, if it waits for a load."""
        now_s = self._clock()
        self.offload.fail("update_state_after_alloc", error, now_s)
        # Unknown to core by now, so that this only records the load, as one that has failed.
        self.offload.commit(request.request_id, (), num_external_tokens, now_s)

    def finish_failed(self, request_id: str, error: Exception) -> None:
        """`finish` raised: the request is forgotten, and nothing more of it is stored."""
        now_s = self._clock()
        self._requests.pop(request_id, None)
        self._tables.pop(request_id, None)
        self._device_hits.pop(request_id, None)
        self.offload.fail("request_finished", error, now_s)
        self.offload.on_request_finished(request_id, now_s)

    def plan_failed(self, error: Exception) -> StepOrders:
        """`plan` raised: its jobs have failed. What requests have to recompute is still passed on."""
        now_s = self._clock()
        self.offload.fail("build_connector_meta", error, now_s)
        self.offload.lose_plan(now_s)
        self._take_lost(now_s)
        lost, self._lost = self._lost, []
        made = self.planned
        return StepOrders(lost=lost) if made is None else StepOrders(lost=[*made.lost, *lost], sizes=made.sizes)

    def reports_failed(self, output: Any, error: Exception) -> None:
        """`take_reports` raised: what the workers reported is read again with the next plan."""
        self.offload.record_error("update_connector_output", error)
        reports = output.kv_connector_worker_meta
        if isinstance(reports, StepReports):
            self._unread += reports.results
        if output.invalid_block_ids:
            self.offload.fail("update_connector_output", error, self._clock())

    def has_open_work(self) -> bool:
        """Whether steps are needed although no request may be there."""
        is_waiting = self._extents is not None and self._extents.is_waiting
        is_wanted = self._step_wanted is not None and self._step_wanted.is_set()
        is_behind = self._events is not None and self._events.is_behind
        return bool(self._lost or self._unread) or is_waiting or is_wanted or is_behind or self.offload.has_open_work()

    def reset(self) -> None:
        """Forget all blocks. Transfers under way end, and publish nothing."""
        self.offload.reset(self._clock())
        self.num_changes += 1

    # --- inside --------------------------------------------------------------------------------------------------

    def _wait_for_tiers(self) -> None:
        """Requests may wait for a tier, and nothing else be under way: vLLM would only ask again, as fast as it can."""
        if self._woken is not None and self._requests and not self.offload.has_open_work():
            self._woken.wait(IDLE_WAIT_S)
            self._woken.clear()

    def _progress(self, output: Any) -> Iterable[StepProgress]:
        """How far each scheduled request will have come, with its tables as they are now."""
        state = output.kv_connector_block_state
        num_new = output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        offers = state.boundary_state_offloads
        for request_id, num_computed, has_grown in _scheduled(output):
            ours = self._requests.get(request_id)
            if ours is None:
                continue
            # vLLM lists all of a request's blocks for whoever asks. Of what it had in the step before, nothing but what
            # is in a window leaves without another block coming.
            tables = None if has_grown or not self._only_grow else self._tables.get(request_id)
            if tables is None:
                tables = self._tables[request_id] = state.get_block_ids(request_id)
            end = num_computed + num_new[request_id] - len(drafts.get(request_id, ()))
            if self._events is not None:
                self._events.note(ours, end)
            if any(self._by_offer):
                yield from self._by_boundaries(request_id, tables, end, offers.get(request_id, ()))
            else:
                yield StepProgress(request_id, tables, end)

    def _note_early_writes(self, output: Any) -> None:
        """Exclude blocks that vLLM zeroes or copies to before `handle_preemptions` from stores ahead of the step."""
        copied = [copy.dst_block_id for copy in output.kv_cache_block_copies or ()]
        # Which blocks recurrent states are moved to is not in the output.
        self.device.note_overwritten(None if self._has_states else [*(output.new_block_ids_to_zero or ()), *copied])

    def _by_boundaries(
        self, request_id: str, tables: Sequence[Sequence[int]], end: int, offers: Iterable[tuple[int, int, int]]
    ) -> Iterable[StepProgress]:
        """Recurrent states are in the blocks that vLLM hands over for a boundary, and nowhere else."""
        at: dict[int, dict[int, int]] = {}
        for group, block, boundary in offers:
            if self._by_offer[group] and boundary <= end and boundary % self._block_sizes[group] == 0:
                at.setdefault(boundary, {})[group] = block
        for boundary in sorted({*at, end}):
            states = at.get(boundary, {})
            yield StepProgress(
                request_id,
                [
                    self._state_table(table, group, boundary, states.get(group)) if self._by_offer[group] else table
                    for group, table in enumerate(tables)
                ],
                boundary,
            )

    def _state_table(self, table: Sequence[int], group: int, boundary: int, block: int | None) -> list[int]:
        blank = [NULL_BLOCK] * len(table)
        number = boundary // self._block_sizes[group] - 1
        if block is not None and number >= 0:
            blank += [NULL_BLOCK] * (number + 1 - len(blank))
            blank[number] = block
        return blank

    def _name_boundary(self, request: Any, boundary: int) -> None:
        """Have vLLM keep the windows and states at a boundary that only the pool knows, as it does at its own.

        vLLM ends a chunk at the boundary where it has recurrent states, and hands those over; blocks of windows get a
        hash there, by which lazy mode knows what they hold.
        """
        theirs = getattr(request, "shared_prefix_boundary", None)
        if theirs is not None and boundary > theirs:
            request.shared_prefix_boundary = boundary

    def _report_hit(self, request: Any, num_external_tokens: int) -> None:
        """Have routers learn of the blocks that a request found, if it asks for full reports as vLLM's own do."""
        num_device_tokens = self._device_hits.pop(request.request_id, None)
        ours = self._requests.get(request.request_id)
        if self._events is None or ours is None or num_device_tokens is None:
            return
        if getattr(request, "kv_cache_report_mode", None) == "full":
            self._events.report(ours, num_device_tokens + num_external_tokens)

    def _note_preemption(self, request_id: str, now_s: float) -> None:
        """vLLM has no hook for it, and may resume a request within the very step that preempts it."""
        ours = self._requests.get(request_id)
        if ours is not None and ours.num_preemptions != ours.request.num_preemptions:
            ours.num_preemptions = ours.request.num_preemptions
            self._tables.pop(request_id, None)
            self.offload.on_preempted(request_id, now_s)

    def _take_unread(self, now_s: float) -> None:
        """Results that were reported in a step that failed. vLLM has the requests' loads for done already."""
        unread, self._unread = self._unread, []
        for at, result in enumerate(unread):
            self._open_stores.pop(result.job_id, None)
            if result.job_id in self._distrusted:
                unread[at] = TransferResult(result.job_id, result.worker, INVALID_BLOCKS)
        if unread:
            self.offload.on_transfers_finished(unread, now_s)

    def _take_lost(self, now_s: float) -> None:
        """Loads that vLLM has just agreed to and that cannot begin."""
        self._lost += [outcome.request_id for outcome in self.offload.on_transfers_finished((), now_s)]

    def _checked(self, results: Sequence[TransferResult]) -> list[TransferResult]:
        """Results, those of stores that read bad bytes as failures."""
        checked: list[TransferResult] = []
        for result in results:
            if result.job_id in self._distrusted:
                result = TransferResult(result.job_id, result.worker, INVALID_BLOCKS)
            if result.job_id in self._open_stores:
                self._open_stores[result.job_id] -= 1
                if not self._open_stores[result.job_id]:
                    del self._open_stores[result.job_id]
                    self._distrusted.discard(result.job_id)
            checked.append(result)
        return checked

    def _distrust(self, invalid: set[int]) -> None:
        """Another connector's load into these blocks failed, and steps have computed on what is in them.

        Nothing that the requests concerned hold is stored, and no store that is under way counts.
        """
        affected = [
            request_id
            for request_id, tables in self._tables.items()
            if any(not invalid.isdisjoint(table) for table in tables)
        ]
        self._distrusted.update(self._open_stores)
        self.offload.on_step_failed(affected, self._clock())


def _scheduled(output: Any) -> Iterable[tuple[str, int, bool]]:
    """Each scheduled request, its computed tokens before the step, and whether it was given blocks for it."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, True
    cached = output.scheduled_cached_reqs
    given = (blocks is not None for blocks in cached.new_block_ids)
    yield from zip(cached.req_ids, cached.num_computed_tokens, given, strict=True)
