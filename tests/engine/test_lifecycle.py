"""Requests come, wait, run, are canceled and end, in every order, and every block comes back."""

from __future__ import annotations

import asyncio
import itertools
import re
import threading
from collections.abc import Callable, Sequence

import pytest

from kvferry.app.api.errors import Problem
from kvferry.app.engines.embedded.block_pool import BlockPool
from kvferry.app.engines.embedded.engine import EmbeddedEngine, OutputStream
from kvferry.app.engines.embedded.request import FinishReason, SamplingParams
from kvferry.app.engines.embedded.scheduler import MAX_LATER_PER_STEP
from kvferry.app.settings import Settings
from kvferry.core.engine_api import StepProgress
from kvferry.core.scheduler.scheduler import Hit, Later, Miss
from kvferry.core.transfers import StepPlan
from tests.harness.embedded import (
    NoCopies,
    NoOffload,
    Recorder,
    ask,
    ask_all,
    collect,
    greedy,
    random_prompts,
    run,
    until,
)
from tests.harness.waiting import wait_until

Make = Callable[..., EmbeddedEngine]


class StepRecorder(Recorder):
    """Records also what an engine's steps do. The first `later` matches of followers are told to come again."""

    def __init__(self) -> None:
        super().__init__()
        self.computed: dict[str, int] = {}
        self.num_matches_of_step = [0]
        self.matched: dict[str, int] = {}
        self.block_size = 16
        self.later = 0
        self.pool: BlockPool | None = None
        self.in_use_at_finish: list[int] = []
        self.failed: list[tuple[str, bool]] = []
        self.preempted: list[str] = []
        self.fail_plans = 0

    def match(self, request_id: str, num_computed_tokens: int, now_s: float) -> Hit | Miss | Later:
        self.matched[request_id] = self.matched.get(request_id, 0) + 1
        self.num_matches_of_step[-1] += 1
        if request_id.startswith("follower") and self.later:
            self.later -= 1
            return Later()
        return super().match(request_id, num_computed_tokens, now_s)

    def plan_step(self, progress: Sequence[StepProgress], now_s: float) -> StepPlan:
        self.num_matches_of_step.append(0)
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

    def on_request_finished(self, request_id: str, now_s: float, *, is_aborted: bool = False) -> None:
        super().on_request_finished(request_id, now_s, is_aborted=is_aborted)
        if self.pool is not None:
            self.in_use_at_finish.append(self.pool.num_blocks - self.pool.num_free)


@pytest.fixture
def recorded(make_engine: Make) -> Callable[..., tuple[EmbeddedEngine, StepRecorder]]:
    def make(**settings: object) -> tuple[EmbeddedEngine, StepRecorder]:
        engine, recorder = make_engine(dtype="float32", **settings), StepRecorder()
        recorder.pool = engine.block_pool
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
        await until(lambda: engine.block_pool.num_free == 600, "all blocks are free")

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
        second = await ask(engine, list(range(10, 40)), greedy(3), request_id="second")
        assert len((await collect(first)).token_ids) == 10
        assert (len(second.token_ids), second.cached) == (3, 0)

    run(scenario())
    assert set(recorder.preempted) == {"second"}


def test_an_old_cancel_does_not_hit_a_new_request_of_the_same_id(recorded: Callable) -> None:
    engine, recorder = recorded()

    async def scenario() -> None:
        old = engine.submit([5], greedy(1), request_id="mine")
        await until(lambda: recorder.finished == ["mine"], "the first has ended")
        await until(lambda: engine.block_pool.num_free == 512, "its blocks are free")
        new = engine.submit([5] * 4, greedy(30), request_id="mine")
        old.cancel()
        assert len((await collect(new)).token_ids) == 30

    run(scenario())


def test_an_id_in_use_gets_a_suffix_and_stays_an_alias(recorded: Callable) -> None:
    engine, recorder = recorded()

    async def scenario() -> None:
        streams = [engine.submit([5, 6], greedy(20), request_id="same", aliases=("other",)) for _ in range(3)]
        await asyncio.gather(*map(collect, streams))
        await ask(engine, [5, 6], greedy(1), request_id="same")

    run(scenario())
    first, second, third, again = recorder.announced
    assert len({first.request_id, second.request_id, third.request_id}) == 3
    assert again.request_id == "same"
    assert (first.request_id, first.aliases) == ("same", ("other",))
    assert second.request_id.startswith("same-")
    assert second.aliases == ("same", "other")


def test_requests_start_in_the_order_of_their_arrival(recorded: Callable) -> None:
    engine, recorder = recorded(max_running=1)
    ended: list[int] = []

    async def answer(number: int, max_tokens: int) -> None:
        await collect(engine.submit([5 + number] * 4, greedy(max_tokens)))
        ended.append(number)

    async def scenario() -> None:
        await asyncio.gather(*(answer(number, 30 if number % 2 else 1) for number in range(8)))

    run(scenario())
    assert ended == list(range(8))
    assert not recorder.preempted


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
    recorder.fail_plans = 3
    for _ in range(3):
        assert engine.reasons() == []
        failed = ask_all(engine, [[5, 6]], greedy(2))[0]
        assert failed.reason is FinishReason.ERROR
    assert recorder.failed == [(request.request_id, False) for request in recorder.announced]
    assert "a bug, says the test" in str(engine.last_error)
    assert sum("the engine step" in record.message for record in caplog.records) == 1
    (reason,) = engine.reasons()
    assert re.fullmatch("the last 3 engine steps failed; last error: .*a bug, says the test", reason)
    assert len(ask_all(engine, [[5, 6]], greedy(2))[0].token_ids) == 2
    assert engine.reasons() == []
    assert len(recorder.finished) == 4


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
    ended = ask_all(engine, random_prompts(4, 3, 9), SamplingParams(max_tokens=400, temperature=0))
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
    with pytest.raises(Problem, match="DEVICE_BLOCKS=4"):
        ask_all(engine, [[5] * 16], greedy(1))


def test_matches_per_step_when_many_wait_are_bounded(recorded: Callable) -> None:
    engine, recorder = recorded(max_running=2, max_waiting=500)
    recorder.may_start.clear()

    async def scenario() -> None:
        streams = [engine.submit([5, 6], greedy(1)) for _ in range(400)]
        await until(lambda: len(recorder.announced) == 400, "all were announced")
        await until(lambda: sum(map(bool, recorder.num_matches_of_step)) > 3, "some steps were taken")
        recorder.may_start.set()
        for stream in streams:
            assert len((await collect(stream)).token_ids) == 1

    run(scenario())
    assert max(recorder.num_matches_of_step) <= 2 + MAX_LATER_PER_STEP


def test_requests_when_many_arrive_are_taken_in_parts(make_engine: Make) -> None:
    engine = make_engine(dtype="float32")
    engine.inbox.open()
    engine.inbox.post([engine.prepare([5, 6], greedy(1)) for _ in range(200)])
    assert [len(engine.inbox.take()[0]) for _ in range(5)] == [64, 64, 64, 8, 0]


async def post_all_in_one_step(engine: EmbeddedEngine, recorder: StepRecorder, posts: Callable[[], object]) -> None:
    """Call `posts` while a step runs, so that the next one finds all messages."""
    is_entered, may_leave = threading.Event(), threading.Event()
    hook = engine.model.module.register_forward_pre_hook(lambda *_: is_entered.set() or (may_leave.wait() and None))
    stream = engine.submit([5, 6], greedy(1))
    await asyncio.to_thread(is_entered.wait, 60.0)
    hook.remove()
    recorder.announced.clear()
    posts()
    may_leave.set()
    await collect(stream)


def test_requests_when_canceled_as_they_arrive_end_unannounced(recorded: Callable) -> None:
    engine, recorder = recorded(max_waiting=500)
    streams: list[OutputStream] = []

    def post() -> None:
        streams.extend(engine.submit([5, 6], greedy(1)) for _ in range(200))
        for stream in streams[10:]:
            stream.cancel()
            stream.cancel()

    async def scenario() -> None:
        await post_all_in_one_step(engine, recorder, post)
        answers = [await collect(stream) for stream in streams]
        assert [answer.reason for answer in answers[:10]] == [FinishReason.LENGTH] * 10
        assert {answer.reason for answer in answers[10:]} == {FinishReason.ABORT}
        assert not engine.inbox.live()

    run(scenario())
    assert len(recorder.announced) == 10
    assert len(set(recorder.finished)) == len(recorder.finished) == 11


def test_requests_when_the_engine_closes_all_end_though_many_arrive(recorded: Callable) -> None:
    engine, recorder = recorded(max_waiting=500)
    streams: list[OutputStream] = []

    def post() -> None:
        streams.extend(engine.submit([5, 6], greedy(1)) for _ in range(400))
        threading.Thread(target=engine.close).start()
        wait_until(is_closing, "the engine closes")

    def is_closing() -> bool:
        try:
            streams.append(engine.submit([5, 6], greedy(1)))
        except Problem as problem:
            return problem.status == 503
        return False

    async def scenario() -> None:
        await post_all_in_one_step(engine, recorder, post)
        answers = [await collect(stream) for stream in streams]
        assert {answer.reason for answer in answers} == {FinishReason.ABORT}
        await until(lambda: not engine.is_alive(), "the engine has stopped")

    run(scenario())
    assert not engine.inbox.live()
    assert len(recorder.finished) == len(recorder.announced) + 1


def test_reasons_when_a_step_hangs_or_steps_fail_end_in_time() -> None:
    now_s, is_entered, may_leave = [1000.0], threading.Event(), threading.Event()
    wall_s = itertools.count(1e9, 3600.0)
    engine = EmbeddedEngine(
        Settings.model_construct(device="cpu", dtype="float32"), lambda: next(wall_s), timer=lambda: now_s[0]
    )
    engine.attach(Recorder(), NoCopies())
    engine.model.module.register_forward_pre_hook(lambda *_: is_entered.set() or (may_leave.wait() and None))
    assert any("not running" in reason for reason in engine.reasons())
    engine.start()

    async def scenario() -> None:
        stream = engine.submit([5, 6], greedy(1))
        await asyncio.to_thread(is_entered.wait, 60.0)
        now_s[0] += 10.0
        assert engine.reasons() == []
        now_s[0] += 5.0
        assert engine.reasons() == ["engine step has been running for 15 s"]
        may_leave.set()
        await collect(stream)
        await until(lambda: engine.reasons() == [], "the step has ended")
        engine.model.module.register_forward_pre_hook(lambda *_: 1 / 0)
        for _ in range(3):
            await collect(engine.submit([5, 6], greedy(1)))
        assert len(engine.reasons()) == 1
        now_s[0] += 600.0
        await until(lambda: engine.reasons() == [], "the failures are long ago")

    run(scenario())
    engine.close()


def test_end_of_a_request_is_later_than_its_last_step_began() -> None:
    class Times(NoOffload):
        planned_s = finished_s = 0.0

        def plan_step(self, progress: Sequence[StepProgress], now_s: float) -> StepPlan:
            self.planned_s = now_s if progress else self.planned_s
            return StepPlan()

        def on_request_finished(self, request_id: str, now_s: float, *, is_aborted: bool = False) -> None:
            self.finished_s = now_s

    times, ticks = Times(), itertools.count(1000)
    engine = EmbeddedEngine(Settings.model_construct(device="cpu", dtype="float32"), clock=lambda: float(next(ticks)))
    engine.attach(times, NoCopies())
    engine.start()
    ask_all(engine, [[5, 6]], greedy(1))
    engine.close()
    assert times.finished_s > times.planned_s > 0
