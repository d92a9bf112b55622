"""KV events of a whole service over ZMQ, as a router receives them, and over its death."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvferry.app.engines.embedded.kv_events import external_hash
from kvferry.app.engines.embedded.kv_sockets import EventBatch
from kvferry.app.preflight import start_problems
from kvferry.app.settings import Settings
from tests.harness.kv_router import Router
from tests.harness.server_process import free_port
from tests.harness.service_process import Served, serving
from tests.harness.waiting import DEADLINE_S, wait_until

PROMPTS = [[(7 * n + 3 * i) % 250 + 1 for i in range(160)] for n in range(6)]


def settings_of(folder: Path, endpoints: Sequence[str]) -> dict[str, object]:
    return {
        "engine_name": "routed",
        "device_blocks": 24,
        "dtype": "float64",
        "pool_bytes": 2 << 20,
        "pool_kind": "file",
        "pool_path": folder / "pool",
        "load_decision": "always",
        "kv_events_endpoint": endpoints[0],
        "kv_events_replay_endpoint": endpoints[1],
        "kv_events_topic": "kv@pod@tiny",
    }


def is_right(router: Router, served: Served) -> bool:
    while router.receive(0):
        pass
    blocks = served.get("/admin/v1/blocks?limit=1000")["items"]
    return router.held("CPU") == {external_hash(bytes.fromhex(block["key"][:-2])) for block in blocks}


@pytest.mark.long
def test_router_index_over_a_kill_of_the_service_equals_the_pool(tmp_path: Path) -> None:
    endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    router = Router(*endpoints, EventBatch)
    try:
        with serving(tmp_path, **settings_of(tmp_path, endpoints)) as served:
            for prompt in PROMPTS:
                served.complete(prompt, max_tokens=2)
            served.settle()
            wait_until(lambda: is_right(router, served), "the router knows the pool")
            assert len(router.held("CPU")) > 5
            assert router.held("GPU")
            assert sum(len(event.token_ids) for event in router.stored()) >= len(PROMPTS) * 160
            served.process.send_signal(signal.SIGKILL)
            served.process.wait(DEADLINE_S)
        router.events.clear()
        with serving(tmp_path, **settings_of(tmp_path, endpoints)) as served:
            served.complete(PROMPTS[0], max_tokens=2)
            served.settle()
            wait_until(lambda: is_right(router, served), "the router knows the recovered pool")
            assert len(router.held("GPU")) == 10, "those of the one prompt"
            assert served.stop() == 0
        wait_until(lambda: not router.receive(0) and not router.held("CPU"), "the router knows that nothing is left")
    finally:
        router.close()


@pytest.mark.parametrize("package", ["zmq", "msgspec"])
def test_kv_events_without_their_packages_refuse_to_start(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    (problem,) = start_problems(Settings(_env_file=None, kv_events_endpoint="tcp://127.0.0.1:1", model="tiny"))
    assert problem.startswith(f"KVFERRY_KV_EVENTS_ENDPOINT=tcp://127.0.0.1:1: {package} not installed; pip install")
