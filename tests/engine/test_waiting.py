"""Calls and callers take turns: one of many prompts or calls does not delay all others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.app.engines.embedded import EmbeddedEngine, scheduler
from kvferry.app.engines.embedded.admission import MAX_IDLE_CALLERS, WaitingQueue
from tests.harness.effort import examples
from tests.harness.embedded import ask_all, collect, greedy, random_prompts, run


class Waiting:
    """As much of a request as the queue uses."""

    def __init__(self, number: int, number_in_call: int, caller: str) -> None:
        self.request_id = f"{number}-{number_in_call}"
        self.arrival = number
        self.number_in_call = number_in_call
        self.caller = caller


@settings(max_examples=examples(60))
@given(
    st.lists(st.one_of(st.integers(1, 6), st.sampled_from(["start", "again", "sliced", "cancel"])), max_size=40),
    st.data(),
)
def test_order_is_that_of_a_sorted_list(steps: list[int | str], data: st.DataObject) -> None:
    queue, started_place, arrivals, firsts = WaitingQueue(), (0, 0), 0, 0
    previous_calls: dict[str, tuple[int, int]] = {}
    last_sliced = (0, 0)
    model: list[tuple[tuple[int, int], int, Waiting]] = []
    started: list[Waiting] = []
    for step in steps:
        if isinstance(step, int):
            caller = data.draw(st.sampled_from("abc"))
            turn, rank = max(started_place, previous_calls.get(caller, (0, 0)))
            previous_calls[caller] = turn, rank + 1
            for number in range(step):
                arrivals += 1
                request = Waiting(arrivals, number, caller)
                queue.add(request)  # type: ignore[arg-type]
                model.append(((turn + number, rank + 1), arrivals, request))
        elif step == "again" and started:
            firsts -= 1
            request = started.pop(data.draw(st.integers(0, len(started) - 1)))
            queue.add_first(request)  # type: ignore[arg-type]
            model.append(((-1, 0), firsts, request))
        elif step == "sliced" and started:
            turn, rank = max(last_sliced, (started_place[0] + 1, 0))
            last_sliced = turn, rank + 1
            request = started.pop(0)
            queue.add_again(request)  # type: ignore[arg-type]
            model.append((last_sliced, request.arrival, request))
        elif model:
            model.sort(key=lambda one: one[:2])
            at = 0 if step == "start" else data.draw(st.integers(0, len(model) - 1))
            place, _, request = model.pop(at)
            if step == "start":
                assert next(iter(queue)) is request
                queue.start(request)  # type: ignore[arg-type]
                started_place = max(started_place, place)
                started.append(request)
            else:
                queue.discard(request)  # type: ignore[arg-type]
                queue.discard(request)  # type: ignore[arg-type]
        model.sort(key=lambda one: one[:2])
        assert list(queue) == [request for _, _, request in model]
        assert len(queue) == len(model)
        assert all(queue.get(request.request_id) is request for _, _, request in model)


def test_a_call_of_one_prompt_waits_for_few_of_a_large_call(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine = make_engine(max_running=2)
    both_wait = threading.Event()
    engine.model.module.register_forward_pre_hook(lambda *_: both_wait.wait() and None)
    engine.start()
    ended: list[str] = []

    async def answer(name: str, stream: object) -> None:
        await collect(stream)  # type: ignore[arg-type]
        ended.append(name)

    async def both() -> None:
        prompts = random_prompts(41, 30, 20)
        large = engine.submit_all(
            [engine.prepare(prompt, greedy(4), request_id=f"large-{at}") for at, prompt in enumerate(prompts)]
        )
        small = engine.submit(prompts[0], greedy(4), request_id="small")
        both_wait.set()
        await asyncio.gather(*(answer("large", one) for one in large), answer("small", small))

    run(both())
    assert len(ended) == 31
    # The first two of the large call run, the third has the same turn as the small call.
    assert ended.index("small") < 5


def test_a_caller_behind_many_calls_of_another_starts_among_the_first(
    make_engine: Callable[..., EmbeddedEngine],
) -> None:
    engine = make_engine(max_running=2)
    all_wait = threading.Event()
    engine.model.module.register_forward_pre_hook(lambda *_: all_wait.wait() and None)
    engine.start()
    ended: list[str] = []

    async def answer(client: str, prompt: list[int], salt: str | None) -> None:
        request = engine.prepare(prompt, greedy(4), cache_salt=salt)
        (stream,) = engine.submit_all([request], engine.admission.begin(client))
        if (client, salt) == ("8.8.8.8", "last"):
            all_wait.set()
        await collect(stream)
        ended.append(f"{client} {salt}")

    async def all_of_them() -> None:
        prompts = random_prompts(43, 30, 20)
        flood = [answer("9.9.9.9", prompt, None) for prompt in prompts]
        await asyncio.gather(*flood, answer("9.9.9.9", prompts[0], "salt"), answer("8.8.8.8", prompts[0], "last"))

    run(all_of_them())
    assert len(ended) == 32
    assert ended.index("8.8.8.8 last") < 7
    assert ended.index("9.9.9.9 salt") < 7


def test_idle_callers_are_dropped_beyond_their_limit() -> None:
    queue = WaitingQueue()
    for number in range(2000):
        request = Waiting(number, 0, f"caller {number}")
        queue.add(request)  # type: ignore[arg-type]
        queue.start(request)  # type: ignore[arg-type]
    assert len(queue._last_of) <= MAX_IDLE_CALLERS


def test_a_short_call_while_long_answers_run_ends_before_them(
    make_engine: Callable[..., EmbeddedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "SLICE_TOKENS", 8)
    engine = make_engine(max_running=2, dtype="float64")
    engine.start()
    prompts = random_prompts(47, 5, 20)
    alone = [ask_all(engine, [prompt], greedy(30))[0].token_ids for prompt in prompts]
    ended: list[int] = []

    async def answer(index: int, max_tokens: int) -> list[int]:
        token_ids = (await collect(engine.submit(prompts[index % 5], greedy(max_tokens)))).token_ids
        ended.append(index)
        return token_ids

    async def all_of_them() -> list[list[int]]:
        return await asyncio.gather(*(answer(index, 30) for index in range(5)), answer(5, 4))

    answers = run(all_of_them())
    assert ended[0] == 5
    assert answers == [*alone, alone[0][:4]]
