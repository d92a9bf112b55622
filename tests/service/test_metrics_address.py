"""Metrics on an address of their own: what is served there, to which callers, and what happens when it is taken."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvferry.app.service.server import answering, listen, url_of
from kvferry.app.service.startup import StartProgress
from tests.harness.commands import run_command
from tests.harness.service_process import Served, environment, serving
from tests.harness.waiting import DEADLINE_S

READ = "read-token-0123456789"
ADMIN = "admin-token-0123456789"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("metrics")
    tokens = {"admin_token": ADMIN, "read_token": READ}
    with serving(folder, engine="none", pool_bytes="8MiB", metrics_port=0, **tokens) as running:
        yield running


@pytest.fixture(scope="module")
def address(served: Served) -> str:
    """The address, from the discovery file."""
    (file,) = (served.log_path.parent / "services").glob("*.json")
    url: str = json.loads(file.read_text())["metrics_url"]
    assert url != served.url
    assert f"metrics alone on {url}/metrics" in served.log()
    return url


def get(url: str, token: str | None = ADMIN, method: str = "GET") -> httpx.Response:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.request(method, url, headers=headers, trust_env=False, verify=False, timeout=DEADLINE_S)


def test_metrics_are_served_on_both_addresses(served: Served, address: str) -> None:
    for url in (address, served.url):
        for token in (READ, ADMIN):
            answer = get(f"{url}/metrics", token)
            assert answer.status_code == 200
            assert "kvferry_ready 1.0" in answer.text


def test_metrics_address_without_a_token_is_401(address: str) -> None:
    for token in (None, "another-token-0123"):
        assert get(f"{address}/metrics", token).status_code == 401


@pytest.mark.parametrize(
    "path", ["/", "/healthz", "/admin/v1/stats", "/ui/", "/docs", "/v1/models", "/metrics/", "//metrics"]
)
def test_metrics_address_has_nothing_else(address: str, path: str) -> None:
    for method in ("GET", "POST", "DELETE"):
        answer = get(address + path, method=method)
        assert answer.status_code == 404
        assert answer.headers["X-Request-ID"]


def test_metrics_address_during_a_start_has_nothing_else() -> None:
    with (
        listen("127.0.0.1", 0) as listener,
        listen("127.0.0.1", 0) as metrics,
        answering(listener, StartProgress(), metrics),
    ):
        assert get(f"{url_of(listener)}/healthz").status_code == 200
        assert get(f"{url_of(metrics)}/healthz").status_code == 404
        assert get(f"{url_of(metrics)}/metrics").status_code == 503


def test_taken_metrics_port_is_refused_by_its_name(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = environment(tmp_path, {"engine": "none", "metrics_port": port})
        ended = run_command(["serve"], settings, tmp_path, timeout=DEADLINE_S)
    assert ended.returncode == 2
    assert re.search(rf"KVFERRY_METRICS_HOST=127.0.0.1 KVFERRY_METRICS_PORT={port} cannot be", ended.stderr)
