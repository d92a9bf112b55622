"""Step scheduler: which tokens of which requests the next step computes, and allocation of their blocks.

Running requests go first, decodes before prefills, under one token budget; then waiting ones start, as far as blocks
suffice. When blocks run out, a request is preempted and recomputed later. While others wait, a request that has decoded
for a while yields its place.

Tokens of a step, places and blocks are shared by client address, so that a short request of one need not wait for long
ones of another: the latest request of the address that has most is preempted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

from kvferry.app.engines.embedded.block_pool import BlockPool
from kvferry.app.engines.embedded.offload import Offload
from kvferry.app.engines.embedded.request import Request
from kvferry.app.engines.embedded.waiting import WaitingQueue
from kvferry.core.engine_api import StepProgress
from kvferry.core.scheduler.scheduler import Hit, Later
from kvferry.core.transfers import LoadOutcome

MAX_LATER_PER_STEP = 64
"""Waiting requests that a step may pass over, so that its cost does not grow with the number of waiting ones."""

SLICE_TOKENS = 128
"""Tokens that a request decodes before it yields its place to a waiting one."""
SLICES_PER_CONTEXT = 8
"""A slice has at least one eighth of the request's tokens, which may have to be recomputed."""
SHARED_STEPS = 8
"""Parts of a step's token budget while several client addresses have requests. The prompts of one address get one part,
so that the next token of another does not wait for thousands of theirs."""


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
    """Chunks of one step, the remaining token budget, and what the prompts of one client address may have of it."""

    chunks: dict[str, Chunk] = field(default_factory=dict)
    budget_tokens: int = 0
    share_tokens: int = 0
    used_tokens: Counter[str] = field(default_factory=Counter)

    def room_for(self, request: Request) -> int:
        """Return how many tokens of a request may be added, 0 or less if none."""
        share = self.share_tokens - self.used_tokens[request.address]
        return self.budget_tokens if _is_decoding(request) else min(self.budget_tokens, share)

    def add(self, request: Request, num_new_tokens: int) -> None:
        """Add tokens of a request."""
        self.chunks[request.request_id] = Chunk(request, num_new_tokens)
        self.budget_tokens -= num_new_tokens
        self.used_tokens[request.address] += 0 if _is_decoding(request) else num_new_tokens

    def drop(self, request: Request) -> None:
        """Remove a request."""
        chunk = self.chunks.pop(request.request_id, None)
        if chunk is not None:
            self.budget_tokens += chunk.num_new_tokens
            self.used_tokens[request.address] -= 0 if _is_decoding(request) else chunk.num_new_tokens

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
        self.waiting = WaitingQueue()
        self.loading: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self._arrivals = 0

    def add(self, request: Request) -> None:
        """Queue a new request."""
        self._arrivals += 1
        request.arrival = self._arrivals
        self.waiting.add(request)

    def is_live(self, request: Request) -> bool:
        """Return whether this request object was added and has not finished."""
        return any(queue.get(request.request_id) is request for queue in (self.running, self.waiting, self.loading))

    def requests(self) -> list[Request]:
        """Return every live request."""
        return [*self.running.values(), *self.loading.values(), *self.waiting]

    def schedule(self, now_s: float) -> Step:
        """Choose the next step's tokens and allocate their blocks."""
        self._end_slices(now_s)
        step = Step(budget_tokens=self.max_batched_tokens, share_tokens=self._share_tokens())
        preempted = False
        for request in self._running_in_order():
            room = step.room_for(request)
            if request.request_id not in self.running or room <= 0:
                continue
            num_new = min(request.num_tokens - request.num_computed_tokens, room)
            while not self._grow(request, request.num_computed_tokens + num_new):
                victim = self._find_victim() or request
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
            self.waiting.add_first(request)
        request.num_loading_tokens = 0

    def finish(self, request: Request, now_s: float) -> None:
        """Remove a request in any state. Blocks under transfer stay held by the offload scheduler."""
        for queue in (self.running, self.loading):
            queue.pop(request.request_id, None)
        self.waiting.discard(request)
        try:
            self.offload.on_request_finished(request.request_id, now_s)
        finally:
            self._free_blocks(request)

    def _running_in_order(self) -> list[Request]:
        """Return decodes, then prefills, each by arrival."""
        return sorted(self.running.values(), key=lambda r: (not _is_decoding(r), r.arrival))

    def _start_waiting(self, step: Step, now_s: float) -> None:
        """Start waiting requests in order, until one of each client address does not fit.

        Pass over those whose prefix is being loaded.
        """
        full: set[str] = set()
        for request in list(islice(self.waiting, self.max_running + MAX_LATER_PER_STEP)):
            if step.budget_tokens == 0:
                return
            room = step.room_for(request)
            is_full = len(self.running) + len(self.loading) >= self.max_running
            yielding = self._find_yielding(request) if is_full else None
            if request.address in full or room <= 0 or (is_full and yielding is None):
                full.add(request.address)
                continue
            loadable = request.block_hashes[: (request.num_tokens - 1) // self.block_size]
            on_device = self.pool.find_prefix(loadable)
            num_hit = len(on_device) * self.block_size
            answer = self.offload.match(request.request_id, num_hit, now_s)
            if isinstance(answer, Later):
                continue
            most = len(loadable) * self.block_size - num_hit
            num_load = min(answer.num_tokens, most) if isinstance(answer, Hit) else 0
            num_new = min(request.num_tokens - num_hit - num_load, room)
            num_blocks = self._blocks_for(num_hit + num_load + num_new) - len(on_device)
            table = self.pool.allocate(on_device, num_blocks)
            while table is None and self._make_room(request, len(on_device) + num_blocks, step, now_s):
                table = self.pool.allocate(on_device, num_blocks)
            if table is None:
                full.add(request.address)
                continue
            if yielding is not None and yielding.request_id in self.running:
                self._yield_to_other(yielding, step, now_s)
            self.waiting.start(request)
            request.num_output_at_start = request.num_output_tokens
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

    def _find_yielding(self, request: Request) -> Request | None:
        """Return the latest of the address with most places, if it has two more than this request's address."""
        places = Counter(one.address for one in (*self.running.values(), *self.loading.values()))
        address, num_most = places.most_common(1)[0]
        of_most = [one for one in self.running.values() if one.address == address]
        if num_most - places[request.address] < 2:
            return None
        return max(of_most, key=lambda one: one.arrival, default=None)

    def _make_room(self, request: Request, num_blocks: int, step: Step, now_s: float) -> bool:
        """Preempt a request of an address with more blocks than this request's would have; False if there is none."""
        victim, blocks = self._find_victim(), self._blocks_by_address()
        if victim is None or blocks[victim.address] <= blocks[request.address] + num_blocks:
            return False
        self._yield_to_other(victim, step, now_s)
        return True

    def _yield_to_other(self, request: Request, step: Step, now_s: float) -> None:
        step.drop(request)
        self._preempt(request, now_s, is_slice=True)

    def _find_victim(self) -> Request | None:
        """Return the latest running request of the address that has most blocks.

        It is never the earliest of all, so that this one ends; None if no other runs.
        """
        blocks = self._blocks_by_address()
        by_arrival = sorted(self.running.values(), key=lambda one: one.arrival)
        return max(by_arrival[1:], key=lambda one: (blocks[one.address], one.arrival), default=None)

    def _blocks_by_address(self) -> Counter[str]:
        blocks: Counter[str] = Counter()
        for request in self.running.values():
            blocks[request.address] += len(request.block_table)
        return blocks

    def _share_tokens(self) -> int:
        """Return how many tokens of a step the prompts of one client address may have."""
        addresses = {request.address for request in (*self.running.values(), *self.loading.values())}
        is_shared = len(addresses) > 1 or any(map(self.waiting.has_other_address, addresses))
        return max(self.max_batched_tokens // SHARED_STEPS, self.block_size) if is_shared else self.max_batched_tokens

    def _grow(self, request: Request, num_tokens: int) -> bool:
        more = self._blocks_for(num_tokens) - len(request.block_table)
        if more <= 0:
            return True
        blocks = self.pool.allocate((), more)
        if blocks is None:
            return False
        request.block_table.extend(blocks)
        return True

    def _end_slices(self, now_s: float) -> None:
        """Preempt requests whose slice is over, at most as many as wait without a free place."""
        num_wanted = len(self.waiting) - (self.max_running - len(self.running) - len(self.loading))
        if num_wanted <= 0:
            return
        for request in sorted(self.running.values(), key=lambda r: r.arrival):
            slice_tokens = max(SLICE_TOKENS, request.num_tokens // SLICES_PER_CONTEXT)
            if num_wanted and request.num_output_tokens - request.num_output_at_start >= slice_tokens:
                num_wanted -= 1
                self._preempt(request, now_s, is_slice=True)

    def _preempt(self, request: Request, now_s: float, *, is_slice: bool = False) -> None:
        """Free a request's blocks. It keeps its answer so far, and recomputes or reloads all tokens."""
        del self.running[request.request_id]
        if is_slice:
            self.waiting.add(request)
        else:
            self.waiting.add_first(request)
        try:
            self.offload.on_preempted(request.request_id, now_s)
        finally:
            self._free_blocks(request)

    def _free_blocks(self, request: Request) -> None:
        self.pool.free(request.block_table)
        request.block_table = []
        request.num_computed_tokens = 0

    def _register(self, request: Request, first_block: int, end_block: int) -> None:
        for index in range(first_block, end_block):
            self.pool.register(request.block_table[index], request.block_hashes[index])

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)
