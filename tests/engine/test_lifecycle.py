"""Requests come, wait, run, are canceled and end, in every order, and every block comes back."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Sequence

import pytest

from kvferry.app.api.errors import Problem
from kvferry.app.engines.embedded import (
    EmbeddedEngine,
    FinishReason,
    Sampling,
)
from kvferry.app.engines.embedded.block_pool import BlockPool
from kvferry.app.engines.embedded.scheduler import MAX_LATER_PER_STEP
from kvferry.app.settings import Settings
from kvferry.core.engine_api import EngineRequest, StepProgress
from kvferry.core.scheduler.scheduler import Hit, Later, Miss
from kvferry.core.transfers import StepPlan
from tests.harness.embedded import NoCopies, NoOffload, ask, ask_all, collect, greedy, random_prompts, run, until

Make = Callable[..., EmbeddedEngine]


class Recorder(NoOffload):
    """Writes down what an engine tells, and says `Later` as often as it is told to."""

    def __init__(self) -> None:
        self.announced: list[EngineRequest] = []
        self.finished: list[str] = []
        self.computed: dict[str, int] = {}
        self.matched: dict[str, int] = {}
        self.block_size = 16
        self.later = 0
        self.pool: BlockPool | None = None
        self.in_use_at_finish: list[int] = []
        self.failed: list[tuple[str, bool]] = []
        self.preempted: list[str] = []
        self.fail_plans = 0

    def on_new_request(self, request: EngineRequest, now_s: float) -> None:
        if request.request_id == "poison":
            raise ValueError("not this one")
        self.announced.append(request)

    def match(self, request_id: str, num_computed_tokens: int, now_s: float) -> Hit | Miss | Later:
        self.matched[request_id] = self.matched.get(request_id, 0) + 1
        if request_id.startswith("follower") and self.later:
            self.later -= 1
            return Later()
        return Miss()

    def plan_step(self, progress: Sequence[StepProgress], now_s: float) -> StepPlan:
        if self.fail_plans and progress:
            self.fail_plans -= 1
            raise ZeroDivisionError("a bug, says the test")
        for step in progress:
            (table,) = step.block_ids
            assert len(table) * self.block_size >= step.num_computed_tokens > self.computed.get(step.request_id, 0)
            self.computed[step.request_id] = step.num_computed_tokens
        return StepPlan()

    def on_preempted(self, request_id: str, now_s: float) -> None:
        self.preempted.append(request_id)
        self.computed[request_id] = 0

    def on_step_failed(self, request_ids: Sequence[str], now_s: float) -> None:
        self.failed += [(request_id, request_id in self.finished) for request_id in request_ids]

    def on_request_finished(self, request_id: str, now_s: float) -> None:
        self.finished.append(request_id)
        if self.pool is not None:
            self.in_use_at_finish.append(self.pool.num_blocks - self.pool.num_free)


@pytest.fixture
def recorded(make_engine: Make) -> Callable[..., tuple[EmbeddedEngine, Recorder]]:
    def make(**settings: object) -> tuple[EmbeddedEngine, Recorder]:
        engine, recorder = make_engine(dtype="float32", **settings), Recorder()
        recorder.pool = engine.pool
        recorder.block_size = engine.settings.block_size
        engine.attach(recorder, NoCopies())
        engine.start()
        return engine, recorder

    return make


def test_canceled_in_every_state(recorded: Callable) -> None:
    engine, recorder = recorded(max_running=2, max_batched_tokens=8, device_blocks=600)

    async def scenario() -> None:
        decoding = engine.submit([5] * 4, greedy(4000), request_id="decoding")
        async for _ in decoding:
            break
        prefilling = engine.submit([6] * 4000, greedy(5), request_id="prefilling")
        await until(lambda: recorder.computed.get("prefilling", 0) > 0, "the prefill has begun")
        waiting = engine.submit([7] * 4, greedy(5), request_id="waiting")
        await until(lambda: len(recorder.announced) == 3, "the third was announced")
        unseen = engine.submit([8] * 4, greedy(5), request_id="unseen")
        for stream in (unseen, waiting, prefilling, decoding):
            stream.cancel()
            answer = await collect(stream)
            assert answer.reason is FinishReason.ABORT
            stream.cancel()
        assert "waiting" not in recorder.computed
        await until(lambda: engine.pool.num_free == 600, "all blocks are free")

    run(scenario())
    assert sorted(recorder.finished) == sorted(request.request_id for request in recorder.announced)
    assert engine.last_error is None


def test_request_is_finished_before_its_blocks_are_freed(recorded: Callable) -> None:
    engine, recorder = recorded()
    for count in range(1, 4):
        ask_all(engine, [[count + 4] * 33], greedy(1))
        assert recorder.in_use_at_finish == [3] * count


def test_preemption_takes_the_latest_request(recorded: Callable) -> None:
    engine, recorder = recorded(device_blocks=12, block_size=4, max_batched_tokens=4)

    async def scenario() -> None:
        first = engine.submit([5] * 20, greedy(10), request_id="first")
        await anext(first)
        second = await ask(engine, list(range(10, 40)), greedy(3), request_id="second")
        assert len((await collect(first)).token_ids) == 9
        assert (len(second.token_ids), second.cached) == (3, 0)

    run(scenario())
    assert set(recorder.preempted) == {"second"}


def test_an_old_cancel_does_not_hit_a_new_request_of_the_same_id(recorded: Callable) -> None:
    engine, recorder = recorded()

    async def scenario() -> None:
        old = engine.submit([5], greedy(1), request_id="mine")
        await until(lambda: recorder.finished == ["mine"], "the first has ended")
        await until(lambda: engine.pool.num_free == 512, "its blocks are free")
        new = engine.submit([5] * 4, greedy(30), request_id="mine")
        old.cancel()
        assert len((await collect(new)).token_ids) == 30

    run(scenario())


def test_an_id_in_use_gets_a_suffix_and_stays_an_alias(recorded: Callable) -> None:
    engine, recorder = recorded()

    async def scenario() -> None:
        streams = [engine.submit([5, 6], greedy(20), request_id="same", aliases=("other",)) for _ in range(3)]
        await asyncio.gather(*map(collect, streams))
        assert len({stream.request_id for stream in streams}) == 3
        again = engine.submit([5, 6], greedy(1), request_id="same")
        assert again.request_id == "same"
        await collect(again)

    run(scenario())
    first, second = recorder.announced[:2]
    assert (first.request_id, first.aliases) == ("same", ("other",))
    assert second.request_id.startswith("same-")
    assert second.aliases == ("same", "other")


def test_random_cancellations_leave_nothing_behind(recorded: Callable) -> None:
    engine, recorder = recorded(device_blocks=20, block_size=16, max_running=5, max_batched_tokens=32)
    rng = random.Random(3)

    async def client(prompt: list[int]) -> None:
        stream = engine.submit(prompt, greedy(rng.randrange(1, 60)))
        await asyncio.sleep(rng.random() * 0.1)
        if rng.random() < 0.6:
            stream.cancel()
        assert (await collect(stream)).last is not None

    async def scenario() -> None:
        await asyncio.gather(*[client(prompt) for prompt in random_prompts(5, 60, 120)])
        await until(lambda: engine.pool.num_free == 20, "all blocks are free")

    run(scenario())
    assert sorted(recorder.finished) == sorted(request.request_id for request in recorder.announced)
    assert len(recorder.finished) == 60


def test_a_follower_is_passed_over_and_comes_back(recorded: Callable) -> None:
    engine, recorder = recorded()
    recorder.later = 3

    async def scenario() -> None:
        follower = engine.submit([5] * 40, greedy(2), request_id="follower")
        await ask(engine, [6] * 4, greedy(2), request_id="other")
        assert len((await collect(follower)).token_ids) == 2

    run(scenario())
    assert recorder.matched == {"follower": 4, "other": 1}


def test_a_bug_in_a_step_ends_its_requests_and_not_the_engine(
    recorded: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    engine, recorder = recorded()
    recorder.fail_plans = 2
    for _ in range(2):
        failed = ask_all(engine, [[5, 6]], greedy(2))[0]
        assert failed.reason is FinishReason.ERROR
    assert recorder.failed == [(request.request_id, False) for request in recorder.announced]
    assert "a bug, says the test" in str(engine.last_error)
    assert sum("the engine step" in record.message for record in caplog.records) == 1
    assert len(ask_all(engine, [[5, 6]], greedy(2))[0].token_ids) == 2
    assert len(recorder.finished) == 3


def test_a_request_that_cannot_be_announced_fails_alone(recorded: Callable) -> None:
    engine, recorder = recorded()

    async def scenario() -> None:
        bad, good = await asyncio.gather(
            ask(engine, [5, 6], greedy(2), request_id="poison"), ask(engine, [5, 6], greedy(2))
        )
        assert bad.reason is FinishReason.ERROR
        assert len(good.token_ids) == 2

    run(scenario())
    assert len(recorder.finished) == 1


def test_a_client_whose_loop_is_gone_is_canceled(recorded: Callable) -> None:
    engine, recorder = recorded()

    async def leave() -> None:
        engine.submit([5] * 4, greedy(8000), request_id="left")

    run(leave())
    run(until(lambda: recorder.finished == ["left"], "the abandoned request has ended"))
    assert recorder.announced[0].num_tokens < 4000


def test_answers_end_where_they_should(make_engine: Make) -> None:
    engine = make_engine(device_blocks=600, dtype="float32")
    engine.start()
    text = ask_all(engine, [[5, 6, 7]], greedy(40))[0]
    assert text.reason is FinishReason.LENGTH
    stop = text.text[6:9]
    stopped = ask_all(engine, [[5, 6, 7]], greedy(40, stop=(stop,)))[0]
    assert stopped.text == text.text[: text.text.index(stop)]
    assert stopped.reason is FinishReason.STOP
    ended = [
        ask_all(engine, [prompt], Sampling(max_tokens=400, temperature=0))[0] for prompt in random_prompts(4, 3, 9)
    ]
    for answer in ended:
        assert answer.last is not None
        reason = FinishReason.STOP if answer.token_ids[-1] == 1 else FinishReason.LENGTH
        assert answer.reason is reason
        assert 1 not in answer.token_ids[:-1]
    assert any(answer.token_ids[-1] == 1 for answer in ended)


def test_an_answer_ends_with_the_context(make_engine: Make, checkpoints: dict[str, str]) -> None:
    engine = make_engine(model=checkpoints["llama"], dtype="float32")
    engine.start()
    assert len(ask_all(engine, [[9] * 510], greedy(100))[0].token_ids) == 2


def test_a_pool_that_just_fits_is_enough(make_engine: Make) -> None:
    engine = make_engine(device_blocks=4, block_size=4, dtype="float32")
    engine.start()
    answers = ask_all(engine, [[5 + i] * (1 + i * 2) for i in range(8)], greedy(100))
    assert [len(answer.token_ids) for answer in answers] == [16 - 1 - i * 2 for i in range(8)]


@pytest.mark.parametrize(
    ("prompt", "sampling", "param", "message"),
    [
        ([], {}, "prompt", "empty"),
        ([259], {}, "prompt", "token id 259, and the vocabulary is 0 to 258"),
        ([-1, 5], {}, "prompt", "token id -1"),
        ([5], {"max_tokens": 0}, "max_tokens", "must be at least 1"),
        ([5] * 8192, {}, "prompt", "the model's context holds 8192"),
        ([5] * 320, {}, "prompt", "DEVICE_BLOCKS=20"),
    ],
)
def test_submit_of_an_impossible_request_is_refused(
    prompt: list[int], sampling: dict[str, int], param: str, message: str, make_engine: Make
) -> None:
    engine = make_engine(device_blocks=20 if len(prompt) == 320 else 600, dtype="float32")
    engine.start()

    async def submit() -> None:
        engine.submit(prompt, Sampling(**sampling))

    with pytest.raises(Problem, match=message) as refused:
        run(submit())
    assert (refused.value.status, refused.value.extras["param"]) == (400, param)


def test_submit_when_the_engine_is_stopped_is_refused(make_engine: Make) -> None:
    engine = make_engine(dtype="float32")

    async def submit() -> None:
        engine.submit([5], greedy(1))

    with pytest.raises(Problem, match="not running"):
        run(submit())
    engine.start()
    assert engine.is_alive()
    with pytest.raises(RuntimeError, match="started already"):
        engine.start()
    with pytest.raises(RuntimeError, match="before the engine starts"):
        engine.attach(NoOffload(), NoCopies())
    ask_all(engine, [[5]], greedy(1))
    engine.close()
    assert engine.thread_cpu_s > 0
    with pytest.raises(Problem, match="not running"):
        run(submit())


class Held(NoOffload):
    """Keeps every request waiting until `release` is called."""

    def __init__(self) -> None:
        self.is_held = True
        self.num_matches_of_step: list[int] = [0]
        self.num_announced = 0

    def on_new_request(self, request: EngineRequest, now_s: float) -> None:
        self.num_announced += 1

    def match(self, request_id: str, num_computed_tokens: int, now_s: float) -> Hit | Miss | Later:
        self.num_matches_of_step[-1] += 1
        return Later() if self.is_held else Miss()

    def plan_step(self, progress: Sequence[StepProgress], now_s: float) -> StepPlan:
        self.num_matches_of_step.append(0)
        return StepPlan()


def test_submit_when_too_many_wait_is_refused_whole(make_engine: Make) -> None:
    engine, held = make_engine(dtype="float32", max_running=1, max_waiting=3), Held()
    engine.attach(held, NoCopies())
    engine.start()

    async def scenario() -> None:
        streams = engine.submit_all([engine.prepare([5, 6], greedy(2)) for _ in range(3)])
        with pytest.raises(Problem, match=r"too many requests are waiting \(KVFERRY_MAX_WAITING=3"):
            engine.submit_all([engine.prepare([5, 6], greedy(2)) for _ in range(2)])
        with pytest.raises(Problem, match="5 prompts, more than KVFERRY_MAX_WAITING=3"):
            engine.submit_all([engine.prepare([5, 6], greedy(2)) for _ in range(5)])
        streams.append(engine.submit([5, 6], greedy(2)))
        streams.pop(0).cancel()
        await until(lambda: held.num_announced == 4, "all four were announced")
        await until(lambda: engine.has_room(), "the canceled one has ended")
        streams.append(engine.submit([5, 6], greedy(2)))
        held.is_held = False
        assert [len((await collect(stream)).token_ids) for stream in streams] == [2] * 4

    run(scenario())


def test_matches_per_step_when_many_wait_are_bounded(make_engine: Make) -> None:
    engine, held = make_engine(dtype="float32", max_running=2, max_waiting=500), Held()
    engine.attach(held, NoCopies())
    engine.start()

    async def scenario() -> None:
        streams = engine.submit_all([engine.prepare([5, 6], greedy(1)) for _ in range(400)])
        await until(lambda: held.num_announced == 400, "all were announced")
        await until(lambda: sum(map(bool, held.num_matches_of_step)) > 3, "some steps were taken")
        held.is_held = False
        for stream in streams:
            assert len((await collect(stream)).token_ids) == 1

    run(scenario())
    assert max(held.num_matches_of_step) <= 2 + MAX_LATER_PER_STEP


class Hanging(NoOffload):
    """Hangs in the first step that has a request."""

    def __init__(self) -> None:
        self.is_entered = threading.Event()
        self.may_leave = threading.Event()

    def match(self, request_id: str, num_computed_tokens: int, now_s: float) -> Hit | Miss | Later:
        self.is_entered.set()
        self.may_leave.wait(60.0)
        return Miss()


def test_reasons_when_a_step_hangs_name_its_seconds() -> None:
    now_s, hanging = [1000.0], Hanging()
    engine = EmbeddedEngine(Settings.model_construct(device="cpu", dtype="float32"), clock=lambda: now_s[0])
    engine.attach(hanging, NoCopies())
    assert any("not running" in reason for reason in engine.reasons())
    engine.start()

    async def scenario() -> None:
        stream = engine.submit([5, 6], greedy(1))
        await asyncio.to_thread(hanging.is_entered.wait, 60.0)
        now_s[0] += 10.0
        assert engine.reasons() == []
        now_s[0] += 5.0
        assert engine.reasons() == ["engine step has been running for 15 s"]
        hanging.may_leave.set()
        await collect(stream)
        await until(lambda: engine.reasons() == [], "the step has ended")

    run(scenario())
    engine.close()
