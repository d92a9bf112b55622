"""A small engine around the real scheduler, whose blocks hold values derived from their tokens instead of KV.

A device block "computed" for some tokens holds their value, and a copy moves values. So whoever reads anything but the
right bytes is caught at once. Transfers end when the test says so, in any order, well or badly. Unit tests and
the simulator use this one engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.engine_api import StepProgress, StoreMode
from kvferry.core.groups import GroupKind, GroupLayout, GroupSpec
from kvferry.core.keys import RequestFilter
from kvferry.core.policy import REQUEST_FIELDS_DEFAULT, Override, PolicyResolver, RequestPolicy
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.records import HeaderQueue
from kvferry.core.pool.resize import PoolResize, Todo
from kvferry.core.pool.slots import BATCH_SLOTS
from kvferry.core.pool.tenant_limits import TenantLimits
from kvferry.core.rules import Rule
from kvferry.core.scheduler.resets import ResetTicket
from kvferry.core.scheduler.scheduler import OffloadScheduler, SchedulerOptions
from kvferry.core.transfers import LoadOutcome, StepPlan, TransferResult
from tests.harness import toy_checks
from tests.harness.toy_compute import Chunk, check_context, check_values, fill, first_needed, needed_values
from tests.harness.toy_copies import ToyCopies, blocks_of, slots_of
from tests.harness.toy_device import ToyDevice
from tests.harness.toy_ledger import Ledger
from tests.harness.toy_schedule import Habits, ToySchedule
from tests.harness.toy_tiers import ToyTier
from tests.harness.toy_tokens import BLOCK_SIZE, ToyRequest, Truth

__all__ = ["BLOCK_SIZE", "SLOT_BYTES", "Habits", "ToyEngine", "ToyRequest", "blocks_of", "slots_of"]

SLOT_BYTES = 64


class ToyEngine(ToySchedule):
    """Every call that fails a promise raises `AssertionError`; `check` looks at all that must hold between calls."""

    def __init__(
        self,
        num_slots: int,
        num_blocks: int,
        *,
        settings: RequestPolicy | None = None,
        num_workers: int = 1,
        sink=None,
        specs: Sequence[GroupSpec] = (GroupSpec(BLOCK_SIZE, SLOT_BYTES),),
        blocks_per_slot: int = 1,
        hash_block_size: int | None = None,
        null_block: int = -1,
        skips_last_block: bool = False,
        window_interval_tokens: int | None = 0,
        eviction_policy: str = "lru",
        cost_model: LoadOrCompute | None = None,
        habits: Habits | None = None,
        store_mode: StoreMode = StoreMode.EAGER,
        watermark_blocks: int = 64,
        tiers: Sequence[str] = (),
        open_tier: Callable[[ToyEngine], Any] = ToyTier,
        extent_slots: int = 1,
        max_slots: int = 0,
        request_fields: Sequence[str] = REQUEST_FIELDS_DEFAULT,
        policy_sources: Mapping[str, str] | None = None,
        header_queue: HeaderQueue | None = None,
        batch_slots: int = BATCH_SLOTS,
    ) -> None:
        super().__init__()
        self.habits = habits or Habits()
        self.layout = GroupLayout(
            specs,
            blocks_per_slot,
            hash_block_size,
            null_block,
            skips_last_block=skips_last_block,
            window_interval_tokens=window_interval_tokens,
        )
        self.groups = self.layout.groups
        self.manager = OffloadManager(
            num_slots,
            self.layout.slot_bytes,
            eviction_policy,
            sink=sink,
            header_queue=header_queue,
            max_slots=max_slots,
            batch_slots=batch_slots,
        )
        self.resize = PoolResize(self.manager, extent_slots)
        self.limits = TenantLimits(self.manager)
        self.policies = PolicyResolver(settings or RequestPolicy(), policy_sources or {}, self.manager.lock)
        self.num_workers = num_workers
        self.device = ToyDevice(num_blocks, num_workers, null_block)
        if self.habits.hides_windows:
            windows = {group.index for group in self.groups if group.spec.kind is GroupKind.SLIDING}
            self.device.hides = lambda group, name: group in windows and name[-1] % self.habits.hides_windows > 0
        self.copies = ToyCopies(self.device, self.groups, num_slots, num_workers)
        self.now_s = 1000.0
        self.tiers = {name: open_tier(self) for name in tiers}
        self.offload = OffloadScheduler(
            self.manager,
            self.policies,
            self.device,
            self.layout,
            SchedulerOptions(
                num_workers=num_workers,
                num_recent_requests=10**6,
                store_mode=store_mode,
                watermark_blocks=watermark_blocks,
                steps_in_flight=int(self.habits.asynchronous),
                request_fields=tuple(request_fields),
            ),
            cost_model=cost_model,
            tiers=self.tiers,
        )
        self.truth = Truth(self.groups, self.layout.hash_block_size)
        self.ledger = Ledger(self)
        self.step_s = 1.0
        self.last_sent = 0
        self.living_ranks: Callable[[], Iterable[int]] = lambda: range(num_workers)

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, budget: int = 32, *, copy: bool = False) -> StepPlan:
        """One engine step; with `copy`, all transfers of the plan and before end well at once."""
        chunks, plan = self._begin_step(budget)
        while self.flight and (len(self.flight) > 1 or not self.habits.asynchronous or not chunks):
            self._run_step()
        if copy:
            while self.copies.open:
                self.end_job(next(iter(self.copies.open)))
        return plan

    def fail_step(self, budget: int = 32) -> None:
        """A step whose compute comes to nothing: what it was to fill is junk, and all requests that hold it fail."""
        self._begin_step(budget)
        junk = {b for chunks, _ in self.flight for c in chunks for b in c.blocks_from(self.groups, c.start)}
        for block_id in junk:
            self.device.forget(block_id)
        self.device.spoil(sorted(junk))
        junk.discard(self.device.null_block)
        failed = [r for r in self.requests.values() if any(not junk.isdisjoint(table) for table in r.tables)]
        stores = [job for _, plan in self.flight for job in plan.stores]
        self.offload.on_step_failed([r.request_id for r in failed], self.now_s)
        self.ledger.step_failed(failed)
        for request in failed:
            self.finish(request, is_aborted=True)
        for chunks, _ in self.flight:
            self._let_go(chunks)
        self.flight.clear()
        self.deliver(
            [TransferResult(job.job_id, rank, "the step failed") for job in stores for rank in range(self.num_workers)]
        )

    def _begin_step(self, budget: int) -> tuple[list[Chunk], StepPlan]:
        self.now_s += self.step_s
        chunks = self.planned = self._schedule(budget)
        progress = [StepProgress(c.request.request_id, self._told(c.request), c.end) for c in chunks]
        plan = self.offload.plan_step(progress, self.now_s)
        self.ledger.opened(plan)
        self.last_sent = max((job.job_id for job in plan.jobs), default=self.last_sent)
        if plan.stores_ahead:
            # They read what the steps before have computed, and are read before this one writes to any block.
            while self.flight:
                self._run_step()
            self.events["stored ahead of a step"] += sum(job.num_blocks for job in plan.stores_ahead)
        for job in plan.stores_ahead:
            self.copies.submit_ahead(job, self.living_ranks())
        self.device.overwrite()
        self.flight.append((chunks, plan))
        self.planned = []
        self.submit(plan, stores=False)
        return chunks, plan

    def submit(self, plan: StepPlan, *, loads: bool = True, stores: bool = True) -> None:
        """Let the copies of a plan begin."""
        toy_checks.check_plan(plan)
        for job in (plan.loads if loads else []) + (plan.stores if stores else []):
            self.copies.submit(job)

    def _run_step(self) -> None:
        """Compute the oldest step that was planned, let its stores begin, and take its tokens."""
        chunks, plan = self.flight.popleft()
        for chunk in chunks:
            self._compute(chunk)
        self.submit(plan, loads=False)
        for chunk in chunks:
            self._take_token(chunk)
        self._let_go(chunks)

    def _let_go(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            for table in chunk.tables:
                self.device.drop(reversed(table))

    def _compute(self, chunk: Chunk) -> None:
        if chunk.end < len(chunk.request.chain):
            check_context(self.device, self.groups, chunk)
            fill(self.device, self.groups, chunk, chunk.end, self.habits.every_state)
        elif chunk.request.state != "idle" or chunk.life != chunk.request.lives:
            # It went on from a token that was never chosen, since its request lost its blocks meanwhile.
            self.device.spoil(chunk.blocks_from(self.groups, chunk.start))

    def _take_token(self, chunk: Chunk) -> None:
        request = chunk.request
        if self.requests.get(request.request_id) is not request or request.lives != chunk.life:
            self.events["a step's result was not wanted any more"] += 1
            return
        request.num_expected -= chunk.expects + (chunk.num_drafts if self.habits.asynchronous else 0)
        if not chunk.samples or request.state == "idle":
            return
        if request.is_done():
            self._end_answer(request)
            return
        accepted = self.choose(0, chunk.num_drafts) if chunk.num_drafts else 0
        for _ in range(accepted + 1):
            request.append_token()
            if request.stops():
                break
        self.ledger.learn(request)
        if chunk.num_drafts:
            self._take_back(chunk, accepted)
        if request.stops():
            self._end_answer(request)

    def _take_back(self, chunk: Chunk, accepted: int) -> None:
        """Some of a chunk's drafts were right; the step under way goes on behind those."""
        request, rejected = chunk.request, chunk.num_drafts - accepted
        self.events["drafts taken back"] += rejected > 0
        if not self.habits.asynchronous:
            request.num_computed += accepted
        else:
            request.num_computed -= rejected
            for chunks in (*(chunks for chunks, _ in self.flight), self.planned):
                for i, later in enumerate(chunks):
                    if rejected and later.request is request and later.life == chunk.life:
                        self.events["a step under way was moved back"] += 1
                        chunks[i] = replace(later, start=later.start - rejected, end=later.end - rejected)
        end = min(chunk.end + accepted, request.num_tokens)
        self.device.spoil(chunk.blocks_from(self.groups, end))
        fill(self.device, self.groups, chunk, end, self.habits.every_state)

    def _end_answer(self, request: ToyRequest) -> None:
        """The request is over, or a session that waits for its client."""
        if request.num_turns:
            request.state = "idle"
        else:
            self.finish(request)

    def continue_session(self, request: ToyRequest, tokens: Sequence[int]) -> None:
        """The client of an idle session sends more; a token that was not computed is not kept."""
        self.events["a session went on"] += 1
        request.keep(min(request.num_computed, request.num_tokens))
        request.num_computed = num_kept = request.num_tokens
        request.continue_with(tokens)
        request.num_turns -= 1
        request.state = "running"
        self.ledger.continued(request, num_kept)
        if self.habits.commits_again:
            self.offload.commit(request.request_id, self._told(request), 0, self.now_s)

    def discard(self) -> list[Exception]:
        """Have core discard the state of all requests, as its guard does after an exception."""
        return self.offload.abandon_all(self.now_s, self.last_sent)

    # --- transfers --------------------------------------------------------------------------------------------------

    def end_job(self, job_id: int, *, error: str | None = None, worker: int | None = None) -> None:
        """Let all workers, or one, be done with a job now."""
        copy = self.copies.open[job_id]
        workers = sorted(copy.missing) if worker is None else [worker]
        self.deliver([self.copies.report(copy, rank, error, 0.001) for rank in workers])

    def deliver(self, results: Sequence[TransferResult]) -> None:
        """Tell core what workers reported, and let the requests go on whose loads have ended."""
        outcomes = self.offload.on_transfers_finished(results, self.now_s)
        self.ledger.reported(results)
        for outcome in outcomes:
            self._end_load(outcome)

    def _end_load(self, outcome: LoadOutcome) -> None:
        request = self.requests[outcome.request_id]
        assert request.state == "loading", "a load ended for a request that does not wait for one"
        assert (outcome.first_token, outcome.num_tokens) == (request.num_computed, request.num_loading)
        request.num_loading = 0
        self.ledger.loaded(request, outcome)
        if outcome.ok:
            self._use_loaded(request, outcome.first_token, outcome.first_token + outcome.num_tokens)
        elif self.habits.keeps_failed:
            # It recomputes in the blocks that were to be filled, without asking again.
            request.state = "running"
        else:
            # Back to waiting without blocks: the next match finds what is left of the hit.
            self._lose_blocks(request)
            request.state = "waiting"

    def _use_loaded(self, request: ToyRequest, first_token: int, end: int) -> None:
        for group in self.groups:
            size, table = group.spec.block_size, request.tables[group.index]
            needed = needed_values(group, table, request.chain, end, first_token)
            check_values(self.device, needed, f"{request.request_id} has loaded for group {group.index}")
            for i in range(max(first_needed(group, end), first_token // size), end // size):
                self.device.cache(group.index, request.hash_at((i + 1) * size), table[i])
        request.num_computed = end
        request.state = "running"
        if self.habits.commits_again:
            self.offload.commit(request.request_id, self._told(request), 0, self.now_s)

    def run(self, max_steps: int = 2000) -> None:
        """Step until every request is answered and every transfer has ended."""
        for _ in range(max_steps):
            if self.is_idle():
                return
            self.step(copy=True)
            self.deliver([])
        raise AssertionError(f"not idle after {max_steps} steps: {self.requests} {self.copies.open}")

    def is_idle(self) -> bool:
        busy = any(link.open_jobs or link.open_resets for link in self.offload.tiers.clients)
        return not (self.requests or self.copies.open or self.flight or busy or self.offload.has_open_work())

    # --- operators --------------------------------------------------------------------------------------------------

    def reset(self, match: RequestFilter | None = None, places: Sequence[str] | None = None) -> ResetTicket:
        """Forget everything, or what matches, everywhere or in some places."""
        note, num_interferences = self.ledger.resetting(match, places), self.events["an operator interfered"]
        ticket = self.offload.resets.reset(self.now_s, match, places)
        self.ledger.was_reset(note, ticket, is_alone=self.events["an operator interfered"] == num_interferences)
        return ticket

    def attach_tier(self, name: str, tier: Any = None) -> Any:
        """Use a tier from now on, and return it; resets since it was detached come before."""
        self.tiers[name] = tier = ToyTier(self) if tier is None else tier
        self.offload.tiers.attach(name, tier, is_enabled=False)
        self.offload.resets.repeat_detached(name, self.now_s)
        self.offload.tiers.enable(name, is_enabled=True)
        return tier

    def detach_tier(self, name: str) -> Any:
        """Use a tier no longer, and return it; None if it may still touch slots, or has not ended a reset."""
        if not self.offload.tiers.detach(name, self.now_s):
            return None
        tier = self.tiers.pop(name)
        assert not tier.wrongs, tier.wrongs
        assert not tier.touched_slots, f"{name} was detached and may still touch slots"
        tier.close(0.0)
        return tier

    def sleep(self, places: Sequence[str] | None) -> None:
        """Give the device's memory up, and forget what it held; the requests start over."""
        while self.flight:
            self._run_step()
        for request in [r for r in self.requests.values() if r.state in ("running", "loading", "idle")]:
            self.preempt(request)
        self.device.forget_all()
        self.reset(None, places)
        self.device.spoil(range(len(self.device.refs)))

    def close(self) -> None:
        """No tier hears of anything any more."""
        self.offload.tiers.close(self.now_s)
        toy_checks.check_closed(self)

    def expire(self) -> None:
        """What a process does every second beside its engine."""
        self.offload.expire(self.now_s)
        self.ledger.expired()

    def drive_resize(self, may_acknowledge: Callable[[int], bool] = lambda rank: True) -> Todo:
        """Take a step of a resize; ranks that have to add memory, or to free some, do it now if they may."""
        todo = self.resize.step(self.now_s)
        if todo is Todo.MEMORY:
            for rank in range(self.num_workers):
                if may_acknowledge(rank):
                    self.copies.set_memory(rank, self.resize.memory_slots)
            if all(len(rows) == self.resize.memory_slots for rows in self.copies.host):
                self.resize.acknowledge(self.resize.memory_slots)
        return todo

    def finish_resize(self, max_steps: int = 1000) -> None:
        """Let the pool come to the size that is wanted."""
        for _ in range(max_steps):
            if not self.resize.is_open:
                return
            if self.drive_resize() is Todo.LATER:
                self.now_s += 1.0
        raise AssertionError(f"the pool has {self.manager.counts().slots} slots after {max_steps} steps")

    def set_override(self, override: Override) -> None:
        """Set a request's policy."""
        self.ledger.policies.overrides[override.request_id] = override
        self.offload.policies.set_override(override)
        self.ledger.grant_all()

    def drop_override(self, request_id: str) -> None:
        """Take a request's policy away."""
        known = self.ledger.policies.overrides.pop(request_id, None)
        dropped = self.offload.policies.drop_override(request_id, self.now_s)
        assert known is not None or not dropped
        self.ledger.grant_all()

    def set_runtime(self, patch: Mapping[str, Any], removed: Sequence[str] = ()) -> None:
        """Set the policy of all who ask for nothing else."""
        runtime = {**self.ledger.policies.runtime, **patch}
        self.ledger.policies.runtime = {name: value for name, value in runtime.items() if name not in removed}
        self.offload.policies.set_runtime(patch, removed)
        self.ledger.grant_all()

    def put_rule(self, rule: Rule) -> None:
        """Set the policy of all whom a rule is about."""
        self.ledger.policies.rules[rule.name] = rule
        self.offload.policies.put_rule(rule)
        self.ledger.grant_all()

    def drop_rule(self, name: str) -> None:
        """Take a rule away."""
        known = self.ledger.policies.rules.pop(name, None) is not None
        assert self.offload.policies.drop_rule(name) is known
        self.ledger.grant_all()

    def set_mode(self, mode: StoreMode) -> None:
        """Offer blocks as they fill, or when they leave the device."""
        self.ledger.was_lazy |= mode is StoreMode.LAZY
        self.offload.set_store_mode(mode)

    # --- what must always hold --------------------------------------------------------------------------------------

    def check(self) -> None:
        """All invariants, at this very moment."""
        toy_checks.check(self)

    def check_idle(self) -> None:
        """Nothing is left of anything."""
        toy_checks.check_idle(self)
