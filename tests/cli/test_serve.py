"""`kvferry serve` as an operator runs it: a process that starts, serves a replay, and stops when told to."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from contextlib import AbstractContextManager, closing
from pathlib import Path

import pytest

from kvferry.app.client import KVFerryClient
from tests.cli.conftest import Run
from tests.harness.service_process import Served, environment, serving
from tests.harness.waiting import DEADLINE_S

TOKEN = "an-admin-token-of-this-test"


def serve(folder: Path) -> AbstractContextManager[Served]:
    return serving(
        folder,
        admin_token=TOKEN,
        device_blocks=64,
        pool_bytes="64MiB",
        # As Kubernetes injects it for a service called kvferry.
        service_host="10.0.0.1",
    )


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)], ids=lambda number: number.name
)
def test_serve_is_found_answers_and_stops_cleanly_on_a_signal(number: signal.Signals, tmp_path: Path, run: Run) -> None:
    with serve(tmp_path) as served:
        found = run("stats", "--json", STATE_DIR=str(tmp_path), ADMIN_TOKEN=TOKEN)
        assert found.code == 0, found.err
        assert found.json["engine"]["name"] == "embedded"
        body = {"prompt": [10, 20, 30], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
        with KVFerryClient(served.url, TOKEN) as client:
            (model,) = client.get("/v1/models")["data"]
            assert model["max_model_len"] > 0
            answer = client.send("POST", "/v1/completions", body)
        assert len(answer["choices"][0]["token_ids"]) == 4
        served.process.send_signal(number)
        assert served.process.wait(DEADLINE_S) == 0, served.log()
    assert served.log().count("enableServiceLinks: false") == 1
    assert TOKEN not in served.log()
    check_closed(tmp_path)


def check_closed(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "kvferry.db")) as database:
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
    assert not (folder / "kvferry.db-wal").exists(), "the store was closed in order"
    assert list((folder / "services").iterdir()) == [], "no client is sent to it any more"


STOPPED_WHILE_STARTING = """
import os, signal, sys, threading
from kvferry.app.cli import main

event, argument = sys.argv[1:]
is_sent = False

def hook(name, arguments):
    global is_sent
    if name == event and argument in str(arguments[0]) and not is_sent:
        if threading.current_thread() is threading.main_thread():
            is_sent = True
            os.kill(os.getpid(), signal.SIGTERM)

sys.addaudithook(hook)
sys.exit(main(["serve"]))
"""


@pytest.mark.parametrize(
    ("event", "argument"),
    [
        ("import", "typer"),
        pytest.param("import", "kvferry.app.serve.process", marks=pytest.mark.long),
        pytest.param("socket.bind", "", marks=pytest.mark.long),
        ("open", "kvferry-of-this-test"),
        pytest.param("sqlite3.connect", "kvferry.db", marks=pytest.mark.long),
        ("import", "kvferry.app.api.app"),
    ],
)
def test_serve_when_stopped_while_it_starts_never_serves(event: str, argument: str, tmp_path: Path) -> None:
    settings = {"engine": "none", "pool_bytes": "16MiB", "pool_kind": "file", "pool_path": tmp_path / "pools"}
    done = subprocess.run(
        [sys.executable, "-c", STOPPED_WHILE_STARTING, event, argument],
        env=environment(tmp_path, settings | {"engine_name": "kvferry-of-this-test"}),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "serving on" not in done.stderr
