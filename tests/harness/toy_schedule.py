"""How a toy engine schedules: who gets blocks, which tokens the next step computes, and who has to give way."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvferry.core.groups import Group, GroupKind, GroupLayout
from kvferry.core.scheduler.scheduler import Hit, Later, OffloadScheduler
from kvferry.core.transfers import StepPlan
from tests.harness.toy_compute import Chunk, first_needed
from tests.harness.toy_device import ToyDevice
from tests.harness.toy_ledger import Ledger
from tests.harness.toy_tokens import ToyRequest


@dataclass(frozen=True)
class Habits:
    """How an engine goes about it.

    `asynchronous`: a step is planned before the tokens of the one before it are known. `max_drafts`: tokens guessed
    behind a decode. `drops_passed`: blocks that nobody looks at any more are given back while the request runs.
    `every_state`: recurrent groups keep a state at every boundary, not only at the end of a chunk. `allocates_ahead`:
    blocks for all tokens at admission. `caches_early`: blocks can be found once their compute is planned.
    `shares_tables`: core gets the live tables. `ends_chunks_at`: a multiple of it, if it can. `commits_again`: once
    more after a load. `keeps_failed`: a failed load is recomputed in the same blocks. `fills_passed`: a load gets
    blocks also where none is needed. `hides_windows`: only one of so many blocks of windows can be found.
    """

    asynchronous: bool = False
    max_drafts: int = 0
    drops_passed: bool = True
    every_state: bool = True
    allocates_ahead: bool = True
    caches_early: bool = False
    shares_tables: bool = False
    ends_chunks_at: int = 1
    commits_again: bool = False
    keeps_failed: bool = False
    fills_passed: bool = False
    hides_windows: int = 0
    max_running: int = 1000


class ToySchedule:
    """Requests in the order of their arrival, running ones first; one pool of blocks for all groups.

    `choose(low, high)` decides how many drafts there are and are right, `take_hit` how many tokens of a hit the engine
    wants. `flight` are the steps that were planned and have not run, `planned` is the step that is being planned.
    """

    device: ToyDevice
    layout: GroupLayout
    groups: tuple[Group, ...]
    offload: OffloadScheduler
    ledger: Ledger
    habits: Habits
    now_s: float

    def __init__(self) -> None:
        self.requests: dict[str, ToyRequest] = {}
        self.flight: deque[tuple[list[Chunk], StepPlan]] = deque()
        self.planned: list[Chunk] = []
        self.events: Counter[str] = Counter()
        self.choose: Callable[[int, int], int] = lambda low, high: high
        self.take_hit: Callable[[int], int] = lambda num_tokens: num_tokens

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: ToyRequest) -> None:
        """Announce a request. One that has its id and is still there is forgotten without a word."""
        forgotten = self.requests.pop(request.request_id, None)
        if forgotten is not None:
            self.ledger.forgetting(forgotten)
            self._lose_blocks(forgotten)
        self.requests[request.request_id] = request
        self.offload.on_new_request(request, self.now_s)
        self.ledger.arrived(request)

    def finish(self, request: ToyRequest, *, is_aborted: bool = False) -> None:
        """End a request, wherever it stands; an abort only gets no lease."""
        self.ledger.finishing(request)
        self.offload.on_request_finished(request.request_id, self.now_s, request.num_computed, is_aborted=is_aborted)
        self.ledger.finished(request)
        self._lose_blocks(request)
        request.state = "finished"
        del self.requests[request.request_id]

    def preempt(self, request: ToyRequest) -> None:
        """Take a request's blocks; it starts over."""
        self.ledger.preempting(request)
        self.offload.on_preempted(request.request_id, self.now_s)
        self._lose_blocks(request)
        request.state = "waiting"

    def _lose_blocks(self, request: ToyRequest) -> None:
        # The last blocks become free first, so that what begins a prefix stays longest.
        self.device.drop(block_id for table in request.tables for block_id in reversed(table))
        request.tables = []
        request.num_computed = request.num_expected = request.num_loading = 0
        request.lives += 1

    # --- admission --------------------------------------------------------------------------------------------------

    def find_prefix(self, request: ToyRequest) -> int:
        """The longest prefix, in tokens, that all groups can go on from with what the device still has."""
        step = self.layout.alignment_tokens
        end = (request.num_tokens - 1) // step * step
        for group in self.layout.full_groups:
            size, found = group.spec.block_size, 0
            while found < end and (group.index, request.hash_at(found + size)) in self.device.cached:
                found += size
            end = min(end, found) // step * step
        skipped = self.layout.skipped_tokens
        end = self._agreed_end(request, max(end - skipped, 0) if self.layout.full_groups else end)
        return end if self.layout.full_groups or not skipped else self._agreed_end(request, max(end - skipped, 0))

    def _agreed_end(self, request: ToyRequest, end: int) -> int:
        """The longest prefix up to `end` whose windows and states the device has."""
        cached = self.device.cached
        windowed = [group for group in self.groups if group.spec.kind is not GroupKind.FULL]
        while end and not all(
            (group.index, request.hash_at((i + 1) * group.spec.block_size)) in cached
            for group in windowed
            for i in range(first_needed(group, end), end // group.spec.block_size)
        ):
            end -= self.layout.alignment_tokens
        return end

    def admit(self, request: ToyRequest) -> bool:
        """Try to give a waiting request its blocks; False if it has to wait."""
        prefix = self.find_prefix(request)
        answer = self.offload.match(request.request_id, prefix, self.now_s)
        self.ledger.matched(request, prefix, answer)
        if isinstance(answer, Later):
            return False
        wanted = self.take_hit(answer.num_tokens) if isinstance(answer, Hit) else 0
        tables = self._allocate(request, prefix, wanted)
        if tables is None:
            self.events["no room on the device for what was matched"] += 1
            return False
        request.tables = tables
        request.num_computed, request.num_loading = prefix, wanted
        request.state = "loading" if wanted else "running"
        self.offload.commit(request.request_id, self._told(request), wanted, self.now_s)
        self.ledger.committed(request)
        return True

    def _allocate(self, request: ToyRequest, prefix: int, num_loading: int) -> list[list[int]] | None:
        """Tables for a request: what the device has of its prefix, new blocks behind it; None without room."""
        end, null = prefix + num_loading, self.device.null_block
        ahead = request.num_tokens if self.habits.allocates_ahead else end
        shared: list[int] = []
        tables: list[list[int]] = []
        places: list[tuple[list[int], int]] = []
        for group in self.groups:
            size = group.spec.block_size
            table = [null] * -(-ahead // size)
            num_found, num_loaded = prefix // size, end // size
            for i in range(min(first_needed(group, prefix), num_found), num_found):
                table[i] = self.device.cached[group.index, request.hash_at((i + 1) * size)]
                shared.append(table[i])
            first_loaded = num_found if self.habits.fills_passed else max(first_needed(group, end), num_found)
            keeps_last_state = group.spec.kind is GroupKind.RECURRENT and not self.habits.every_state
            places += [(table, i) for i in range(first_loaded, num_loaded)]
            places += [(table, i) for i in range(num_loaded, 0 if keeps_last_state else len(table))]
            tables.append(table)
        if len(self.device.free) - sum(block_id in self.device.free for block_id in shared) < len(places):
            return None
        self.device.keep(shared)
        self._fill_places(places)
        return tables

    def _fill_places(self, places: list[tuple[list[int], int]]) -> None:
        for (table, i), block_id in zip(places, self.device.take(len(places)), strict=True):
            table[i] = block_id

    def _told(self, request: ToyRequest) -> list[list[int]]:
        return request.tables if self.habits.shares_tables else [list(table) for table in request.tables]

    # --- the next step ----------------------------------------------------------------------------------------------

    def under_way(self, request: ToyRequest) -> list[Chunk]:
        """The chunks of a request in steps that were planned and have not run."""
        return [chunk for chunks, _ in self.flight for chunk in chunks if chunk.request is request]

    def _schedule(self, budget: int) -> list[Chunk]:
        """Running requests first, then waiting ones, unless blocks had to be taken. Who came last gives way."""
        chunks: list[Chunk] = []
        preempted = False
        for request in [r for r in self.requests.values() if r.state == "running"]:
            chunk = self._next_chunk(request, budget) if request.state == "running" else None
            while chunk is not None and not self._grow(chunk):
                chunk = None
                # What could be taken from others is in use until the step under way has ended.
                if not self.flight:
                    victim = [r for r in self.requests.values() if r.state == "running"][-1]
                    preempted = True
                    self.preempt(victim)
                    chunk = self._next_chunk(request, budget) if victim is not request else None
            if chunk is not None:
                budget -= self._plan(chunk, chunks)
        for request in [] if preempted else [r for r in self.requests.values() if r.state == "waiting"]:
            if sum(r.state in ("running", "loading") for r in self.requests.values()) >= self.habits.max_running:
                break
            if self.admit(request) and request.state == "running":
                chunk = self._next_chunk(request, budget)
                if chunk is not None and self._grow(chunk):
                    budget -= self._plan(chunk, chunks)
        return chunks

    def _next_chunk(self, request: ToyRequest, budget: int) -> Chunk | None:
        """What a request could compute next; its tables come with `_plan`."""
        start, known = request.num_computed, request.num_tokens + request.num_expected
        end = min(known, start + budget)
        if end < known:
            aligned = end // self.habits.ends_chunks_at * self.habits.ends_chunks_at
            end = aligned if aligned > start else end
        if end <= start:
            return None
        samples = end == known
        num_chosen = request.num_outputs + request.num_expected
        expects = samples and num_chosen < request.max_tokens
        drafts = min(self.habits.max_drafts, request.max_tokens - num_chosen - 1)
        # A state that a step under way leaves behind cannot be moved back.
        if not expects or drafts <= 0 or end - start > 1 or (self.habits.asynchronous and self._keeps_last_states):
            drafts = 0
        drafts = self.choose(0, drafts) if drafts else 0
        return Chunk(request, request.lives, start, end, drafts, samples, expects, ())

    @property
    def _keeps_last_states(self) -> bool:
        return not self.habits.every_state and any(group.spec.kind is GroupKind.RECURRENT for group in self.groups)

    def _grow(self, chunk: Chunk) -> bool:
        """Give back what the chunk passes, and take the blocks that it fills; False without room."""
        null, request = self.device.null_block, chunk.request
        places: list[tuple[list[int], int]] = []
        sure = chunk.start - sum(one.num_drafts for one in self.under_way(request) if one.life == request.lives)
        for group, table in zip(self.groups, request.tables, strict=True):
            size = group.spec.block_size
            if self.habits.drops_passed:
                passed = range(min(first_needed(group, sure), len(table)))
                self.device.drop([table[i] for i in reversed(passed)])
                for i in passed:
                    table[i] = null
            first, end = chunk.start // size, -(-(chunk.end + chunk.num_drafts) // size)
            if group.spec.kind is GroupKind.RECURRENT and not self.habits.every_state:
                first = (chunk.end - 1) // size
            table += [null] * (end - len(table))
            places += [(table, i) for i in range(first, end) if table[i] == null]
        if len(self.device.free) < len(places):
            return False
        self._fill_places(places)
        return True

    def _plan(self, chunk: Chunk, chunks: list[Chunk]) -> int:
        """Make a chunk part of the step, and say how many tokens it takes."""
        request = chunk.request
        request.num_computed = chunk.end
        request.num_expected += chunk.expects
        if self.habits.asynchronous:
            # The next step goes on behind the drafts, and is moved back by those that turn out to be wrong.
            request.num_computed += chunk.num_drafts
            request.num_expected += chunk.num_drafts
        planned = replace(chunk, tables=tuple(list(table) for table in request.tables))
        for table in planned.tables:
            # What a step under way reads and writes is nobody else's, whatever becomes of its requests.
            self.device.keep(table)
        chunks.append(planned)
        self.ledger.planned(planned)
        if self.habits.caches_early:
            self._cache_early(planned)
        return chunk.end - chunk.start

    def _cache_early(self, chunk: Chunk) -> None:
        request = chunk.request
        for group in self.groups:
            size = group.spec.block_size
            if group.spec.kind is not GroupKind.RECURRENT or self.habits.every_state:
                for i in range(chunk.start // size, min(chunk.end, request.num_hashed) // size):
                    self.device.cache(group.index, request.hash_at((i + 1) * size), chunk.tables[group.index][i])
