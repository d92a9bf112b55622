"""With the offload scheduler attached: the same answers, from host memory where it has them, whatever fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from kvferry.app.engines.embedded.engine import EmbeddedEngine
from kvferry.app.engines.embedded.request import FinishReason
from kvferry.core.transfers import Direction
from tests.harness.embedded import (
    ask,
    ask_all,
    collect,
    greedy,
    run,
    until,
)
from tests.harness.fake_cuda import FakeCuda
from tests.harness.offloading import MakeOffloaded, Offloaded

MAX_TOKENS = 12
MAX_ROUNDS = 50
"""How often prompts are asked until some were preempted, and some hit in a pool that is smaller than they are."""
SMALL = {"device_blocks": 24, "block_size": 4, "max_running": 4}


def settle(offloaded: Offloaded) -> None:
    run(until(offloaded.settled, "all transfers have ended"))


def flush_device(offloaded: Offloaded) -> None:
    """Fill the device with something else, so that hits can only come from the host."""
    engine = offloaded.engine
    longest = engine.settings.device_blocks * engine.settings.block_size - 2
    ask_all(engine, [[4] * longest], greedy(1))
    settle(offloaded)


def check_answers_until_preempted(offloaded: Offloaded, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """Ask prompts until some were preempted and some hit in the host; all answers have to be these."""
    for number in range(MAX_ROUNDS):
        got = ask_all(offloaded.engine, prompts, greedy(MAX_TOKENS))
        assert [answer.token_ids for answer in got] == answers
        stats = offloaded.stats
        if number and stats.prompt_tokens.host_hit and stats.requests.preempted:
            break
    settle(offloaded)
    stats = offloaded.stats
    assert offloaded.engine.last_error is None
    assert stats.prompt_tokens.host_hit > 0
    assert stats.requests.preempted > 0
    assert stats.load.failed == stats.store.failed == 0


@contextmanager
def failing_forward(engine: EmbeddedEngine, times: int = 1) -> Iterator[None]:
    left = [times]

    def fail(module: torch.nn.Module, args: tuple[object, ...]) -> None:
        if left[0]:
            left[0] -= 1
            raise RuntimeError("a kernel failed, says the test")

    handle = engine.model.module.model.layers[2].register_forward_pre_hook(fail)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("num_slots", "cuda"),
    [(400, None), (24, None), (400, {"batches": True}), (400, {"batches": False})],
    ids=["large-pool", "small-pool", "cuda", "cuda-without-batches"],
)
def test_answers_are_the_same_under_eviction_and_preemption(
    num_slots: int,
    cuda: dict[str, bool] | None,
    prompts: list[list[int]],
    answers: list[list[int]],
    make_offloaded: MakeOffloaded,
) -> None:
    offloaded = make_offloaded(num_slots, cuda=None if cuda is None else FakeCuda(3, **cuda), **SMALL)
    check_answers_until_preempted(offloaded, prompts, answers)


@pytest.mark.parametrize("how", ["fail", "refuse"])
def test_a_failed_load_is_recomputed(
    how: str, prompts: list[list[int]], answers: list[list[int]], make_offloaded: MakeOffloaded
) -> None:
    offloaded = make_offloaded(**SMALL)
    ask_all(offloaded.engine, prompts, greedy(MAX_TOKENS))
    flush_device(offloaded)
    host_hit = offloaded.stats.prompt_tokens.host_hit
    getattr(offloaded.copies, how).add(Direction.LOAD)
    got = ask_all(offloaded.engine, prompts, greedy(MAX_TOKENS))
    assert [answer.token_ids for answer in got] == answers
    settle(offloaded)
    assert offloaded.stats.load.failed > 0
    assert offloaded.stats.prompt_tokens.host_hit == host_hit


@pytest.mark.parametrize("how", ["fail", "refuse"])
def test_a_failed_store_is_never_found(
    how: str, prompts: list[list[int]], answers: list[list[int]], make_offloaded: MakeOffloaded
) -> None:
    offloaded = make_offloaded(**SMALL)
    getattr(offloaded.copies, how).add(Direction.STORE)
    for _ in range(2):
        got = ask_all(offloaded.engine, prompts, greedy(MAX_TOKENS))
        assert [answer.token_ids for answer in got] == answers
    settle(offloaded)
    stats = offloaded.stats
    assert (stats.store.stored, stats.prompt_tokens.host_hit, stats.pool.ready) == (0, 0, 0)
    assert stats.store.failed > 0


def test_a_failed_forward_ends_its_requests_and_stores_nothing(
    prompts: list[list[int]], answers: list[list[int]], make_offloaded: MakeOffloaded
) -> None:
    offloaded = make_offloaded(device_blocks=200, block_size=4)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    with failing_forward(offloaded.engine):
        failed = ask_all(offloaded.engine, [prompts[longest]], greedy(MAX_TOKENS))[0]
    assert failed.reason is FinishReason.ERROR
    assert "RuntimeError" in str(failed.last.error)
    assert "kernel" not in str(failed.last.error)
    assert "a kernel failed" in str(offloaded.engine.last_error)
    settle(offloaded)
    assert offloaded.stats.store.stored == 0
    again = ask_all(offloaded.engine, [prompts[longest]], greedy(MAX_TOKENS))[0]
    assert (again.token_ids, again.cached) == (answers[longest], 0)
    assert offloaded.engine.is_alive()


def test_failed_forward_does_not_end_waiting_requests(
    prompts: list[list[int]], answers: list[list[int]], make_offloaded: MakeOffloaded
) -> None:
    offloaded = make_offloaded(device_blocks=200, block_size=4, max_running=1)
    with failing_forward(offloaded.engine):
        got = ask_all(offloaded.engine, prompts[:3], greedy(MAX_TOKENS))
    reasons = [answer.reason for answer in got if answer.last]
    assert sorted(reasons) == [FinishReason.ERROR, FinishReason.LENGTH, FinishReason.LENGTH]
    right = [answer.token_ids == expected for answer, expected in zip(got, answers, strict=False)]
    assert sorted(right) == [False, True, True]


def test_others_run_while_one_waits_for_its_load(
    prompts: list[list[int]], answers: list[list[int]], make_offloaded: MakeOffloaded
) -> None:
    """vllm#45704: a store began before the kernel that computes its block was done."""
    offloaded = make_offloaded(device_blocks=40, block_size=4)
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i]))
    ask_all(offloaded.engine, [prompts[longest]], greedy(MAX_TOKENS))
    flush_device(offloaded)
    offloaded.copies.shut()

    async def scenario() -> None:
        waiting = offloaded.engine.submit(prompts[longest], greedy(MAX_TOKENS))
        await until(lambda: offloaded.copies.kept(Direction.LOAD) == 1, "a load was planned")
        assert offloaded.stats.requests.waiting_for_load == 1
        other = await ask(offloaded.engine, [9, 9, 9], greedy(3))
        assert len(other.token_ids) == 3
        offloaded.copies.open()
        assert (await collect(waiting)).token_ids == answers[longest]

    run(scenario())


@pytest.mark.parametrize("is_cuda", [False, True], ids=["cpu", "cuda"])
def test_lazy_mode_answers_alike_and_computes_nothing_twice(
    is_cuda: bool, prompts: list[list[int]], answers: list[list[int]], make_offloaded: MakeOffloaded
) -> None:
    offloaded = make_offloaded(cuda=FakeCuda() if is_cuda else None, **SMALL)
    offloaded.set_store_mode("lazy")
    new = []
    for _ in range(2):
        for prompt, answer in zip(prompts, answers, strict=True):
            assert ask_all(offloaded.engine, [prompt], greedy(MAX_TOKENS))[0].token_ids == answer
        settle(offloaded)
        new.append(offloaded.stats.missed_tokens.causes["new"])
    stats = offloaded.stats
    assert new[0] == new[1] > 0
    assert stats.store.skipped["left_device"] == stats.store.failed == 0
    assert stats.prompt_tokens.host_hit > 0


def test_canceled_while_loading(prompts: list[list[int]], make_offloaded: MakeOffloaded) -> None:
    offloaded = make_offloaded(device_blocks=40, block_size=4)
    longest = max(prompts, key=len)
    ask_all(offloaded.engine, [longest], greedy(MAX_TOKENS))
    flush_device(offloaded)
    offloaded.copies.shut()

    async def scenario() -> None:
        stream = offloaded.engine.submit(longest, greedy(MAX_TOKENS), request_id="mine")
        await until(lambda: offloaded.copies.kept(Direction.LOAD) == 1, "a load was planned")
        stream.cancel()
        answer = await collect(stream)
        assert answer.reason is FinishReason.ABORT
        assert offloaded.engine.block_pool.num_held > 0
        again = offloaded.engine.prepare([5, 6], greedy(1), request_id="mine")
        await collect(offloaded.engine.submit_all([again]))
        assert again.request_id == "mine"
        offloaded.copies.open()
        await until(offloaded.settled, "the load has ended")

    run(scenario())
    assert offloaded.engine.block_pool.num_held == 0
    assert offloaded.engine.block_pool.num_free == 40


def test_closing_waits_for_transfers_and_ends_every_answer(make_offloaded: MakeOffloaded) -> None:
    offloaded = make_offloaded(device_blocks=60, block_size=4)
    offloaded.copies.shut()

    async def scenario() -> None:
        streams = [offloaded.engine.submit([i + 3] * 40, greedy(1000)) for i in range(4)]
        await until(lambda: offloaded.copies.kept(Direction.STORE) > 0, "something is being stored")
        closing = asyncio.create_task(asyncio.to_thread(offloaded.engine.close))
        for answer in await asyncio.gather(*map(collect, streams)):
            assert answer.reason in (FinishReason.ABORT, FinishReason.LENGTH)
        assert not closing.done()
        offloaded.copies.open()
        await closing

    run(scenario())
    assert offloaded.stats.store.stored > 0


def test_everything_at_once(prompts: list[list[int]], answers: list[list[int]], make_offloaded: MakeOffloaded) -> None:
    """Cancellations, resets, failing copies and a gate that opens and shuts: who gets an answer gets the right one."""
    offloaded = make_offloaded(40, **SMALL)
    engine, copies, rng = offloaded.engine, offloaded.copies, random.Random(9)

    async def client() -> int:
        await asyncio.sleep(rng.random() * 1.5)
        which = rng.randrange(len(prompts))
        stream = engine.submit(prompts[which], greedy(MAX_TOKENS), request_id=rng.choice(["a", "b", None]))
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.05)
            stream.cancel()
        answer = await collect(stream)
        assert answer.last is not None
        if answer.reason is FinishReason.ABORT:
            return 0
        assert answer.token_ids == answers[which]
        return 1

    async def trouble(clients: list[asyncio.Task[int]]) -> None:
        while not all(task.done() for task in clients):
            rng.choice([copies.shut, copies.open, copies.open, lambda: offloaded.scheduler.resets.reset(0.0)])()
            copies.fail = {direction for direction in Direction if rng.random() < 0.2}
            copies.refuse = {direction for direction in Direction if rng.random() < 0.1}
            engine.wake()
            await asyncio.sleep(0.02)
            copies.open()

    async def scenario() -> int:
        clients = [asyncio.create_task(client()) for _ in range(120)]
        await trouble(clients)
        return sum(task.result() for task in clients)

    assert run(scenario()) > 60
    copies.fail = copies.refuse = set()
    copies.open()
    settle(offloaded)
    # While offloading is off, after copies that were refused, requests are not announced.
    assert offloaded.stats.requests.finished == offloaded.stats.requests.seen > 0
