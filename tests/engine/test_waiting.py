"""Addresses, tenants and calls take turns: one of many prompts, calls or cache salts does not delay all others."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.app.callers import caller_of
from kvferry.app.engines.embedded import EmbeddedEngine, scheduler, waiting
from kvferry.app.engines.embedded.request import ClientOptions
from kvferry.app.engines.embedded.waiting import WaitingQueue
from tests.harness.effort import examples
from tests.harness.embedded import ask_all, collect, greedy, random_prompts, run


class Waiting:
    """As much of a request as the queue uses."""

    def __init__(self, number: int, address: str, tenant: str | None, call_number: int) -> None:
        self.request_id = f"request {number}"
        self.caller = address, tenant
        self.call_number = call_number

    def __repr__(self) -> str:
        return f"{self.request_id} of {self.caller}, call {self.call_number}"


class Model:
    """The queue by its rules: whose latest turn is longest ago is the next one, by address, tenant, call and request.

    One that does not wait has no turn to remember: it has had its latest when it comes back.
    """

    def __init__(self) -> None:
        self.first: list[Waiting] = []
        self.others: list[Waiting] = []
        self.turn_of: dict[tuple[object, ...], int] = {}
        self.now = 0

    def add(self, request: Waiting) -> None:
        waiting = {part for other in self.others for part in self._parts(other)}
        self.now += 1
        for part in self._parts(request):
            if part not in waiting:
                self.turn_of[part] = self.now
        self.others.append(request)

    def start(self, request: Waiting) -> None:
        if request in self.first:
            self.first.remove(request)
            return
        self.others.remove(request)
        self.now += 1
        self.turn_of.update(dict.fromkeys(self._parts(request), self.now))

    def discard(self, request: Waiting) -> None:
        (self.first if request in self.first else self.others).remove(request)

    def order(self) -> list[Waiting]:
        """Return all requests as they start, by starting them on a copy."""
        copied = Model()
        copied.others, copied.turn_of, copied.now = list(self.others), dict(self.turn_of), self.now
        order = list(self.first)
        while copied.others:
            order.append(min(copied.others, key=lambda one: [copied.turn_of[part] for part in copied._parts(one)]))
            copied.start(order[-1])
        return order

    def _parts(self, request: Waiting) -> list[tuple[object, ...]]:
        path = (*request.caller, request.call_number, request.request_id)
        return [path[: depth + 1] for depth in range(len(path))]


@settings(max_examples=examples(60))
@given(
    st.lists(st.one_of(st.integers(1, 6), st.sampled_from(["start", "pass", "first", "again", "cancel"])), max_size=40),
    st.data(),
)
def test_order_is_that_of_the_model(steps: list[int | str], data: st.DataObject) -> None:
    queue: Any = WaitingQueue()
    model = Model()
    number = 0
    started: list[Waiting] = []
    for call_number, step in enumerate(steps):
        order = model.order()
        if isinstance(step, int):
            address, tenant = data.draw(st.tuples(st.sampled_from("abc"), st.sampled_from([None, "x", "y"])))
            for _ in range(step):
                number += 1
                request = Waiting(number, address, tenant, call_number)
                queue.add(request)
                model.add(request)
        elif step in ("first", "again") and started:
            request = started.pop(data.draw(st.integers(0, len(started) - 1)))
            if step == "first":
                queue.add_first(request)
                model.first.insert(0, request)
            else:
                queue.add(request)
                model.add(request)
        elif step in ("start", "pass", "cancel") and order:
            request = order[0 if step == "start" else data.draw(st.integers(0, len(order) - 1))]
            if step == "cancel":
                queue.discard(request)
                queue.discard(request)
                model.discard(request)
            else:
                queue.start(request)
                model.start(request)
                started.append(request)
        order = model.order()
        assert list(queue) == order
        assert len(queue) == len(order)
        assert all(queue.get(request.request_id) is request for request in order)
        assert not any(queue.get(request.request_id) for request in started)


def test_many_salts_and_calls_of_an_address_delay_others_by_one_request_a_turn() -> None:
    queue: Any = WaitingQueue()
    flood = [Waiting(number, "9.9.9.9", f"salt {number}", number) for number in range(5000)]
    users = [Waiting(10_000 + number, f"8.8.8.{number}", None, 10_000 + number) for number in range(10)]
    for request in (*flood, *users):
        queue.add(request)
    assert list(itertools.islice(queue, 11)) == [flood[0], *users]


def test_an_address_that_comes_back_waits_for_a_turn_of_the_others() -> None:
    queue: Any = WaitingQueue()
    requests = {address: [Waiting(ord(address) * 10 + at, address, None, at) for at in range(3)] for address in "abc"}
    for at in range(2):
        for address in "bc":
            queue.add(requests[address][at])
    for at in range(2):
        queue.add(requests["a"][at])
        assert [one.caller[0] for one in itertools.islice(queue, 3)] == ["b", "c", "a"]
        for address in "bca":
            queue.start(requests[address][at])


def test_a_start_touches_few_members_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []

    class Counted(OrderedDict[Any, Any]):
        def values(self) -> Any:
            return (touched.append(1) or value for value in super().values())  # type: ignore[func-returns-value]

    monkeypatch.setattr(waiting, "OrderedDict", Counted)
    counts = []
    for num_waiting in (100, 2000):
        queue: Any = WaitingQueue()
        for number in range(num_waiting):
            queue.add(Waiting(number, f"address {number % 7}", f"salt {number % 50}", number))
        touched.clear()
        for _ in range(50):
            queue.start(next(iter(queue)))
        counts.append(len(touched))
    assert counts[0] == counts[1] == 50 * 4


@pytest.mark.parametrize(
    ("host", "caller"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::9", "2001:db8:1:3::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::/64"),
        ("", ""),
        ("no address", "no address"),
    ],
)
def test_addresses_of_a_customer_count_as_one_caller(host: str, caller: str) -> None:
    assert caller_of(host) == caller


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
        request = engine.prepare(prompt, greedy(4), options=ClientOptions(salt))
        (stream,) = engine.submit_all([request], engine.admission.begin(client))
        if (client, salt) == ("8.8.8.8", "last"):
            all_wait.set()
        await collect(stream)
        ended.append(f"{client} {salt}")

    async def all_of_them() -> None:
        prompts = random_prompts(43, 30, 20)
        flood = [answer("9.9.9.9", prompt, None) for prompt in prompts]
        salted = [answer("2001:db8::1", prompt, f"salt {at}") for at, prompt in enumerate(prompts)]
        others = [answer(f"2001:db8::{at:x}", prompt, None) for at, prompt in enumerate(prompts, start=2)]
        same = answer("9.9.9.9", prompts[0], "salt")
        await asyncio.gather(*flood, *salted, *others, same, answer("8.8.8.8", prompts[0], "last"))

    run(all_of_them())
    assert len(ended) == 92
    # Two run before it arrives, and each of the three addresses has a turn in the order of arrival.
    assert ended.index("8.8.8.8 last") < 7
    assert ended.index("9.9.9.9 salt") < 10


LONG_CALLS = {"long answers": (20, 100, 2048, 400), "long prompts": (600, 4, 64, 400), "blocks": (600, 20, 2048, 100)}
"""Tokens of prompt, answer and step, and device blocks."""


@pytest.mark.parametrize("kind", LONG_CALLS)
def test_a_short_call_behind_long_ones_of_another_address_ends_first(
    kind: str, make_engine: Callable[..., EmbeddedEngine]
) -> None:
    num_prompt, num_output, step_tokens, device_blocks = LONG_CALLS[kind]
    engine = make_engine(max_running=4, max_batched_tokens=step_tokens, dtype="float64", device_blocks=device_blocks)
    all_wait = threading.Event()
    engine.model.module.register_forward_pre_hook(lambda *_: all_wait.wait() and None)
    engine.start()
    prompts = [[3 + (at * 7 + position * position) % 240 for position in range(num_prompt)] for at in range(8)]
    short = random_prompts(54, 1, 20)[0]
    ended: list[str] = []

    async def answer(client: str, prompt: list[int], max_tokens: int) -> list[int]:
        request = engine.prepare(prompt, greedy(max_tokens))
        (stream,) = engine.submit_all([request], engine.admission.begin(client))
        if client == "8.8.8.8":
            all_wait.set()
        token_ids = (await collect(stream)).token_ids
        ended.append(client)
        return token_ids

    async def all_of_them() -> list[list[int]]:
        flood = [answer("9.9.9.9", prompt, num_output) for prompt in prompts]
        return await asyncio.gather(*flood, answer("8.8.8.8", short, 4))

    answers = run(all_of_them())
    assert ended[0] == "8.8.8.8"
    alone = [ask_all(engine, [prompt], greedy(count))[0] for prompt, count in [(prompts[7], num_output), (short, 4)]]
    assert answers[7:] == [one.token_ids for one in alone]


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
