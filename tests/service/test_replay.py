"""A trace replayed against a device cache far smaller than it: the host serves, and the numbers always add up."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path

import httpx

from tests.harness.commands import run_command
from tests.harness.identities import check_identities
from tests.harness.service_process import environment, serving
from tests.harness.waiting import DEADLINE_S


def write_trace(path: Path, conversations: int, turns: int) -> None:
    """Conversations that take turns, each prompt being the one before and more."""
    rng = random.Random(11)
    next_id = iter(range(1, 10_000))
    histories: list[list[int]] = [[0] for _ in range(conversations)]
    with path.open("w") as trace:
        for turn in range(turns):
            for number, history in enumerate(histories):
                history += [next(next_id) for _ in range(rng.randint(3, 8))]
                tokens = len(history) * 512 - rng.randint(0, 511)
                line = {"timestamp": turn * 1000 + number, "input_length": tokens, "output_length": 100}
                trace.write(json.dumps(line | {"hash_ids": history}) + "\n")


def test_replay_finds_its_way_back_to_the_host_pool(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.jsonl", conversations=20, turns=5)
    with serving(tmp_path, device_blocks=64, pool_bytes="64MiB", load_decision="always") as served:
        done = threading.Event()
        seen = []

        def watch() -> None:
            with httpx.Client(base_url=served.url, timeout=DEADLINE_S, verify=False) as http:
                while not done.wait(0.05):
                    seen.append(http.get("/admin/v1/stats").json())

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            command = ["replay", str(tmp_path / "trace.jsonl"), "--url", served.url, "--json", "--concurrency", "6"]
            ended = run_command(command, environment(tmp_path, {}), tmp_path, timeout=240)
        finally:
            done.set()
            watcher.join()
        assert ended.returncode == 0, ended.stderr
        stats = served.settle()
        assert len(seen) > 10
        for snapshot in [*seen, stats]:
            check_identities(snapshot)
        assert stats["prompt_tokens"]["host_hit"] > stats["prompt_tokens"]["total"] // 4
        assert stats["load"]["bytes"] == stats["load"]["blocks"] * stats["pool"]["slot_bytes"]
        assert stats["store"]["bytes"] == stats["store"]["stored"] * stats["pool"]["slot_bytes"]
        assert json.loads(ended.stdout)["requests"] == 100
        assert served.stop() == 0
        assert "ERROR" not in served.log()
