"""The whole service as its users run it: `kvferry serve` in a process of its own, and an HTTP client."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.harness.commands import Command, start_command
from tests.harness.waiting import DEADLINE_S, wait_until

ROOT = Path(__file__).parents[2]
_URL = re.compile(r"serving on (http://\S+?):? ")


def environment(folder: Path, settings: dict[str, object], import_path: Path = ROOT) -> dict[str, str]:
    env = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(import_path),
        "KVFERRY_STATE_DIR": str(folder),
        "KVFERRY_PORT": "0",
        # Whatever sizes a test gives to pool and device.
        "KVFERRY_STORE_MODE": "eager",
    }
    return os.environ | env | {f"KVFERRY_{name.upper()}": str(value) for name, value in settings.items()}


@dataclass
class Served:
    """A running service."""

    process: Command
    log_path: Path
    url: str
    http: httpx.Client

    def log(self) -> str:
        return self.log_path.read_text()

    def get(self, path: str) -> Any:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stats(self) -> Any:
        return self.get("/admin/v1/stats")

    def complete(self, prompt: list[int] | str, request_id: str | None = None, **body: Any) -> Any:
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "return_token_ids": True} | body
        headers = {"X-Request-ID": request_id} if request_id else {}
        answer = self.http.post("/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def tokens(self, prompt: list[int] | str, **body: Any) -> list[int]:
        return list(self.complete(prompt, **body)["choices"][0]["token_ids"])

    def is_idle(self) -> bool:
        stats = self.stats()
        open_blocks = stats["store"]["in_flight"] + stats["load"]["in_flight"]
        return stats["requests"]["running"] == 0 and open_blocks == 0 and stats["pool"]["storing"] == 0

    def settle(self) -> Any:
        """Wait until every request is over and every transfer has ended."""
        wait_until(self.is_idle, "idle")
        return self.stats()

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(DEADLINE_S)


def is_well(answer: httpx.Response) -> bool:
    """Whether a service is ready, and so are its tiers."""
    return answer.status_code == 200 and not answer.json()["degraded"]


@contextmanager
def serving(
    folder: Path,
    *,
    import_path: Path = ROOT,
    is_up: Callable[[httpx.Response], bool] = is_well,
    **settings: object,
) -> Iterator[Served]:
    """`kvferry serve` with these settings, ready; killed at the end if it has not been stopped.

    `is_up` decides by the answer of `/readyz`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log_path = folder / f"serve-{time.monotonic_ns()}.log"
    with log_path.open("w") as log:
        env = environment(folder, settings, import_path)
        # Nothing of the folder that tests are run in, such as its `.env`, may be found.
        process = start_command(["serve"], env, folder, log, log)
    try:
        wait_until(
            lambda: process.poll() is not None or _URL.search(log_path.read_text()) is not None,
            "serving",
        )
        match = _URL.search(log_path.read_text())
        assert match is not None, f"exit code {process.poll()}:\n{log_path.read_text()}"
        token = settings.get("admin_token")
        headers = {"Authorization": f"Bearer {token}"} if token is not None else {}
        with httpx.Client(base_url=match[1], headers=headers, timeout=DEADLINE_S, verify=False) as http:
            served = Served(process, log_path, match[1], http)
            wait_until(lambda: is_up(http.get("/readyz")), "ready")
            yield served
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(DEADLINE_S)
