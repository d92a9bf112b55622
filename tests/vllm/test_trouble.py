"""Whatever goes wrong around a transfer, vLLM answers as it does without kvferry, and nothing is left behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvferry.core.stats import NotStored
from kvferry.core.transfers import Direction, TransferJob
from kvferry.cuda_ops.copy.cpu_copy import CpuCopyEngine
from tests.harness.waiting import DEADLINE_S, wait_until
from tests.vllm.engines import InProcess, in_process, transfer_config
from tests.vllm.test_in_process import assert_nothing_left
from tests.vllm.workload import BLOCK, Answer, Prompt, assert_same, shared_prefixes

PROMPTS = shared_prefixes(80, seed=11)
SOME = PROMPTS[:40]
LARGE = (PROMPTS[1] * 8)[:1990]
"""Leaves less of the device than any other prompt needs."""

Plan = Callable[[CpuCopyEngine, TransferJob, Any], Any]


@pytest.fixture
def engine(llama: Path) -> Iterator[InProcess]:
    with in_process(llama, transfer_config(load_decision="always")) as engine:
        yield engine
        assert_nothing_left(engine)


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[TransferJob], None]], None]:
    """Has something happen on the copy thread before each copy."""
    plain: Plan = CpuCopyEngine._plan

    def patch(before: Callable[[TransferJob], None]) -> None:
        def plan(self: CpuCopyEngine, job: TransferJob, thread: Any) -> Any:
            before(job)
            return plain(self, job, thread)

        monkeypatch.setattr(CpuCopyEngine, "_plan", plan)

    return patch


def refill(engine: InProcess, prompts: Sequence[Prompt] = PROMPTS) -> None:
    """Have the pool hold what the prompts need, and the device nothing."""
    engine.generate(prompts)
    engine.forget_device()


@pytest.mark.parametrize("every", [1, 3])
def test_failed_load_is_recomputed_and_its_blocks_dropped(
    engine: InProcess, truth: list[Answer], copying: Any, every: int
) -> None:
    refill(engine)
    loads: list[int] = []

    def fail(job: TransferJob) -> None:
        if job.direction is Direction.LOAD:
            loads.append(job.num_blocks)
            if len(loads) % every == 0:
                raise OSError("injected")

    copying(fail)
    assert_same(engine.generate(PROMPTS), truth)
    after = engine.settle()
    assert after.load.failed > 0
    assert after.load.blocks > 0 or every == 1
    assert after.evictions.by_reason["load_failed"] > 0


def test_failed_stores_publish_nothing(engine: InProcess, truth: list[Answer], copying: Any) -> None:
    def fail(job: TransferJob) -> None:
        if job.direction is Direction.STORE:
            raise OSError("injected")

    copying(fail)
    assert_same(engine.generate(PROMPTS), truth)
    after = engine.settle()
    assert after.store.failed > 0
    assert after.store.stored == after.pool.ready == 0


def test_blocks_after_failed_or_unfinished_load_are_not_stored(engine: InProcess, copying: Any) -> None:
    refill(engine, SOME)
    prompt = PROMPTS[0]
    may_load, stored = threading.Event(), []

    def wait_and_fail(job: TransferJob) -> None:
        if job.direction is Direction.LOAD:
            assert may_load.wait(DEADLINE_S)
            raise OSError("injected")
        stored.append(job)

    copying(wait_and_fail)
    engine.add("first", prompt)
    wait_until(lambda: (engine.step(), engine.snapshot().requests.waiting_for_load == 1)[1], "it loads", DEADLINE_S)
    target = {block for job in engine.core._jobs for run in job.job.runs for block in run.block_ids.tolist()}
    for _ in range(20):
        engine.step()
    assert not stored
    assert all(engine.pool.blocks[block].block_hash is None for block in target)
    may_load.set()
    wait_until(lambda: bool(engine.step()), "it ends", DEADLINE_S)
    assert engine.settle().load.failed == len(target)
    # What it recomputed is stored again, and only after it was computed.
    assert stored
    engine.forget_device()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_completion_when_lost_does_not_hang_requests(engine: InProcess, truth: list[Answer], copying: Any) -> None:
    refill(engine)
    deaths: list[int] = []

    def die(job: TransferJob) -> None:
        if job.direction is Direction.LOAD and len(deaths) < 3:
            deaths.append(job.job_id)
            # Not an `Exception`: the thread does not survive it.
            raise SystemExit

    copying(die)
    assert_same(engine.generate(PROMPTS), truth)
    assert len(deaths) == 3
    assert engine.settle().load.failed > 0


def test_steps_without_work_are_bounded_while_a_load_is_in_flight(engine: InProcess, copying: Any) -> None:
    refill(engine, SOME)
    may_load = threading.Event()
    copying(lambda job: may_load.wait(DEADLINE_S) and None)
    engine.add("slow", PROMPTS[0])
    wait_until(lambda: (engine.step(), engine.snapshot().load.in_flight > 0)[1], "it loads", DEADLINE_S)
    started_s = time.monotonic()
    for _ in range(40):
        engine.step()
    spent_s = time.monotonic() - started_s
    may_load.set()
    wait_until(lambda: bool(engine.step()), "it ends", DEADLINE_S)
    # Each of them waited for the copy, instead of taking its processor.
    assert spent_s >= 40 * 0.005


def test_reset_with_open_transfers_gives_the_same_answers(engine: InProcess, truth: list[Answer], copying: Any) -> None:
    copies: list[int] = []

    def reset(job: TransferJob) -> None:
        copies.append(job.job_id)
        if len(copies) % 5 == 0:
            engine.core.resets.reset(time.time())

    for _ in range(2):
        copying(reset)
        assert_same(engine.generate(PROMPTS), truth)
    after = engine.settle()
    assert after.epoch > 2
    assert after.store.skipped[NotStored.RESET] + after.load.failed > 0


def test_vllm_reset_while_blocks_are_held_resets_the_pool(engine: InProcess, copying: Any) -> None:
    may_copy = threading.Event()
    copying(lambda job: may_copy.wait(DEADLINE_S) and None)
    engine.add("one", PROMPTS[0])
    wait_until(lambda: bool(engine.step()), "it ends", DEADLINE_S)
    assert engine.scheduler.device.num_held > 0
    # vLLM says no for its own cache, since blocks are held, and resets ours all the same.
    assert not engine.vllm_scheduler.reset_prefix_cache(reset_connector=True)
    with pytest.raises(RuntimeError, match="Failed to reset KV cache"):
        engine.vllm_scheduler.reset_prefix_cache(reset_running_requests=True)
    may_copy.set()
    after = engine.settle()
    assert after.epoch == 1
    assert after.pool.ready == 0
    assert engine.vllm_scheduler.reset_prefix_cache(reset_connector=True)


def test_reset_of_running_requests_resumes_them_in_one_step(engine: InProcess, truth: list[Answer]) -> None:
    for number, prompt in enumerate(PROMPTS[:4]):
        engine.add(str(number), prompt)
    wait_until(lambda: (engine.step(), engine.snapshot().store.stored > 0)[1], "they run", DEADLINE_S)
    wait_until(
        lambda: engine.scheduler.device.num_held == 0 or not engine.settle().open_jobs, "no copy runs", DEADLINE_S
    )
    answers: dict[str, Answer] = {}
    engine.vllm_scheduler.reset_prefix_cache(reset_running_requests=True)
    wait_until(lambda: (answers.update(engine.step()), len(answers) == 4)[1], "they end", DEADLINE_S)
    assert engine.snapshot().requests.preempted >= 1
    assert_same([answers[str(number)] for number in range(4)], truth[:4])


def test_preempted_requests_get_the_same_answers(llama: Path) -> None:
    prompts = shared_prefixes(40, prefixes=20, prefix_tokens=5 * BLOCK, seed=5)
    with in_process(llama, num_gpu_blocks_override=256) as alone:
        truth = alone.generate(prompts, max_tokens=100)
    with in_process(llama, transfer_config(offload_prompt_only=False, load_decision="always")) as engine:
        assert_same(engine.generate(prompts, max_tokens=100), truth)
        after = engine.settle()
        assert after.requests.preempted > 0
        assert after.load.blocks > 0
        assert_nothing_left(engine)


@pytest.mark.parametrize("when", ["waiting", "matched", "loading", "running"])
def test_abort_in_any_state_releases_everything(engine: InProcess, copying: Any, when: str) -> None:
    refill(engine, SOME)
    may_copy = threading.Event()
    copying(lambda job: may_copy.wait(DEADLINE_S) and None)
    if when == "matched":
        # The device is full of a running request, so that the next one is looked up and cannot be allocated.
        may_copy.set()
        engine.add("large", LARGE, max_tokens=40)
        for _ in range(8):
            engine.step()
        may_copy.clear()
    if when == "running":
        may_copy.set()
    engine.add("one", PROMPTS[0], max_tokens=50)
    reached = {
        "waiting": lambda: True,
        "matched": lambda: engine.snapshot().pool.pinned > 0,
        "loading": lambda: engine.snapshot().requests.waiting_for_load == 1,
        "running": lambda: len(engine.vllm_scheduler.running) == 1,
    }[when]
    wait_until(lambda: reached() or (engine.step(), False)[1], when, DEADLINE_S)
    live = list(engine.vllm_scheduler.requests)
    engine.engine.abort_request(["one", "large"])
    engine.engine.engine_core.abort_requests(live)
    for _ in range(3):
        engine.step()
    may_copy.set()
    wait_until(lambda: (engine.step(), not engine.vllm_scheduler.requests)[1], "it is gone", DEADLINE_S)


def test_requests_beside_aborted_ones_get_the_same_answers(engine: InProcess, truth: list[Answer]) -> None:
    rng = random.Random(13)
    refill(engine)
    answers: dict[str, Answer] = {}
    for number, prompt in enumerate(PROMPTS):
        engine.add(str(number), prompt)
    aborted: set[str] = set()
    while engine.engine.has_unfinished_requests():
        answers.update(engine.step())
        left = [
            str(number) for number in range(len(PROMPTS)) if str(number) not in answers and str(number) not in aborted
        ]
        if left and rng.random() < 0.2:
            # The next in line, or one that runs or loads: those are the first that are left.
            victim = rng.choice(left[:12])
            aborted.add(victim)
            engine.engine.abort_request([victim])
    assert len(aborted) > 8
    kept = [number for number in range(len(PROMPTS)) if str(number) in answers]
    assert len(kept) > len(PROMPTS) // 2
    assert_same([answers[str(number)] for number in kept], [truth[number] for number in kept])


def test_stores_after_the_last_request_are_completed(engine: InProcess, copying: Any) -> None:
    """Without `has_pending_push_work` vLLM would stop taking steps, and nothing would ever be published."""
    may_copy = threading.Event()
    copying(lambda job: may_copy.wait(DEADLINE_S) and None)
    engine.add("one", PROMPTS[0])
    wait_until(lambda: bool(engine.step()), "it ends", DEADLINE_S)
    assert not engine.vllm_scheduler.requests
    assert engine.connector.has_pending_push_work()
    assert engine.vllm_scheduler.has_requests()
    assert engine.snapshot().pool.ready == 0
    may_copy.set()
    wait_until(lambda: (engine.step(), not engine.vllm_scheduler.has_requests())[1], "it comes to rest", DEADLINE_S)
    assert not engine.connector.has_pending_push_work()
    assert engine.snapshot().pool.ready == len(PROMPTS[0]) // BLOCK


def test_lookups_when_polled_replace_their_pins(engine: InProcess) -> None:
    refill(engine, SOME)
    engine.add("large", LARGE, max_tokens=40)
    for _ in range(8):
        engine.step()
    engine.add("one", PROMPTS[0])
    pinned = []
    while engine.vllm_scheduler.waiting:
        engine.step()
        pinned.append(engine.snapshot().pool.pinned)
    assert pinned.count(8) > 3
    assert max(pinned) == 8
    while engine.vllm_scheduler.requests:
        engine.step()
