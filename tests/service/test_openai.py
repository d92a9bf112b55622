"""A service by OpenAI's own client: chats, completions, models, and an exception of the right class for each error."""

from __future__ import annotations

import contextlib
import io
import json
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from kvferry.app.engines.embedded.tokenizer import TINY_FOLDER, load_tokenizer
from tests.harness.service_process import ROOT, Served, serving
from tests.harness.waiting import DEADLINE_S

ADMIN, READ = "admin" * 8, "read" * 8
CHAT = [
    {"role": "system", "content": "You answer in one word. \u20ac \U0001f600"},
    {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "the capital?"}]},
]
PROMPT = "<|system|>\nYou answer in one word. \u20ac \U0001f600\n<|user|>\nWhat is\nthe capital?\n<|assistant|>\n"
NEUTRAL: dict[str, Any] = {
    "n": 1,
    "top_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "logit_bias": {},
    "seed": None,
    "stop": None,
    "extra_body": {
        "response_format": {"type": "text"},
        "repetition_penalty": 1.0,
        "top_k": -1,
        "min_p": 0,
        "min_tokens": None,
        "ignore_eos": None,
        "return_token_ids": None,
        "priority": None,
        "kv_transfer_params": None,
        "cache_salt": None,
        "stop_token_ids": [],
        "skip_special_tokens": True,
        "field_of_the_future": 5,
    },
}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("openai")
    with serving(folder, admin_token=ADMIN, read_token=READ, device_blocks=600, pool_bytes="16MiB") as served:
        yield served


@pytest.fixture(scope="module")
def client(service: Served) -> Iterator[openai.OpenAI]:
    with httpx.Client(trust_env=False, timeout=DEADLINE_S) as http:
        yield openai.OpenAI(base_url=f"{service.url}/v1", api_key=READ, max_retries=0, http_client=http)


def ask(client: openai.OpenAI, **more: Any) -> Any:
    asked = {"model": "tiny", "messages": CHAT, "max_completion_tokens": 24, "temperature": 0} | more
    return client.chat.completions.create(**asked)


def test_chat_when_whole_and_streamed_is_the_same(client: openai.OpenAI) -> None:
    body = {"ignore_eos": True, "return_token_ids": True}
    whole = ask(client, extra_body=body)
    (choice,) = whole.choices
    assert (whole.object, choice.message.role, choice.finish_reason) == ("chat.completion", "assistant", "length")
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT.encode()), 24)
    first, *chunks, usage = ask(client, stream=True, stream_options={"include_usage": True}, extra_body=body)
    assert (first.object, first.choices[0].delta.role, first.usage) == ("chat.completion.chunk", "assistant", None)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == choice.message.content
    assert [token for chunk in chunks for token in chunk.choices[0].token_ids] == choice.token_ids
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 23 + ["length"]
    assert (usage.choices, usage.usage.completion_tokens) == ([], 24)
    assert len({chunk.id for chunk in (first, *chunks, usage)}) == 1


def test_chat_when_its_prompt_is_completed_has_the_same_answer(client: openai.OpenAI) -> None:
    completed = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0)
    assert ask(client).choices[0].message.content == completed.choices[0].text


def test_chat_when_repeated_is_cached_and_counted_so(client: openai.OpenAI, service: Served) -> None:
    def ask_new(name: str, **more: Any) -> Any:
        return ask(
            client,
            messages=[{"role": "user", "content": "a question of its own " * 8}],
            extra_headers={"X-Request-ID": name},
            **more,
        )

    first = ask_new("first-chat", extra_body={"kv_transfer_params": {"max_offload_tokens": 64}})
    assert (first.id, first.usage.prompt_tokens_details.cached_tokens) == ("chatcmpl-first-chat", 0)
    again = ask_new("second-chat")
    *_, streamed = ask_new("third-chat", stream=True, stream_options={"include_usage": True})
    known = service.settle() and service.get("/admin/v1/requests/first-chat")
    cached = (known["prompt_tokens"]["total"] - 1) // 16 * 16
    assert cached > 150
    for answer in (again, streamed):
        assert answer.usage.prompt_tokens_details.cached_tokens == cached
    assert known["policy"]["max_offload_tokens"] == {"value": 64, "source": "request"}
    assert known["store"]["stored"] == 4
    assert service.get("/admin/v1/requests/chatcmpl-second-chat")["prompt_tokens"]["device_hit"] == cached


@pytest.mark.long
def test_chat_without_a_limit_ends_long_before_the_context(client: openai.OpenAI) -> None:
    answer = ask(client, max_completion_tokens=None, extra_body={"ignore_eos": True})
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (512, "length")
    longer = {"min_tokens": 520, "ignore_eos": True}
    assert ask(client, max_completion_tokens=None, extra_body=longer).usage.completion_tokens == 520


def test_pieces_of_a_chat_end_between_characters(client: openai.OpenAI) -> None:
    asked = {"temperature": 2, "seed": 5, "max_completion_tokens": 200}
    body = {"return_token_ids": True, "ignore_eos": True}
    pieces = [chunk.choices[0] for chunk in ask(client, stream=True, extra_body=body, **asked)]
    token_ids = [token for piece in pieces[1:] for token in piece.token_ids]
    assert "".join(piece.delta.content for piece in pieces) == load_tokenizer(str(TINY_FOLDER)).decode(token_ids)
    assert any(len(piece.delta.content.encode()) > 1 and "\ufffd" not in piece.delta.content for piece in pieces)


def test_usage_when_continuous_grows_with_every_chunk(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    _, *chunks, last = ask(client, stream=True, stream_options=options, extra_body={"ignore_eos": True})
    assert [chunk.usage.completion_tokens for chunk in chunks] == list(range(1, 25))
    assert last.usage == chunks[-1].usage


def test_fields_when_without_effect_are_accepted(client: openai.OpenAI) -> None:
    only_chat = {"tools": [], "tool_choice": "none", "top_logprobs": 0, "logprobs": False, "parallel_tool_calls": True}
    texts = {
        ask(client).choices[0].message.content,
        ask(client, **NEUTRAL, **only_chat).choices[0].message.content,
        client.completions.create(model="tiny", prompt=PROMPT, max_tokens=24, temperature=0, **NEUTRAL).choices[0].text,
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"n": 2}, "n", "less than or equal to 1"),
        ({"n": True}, "n", "integer"),
        ({"best_of": 2}, "best_of", "less than or equal to 1"),
        ({"logprobs": True}, "logprobs", "should be False"),
        ({"logprobs": 0}, "logprobs", "should be False"),
        ({"top_logprobs": 3}, "top_logprobs", "should be 0"),
        ({"top_logprobs": False}, "top_logprobs", "should be 0"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "leave it out"),
        ({"functions": [{"name": "f"}]}, "functions", "leave it out"),
        ({"response_format": {"type": "json_object"}}, "response_format.type", "'text'"),
        ({"min_tokens": 25}, "min_tokens", "at most max_tokens, which is 24"),
        ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
        ({"max_tokens": True}, "max_tokens", "integer"),
        ({"stop": ["x"] * 129}, "stop", "up to 4 strings"),
        ({"messages": None}, "messages", "array"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": "Hi"}, "messages", "array"),
        ({"messages": ["Hi"]}, "messages[0]", "must be a JSON object"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, None, "JSON"),
        ({"messages": [{"role": "user", "content": "a" * 9000}]}, "messages", "9000 characters"),
        ({"messages": [{"role": "user", "content": "a" * 8191}]}, "messages", "8192, one of them for the answer"),
        ({"messages": [{"role": "user", "content": "a"}] * 5000}, "messages", "8192, one of them for the answer"),
        ({"messages": [{"role": "cook", "content": "a"}]}, "messages[0].role", "'user'"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "list of text parts"),
        (
            {"messages": [CHAT[0], {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[1].content",
            'list of text parts: {"type": ',
        ),
        (
            {"messages": [{"role": "assistant", "content": "a", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls",
            "not supported",
        ),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict) else "",
)
def test_chat_when_refused_names_field_and_value(
    body: dict[str, Any], param: str | None, message: str, service: Served
) -> None:
    sent = {"messages": CHAT, "max_tokens": 24, "stream": True} | body
    answer = service.http.post(
        "/v1/chat/completions", content=json.dumps(sent), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert message in error["message"]
    assert len(error["message"]) < 400


def test_errors_raise_the_exception_of_their_status(client: openai.OpenAI, service: Served) -> None:
    with pytest.raises(openai.AuthenticationError) as unauthorized:
        client.with_options(api_key="wrong").models.list()
    assert unauthorized.value.code == "invalid_api_key"
    with pytest.raises(openai.NotFoundError) as unknown:
        ask(client, model="gpt-5")
    assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="a")
    with pytest.raises(openai.BadRequestError) as bad:
        ask(client, temperature=3)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        ask(client, messages=[{"role": "user", "content": "a" * 8300}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as large:
        ask(client, messages=[{"role": "user", "content": "a" * (17 << 20)}])
    assert (large.value.status_code, large.value.type) == (413, "invalid_request_error")
    for path in ("/v1/nothing", "/v1"):
        assert set(service.http.get(path).json()["error"]) == {"message", "type", "param", "code"}
    assert service.http.get("/admin/v1/nothing").headers["Content-Type"] == "application/problem+json"


def test_example_of_the_documentation_prints_a_chat(service: Served) -> None:
    page = (ROOT / "docs" / "openai.md").read_text()
    (example,) = re.findall(r"(?:^    .*\n|^\n)+(?=Where tokens)", page, re.MULTILINE)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(textwrap.dedent(example).replace("http://127.0.0.1:8787", service.url).replace('"none"', f'"{READ}"'))
    assert "completion_tokens=" in out.getvalue()


def test_models_have_their_context(client: openai.OpenAI) -> None:
    assert [(model.id, model.max_model_len) for model in client.models.list()] == [("tiny", 8192)]  # type: ignore[attr-defined]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-5")
