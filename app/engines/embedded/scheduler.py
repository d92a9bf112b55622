"""Scheduler: which tokens of which requests the next step computes, and on which device blocks.

A request waits, loads if kvferry has more of its prefix than the device, runs, and finishes:

    add --> waiting --> running --> finish        preempted, or its load failed: back to the head of `waiting`
               |           ^
               +-> loading +

Running requests go first, decodes before prefills, under one token budget. Then waiting ones start in the order of
their arrival, as far as blocks suffice. When blocks run out, the latest request is preempted and recomputed later.

All of kvferry's hooks are called here, on the engine thread. The calls are marked `offload:`, with the reason why each
stands where it does. With the copy engine, which the loop submits jobs to, they are the whole attachment: another
engine attaches by calling the same hooks at the same places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Protocol

from kvferry.app.engines.embedded.block_pool import BlockPool
from kvferry.app.engines.embedded.request import Request
from kvferry.core.engine_api import BlockTables, EngineRequest, StepProgress
from kvferry.core.scheduler.scheduler import Hit, Later, Miss
from kvferry.core.transfers import LoadOutcome, StepPlan, TransferResult

MAX_LATER_PER_STEP = 64
"""Waiting requests that a step looks at beyond `max_running`: its cost does not grow with their number."""


class Offload(Protocol):
    """kvferry's hooks: the part of `OffloadScheduler`, or of `OffloadGuard` around it, that an engine calls."""

    def on_new_request(self, request: EngineRequest, now_s: float) -> None: ...
    def match(self, request_id: str, num_computed_tokens: int, now_s: float) -> Hit | Miss | Later: ...
    def commit(self, request_id: str, block_ids: BlockTables, num_loaded_tokens: int, now_s: float) -> None: ...
    def plan_step(self, progress: Sequence[StepProgress], now_s: float) -> StepPlan: ...
    def on_step_failed(self, request_ids: Sequence[str], now_s: float) -> None: ...
    def on_transfers_finished(self, results: Sequence[TransferResult], now_s: float) -> list[LoadOutcome]: ...
    def on_preempted(self, request_id: str, now_s: float) -> None: ...
    def on_request_finished(self, request_id: str, now_s: float, *, is_aborted: bool = False) -> None: ...
    def has_open_work(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_new_tokens` tokens of a request."""

    request: Request
    num_new_tokens: int

    @property
    def num_tokens_after(self) -> int:
        """Return how many tokens of the request are computed once the step has run."""
        return self.request.num_computed_tokens + self.num_new_tokens

    @property
    def samples(self) -> bool:
        """Return whether the chunk ends at the request's last token, so that the next one can be sampled."""
        return self.num_tokens_after == self.request.num_tokens


@dataclass(slots=True)
class Step:
    """One step: chunks to compute, by request id, and transfers."""

    budget_tokens: int
    """How many more tokens the step may compute."""
    chunks: dict[str, Chunk] = field(default_factory=dict)
    plan: StepPlan = field(default_factory=StepPlan)

    def add(self, request: Request, num_new_tokens: int) -> None:
        """Add tokens of a request."""
        self.chunks[request.request_id] = Chunk(request, num_new_tokens)
        self.budget_tokens -= num_new_tokens

    def drop(self, request: Request) -> None:
        """Remove a request, if it was added."""
        chunk = self.chunks.pop(request.request_id, None)
        if chunk is not None:
            self.budget_tokens += chunk.num_new_tokens


class Scheduler:
    """Requests of the engine, each in exactly one of `waiting`, `loading` and `running`. Thread: engine."""

    def __init__(
        self, block_pool: BlockPool, offload: Offload, block_size: int, max_batched_tokens: int, max_running: int
    ) -> None:
        """Create a scheduler without requests."""
        self.block_pool = block_pool
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        """Waiting requests by arrival; a preempted one is ahead of all others."""
        self.loading: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self._offload = offload
        self._block_size = block_size
        self._max_batched_tokens = max_batched_tokens
        self._max_running = max_running
        self._num_arrivals = 0

    # ---- the way of a request ----------------------------------------------------------------------------------------

    def add(self, request: Request, now_s: float) -> None:
        """Queue a new request."""
        # offload: before anything else about this request, because its policy is resolved here.
        self._offload.on_new_request(request, now_s)
        self._num_arrivals += 1
        request.arrival = self._num_arrivals
        self.waiting[request.request_id] = request

    def schedule(self, now_s: float) -> Step:
        """Choose the next step's tokens, allocate their blocks, and plan the transfers of the step."""
        step = Step(self._max_batched_tokens)
        if self._continue_running(step, now_s):
            self._start_waiting(step, now_s)
        progress = [
            StepProgress(request_id, (chunk.request.block_table,), chunk.num_tokens_after)
            for request_id, chunk in step.chunks.items()
        ]
        # offload: in every step, also an empty one, before anything writes to the blocks that were allocated above:
        # their old contents may have to be stored ahead of the step.
        step.plan = self._offload.plan_step(progress, now_s)
        return step

    def _continue_running(self, step: Step, now_s: float) -> bool:
        """Add running requests to the step. Return whether none had to be preempted, so that others may start."""
        is_preempted = False
        for request in sorted(self.running.values(), key=_turn):
            if request.request_id not in self.running or step.budget_tokens == 0:
                continue
            num_new = min(request.num_tokens - request.num_computed_tokens, step.budget_tokens)
            while not self._grow(request, request.num_computed_tokens + num_new):
                victim = max(self.running.values(), key=attrgetter("arrival"))
                step.drop(victim)
                self._preempt(victim, now_s)
                is_preempted = True
                if victim is request:
                    break
            if request.request_id in self.running:
                step.add(request, num_new)
        return not is_preempted

    def _start_waiting(self, step: Step, now_s: float) -> None:
        """Start waiting requests in order, until one does not fit. Pass over those that kvferry answers `Later`."""
        for request in list(islice(self.waiting.values(), self._max_running + MAX_LATER_PER_STEP)):
            if step.budget_tokens == 0 or len(self.running) + len(self.loading) >= self._max_running:
                return
            # The last token is always computed: its logits are needed.
            cacheable = request.block_hashes[: (request.num_tokens - 1) // self._block_size]
            on_device = self.block_pool.find_prefix(cacheable)
            num_on_device = len(on_device) * self._block_size
            # offload: before blocks are allocated, because a hit needs some, and in each step until it is not `Later`.
            answer = self._offload.match(request.request_id, num_on_device, now_s)
            if isinstance(answer, Later):
                continue
            num_load = answer.num_tokens if isinstance(answer, Hit) else 0
            num_new = min(request.num_tokens - num_on_device - num_load, step.budget_tokens)
            num_blocks = self._blocks_for(num_on_device + num_load + num_new) - len(on_device)
            table = self.block_pool.allocate(on_device, num_blocks)
            if table is None:
                return
            del self.waiting[request.request_id]
            request.block_table = table
            request.num_computed_tokens = num_on_device
            if num_load:
                self.loading[request.request_id] = request
            else:
                request.record_cached(num_on_device)
                self.running[request.request_id] = request
                step.add(request, num_new)
            # offload: once the request has blocks, because the load is planned into those behind the device's own hit.
            self._offload.commit(request.request_id, (table,), num_load, now_s)

    def end_transfers(self, results: Sequence[TransferResult], now_s: float) -> None:
        """Report ended transfers, and resume the requests whose loads have ended."""
        # offload: in every step, before `schedule`, so that stored blocks can be found and loaded requests run.
        for outcome in self._offload.on_transfers_finished(results, now_s):
            request = self.loading.pop(outcome.request_id)
            if outcome.ok:
                first_block = request.num_computed_tokens // self._block_size
                request.num_computed_tokens += outcome.num_tokens
                request.record_cached(request.num_computed_tokens)
                self._register_from(first_block, request)
                self.running[request.request_id] = request
            else:
                self._free_blocks(request)
                self._wait_first(request)

    def advance(self, chunk: Chunk) -> None:
        """Record a computed chunk: the blocks that it filled can be found from now on."""
        first_block = chunk.request.num_computed_tokens // self._block_size
        chunk.request.num_computed_tokens = chunk.num_tokens_after
        self._register_from(first_block, chunk.request)

    def finish(self, request: Request, now_s: float, *, is_aborted: bool = False) -> None:
        """Remove a request, in any state. One that was never added, or is removed already, is ignored."""
        for queue in (self.running, self.loading, self.waiting):
            if queue.pop(request.request_id, None) is not None:
                # offload: once, and before the blocks are freed: those under transfer are held by kvferry.
                self._offload.on_request_finished(request.request_id, now_s, is_aborted=is_aborted)
                self._free_blocks(request)

    def report_failed(self, requests: Sequence[Request], now_s: float) -> None:
        """Report requests that fail in a step. They have to finish next."""
        # offload: before they finish, so that none of the blocks that the step should have filled is stored.
        self._offload.on_step_failed([request.request_id for request in requests], now_s)

    def _preempt(self, request: Request, now_s: float) -> None:
        """Free a request's blocks. It keeps its answer so far, and recomputes or reloads all tokens."""
        del self.running[request.request_id]
        # offload: before the blocks are freed; then the request is matched again, as a new one is.
        self._offload.on_preempted(request.request_id, now_s)
        self._free_blocks(request)
        self._wait_first(request)

    # ---- all requests ------------------------------------------------------------------------------------------------

    def requests(self) -> list[Request]:
        """Return every request that was added and has not finished."""
        return [*self.running.values(), *self.loading.values(), *self.waiting.values()]

    def has_work(self) -> bool:
        """Return whether steps are needed, also ones that compute nothing."""
        # offload: transfers end, and are reported, only in steps.
        return bool(self.waiting or self.loading or self.running) or self._offload.has_open_work()

    # ---- blocks ------------------------------------------------------------------------------------------------------

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for so many tokens of a request. Return False if too few are free."""
        num_more = self._blocks_for(num_tokens) - len(request.block_table)
        blocks = self.block_pool.allocate((), max(num_more, 0))
        if blocks is None:
            return False
        request.block_table.extend(blocks)
        return True

    def _register_from(self, first_block: int, request: Request) -> None:
        """Make blocks findable from this one on, as far as they are computed or loaded."""
        for index in range(first_block, request.num_computed_tokens // self._block_size):
            self.block_pool.register(request.block_table[index], request.block_hashes[index])

    def _free_blocks(self, request: Request) -> None:
        self.block_pool.free(request.block_table)
        request.block_table = []
        request.num_computed_tokens = 0

    def _wait_first(self, request: Request) -> None:
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _turn(request: Request) -> tuple[bool, int]:
    """Return the place of a running request in a step: decodes, of which one token is left, before prefills."""
    return request.num_tokens - request.num_computed_tokens > 1, request.arrival
