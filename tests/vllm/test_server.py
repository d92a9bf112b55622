"""`vllm serve`, engine, workers and clients each in a process of their own, with kvferry's admin API inside."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from kvferry.app.discovery import find_services
from tests.harness.waiting import wait_until
from tests.vllm.engines import in_process, transfer_config
from tests.vllm.server import ROOT, VllmServer, environment, free_port, serving
from tests.vllm.workload import BLOCK, Answer, Prompt, assert_same, random_tokens, shared_prefixes
from vllm.distributed.kv_events import KVEventBatch

PROMPTS = shared_prefixes(200)
CLIENTS = 6
MIB = 1 << 20


@pytest.fixture(scope="module")
def truth(llama: Path) -> list[Answer]:
    with in_process(llama) as engine:
        return engine.generate(PROMPTS)


@pytest.fixture(scope="module")
def events_port() -> int:
    """Where the server tells its KV events."""
    return free_port()


@pytest.fixture(scope="module")
def server(llama: Path, events_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    folder = tmp_path_factory.mktemp("serve")
    # A pool that is soon full, so that blocks leave it.
    transfer = transfer_config(load_decision="always", pool_bytes="24MiB")
    # vLLM listens at an address with a star in it; to any other it connects.
    events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{events_port}"}
    with serving(llama, transfer, folder, kv_events_config=events) as server:
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
        assert by_source == stats["prompt_tokens"]["host_hit"]
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


def test_settings_when_changed_while_running_are_applied(server: VllmServer) -> None:
    prompt = random_tokens(random.Random(80), 4 * BLOCK + 3)
    changed = {"eviction_policy": "arc", "store_threshold": 2}
    before = server.settled()
    server.admin.patch("/admin/v1/config", json=changed).raise_for_status()
    try:
        ask(server, prompt)
        after = server.settled()
        assert after["pool"]["eviction_policy"] == "arc"
        assert after["store"]["stored"] == before["store"]["stored"]
        ask(server, prompt)
        assert server.settled()["store"]["stored"] == before["store"]["stored"] + 4
    finally:
        server.admin.patch("/admin/v1/config", json=dict.fromkeys(changed)).raise_for_status()
    assert server.settled()["pool"]["eviction_policy"] == "lru"


def test_pool_size_when_changed_under_load_and_between_requests_is_reached(
    server: VllmServer, truth: list[Answer]
) -> None:
    some = PROMPTS[:100]
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = [clients.submit(ask, server, prompt) for prompt in some]
        for number, size in enumerate((3 * MIB, 48 * MIB, 9 * MIB, 96 * MIB, 6 * MIB), 1):
            wait_until(lambda: sum(map(Future.done, answers)) >= 14 * number, "requests go on", 60.0)  # noqa: B023
            server.resize(size)
        assert_equal_tokens([answer.result(60) for answer in answers], truth[: len(some)])
    server.resized(6 * MIB)
    stats = server.settled()
    assert stats["evictions"]["by_reason"]["shrink"] > 0
    assert (stats["store"]["failed"], stats["load"]["failed"]) == (0, 0)
    for size in (12 * MIB, 3 * MIB, 24 * MIB):
        server.resize(size)
        pool = server.resized(size)
        with server.stepping():
            wait_until(lambda: server.metric("vllm:kvferry_pool_slots") == pool["slots"], "vLLM shows the size", 30.0)  # noqa: B023
        assert pool["pinned"] == pool["loading"] == pool["storing"] == 0
        assert pool["free"] + pool["ready"] == pool["slots"] == size // pool["slot_bytes"]
    assert_equal_tokens([ask(server, prompt) for prompt in some[:20]], truth[:20])
    server.resize(None)
    assert server.resized(24 * MIB)["slots"] == 24 * MIB // pool["slot_bytes"]


def test_pool_size_without_memory_is_refused_with_both_numbers(server: VllmServer) -> None:
    before = server.stats()["pool"]
    for size, words in (
        (100_000, "holds no extent of this pool, which takes 3,145,728 bytes"),
        (1 << 50, f"is more than this process can have, which is {64 * 24 * MIB:,} bytes"),
    ):
        answer = server.admin.patch("/admin/v1/config", json={"pool_bytes": size})
        assert answer.status_code == 409
        (error,) = answer.json()["errors"]
        assert error["field"] == "pool_bytes"
        assert words in error["message"]
    ask(server, PROMPTS[0])
    ready = server.settled()["pool"]["ready"]
    found = server.admin.get("/admin/v1/blocks", params={"limit": 200}).json()["items"]
    assert ready <= len(found)
    for block in found:
        server.admin.put(f"/admin/v1/blocks/{block['hash']}/pin")
    refused = server.admin.patch("/admin/v1/config", json={"pool_bytes": 3 * MIB})
    assert refused.status_code == 409
    assert refused.json()["count"] > 0
    for block in found:
        server.admin.delete(f"/admin/v1/blocks/{block['hash']}/pin")
    after = server.settled()["pool"]
    assert (after["slots"], after["wanted_slots"]) == (before["slots"], before["slots"])


def test_live_requests_are_listed_while_they_run(server: VllmServer) -> None:
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(ask, server, PROMPTS[3], "long-one", max_tokens=600)
        seen: list[Any] = []

        def is_running() -> bool:
            found = server.admin.get("/admin/v1/requests/long-one")
            seen[:] = [found.json()]
            return found.status_code == 200 and found.json()["state"] == "running"

        wait_until(is_running, "it runs", 30.0)
        answer.result(60)
    assert seen[0]["policy"]["offload_prompt_only"] == {"value": True, "source": "default"}


def test_the_command_line_finds_the_engine(server: VllmServer) -> None:
    env = environment(server.state, server.state)
    words = [sys.executable, "-m", "kvferry.app.cli", "stats", "--json"]
    done = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, check=True, timeout=60)
    assert json.loads(done.stdout)["engine"]["name"] == "vllm"


def test_clients_when_disconnected_leave_nothing_open(server: VllmServer) -> None:
    model = server.model

    def leave(prompt: Prompt) -> None:
        body = {"model": model, "prompt": prompt, "max_tokens": 400, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(base_url=server.url, timeout=30) as client,
            client.stream("POST", "/v1/completions", json=body) as lines,
        ):
            next(lines.iter_lines(), None)

    with ThreadPoolExecutor(CLIENTS) as clients:
        list(clients.map(leave, PROMPTS[:30]))
    after = server.settled()
    assert after["pool"]["pinned"] == after["pool"]["loading"] == after["pool"]["storing"] == 0


def test_vllm_reset_drops_the_pool(server: VllmServer) -> None:
    ask(server, PROMPTS[0])
    before = server.settled()
    assert before["pool"]["ready"] > 0
    server.client.post("/reset_prefix_cache?reset_external=true").raise_for_status()
    after = server.settled()
    assert after["epoch"] == before["epoch"] + 1
    assert after["pool"]["ready"] == 0


def test_operator_reset_while_requests_run_drops_blocks(server: VllmServer, truth: list[Answer]) -> None:
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = [clients.submit(ask, server, prompt) for prompt in PROMPTS[:60]]
        for _ in range(5):
            server.admin.post("/admin/v1/reset", json={"drain_timeout_s": 5}).raise_for_status()
        assert_equal_tokens([answer.result(60) for answer in answers], truth[:60])


def test_kv_events_report_changes_of_host_memory(server: VllmServer, events_port: int) -> None:
    prompt = random_tokens(random.Random(79), 4 * BLOCK + 3)
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(f"tcp://127.0.0.1:{events_port}")
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    decoder = msgspec.msgpack.Decoder(KVEventBatch)
    known: dict[Any, Any] = {}

    def listen() -> None:
        while socket.poll(0):
            for event in decoder.decode(socket.recv_multipart()[-1]).events:
                if getattr(event, "medium", None) != "CPU":
                    continue
                for block_hash in event.block_hashes:
                    if type(event).__name__ == "BlockStored":
                        known[block_hash] = event
                    else:
                        known.pop(block_hash, None)

    def heard(tokens: Prompt) -> Any:
        listen()
        return next((event for event in known.values() if event.token_ids == tokens), None)

    try:
        # A subscriber receives no events of the time before it is connected.
        ask(server, PROMPTS[0])
        wait_until(lambda: bool(ask(server, PROMPTS[1]) and socket.poll(200)), "vLLM's events arrive", 30.0)
        ask(server, prompt)
        wait_until(lambda: heard(prompt[: 4 * BLOCK]) is not None, "it is said to be stored", 30.0)
        event = heard(prompt[: 4 * BLOCK])
        assert (event.parent_block_hash, event.block_size, len(event.block_hashes)) == (None, BLOCK, 4)
        for other in PROMPTS[100:]:
            ask(server, other)
        wait_until(lambda: (listen(), known.keys().isdisjoint(event.block_hashes))[1], "it is said to be gone", 30.0)
        server.settled()
        listen()
        assert known
        # Events of an idle engine leave with its next step.
        server.admin.post("/admin/v1/reset", json={}).raise_for_status()
        with server.stepping():
            wait_until(lambda: (listen(), not known)[1], "all blocks are reported as removed", 30.0)
    finally:
        socket.close(0)
        context.term()


def test_clean_run_logs_its_size_and_nothing_above_info(server: VllmServer) -> None:
    lines = server.log.read_text().splitlines()
    ours = [line for line in lines if re.search(r"\d{4}-\d\d-\d\dT[\d:.]+Z (DEBUG|INFO|WARNING|ERROR|CRITICAL) ", line)]
    assert any("host pool: " in line and "slots of" in line for line in ours)
    assert any("admin API on http://127.0.0.1:" in line for line in ours)
    # The pool of these tests is smaller than the device cache on purpose elsewhere, never here.
    assert [line for line in ours if " INFO " not in line] == []


def test_engine_after_a_killed_one_starts(llama: Path, tmp_path: Path, truth: list[Answer]) -> None:
    """On SIGTERM vLLM kills its engine-core process, whose connector is not called. The other way is a
    container that is killed with all that is in it."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        with serving(llama, transfer_config(), tmp_path) as server:
            assert_equal_tokens([ask(server, PROMPTS[0])], truth[:1])
            assert server.settled()["store"]["stored"] > 0
            assert len(find_services(server.state)) == 1
            server.stop(how)
        wait_until(lambda: not find_services(server.state), "the engine is gone", 30.0)
