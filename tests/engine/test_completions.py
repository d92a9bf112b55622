"""The engine over HTTP, by OpenAI's own client and by clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest
from fastapi import FastAPI

from kvferry.app.api.errors import install_error_handlers
from kvferry.app.engines.embedded import EmbeddedEngine, completions
from kvferry.app.engines.embedded.admission import MIN_CALLS, Admission
from kvferry.app.engines.embedded.completions import completions_router
from kvferry.app.engines.embedded.intake import MAX_LARGE_BODIES, CompletionRequest, read_completion
from kvferry.app.engines.embedded.tokenizer import ByteTokenizer
from kvferry.app.settings import Settings
from tests.harness import http_server
from tests.harness.embedded import NoCopies, Recorder, run, until


@dataclass
class Service:
    engine: EmbeddedEngine
    seen: Recorder
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def post(self, **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}/completions", json=body, timeout=30.0, trust_env=False)


@contextlib.contextmanager
def serve(engine: EmbeddedEngine) -> Iterator[int]:
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(completions_router(engine))
    with http_server.serve(app) as running:
        yield running.port


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    engine = EmbeddedEngine(Settings.model_construct(device="cpu", dtype="float64", device_blocks=600))
    seen = Recorder()
    engine.attach(seen, NoCopies())
    engine.start()
    with serve(engine) as port:
        yield Service(engine, seen, port)
    engine.close()
    assert engine.pool.num_free == 600
    assert sorted(seen.finished) == sorted(request.request_id for request in seen.announced)


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with httpx.Client(trust_env=False, timeout=30.0) as http:
        yield openai.OpenAI(base_url=service.url, api_key="none", max_retries=0, http_client=http)


PROMPT = list(range(10, 50))


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")


def test_whole_and_streamed_answers_are_the_same(client: openai.OpenAI) -> None:
    asked = {
        "model": "tiny",
        "prompt": PROMPT,
        "max_tokens": 20,
        "temperature": 0,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }
    whole = client.completions.create(**asked)
    choice = whole.choices[0]
    assert choice.finish_reason == "length"
    assert len(choice.token_ids) == 20
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (40, 20, 60)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == choice.text
    assert [token for chunk in chunks[:-1] for token in chunk.choices[0].token_ids] == choice.token_ids
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * 19 + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 20
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 32
    assert len({chunk.id for chunk in chunks}) == 1


def test_text_and_its_token_ids_are_one_prompt(client: openai.OpenAI) -> None:
    text = "caf\u00e9, 24 \u20ac"
    ids = [byte + 3 for byte in text.encode()]
    answers = [
        client.completions.create(model="tiny", prompt=prompt, max_tokens=5, temperature=0) for prompt in (text, ids)
    ]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    assert answers[0].usage.prompt_tokens == len(ids)


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_have_a_choice_each(stream: bool, client: openai.OpenAI, service: Service) -> None:
    prompts = [[5, 6, 7], [8, 9], [10]]
    alone = [
        client.completions.create(model="tiny", prompt=p, max_tokens=6, temperature=0).choices[0].text for p in prompts
    ]
    name = f"several-{stream}"
    answer = client.completions.create(
        model="tiny", prompt=prompts, max_tokens=6, temperature=0, stream=stream, extra_headers={"X-Request-ID": name}
    )
    texts = ["", "", ""]
    for part in answer if stream else [answer]:
        for choice in part.choices:
            texts[choice.index] += choice.text
    assert texts == alone
    mine = [request for request in service.seen.announced if name in request.aliases]
    assert [request.request_id for request in mine] == [f"{name}-{i}" for i in range(3)]


def test_engine_receives_the_fields_of_the_body(service: Service) -> None:
    answer = httpx.post(
        f"{service.url}/completions",
        json={
            "prompt": [5, 6],
            "max_tokens": None,
            "cache_salt": "secret",
            "kv_transfer_params": {"store": False},
            "priority": 5,
            "field_of_the_future": [1],
        },
        headers={"X-Request-ID": "by-name"},
        trust_env=False,
    )
    assert answer.headers["X-Request-ID"] == "by-name"
    assert answer.json()["id"] == "cmpl-by-name"
    request = service.seen.announced[-1]
    assert (request.request_id, request.aliases) == ("by-name", ("cmpl-by-name",))
    assert request.kv_transfer_params == {"store": False}
    assert (request.tenant, request.priority) == ("2bb80d537b1da3e3", 5)
    assert answer.json()["usage"]["completion_tokens"] <= 16


@pytest.mark.parametrize("body", [b"{", b"\xff", b'{"prompt": [5], "seed": ' + b"9" * 5000 + b"}"])
def test_body_when_unreadable_is_an_openai_error(service: Service, body: bytes) -> None:
    answer = httpx.post(
        f"{service.url}/completions", content=body, headers={"Content-Type": "application/json"}, trust_env=False
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "JSON" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [[5], []]}, "prompt"),
        ({"prompt": [5, "a"]}, "prompt"),
        ({"prompt": [5.5]}, "prompt"),
        ({"prompt": True}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [259]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [5] * 8192}, "prompt"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": -5}, "max_tokens"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "temperature": -0.1}, "temperature"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "seed": 1 << 64}, "seed"),
        ({"prompt": "a", "stop": ["a", ""]}, "stop"),
        ({"prompt": "a", "stop": ["a"] * 5}, "stop"),
        ({"prompt": "a", "stop": "s" * 1025}, "stop"),
        ({"prompt": "a", "stop": ["s" * 2_000_000]}, "stop"),
        ({"prompt": "a", "stop": [5] * 100_000}, "stop"),
        ({"prompt": ["a"] * 2049}, "prompt"),
        ({"prompt": [[5]] * 2049}, "prompt"),
        ({"prompt": ["a"] * 1_000_000}, "prompt"),
        ({"prompt": [5] * 1_000_000}, "prompt"),
        ({"prompt": [5.5] * 1_000_000}, "prompt"),
        ({"prompt": "a" * 8193}, "prompt"),
        ({"prompt": [10**4000]}, "prompt"),
        ({"prompt": [[5]] * 11_000}, None),
        ({"prompt": "a", "user": [5] * 2_100_000}, None),
        ({"prompt": "a", "max_tokens": -(10**4000)}, "max_tokens"),
        ({"prompt": "a", "suffix": "x" * 1_000_000}, "suffix"),
        ({"prompt": "a", "logit_bias": {str(i): "x" for i in range(5000)}}, "logit_bias"),
        ({"prompt": "a", "cache_salt": "x" * 5000}, "cache_salt"),
        ({"prompt": "a", "kv_transfer_params": {"store": [5] * 2000}}, "kv_transfer_params"),
        ({"prompt": "a", "kv_transfer_params": {"tiers": "x" * 20_000}}, "kv_transfer_params"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "logprobs": 1}, "logprobs"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": "a", "cache_salt": "\udc00"}, "cache_salt"),
        ({"prompt": "a", "kv_transfer_params": [1]}, "kv_transfer_params"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_a_bad_body_is_400_and_names_its_field(body: dict[str, object], param: str | None, service: Service) -> None:
    before = len(service.seen.announced)
    answer = httpx.post(
        f"{service.url}/completions",
        content=json.dumps(body),
        headers={"Content-Type": "application/json"},
        trust_env=False,
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert 0 < len(error["message"]) < 300
    assert len(service.seen.announced) == before


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [[5], []], ["x", ""]])
def test_a_prompt_when_empty_is_400_and_described_so(prompt: object, service: Service) -> None:
    answer = service.post(prompt=prompt)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")
    assert answer.json()["error"]["message"] == "prompt is empty: send at least one token"
    described = CompletionRequest.model_json_schema()["properties"]["prompt"]["anyOf"]
    sizes = [one.get("minLength") or one["minItems"] for one in described]
    assert sizes == [1] * 4
    assert all(one["items"].get("minLength") or one["items"]["minItems"] for one in described[2:])


@pytest.mark.parametrize(
    "body", [{"prompt": [7.0, 8]}, {"prompt": [[7.0], [8]]}, {"max_tokens": 1.0}, {"seed": 5.0}, {"priority": 1.0}]
)
def test_whole_numbers_when_sent_as_floats_are_accepted(body: dict[str, object], service: Service) -> None:
    assert service.post(**({"prompt": "x", "max_tokens": 1} | body)).status_code == 200


def test_the_bounds_of_token_ids_are_described(service: Service) -> None:
    document = httpx.get(f"{service.url.removesuffix('/v1')}/openapi.json", trust_env=False).json()
    operation = document["paths"]["/v1/completions"]["post"]
    prompt = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]["prompt"]
    assert prompt["items"]["maximum"] == prompt["items"]["items"]["maximum"] == service.engine.model.vocab_size - 1
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}


def test_completion_for_another_model_is_404(service: Service, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.completions.create(model="gpt-5", prompt="a")
    assert len(service.post(model="m" * 1_000_000, prompt="a").text) < 300


@pytest.mark.parametrize("prompt", ["[{:,}] " * 5000, '"[' * 20_000, "\\[" * 20_000, '\\"[' * 20_000])
def test_text_when_it_is_full_of_brackets_is_read(prompt: str) -> None:
    assert read_completion(json.dumps({"prompt": prompt}).encode()).prompt == prompt


def test_policy_when_sent_with_fields_of_others_is_all_that_is_kept(service: Service) -> None:
    sent = {"store": False, "remote_block_ids": list(range(5000))}
    assert service.post(prompt="a", max_tokens=1, kv_transfer_params=sent).status_code == 200
    assert service.seen.announced[-1].kv_transfer_params == {"store": False}


def test_large_answers_when_encoded_elsewhere_are_the_same(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"prompt": [[5], [6]], "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answers = [service.post(**asked).json()]
    monkeypatch.setattr(completions, "SMALL_ANSWER_TOKENS", 10)
    answers.append(service.post(**asked).json())
    assert [len(choice["token_ids"]) for choice in answers[0]["choices"]] == [8, 8]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"] == answers[1]["usage"]


def test_call_when_too_many_wait_is_429_with_retry_after(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine, waiting = make_engine(dtype="float32", max_running=1, max_waiting=2), Recorder()
    waiting.may_start.clear()
    engine.attach(waiting, NoCopies())
    engine.start()
    with serve(engine) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"

        async def scenario() -> None:
            async with httpx.AsyncClient(trust_env=False, timeout=30.0) as http:

                async def send(prompt: object) -> httpx.Response:
                    return await http.post(url, json={"prompt": prompt, "max_tokens": 1})

                first = asyncio.create_task(send(["a", "b"]))
                await until(lambda: engine.num_live == 2, "two are accepted")
                refused = await send(["a", "b"])
                assert (await send(["a"] * 4)).status_code == 400, "more than are ever accepted"
                assert "KVFERRY_MAX_WAITING=2" in refused.text
                last = asyncio.create_task(send("c"))
                await until(lambda: not engine.has_room(), "three are accepted")
                for answer in (refused, await send("d")):
                    assert answer.status_code == 429
                    assert answer.headers["Retry-After"] == "1"
                    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
                waiting.may_start.set()
                assert [(await task).status_code for task in (first, last)] == [200, 200]
                assert (await send("e")).status_code == 200

        run(scenario())


def test_a_client_gets_half_of_the_room_for_calls_at_most(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine, waiting = make_engine(dtype="float32", max_running=1), Recorder()
    waiting.may_start.clear()
    engine.attach(waiting, NoCopies())
    engine.start()
    with serve(engine) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"

        async def send(http: httpx.AsyncClient, **more: object) -> httpx.Response:
            return await http.post(url, json={"prompt": "a", "max_tokens": 1, **more})

        async def scenario() -> None:
            transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
            async with (
                httpx.AsyncClient(trust_env=False, timeout=30.0) as flood,
                httpx.AsyncClient(trust_env=False, timeout=30.0, transport=transport) as other,
            ):
                half = [asyncio.create_task(send(flood)) for _ in range(MIN_CALLS // 2)]
                await until(lambda: engine.num_live == len(half), "half of the room is taken")
                for refused in (await send(flood), await send(flood, stream=True)):
                    assert refused.status_code == 429
                    assert refused.headers["Retry-After"] == "1"
                accepted = asyncio.create_task(send(other))
                await until(lambda: engine.num_live == len(half) + 1, "another client's call is accepted")
                half.pop().cancel()
                await until(lambda: engine.num_live == len(half) + 1, "a canceled call has ended")
                assert (await send(flood, prompt="")).status_code == 400
                half.append(asyncio.create_task(send(flood)))
                await until(lambda: engine.num_live == len(half) + 1, "a call is accepted in its place")
                waiting.may_start.set()
                assert {(await task).status_code for task in (*half, accepted)} == {200}

        run(scenario())


def test_the_room_for_calls_grows_with_the_measured_rate() -> None:
    now_s = 0.0
    admission = Admission(max_running=2, max_wait_s=3, clock=lambda: now_s)
    first = admission.begin("a")
    for _ in range(MIN_CALLS // 2 - 1):
        admission.begin("a")
    assert admission.retry_after_s("a") == 1
    assert admission.retry_after_s("b") is None
    for _ in range(200):
        now_s += 1 / 64
        admission.end_request(None, has_run=True)
    for _ in range(64):
        assert admission.retry_after_s("a") is None
        admission.begin("a")
    assert admission.retry_after_s("a") == 2
    for _ in range(2):
        admission.end(first)
    assert admission.retry_after_s("a") is None
    now_s += 100.0
    assert admission.retry_after_s("a") == 60


class SlowTokenizer(ByteTokenizer):
    """Tokenizes long text only once it may."""

    def __init__(self) -> None:
        self.may_go_on = threading.Event()
        self.num_slow = 0

    def encode(self, text: str) -> list[int]:
        if len(text) > 1000:
            self.num_slow += 1
            self.may_go_on.wait(60.0)
        return super().encode(text)


def test_others_when_large_bodies_are_read_are_served(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine, slow = make_engine(dtype="float32", device_blocks=600), SlowTokenizer()
    engine.model = dataclasses.replace(engine.model, tokenizer=slow)
    engine.start()
    with serve(engine) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"

        async def scenario() -> None:
            async with httpx.AsyncClient(trust_env=False, timeout=30.0) as http:
                large = {"prompt": "x" * 1001, "max_tokens": 1, "user": "x" * 70_000}
                sent = [asyncio.create_task(http.post(url, json=large)) for _ in range(MAX_LARGE_BODIES + 2)]
                await until(lambda: sum(task.done() for task in sent) == 2, "those beyond the limit are refused")
                assert {task.result().status_code for task in sent if task.done()} == {429}
                small = await http.post(url, json={"prompt": "short", "max_tokens": 1})
                assert small.status_code == 200
                assert slow.num_slow == 1
                slow.may_go_on.set()
                assert sorted([(await task).status_code for task in sent]) == [200] * MAX_LARGE_BODIES + [429] * 2

        run(scenario())


def hang_up(port: int, body: dict[str, object], after: Callable[[], bool]) -> None:
    """Send a request and close the connection once `after` holds."""
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=20.0) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Request-ID: {body['user']}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        run(until(after, "it is time to hang up"))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", [[5] * 8, [[5] * 8, [6] * 8]], ids=["one", "two"])
def test_request_when_its_client_disconnects_is_canceled(stream: bool, prompt: list[int], service: Service) -> None:
    name = f"gone-{stream}-{len(prompt)}"
    started_s = time.monotonic()
    hang_up(
        service.port,
        {"prompt": prompt, "max_tokens": 8000, "ignore_eos": True, "stream": stream, "user": name},
        lambda: any(request.request_id.startswith(name) for request in service.seen.announced),
    )
    mine = {request.request_id: request for request in service.seen.announced if request.request_id.startswith(name)}
    run(until(lambda: set(service.seen.finished) >= set(mine), "all of it has ended"))
    assert all(request.num_tokens < 8000 for request in mine.values()), time.monotonic() - started_s


def test_completion_when_the_engine_stops_is_503(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine = make_engine(dtype="float32")
    engine.start()
    with serve(engine) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"
        body = {"prompt": [5] * 8, "max_tokens": 8000, "ignore_eos": True}

        async def scenario() -> None:
            async with httpx.AsyncClient(trust_env=False, timeout=30.0) as http:
                cut = asyncio.create_task(http.post(url, json=body))
                await until(lambda: engine.pool.num_free < 512, "it runs")
                async with http.stream("POST", url, json={**body, "stream": True}) as streamed:
                    lines = streamed.aiter_lines()
                    await anext(lines)
                    await asyncio.to_thread(engine.close)
                    rest = [line async for line in lines if line]
                assert json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "server_error"
                assert rest[-1] == "data: [DONE]"
                assert (await cut).status_code == 503
                refused = await http.post(url, json=body)
                assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")

        run(scenario())


def test_a_failed_step_is_500(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine = make_engine(dtype="float32")
    engine.start()

    def fail(*_: object) -> None:
        raise RuntimeError("inner secret")

    handle = engine.model.module.model.layers[0].register_forward_pre_hook(fail)
    with serve(engine) as port:
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a"}, trust_env=False)
        handle.remove()
        again = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a"}, trust_env=False)
    assert (answer.status_code, again.status_code) == (500, 200)
    assert answer.json()["error"]["type"] == "server_error"
    assert "inner secret" not in answer.text
