"""A bad start is refused with one clear message and exit code 2."""

from __future__ import annotations

import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from kvferry.app.serve.process import Process
from kvferry.app.service.startup import StartProgress
from kvferry.app.settings import Settings
from kvferry.app.store import upgrade
from kvferry.app.telemetry.logs import start_logging
from kvferry.core.errors import StartError
from kvferry.cuda_ops.persistent.lock import lock_path
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.prepare import PoolPhase, Preparation
from tests.harness.commands import run_command, start_command
from tests.harness.server_process import free_port
from tests.harness.service_process import environment, serving
from tests.harness.waiting import DEADLINE_S, wait_until


def start_reason(port: int) -> str:
    """What a service that starts says that it is at; nothing if it does not answer."""
    try:
        return str(httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=DEADLINE_S, verify=False).json()["reasons"])
    except httpx.TransportError:
        return ""


def test_second_service_without_a_name_gets_a_number_and_a_pool(tmp_path: Path) -> None:
    shared = {"state_dir": tmp_path, "engine": "none", "pool_bytes": 1 << 20, "pool_kind": "file"}
    settings = Settings(_env_file=None, pool_path=tmp_path / "pool", **shared)
    with start_logging(settings) as logs:
        first, second = Process(settings, logs), Process(settings, logs)
        first.start()
        assert second.name == f"{first.name}-2"
        with pytest.raises(StartError, match=rf"^KVFERRY_ENGINE_NAME={first.name}: another process .*another name$"):
            Process(Settings(_env_file=None, pool_path=tmp_path / "pool", engine_name=first.name, **shared), logs)
        first.close()
        again = Process(settings, logs)
        assert again.name == first.name
        again.start()
        assert again.service.warm_start is not None, "its pool is found again"
        again.close()
        second.close()


def refused(folder: Path, **settings: object) -> str:
    """What `kvferry serve` says when it refuses these settings."""
    folder.mkdir(parents=True, exist_ok=True)
    ended = run_command(["serve"], environment(folder, settings), folder, timeout=120)
    assert ended.returncode == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    return ended.stderr


def test_a_pool_larger_than_memory_is_refused_with_both_numbers(tmp_path: Path) -> None:
    """vllm#42348, vllm#53042: more memory was configured than there is, and 1.92 times as much taken."""
    said = refused(tmp_path, pool_bytes="900TiB")
    numbers = [int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes \(", said)]
    assert len(numbers) == 2
    assert numbers[0] == 900 * 2**40
    assert 0 < numbers[1] < 2**40


def test_a_port_that_is_taken_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(tmp_path, port=port)
    assert f"PORT={port}" in said
    assert "device blocks" not in said


def test_requests_during_a_start_get_503_with_its_stage(tmp_path: Path) -> None:
    """vllm#42632, vllm#54792: what takes long before the engine is up shows in readiness, and no probe hangs."""
    port = free_port()
    database = tmp_path / "kvferry.db"
    upgrade(f"sqlite:///{database}")
    heard: set[str] = set()

    def ask(http: httpx.Client) -> bool:
        try:
            answer = http.get("/readyz")
            if answer.status_code == 503:
                heard.update(answer.json()["reasons"])
                assert http.get("/healthz").json() == {"status": "ok"}
                assert http.get("/health").status_code == 503
                early = http.get("/admin/v1/stats")
                assert (early.status_code, early.json()["type"]) == (503, "urn:kvferry:problem:starting")
                assert early.headers["Retry-After"]
        except httpx.TransportError:
            return False
        return "starting: opening the database" in heard

    def watch(locker: sqlite3.Connection) -> None:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_S, verify=False) as http:
            wait_until(lambda: ask(http), "told that the database is being opened")
        locker.execute("ROLLBACK")

    with (
        closing(sqlite3.connect(database, isolation_level=None, check_same_thread=False)) as locker,
        ThreadPoolExecutor(1) as threads,
    ):
        # Until the start was seen to wait for it, which it does for a while before it gives up.
        locker.execute("BEGIN EXCLUSIVE")
        watching = threads.submit(watch, locker)
        with serving(tmp_path, port=port):
            watching.result()
    assert all(reason.startswith("starting: ") for reason in heard)


def test_start_with_a_large_pool_reports_its_progress(caplog: pytest.LogCaptureFixture) -> None:
    """vllm#42632, vllm#54792: pinning took a minute, and nothing said so."""
    now_s, reasons = 100.0, list[str]()
    progress = StartProgress(clock=lambda: now_s)

    def tell(phase: PoolPhase, done_bytes: int, total_bytes: int) -> None:
        nonlocal now_s
        now_s += 2.0
        progress.note_pool(phase, done_bytes, total_bytes)
        reasons.append(progress.reason)

    with caplog.at_level("INFO", logger="kvferry.app.service.startup"):
        HostPool(8, 4096, 4096, preparation=Preparation(touch=True, num_threads=1, progress=tell)).close()
    shown = [f"mapping the pool: {4096 * done:,} of 32,768 bytes taken" for done in range(1, 9)]
    assert reasons == [f"starting: {stage}" for stage in shown]
    assert [record.getMessage() for record in caplog.records] == [shown[2], shown[5]]


def test_start_when_stopped_while_importing_ends_cleanly(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "kvferry.app.cli", "serve"],
        env=environment(tmp_path, {"engine": "none"}),
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        imported = next(line for line in process.stderr if line.split("|")[-1].strip().startswith("rich"))
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
    assert process.returncode == 0, said
    assert imported
    assert "Traceback" not in said


@pytest.mark.parametrize("kind", ["file", pytest.param("shm", marks=pytest.mark.long)])
def test_start_when_stopped_midway_removes_its_new_pool(tmp_path: Path, kind: str) -> None:
    database, name = tmp_path / "kvferry.db", f"interrupted-{os.getpid()}"
    upgrade(f"sqlite:///{database}")
    pool = SHARED_MEMORY / f"kvferry-{name}.pool" if kind == "shm" else tmp_path / "pool" / f"{name}.pool"
    port = free_port()
    settings: dict[str, object] = {
        "pool_kind": kind,
        "engine_name": name,
        "pool_bytes": "4MiB",
        "engine": "none",
        "port": port,
    }
    if kind == "file":
        settings["pool_path"] = str(pool.parent)
    try:
        with closing(sqlite3.connect(database, isolation_level=None)) as locker:
            # By then the pool is mapped, and its lock is held.
            locker.execute("BEGIN EXCLUSIVE")
            with (tmp_path / "stderr").open("w+") as stderr:
                process = start_command(["serve"], environment(tmp_path, settings), tmp_path, stderr, stderr)
                wait_until(lambda: "opening the database" in start_reason(port), "the stage after the pool's")
                assert pool.exists()
                process.send_signal(signal.SIGTERM)
                locker.execute("ROLLBACK")
                code = process.wait(DEADLINE_S)
                stderr.seek(0)
                assert (code, "Traceback" in stderr.read()) == (0, False)
        assert not pool.exists()
        with serving(tmp_path, **settings) as served:
            assert served.stats()["pool"]["slots"] > 0
            assert served.stop() == 0
        assert pool.exists(), "one that came to serve is kept"
    finally:
        pool.unlink(missing_ok=True)
        lock_path(pool).unlink(missing_ok=True)


def test_without_an_engine_the_admin_api_serves_alone(tmp_path: Path) -> None:
    with serving(tmp_path, engine="none", pool_bytes="16MiB") as served:
        assert served.stats()["engine"]["name"] == "none"
        assert served.http.post("/admin/v1/reset", json={}).json()["epoch"] == 1
        assert served.http.post("/v1/completions", json={}).status_code == 404
        assert served.stop() == 0
