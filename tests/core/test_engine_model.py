"""Any order of arrivals, steps, completions, failures, preemptions, aborts, resets and overrides keeps the promises."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.origins import OriginMatch
from core.policy import Override, RequestPolicy
from core.transfers import TransferResult
from tests.core.toy_engine import BLOCK_SIZE, ToyEngine, ToyRequest


class EngineMachine(RuleBasedStateMachine):
    @initialize(
        num_slots=st.integers(1, 24),
        num_blocks=st.integers(12, 40),
        prompt_only=st.booleans(),
        num_workers=st.sampled_from([1, 1, 2]),
    )
    def start(self, num_slots: int, num_blocks: int, prompt_only: bool, num_workers: int) -> None:
        policy = RequestPolicy(offload_prompt_only=prompt_only)
        self.engine = ToyEngine(num_slots, num_blocks, settings=policy, num_workers=num_workers)
        self.next_id = 0

    @rule(
        family=st.integers(0, 3),
        shared=st.integers(0, 24),
        own=st.integers(1, 14),
        max_tokens=st.integers(1, 9),
        tenant=st.sampled_from([None, "a", "b"]),
        params=st.sampled_from(
            [None, {}, {"max_offload_tokens": 9}, {"store": False}, {"load": False}, {"offload_prompt_only": False}]
        ),
    )
    def arrive(self, family, shared, own, max_tokens, tenant, params) -> None:
        if len(self.engine.requests) >= 6:
            return
        self.next_id += 1
        salt = {None: 0, "a": 100_000, "b": 200_000}[tenant]
        tokens = [salt + family * 1000 + i for i in range(shared)] + [salt + 50_000 + self.next_id] * own
        request = ToyRequest(f"r{self.next_id}", tokens, len(tokens), max_tokens, tenant, None, params)
        self.engine.add(request)

    @rule(budget=st.integers(1, 40))
    def step(self, budget: int) -> None:
        self.engine.step(budget)

    @precondition(lambda self: self.engine.jobs)
    @rule(data=st.data(), failed=st.sampled_from([False, False, False, True]))
    def end_a_job(self, data, failed: bool) -> None:
        job_id = data.draw(st.sampled_from(sorted(self.engine.jobs)))
        self.engine.end_job(job_id, error="injected" if failed else None)

    @rule(job_id=st.integers(0, 50), worker=st.integers(-1, 3))
    def report_what_nobody_waits_for(self, job_id: int, worker: int) -> None:
        if job_id not in self.engine.jobs:
            assert not self.engine.offload._jobs.count_open([job_id])
            self.engine.deliver([TransferResult(job_id, worker)])

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), what=st.sampled_from(["abort", "preempt", "match"]))
    def disturb(self, data, what: str) -> None:
        request = self.engine.requests[data.draw(st.sampled_from(sorted(self.engine.requests)))]
        if what == "abort":
            self.engine.finish(request)
        elif what == "preempt" and request.state in ("running", "loading"):
            self.engine.preempt(request)
        elif what == "match" and request.state == "waiting":
            self.engine.offload.match(request.request_id, data.draw(st.integers(0, 5)) * BLOCK_SIZE, 1.0)

    @rule(tenant=st.sampled_from([None, "a", "*"]), whole=st.booleans())
    def reset(self, tenant: str | None, whole: bool) -> None:
        before = self.engine.offload.snapshot()
        match = None if whole or tenant is None else OriginMatch(tenant=tenant)
        ticket = self.engine.offload.reset(self.engine.now_s, match)
        assert ticket.epoch == before.epoch + 1
        if match is None:
            assert ticket.dropped_blocks == before.pool.ready
            assert self.engine.offload.snapshot().pool.ready == 0

    @rule(cap=st.one_of(st.none(), st.integers(0, 30)), store=st.booleans(), load=st.booleans())
    def steer(self, cap: int | None, store: bool, load: bool) -> None:
        target = f"r{self.next_id}"
        patch = {"max_offload_tokens": cap, "store": store, "load": load}
        self.engine.offload.set_override(Override(target, patch, self.engine.now_s + 5.0))
        self.engine.offload.set_runtime_policy({"store": store or load})

    @rule(data=st.data())
    def pin_a_block(self, data) -> None:
        manager = self.engine.manager
        rows = manager.inventory.list_blocks(0, 100)
        if len(rows.slots):
            key = data.draw(st.sampled_from(sorted(rows.keys)))
            manager.pin_block(key, self.engine.now_s + data.draw(st.integers(1, 5)), self.engine.now_s)
            if data.draw(st.booleans()):
                manager.drop_block(key, self.engine.now_s)
                assert manager.find_block(key) is None

    @invariant()
    def promises(self) -> None:
        if hasattr(self, "engine"):
            self.engine.check()

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(10):
            self.engine.step(0)
        self.engine.now_s += 100
        self.engine.run()
        self.engine.check()
        self.engine.manager.expire_pins(self.engine.now_s)
        self.engine.check_idle()


TestEngineModel = EngineMachine.TestCase
TestEngineModel.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
