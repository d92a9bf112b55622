"""Step scheduler: which tokens of which requests the next step computes, and allocation of their blocks.

Running requests go first, decodes before prefills, under one token budget; then waiting ones start in the order of
their arrival, as far as blocks suffice. When blocks run out, the latest request is preempted and recomputed later.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice

from kvferry.app.engines.embedded.block_pool import BlockPool
from kvferry.app.engines.embedded.offload import Offload
from kvferry.app.engines.embedded.request import Request
from kvferry.core.engine_api import StepProgress
from kvferry.core.scheduler.scheduler import Hit, Later
from kvferry.core.transfers import LoadOutcome

MAX_LATER_PER_STEP = 64
"""Waiting requests that a step may pass over, so that its cost does not grow with the number of waiting ones."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """The next `num_new_tokens` tokens of a request. A chunk up to the request's last token samples another."""

    request: Request
    num_new_tokens: int

    @property
    def samples(self) -> bool:
        """Return whether the chunk ends at the request's last token, so that the next one can be sampled."""
        return self.request.num_computed_tokens + self.num_new_tokens == self.request.num_tokens


@dataclass(slots=True)
class Step:
    """Chunks of one step, and the remaining token budget."""

    chunks: dict[str, Chunk] = field(default_factory=dict)
    budget_tokens: int = 0

    def add(self, request: Request, num_new_tokens: int) -> None:
        """Add tokens of a request."""
        self.chunks[request.request_id] = Chunk(request, num_new_tokens)
        self.budget_tokens -= num_new_tokens

    def drop(self, request: Request) -> None:
        """Remove a request."""
        chunk = self.chunks.pop(request.request_id, None)
        if chunk is not None:
            self.budget_tokens += chunk.num_new_tokens

    def progress(self) -> list[StepProgress]:
        """Return each scheduled request's progress after the step."""
        return [
            StepProgress(
                chunk.request.request_id,
                (chunk.request.block_table,),
                chunk.request.num_computed_tokens + chunk.num_new_tokens,
            )
            for chunk in self.chunks.values()
        ]


def _is_decoding(request: Request) -> bool:
    """Return whether all tokens but the latest are computed."""
    return request.num_tokens - request.num_computed_tokens == 1


class StepScheduler:
    """Assigns every live request to exactly one of `waiting`, `loading` and `running`."""

    def __init__(
        self,
        pool: BlockPool,
        offload: Offload,
        block_size: int,
        max_batched_tokens: int,
        max_running: int,
    ) -> None:
        """Create an empty scheduler."""
        self.pool = pool
        self.offload = offload
        self.block_size = block_size
        self.max_batched_tokens = max_batched_tokens
        self.max_running = max_running
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        """Waiting requests by arrival; a preempted one is ahead of all others."""
        self.loading: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._arrivals += 1
        request.arrival = self._arrivals
        self.waiting[request.request_id] = request

    def is_live(self, request: Request) -> bool:
        """Return whether this request object was added and has not finished."""
        return any(queue.get(request.request_id) is request for queue in (self.running, self.waiting, self.loading))

    def requests(self) -> list[Request]:
        """Return every live request."""
        return [*self.running.values(), *self.loading.values(), *self.waiting.values()]

    def schedule(self, now_s: float) -> Step:
        """Choose the next step's tokens and allocate their blocks."""
        step = Step(budget_tokens=self.max_batched_tokens)
        preempted = False
        for request in self._running_in_order():
            if request.request_id not in self.running or step.budget_tokens == 0:
                continue
            num_new = min(request.num_tokens - request.num_computed_tokens, step.budget_tokens)
            while not self._grow(request, request.num_computed_tokens + num_new):
                victim = max(self.running.values(), key=lambda one: one.arrival)
                step.drop(victim)
                self._preempt(victim, now_s)
                preempted = True
                if victim is request:
                    break
            if request.request_id in self.running:
                step.add(request, num_new)
        if not preempted:
            self._start_waiting(step, now_s)
        return step

    def advance(self, chunk: Chunk) -> None:
        """Record a computed chunk: the blocks that it filled can be found from now on."""
        request = chunk.request
        first = request.num_computed_tokens // self.block_size
        request.advance(chunk.num_new_tokens)
        self._register(request, first, request.num_computed_tokens // self.block_size)

    def end_load(self, outcome: LoadOutcome) -> None:
        """Resume the request of an ended load, with the loaded tokens or from the start."""
        request = self.loading.pop(outcome.request_id, None)
        if request is None:
            return
        if outcome.ok:
            request.num_computed_tokens += request.num_loading_tokens
            request.record_cached(request.num_computed_tokens)
            self.running[request.request_id] = request
            first = outcome.first_token // self.block_size
            self._register(request, first, first + outcome.num_tokens // self.block_size)
        else:
            self._free_blocks(request)
            self._wait_first(request)
        request.num_loading_tokens = 0

    def finish(self, request: Request, now_s: float) -> None:
        """Remove a request in any state. Blocks under transfer stay held by the offload scheduler."""
        for queue in (self.running, self.loading, self.waiting):
            queue.pop(request.request_id, None)
        try:
            self.offload.on_request_finished(request.request_id, now_s)
        finally:
            self._free_blocks(request)

    def _running_in_order(self) -> list[Request]:
        """Return decodes, then prefills, each by arrival."""
        return sorted(self.running.values(), key=lambda r: (not _is_decoding(r), r.arrival))

    def _start_waiting(self, step: Step, now_s: float) -> None:
        """Start waiting requests in order, until one does not fit. Pass over those whose prefix is being loaded."""
        for request in list(islice(self.waiting.values(), self.max_running + MAX_LATER_PER_STEP)):
            if step.budget_tokens == 0 or len(self.running) + len(self.loading) >= self.max_running:
                return
            loadable = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
            on_device = self.pool.find_prefix(loadable)
            num_hit = len(on_device) * self.block_size
            answer = self.offload.match(request.request_id, num_hit, now_s)
            if isinstance(answer, Later):
                continue
            most = len(loadable) * self.block_size - num_hit
            num_load = min(answer.num_tokens, most) if isinstance(answer, Hit) else 0
            num_new = min(request.num_tokens - num_hit - num_load, step.budget_tokens)
            num_blocks = self._blocks_for(num_hit + num_load + num_new) - len(on_device)
            table = self.pool.allocate(on_device, num_blocks)
            if table is None:
                return
            del self.waiting[request.request_id]
            request.block_table = table
            request.num_computed_tokens = num_hit
            request.num_loading_tokens = num_load
            if num_load:
                self.loading[request.request_id] = request
            else:
                request.record_cached(num_hit)
                self.running[request.request_id] = request
                step.add(request, num_new)
            self.offload.commit(request.request_id, (table,), num_load, now_s)

    def _grow(self, request: Request, num_tokens: int) -> bool:
        more = self._blocks_for(num_tokens) - len(request.block_table)
        if more <= 0:
            return True
        blocks = self.pool.allocate((), more)
        if blocks is None:
            return False
        request.block_table.extend(blocks)
        return True

    def _preempt(self, request: Request, now_s: float) -> None:
        """Free a request's blocks. It keeps its answer so far, and recomputes or reloads all tokens."""
        del self.running[request.request_id]
        self._wait_first(request)
        try:
            self.offload.on_preempted(request.request_id, now_s)
        finally:
            self._free_blocks(request)

    def _wait_first(self, request: Request) -> None:
        self.waiting[request.request_id] = request
        self.waiting.move_to_end(request.request_id, last=False)

    def _free_blocks(self, request: Request) -> None:
        self.pool.free(request.block_table)
        request.block_table = []
        request.num_computed_tokens = 0

    def _register(self, request: Request, first_block: int, end_block: int) -> None:
        for index in range(first_block, end_block):
            self.pool.register(request.block_table[index], request.block_hashes[index])

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
