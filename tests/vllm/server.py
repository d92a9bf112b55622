"""`vllm serve` as a process of its own, with kvferry in its engine-core process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

import httpx
import psutil

import vllm
from kvferry.app.common.discovery import find_services
from tests.harness.server_process import free_port
from tests.harness.waiting import DEADLINE_S, wait_until
from tests.vllm.engines import engine_options

ROOT = Path(__file__).parents[2]
START_S = 360.0
STOP_S = 60.0


class VllmServer:
    """A server that runs. `url` is vLLM's, `admin` a client of kvferry's admin API."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path, state: Path) -> None:
        self.process = process
        self.url = url
        self.log = log
        self.state = state
        self.client = httpx.Client(base_url=url, timeout=DEADLINE_S)
        self._admin: httpx.Client | None = None

    @property
    def admin(self) -> httpx.Client:
        if self._admin is None:
            self._admin = httpx.Client(base_url=find_services(self.state)[0].url, timeout=DEADLINE_S)
        return self._admin

    @property
    def model(self) -> str:
        """The model's name, as requests say it."""
        return str(self.client.get("/v1/models").json()["data"][0]["id"])

    def stats(self) -> Any:
        return self.admin.get("/admin/v1/stats").raise_for_status().json()

    def resize(self, num_bytes: int | str | None) -> Any:
        """Ask for another size of the pool, which it then comes to."""
        return self.admin.patch("/admin/v1/config", json={"pool_bytes": num_bytes}).raise_for_status().json()

    def resized(self, num_bytes: int) -> Any:
        """The pool's counts once it has come to a size, and none other is wanted."""
        seen: dict[str, Any] = {}

        def is_there() -> bool:
            seen.update(self.stats()["pool"])
            return seen["bytes"] == num_bytes and seen["slots"] == seen["wanted_slots"]

        with self.stepping():
            wait_until(is_there, f"the pool has {num_bytes:,} bytes", 60.0)
        return seen

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Have the engine take steps, for work that waits for them, by requests without a whole block."""
        model, done = self.model, threading.Event()

        def ask() -> None:
            while not done.is_set():
                body = {"model": model, "prompt": [1], "max_tokens": 1}
                httpx.post(f"{self.url}/v1/completions", json=body, timeout=DEADLINE_S).raise_for_status()

        with ThreadPoolExecutor(1) as client:
            asking = client.submit(ask)
            try:
                yield
            finally:
                done.set()
            asking.result(DEADLINE_S)

    def settled(self) -> Any:
        """The stats once nothing runs and no transfer is open."""
        seen: dict[str, Any] = {}

        def is_idle() -> bool:
            seen.update(self.stats())
            return not (seen["requests"]["running"] or seen["store"]["in_flight"] or seen["load"]["in_flight"])

        wait_until(is_idle, "the engine is idle", 30.0)
        return seen

    def metric(self, name: str, label: str = "") -> float:
        """A counter of vLLM's, summed over its labels, or over those with this one."""
        lines = self.client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name and label in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def stop(self, how: signal.Signals) -> int:
        """End it. Nothing of it is left after SIGKILL: its children would otherwise live on."""
        children = psutil.Process(self.process.pid).children(recursive=True) if how is signal.SIGKILL else []
        self.process.send_signal(how)
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.send_signal(how)
        return self.process.wait(STOP_S)


def environment(shim: Path, state: Path, **more: str) -> dict[str, str]:
    """What a process with vLLM in it needs here."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVFERRY_")}
    kept |= {
        "PYTHONPATH": f"{shim}{os.pathsep}{os.environ.get('PYTHONPATH', ROOT)}",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "KVFERRY_STATE_DIR": str(state),
    }
    return kept | more


def write_shim(folder: Path) -> Path:
    """`vllm serve` asks for the metadata of `vllm`, which the CPU wheel has under another name."""
    version = f"{vllm.__version__.split('+')[0]}+cpu"
    metadata = folder / f"vllm-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return folder


def serve_arguments(model: Path, transfer: Mapping[str, object] | None, port: int, **options: object) -> list[str]:
    """The command line for an engine like those of `engines`."""
    wanted = engine_options(model, **options)
    words = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(wanted.pop("model"))]
    wanted.pop("disable_log_stats")
    for name, value in {**wanted, "port": port, "host": "127.0.0.1"}.items():
        flag = "--" + name.replace("_", "-")
        words += [flag] if value is True else [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return words + ([] if transfer is None else ["--kv-transfer-config", json.dumps(transfer)])


@contextmanager
def serving(
    model: Path,
    transfer: Mapping[str, object] | None,
    folder: Path,
    env: Mapping[str, str] | None = None,
    **options: object,
) -> Iterator[VllmServer]:
    """A server for as long as this lasts. Its log is in `folder`, and so is the state of kvferry."""
    log, state = folder / "vllm.log", folder / "state"
    shim = write_shim(folder / "shim")
    port = free_port()
    with log.open("ab") as out:
        words = serve_arguments(model, transfer, port, **options)
        process = start(words, environment(shim, state, **(env or {})), out)
    server = VllmServer(process, f"http://127.0.0.1:{port}", log, state)
    try:
        wait_until(partial(_is_up, server), f"vllm serve is up; see {log}:\n{tail(log)}", START_S)
        yield server
    finally:
        try:
            if process.poll() is None:
                server.stop(signal.SIGTERM)
        finally:
            if process.poll() is None:
                server.stop(signal.SIGKILL)


def start(words: list[str], env: Mapping[str, str], out: IO[bytes]) -> subprocess.Popen[bytes]:
    more = {"VLLM_SERVER_DEV_MODE": "1"}
    return subprocess.Popen(words, env={**env, **more}, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)


def tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def _is_up(server: VllmServer) -> bool:
    if server.process.poll() is not None:
        raise RuntimeError(f"vllm serve ended with {server.process.returncode}:\n{tail(server.log)}")
    try:
        return server.client.get("/health").status_code == 200
    except httpx.TransportError:
        return False
