"""`vllm serve`, engine, workers and clients each in a process of their own, with kvferry's admin API inside."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from kvferry.app.common.discovery import find_services
from kvferry.app.engines.vllm.versions import cache_source
from tests.harness.waiting import DEADLINE_S, wait_until
from tests.vllm.engines import transfer_config
from tests.vllm.server import ROOT, VllmServer, environment, serving
from tests.vllm.workload import BLOCK, Answer, Prompt, assert_same, random_tokens, shared_prefixes

PROMPTS = shared_prefixes(200)
CLIENTS = 6


@pytest.fixture(scope="module")
def server(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("serve")
    # A pool that is soon full, so that blocks leave it.
    transfer = transfer_config(load_decision="always", pool_bytes="24MiB")
    with serving(llama, transfer, folder) as server:
        yield server


def ask(server: VllmServer, prompt: Prompt, request_id: str | None = None, **body: object) -> Any:
    headers = {} if request_id is None else {"X-Request-ID": request_id}
    sent = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True, **body}
    answer = server.client.post("/v1/completions", json={"model": server.model, **sent}, headers=headers)
    return answer.raise_for_status().json()


def tokens_of(answer: Any) -> Answer:
    return Answer(tuple(answer["choices"][0]["token_ids"]), (), 0)


def assert_equal_tokens(answers: list[Any], truth: list[Answer]) -> None:
    found = [Answer(tokens_of(answer).token_ids, wanted.gaps, 0) for answer, wanted in zip(answers, truth, strict=True)]
    assert_same(found, truth)


def test_200_prompts_of_several_clients_get_the_same_answers(server: VllmServer, truth: list[Answer]) -> None:
    for _ in range(2):
        with ThreadPoolExecutor(CLIENTS) as clients:
            answers = list(clients.map(lambda prompt: ask(server, prompt), PROMPTS))
        assert_equal_tokens(answers, truth)
    stats = server.settled()
    assert stats["engine"]["name"] == "vllm"
    tokens, store, load = stats["prompt_tokens"], stats["store"], stats["load"]
    assert tokens["host_hit"] > 0
    assert stats["evictions"]["total"] > 0
    assert tokens["total"] == tokens["device_hit"] + tokens["host_hit"] + tokens["recomputed"]
    assert store["offered"] == store["stored"] + sum(store["skipped"].values()) + store["failed"]
    ask(server, PROMPTS[0])
    stats = server.settled()
    if stats["requests"]["preempted"] == 0 and stats["load"]["failed"] == 0:
        assert server.metric("vllm:external_prefix_cache_hits_total") == stats["prompt_tokens"]["host_hit"]
        by_source = server.metric("vllm:prompt_tokens_cached_by_source_total", 'source="host"')
        # vLLM 0.31 has no such metric.
        assert by_source == (stats["prompt_tokens"]["host_hit"] if cache_source("HOST") is not None else 0)
    wait_until(
        lambda: server.metric("vllm:kvferry_loaded_bytes_total") == server.stats()["load"]["bytes"], "bytes agree", 30.0
    )
    assert server.metric("vllm:kvferry_stored_bytes_total") == server.stats()["store"]["bytes"]
    assert load["bytes"] == load["blocks"] * stats["pool"]["slot_bytes"]


def test_override_by_the_clients_request_id_is_applied(server: VllmServer) -> None:
    prompt = random_tokens(random.Random(77), 4 * BLOCK + 3)
    before = server.settled()["store"]
    server.admin.put("/admin/v1/requests/my-request-7/policy", json={"store": False}).raise_for_status()
    ask(server, prompt, "my-request-7")
    after = server.settled()["store"]
    assert after["stored"] == before["stored"]
    assert after["skipped"]["disabled"] == before["skipped"]["disabled"] + 4
    shown = server.admin.get("/admin/v1/requests/my-request-7").raise_for_status().json()
    assert shown["policy"]["store"] == {"value": False, "source": "override"}
    assert shown["state"] == "finished"
    assert shown["id"] != "my-request-7"
    ask(server, prompt, "my-request-8")
    assert server.settled()["store"]["stored"] == before["stored"] + 4


def test_policy_fields_sent_with_a_request_are_applied(server: VllmServer) -> None:
    prompt = random_tokens(random.Random(78), 4 * BLOCK + 3)
    before = server.settled()["store"]
    ask(server, prompt, "capped", kv_transfer_params={"max_offload_tokens": 2 * BLOCK})
    after = server.settled()["store"]
    assert after["stored"] == before["stored"] + 2
    assert after["skipped"]["token_cap"] == before["skipped"]["token_cap"] + 2
    shown = server.admin.get("/admin/v1/requests/capped").json()
    assert shown["policy"]["max_offload_tokens"] == {"value": 2 * BLOCK, "source": "request"}


@pytest.mark.parametrize(
    ("body", "header", "expected"),
    [
        ({"session_id": "of/body", "vllm_xargs": {"session_id": "of-xargs"}}, "of-header", "of/body"),
        ({"vllm_xargs": {"session_id": "of-xargs"}}, "of-header", "of-header"),
        ({"vllm_xargs": {"session_id": "of-xargs"}}, None, "of-xargs"),
        ({}, None, None),
        ({"session_id": "x" * 257}, None, None),
    ],
)
def test_session_is_that_of_vllms_request(
    server: VllmServer, body: dict[str, Any], header: str | None, expected: str | None
) -> None:
    name = f"in-{expected}-{len(str(body))}"
    before = server.settled()["requests"]["ignored_sessions"]
    headers = {"X-Request-ID": name} | ({} if header is None else {"X-Session-ID": header})
    sent = {"model": server.model, "prompt": random_tokens(random.Random(79), 4 * BLOCK + 3), "max_tokens": 1, **body}
    server.client.post("/v1/completions", json=sent, headers=headers).raise_for_status()
    ignored = server.settled()["requests"]["ignored_sessions"] - before
    assert ignored == len(str(body)) // 257
    assert server.admin.get(f"/admin/v1/requests/{name}").json()["session"] == expected
    listed = server.admin.get("/admin/v1/sessions").json()["items"]
    assert [one["id"] for one in listed][:1] == [expected] or expected is None
    if expected is not None:
        shown = server.admin.get(f"/admin/v1/sessions/{quote(expected, safe='')}").raise_for_status().json()
        assert shown["num_tokens"] == shown["anywhere"] == 4 * BLOCK


def test_the_command_line_finds_the_engine(server: VllmServer) -> None:
    env = environment(server.state, server.state)
    words = [sys.executable, "-m", "kvferry.app.cli", "stats", "--json"]
    done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, check=True, timeout=DEADLINE_S)
    assert json.loads(done.stdout)["engine"]["name"] == "vllm"


def test_operator_reset_while_requests_run_drops_blocks(server: VllmServer, truth: list[Answer]) -> None:
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = [clients.submit(ask, server, prompt) for prompt in PROMPTS[:60]]
        for _ in range(5):
            server.admin.post("/admin/v1/reset", json={"drain_timeout_s": 5}).raise_for_status()
        assert_equal_tokens([answer.result(DEADLINE_S) for answer in answers], truth[:60])


def test_clean_run_logs_its_size_and_nothing_above_info(server: VllmServer) -> None:
    lines = server.log.read_text().splitlines()
    ours = [line for line in lines if re.search(r"\d{4}-\d\d-\d\dT[\d:.]+Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) ", line)]
    assert any("host pool: " in line and "slots of" in line for line in ours)
    assert any("admin API on http://127.0.0.1:" in line for line in ours)
    # The pool of these tests is smaller than the device cache on purpose elsewhere, never here.
    assert [line for line in ours if " INFO " not in line] == []


def test_engine_after_a_killed_one_starts(server: VllmServer, llama: Path, truth: list[Answer]) -> None:
    """On SIGTERM vLLM kills its engine-core process, whose connector is not called. The other way is a
    container that is killed with all that is in it. Last here, as it ends the server that the other tests share."""
    ask_then_stop(server, signal.SIGTERM, truth)
    with serving(llama, transfer_config(), server.state.parent) as after:
        assert after.state == server.state
        ask_then_stop(after, signal.SIGKILL, truth)


def ask_then_stop(server: VllmServer, how: signal.Signals, truth: list[Answer]) -> None:
    assert_equal_tokens([ask(server, PROMPTS[0])], truth[:1])
    assert server.settled()["store"]["stored"] > 0
    assert len(find_services(server.state)) == 1
    server.stop(how)
    wait_until(lambda: not find_services(server.state), "the engine is gone", 30.0)
