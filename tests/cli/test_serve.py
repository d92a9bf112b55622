"""`kvferry serve` as an operator runs it: a process that starts, serves a replay, and stops when told to."""

from __future__ import annotations

import json
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest

from app.client import KVFerryClient
from tests.api.serving import wait_until

from .conftest import Run, command_environment

START_DEADLINE_S = 90
TOKEN = "an-admin-token-of-this-test"


@dataclass
class Serving:
    """A running `kvferry serve`, and what it has logged so far."""

    process: subprocess.Popen[str]
    lines: list[str]

    @property
    def url(self) -> str | None:
        found = (re.search(r"serving on (http://\S+?)[:,;]? ", line + " ") for line in list(self.lines))
        return next((match[1] for match in found if match), None)


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with start_serving(tmp_path_factory.mktemp("serve")) as serving:
        yield serving


@contextmanager
def start_serving(folder: Path) -> Iterator[Serving]:
    """`kvferry serve` as a process, up and serving until the block ends."""
    settings = {
        "PORT": "0",
        "ADMIN_TOKEN": TOKEN,
        "STATE_DIR": str(folder),
        "DEVICE_BLOCKS": "64",
        "POOL_BYTES": "64MiB",
    }
    environment = command_environment(**settings, SERVICE_HOST="10.0.0.1") | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "app.cli", "serve"], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
    )
    lines: list[str] = []
    pipe = process.stderr
    assert pipe is not None
    reader = threading.Thread(target=_read, args=(pipe, lines))
    reader.start()
    serving = Serving(process, lines)
    try:
        wait_until(
            lambda: serving.url is not None or process.poll() is not None,
            f"serving: {lines}",
            deadline_s=START_DEADLINE_S,
        )
        assert serving.url is not None, lines
        yield serving
    finally:
        process.kill()
        process.wait()
        reader.join()
        pipe.close()


def _read(pipe: IO[str], lines: list[str]) -> None:
    lines.extend(line.rstrip() for line in pipe)


def test_a_replay_of_shared_prefixes_finds_them(serving: Serving, run: Run, clean_world: Path) -> None:
    ids = [list(range(start, start + 20)) for start in (0, 100, 200, 300, 0, 100, 200, 300)]
    trace = clean_world / "trace.jsonl"
    trace.write_text(
        "".join(
            json.dumps({"timestamp": 0, "input_length": 512 * 20, "output_length": 64, "hash_ids": hash_ids}) + "\n"
            for hash_ids in ids
        )
    )
    assert serving.url is not None
    done = run("replay", str(trace), "--concurrency", "2", "--json", URL=serving.url, ADMIN_TOKEN=TOKEN)
    assert done.code == 0, done.err
    cache = done.json["cache"]
    assert cache["prompt_tokens"] == done.json["prompt_tokens"] == 8 * 320
    assert cache["device_tokens"] + cache["host_tokens"] + cache["recomputed_tokens"] == 8 * 320
    assert cache["device_tokens"] + cache["host_tokens"] > 0
    assert cache["stored_blocks"] > 0


def test_a_completion_through_the_client(serving: Serving) -> None:
    with KVFerryClient(serving.url, TOKEN) as client:
        (model,) = client.models()
        assert model["max_model_len"] > 0
        whole = client.complete([10, 20, 30], max_tokens=4, temperature=0, ignore_eos=True, return_token_ids=True)
        chunks = list(
            client.stream_completion([10, 20, 30], max_tokens=4, temperature=0, ignore_eos=True, return_token_ids=True)
        )
    streamed = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"]]
    assert streamed == whole["choices"][0]["token_ids"]
    assert len(streamed) == 4


def test_what_is_for_operators_is_in_the_log(serving: Serving) -> None:
    log = "\n".join(serving.lines)
    assert log.count("enableServiceLinks: false") == 1
    assert TOKEN not in log


def test_a_port_that_is_taken_refuses_to_start(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run("serve", PORT=port, POOL_BYTES="16MiB")
    assert done.code == 2
    assert f"PORT={port}" in done.err


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_when_told_to(told: signal.Signals, tmp_path: Path) -> None:
    with start_serving(tmp_path) as serving:
        serving.process.send_signal(told)
        assert serving.process.wait(START_DEADLINE_S) == 0, serving.lines
    with sqlite3.connect(tmp_path / "kvferry.db") as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
    database.close()
    assert not (tmp_path / "kvferry.db-wal").exists(), "the store was closed in order"
