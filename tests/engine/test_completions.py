"""The engine over HTTP, by OpenAI's own client and by clients that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest
from fastapi import FastAPI
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.app.api.calls import EngineCalls
from kvferry.app.api.errors import Problem, install_error_handlers
from kvferry.app.engines.embedded.api import completions_router
from kvferry.app.engines.embedded.engine import EmbeddedEngine
from kvferry.app.engines.embedded.model import EOS_ID
from kvferry.app.engines.embedded.protocol import CallBody, ChatRequest, CompletionRequest, read_body
from kvferry.app.settings import Settings
from tests.harness import http_server
from tests.harness.effort import examples
from tests.harness.embedded import NoCopies, Recorder, run, until
from tests.harness.waiting import DEADLINE_S


@dataclass
class Service:
    engine: EmbeddedEngine
    seen: Recorder
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def post(self, **body: object) -> httpx.Response:
        return httpx.post(f"{self.url}/completions", json=body, timeout=DEADLINE_S, trust_env=False)


@contextlib.contextmanager
def serve(engine: EmbeddedEngine) -> Iterator[int]:
    app = FastAPI()
    install_error_handlers(app)
    app.include_router(completions_router(engine))
    settings = engine.settings
    app.add_middleware(EngineCalls, max_running=settings.max_running, max_waiting=settings.max_waiting)
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
    assert engine.block_pool.num_free == 600
    assert sorted(seen.finished) == sorted(request.request_id for request in seen.announced)


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with httpx.Client(trust_env=False, timeout=DEADLINE_S) as http:
        yield openai.OpenAI(base_url=service.url, api_key="none", max_retries=0, http_client=http)


PROMPT = list(range(10, 50))


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
        timeout=DEADLINE_S,
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
        f"{service.url}/completions",
        content=body,
        headers={"Content-Type": "application/json"},
        timeout=DEADLINE_S,
        trust_env=False,
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
        ({"prompt": ["x", ""]}, "prompt"),
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
        ({"prompt": "\ud800"}, None),
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
        ({"prompt": [[5]] * 11_000}, "prompt"),
        ({"prompt": "a", "max_tokens": -(10**4000)}, "max_tokens"),
        ({"prompt": "a", "suffix": "x" * 1_000_000}, "suffix"),
        ({"prompt": "a", "cache_salt": "x" * 5000}, "cache_salt"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "echo": 0}, "echo"),
        ({"prompt": "a", "logprobs": 1}, "logprobs"),
        ({"prompt": "a", "cache_salt": "\udc00"}, None),
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
        timeout=DEADLINE_S,
        trust_env=False,
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert 0 < len(error["message"]) < 300
    assert len(service.seen.announced) == before


@pytest.mark.parametrize(
    "body", [{"prompt": [7.0, 8]}, {"prompt": [[7.0], [8]]}, {"max_tokens": 1.0}, {"seed": 5.0}, {"priority": 1.0}]
)
def test_whole_numbers_when_sent_as_floats_are_accepted(body: dict[str, object], service: Service) -> None:
    assert service.post(**({"prompt": "x", "max_tokens": 1} | body)).status_code == 200


def test_the_bounds_of_token_ids_are_described(service: Service) -> None:
    document = httpx.get(f"{service.url.removesuffix('/v1')}/openapi.json", timeout=DEADLINE_S, trust_env=False).json()
    operation = document["paths"]["/v1/completions"]["post"]
    prompt = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]["prompt"]
    assert prompt["items"]["maximum"] == prompt["items"]["items"]["maximum"] == service.engine.model.vocab_size - 1
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}


def test_bounds_of_fields_are_described_in_json_schema(service: Service) -> None:
    document = httpx.get(f"{service.url.removesuffix('/v1')}/openapi.json", timeout=DEADLINE_S, trust_env=False).json()
    of_pydantic = {"ge", "gt", "le", "lt", "min_length", "max_length", "multiple_of"}
    parts, numbers = [document], 0
    while parts:
        part = parts.pop()
        if isinstance(part, dict):
            assert "type" not in part or not of_pydantic & set(part), part
            numbers += "minimum" in part
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    assert numbers > 5


def test_completion_for_another_model_is_404(service: Service, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.completions.create(model="gpt-5", prompt="a")
    assert len(service.post(model="m" * 1_000_000, prompt="a").text) < 300


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["\ud800", "text", "user"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "name", "tool_calls"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@settings(max_examples=examples(50))
@given(data=st.data(), kind=st.sampled_from([CompletionRequest, ChatRequest]))
def test_body_when_arbitrary_is_read_or_refused(data: st.DataObject, kind: type[CallBody]) -> None:
    names = st.sampled_from([*kind.model_fields])
    body = {kind.prompt_field: "a" if kind is CompletionRequest else [{"role": "user", "content": "a"}]}
    body |= data.draw(st.dictionaries(names, json_values, max_size=3))
    refused: Problem | None = None
    try:
        read_body(kind, json.dumps(body).encode())
    except Problem as problem:
        refused = problem
    assert refused is None or (refused.status == 400 and refused.response({"path": "/v1/completions"}).body)


def test_policy_when_sent_with_fields_of_others_is_all_that_is_kept(service: Service) -> None:
    sent = {"store": False, "remote_block_ids": list(range(5000))}
    assert service.post(prompt="a", max_tokens=1, kv_transfer_params=sent).status_code == 200
    assert service.seen.announced[-1].kv_transfer_params == {"store": False}


def test_call_when_too_many_wait_is_429_with_retry_after(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine, waiting = make_engine(dtype="float32", max_running=1, max_waiting=2), Recorder()
    waiting.may_start.clear()
    engine.attach(waiting, NoCopies())
    engine.start()
    with serve(engine) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"

        async def scenario() -> None:
            async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as http:

                async def send(prompt: object) -> httpx.Response:
                    return await http.post(url, json={"prompt": prompt, "max_tokens": 1})

                first = asyncio.create_task(send(["a", "b"]))
                await until(lambda: len(engine.inbox.live()) == 2, "two are accepted")
                refused = await send(["a", "b"])
                assert (await send(["a"] * 4)).status_code == 400, "more than are ever accepted"
                assert "KVFERRY_MAX_WAITING=2" in refused.text
                last = asyncio.create_task(send("c"))
                await until(lambda: len(engine.inbox.live()) == 3, "three are accepted")
                for answer in (refused, await send("d")):
                    assert answer.status_code == 429
                    assert answer.headers["Retry-After"] == "1"
                    assert answer.json()["error"]["code"] == "rate_limit_exceeded"
                assert (await http.get(f"http://127.0.0.1:{port}/v1/models")).status_code == 200
                waiting.may_start.set()
                assert [(await task).status_code for task in (first, last)] == [200, 200]
                assert (await send("e")).status_code == 200

        run(scenario())


def test_place_of_a_canceled_or_refused_call_is_free_again(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine, waiting = make_engine(dtype="float32", max_running=1, max_waiting=1), Recorder()
    waiting.may_start.clear()
    engine.attach(waiting, NoCopies())
    engine.start()
    with serve(engine) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"

        async def scenario() -> None:
            async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as http:

                async def send(**body: object) -> httpx.Response:
                    return await http.post(url, json={"prompt": "a", "max_tokens": 1, **body})

                async def send_once_free(**body: object) -> httpx.Response:
                    async with asyncio.timeout(DEADLINE_S):
                        while (answer := await send(**body)).status_code == 429:
                            continue
                    return answer

                calls = [asyncio.create_task(send()), asyncio.create_task(send(stream=True))]
                await until(lambda: len(engine.inbox.live()) == 2, "both are accepted")
                assert (await send()).status_code == 429
                for number in range(3):
                    calls.pop().cancel()
                    await until(lambda: len(engine.inbox.live()) == 1, "the canceled call has ended")
                    for body in ({"prompt": ""}, {"model": "another"}, {"max_tokens": 0}):
                        assert (await send_once_free(**body)).status_code in (400, 404), number
                    calls.append(asyncio.create_task(send_once_free()))
                    await until(lambda: len(engine.inbox.live()) == 2, "a call is accepted in its place")
                waiting.may_start.set()
                assert {(await task).status_code for task in calls} == {200}

        run(scenario())


def hang_up(port: int, path: str, body: dict[str, object], after: Callable[[], bool]) -> None:
    """Send a request and close the connection once `after` holds."""
    data = json.dumps(body).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
        head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nX-Request-ID: {body['user']}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        run(until(after, "it is time to hang up"))


PROMPTS: dict[str, tuple[str, dict[str, object]]] = {
    "one": ("completions", {"prompt": [5] * 8}),
    "two": ("completions", {"prompt": [[5] * 8, [6] * 8]}),
    "chat": ("chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", PROMPTS)
def test_request_when_its_client_disconnects_is_canceled(stream: bool, kind: str, service: Service) -> None:
    name = f"gone-{stream}-{kind}"
    path, prompt = PROMPTS[kind]
    started_s = time.monotonic()
    hang_up(
        service.port,
        path,
        {**prompt, "max_tokens": 8000, "ignore_eos": True, "stream": stream, "user": name},
        lambda: any(request.request_id.startswith(name) for request in service.seen.announced),
    )
    mine = {request.request_id: request for request in service.seen.announced if request.request_id.startswith(name)}
    run(until(lambda: set(service.seen.finished) >= set(mine), "all of it has ended"))
    assert all(request.num_tokens < 8000 for request in mine.values()), time.monotonic() - started_s


@pytest.mark.parametrize("stream", [False, True])
def test_request_when_abandoned_before_its_first_token_is_canceled(stream: bool, service: Service) -> None:
    name = f"abandoned-{stream}"
    path, prompt = PROMPTS["chat"]
    service.seen.may_start.clear()
    try:
        hang_up(
            service.port,
            path,
            {**prompt, "stream": stream, "user": name},
            lambda: any(request.request_id == name for request in service.seen.announced),
        )
        run(until(lambda: name in service.seen.finished, "it has ended"))
    finally:
        service.seen.may_start.set()


def test_completion_when_the_engine_stops_is_503(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine = make_engine(dtype="float32")
    engine.start()
    with serve(engine) as port:
        url = f"http://127.0.0.1:{port}/v1/completions"
        body = {"prompt": [5] * 8, "max_tokens": 8000, "ignore_eos": True}

        async def scenario() -> None:
            async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as http:
                cut = asyncio.create_task(http.post(url, json=body))
                await until(lambda: engine.block_pool.num_free < 512, "it runs")
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
        bodies = [{"prompt": "a"}, {"prompt": "a", "stream": True}]
        url = f"http://127.0.0.1:{port}/v1/completions"
        failed = [httpx.post(url, json=body, timeout=DEADLINE_S, trust_env=False) for body in bodies]
        handle.remove()
        again = [httpx.post(url, json=body, timeout=DEADLINE_S, trust_env=False) for body in bodies]
    assert [answer.status_code for answer in failed + again] == [500, 500, 200, 200]
    assert all(answer.json()["error"]["type"] == "server_error" for answer in failed)
    assert all("inner secret" not in answer.text for answer in failed)


def test_answer_when_its_end_is_likely_has_min_tokens(make_engine: Callable[..., EmbeddedEngine]) -> None:
    engine = make_engine(dtype="float32")
    engine.start()

    def prefer_the_end(*call: object) -> object:
        call[2][..., EOS_ID] += 1000.0  # type: ignore[index]
        return call[2]

    engine.model.module.lm_head.register_forward_hook(prefer_the_end)
    with serve(engine) as port:
        for temperature in (0, 1):
            body = {"prompt": "a", "max_tokens": 20, "temperature": temperature, "return_token_ids": True}
            url = f"http://127.0.0.1:{port}/v1/completions"
            found = {
                num: httpx.post(url, json={**body, "min_tokens": num}, timeout=DEADLINE_S, trust_env=False).json()[
                    "choices"
                ][0]
                for num in (0, 7, 20)
            }
            assert {num: len(choice["token_ids"]) for num, choice in found.items()} == {0: 1, 7: 8, 20: 20}
            assert [choice["finish_reason"] for choice in found.values()] == ["stop", "stop", "length"]
            assert found[7]["token_ids"].index(EOS_ID) == 7


def test_chat_when_the_model_has_no_template_is_400(
    make_engine: Callable[..., EmbeddedEngine], checkpoints: dict[str, str]
) -> None:
    for name, message in (("llama", "this model has no chat template"), ("qwen2", "this model has no tokenizer")):
        with serve(make_engine(model=checkpoints[name])) as port:
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            answer = httpx.post(
                url, json={"messages": [{"role": "user", "content": "Hi"}]}, timeout=DEADLINE_S, trust_env=False
            )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    ("field", "header", "expected"),
    [
        ("own", "other", "own"),
        (None, "other", "other"),
        ("", "other", "other"),
        ("own", None, "own"),
        (None, None, None),
    ],
)
def test_session_is_that_of_the_body_else_of_the_header(
    service: Service, path: str, field: str | None, header: str | None, expected: str | None
) -> None:
    prompt = {"prompt": [PROMPT, PROMPT]} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    headers = {} if header is None else {"X-Session-ID": header}
    body = {**prompt, "max_tokens": 1, "session_id": field}
    before = len(service.seen.announced)
    url = f"{service.url}/{path}"
    assert httpx.post(url, json=body, headers=headers, timeout=DEADLINE_S, trust_env=False).status_code == 200
    assert {one.session for one in service.seen.announced[before:]} == {expected}


def test_session_that_is_no_text_is_refused(service: Service) -> None:
    refused = service.post(prompt=PROMPT, session_id=5)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "session_id")
