"""A real Prometheus scrapes a live service by the example configuration: every query of `deploy/` finds series."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.deploy.conftest import PROMETHEUS, SELECTOR, alerts, dashboard, panel_queries
from tests.harness.debian import installed
from tests.harness.server_process import free_port
from tests.harness.service_process import Served, serving
from tests.harness.waiting import DEADLINE_S, wait_until

READ = "read-token-0123456789"
VARIABLES = {"$instance": ".*", "$__rate_interval": "15s", "$__range": "1m"}
pytestmark = pytest.mark.long


@dataclass(frozen=True)
class Scraper:
    """A Prometheus, and the service that it scrapes."""

    served: Served
    http: httpx.Client

    def api(self, path: str, **query: str) -> Any:
        answer = self.http.get(f"/api/v1/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def series(self, query: str) -> list[Any]:
        for name, value in VARIABLES.items():
            query = query.replace(name, value)
        return list(self.api("query", query=query)["result"])


@pytest.fixture(scope="module")
def scraper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraper]:
    binary, folder = installed("prometheus", "prometheus"), tmp_path_factory.mktemp("prometheus")
    tiers = json.dumps([{"type": "fs", "path": str(folder / "tier"), "max_bytes": "64MiB"}])
    settings = {"read_token": READ, "admin_token": "admin-token-0123456789", "metrics_port": 0, "tiers": tiers}
    with serving(folder / "state", pool_bytes="2MiB", device_blocks=64, **settings) as served:
        (found,) = (folder / "state" / "services").glob("*.json")
        address = json.loads(found.read_text())["metrics_url"].removeprefix("http://")
        write_configuration(folder, address)
        with (
            running_prometheus(binary, folder) as url,
            httpx.Client(base_url=url, timeout=DEADLINE_S, verify=False) as http,
        ):
            yield Scraper(served, http)


def write_configuration(folder: Path, address: str) -> None:
    """Copy the example, with the service's address and a scrape every second."""
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text())
    (scrape,) = config["scrape_configs"]
    scrape["static_configs"] = [{"targets": [address]}]
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (folder / scrape["authorization"]["credentials_file"]).write_text(READ)
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    (folder / "alerts.yml").write_text((PROMETHEUS / "alerts.yml").read_text())


@contextmanager
def running_prometheus(binary: str, folder: Path) -> Iterator[str]:
    """Run Prometheus until the block ends, and return its URL."""
    port = free_port()
    words = [f"--web.listen-address=127.0.0.1:{port}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "log").open("w") as log:
        words = [binary, "--config.file=prometheus.yml", *words]
        process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, env=os.environ | {"GOMAXPROCS": "1"})
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: process.poll() is not None or is_ready(url), "Prometheus is ready")
        assert process.poll() is None, (folder / "log").read_text()
        yield url
    finally:
        process.kill()
        process.wait(DEADLINE_S)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready", verify=False, timeout=DEADLINE_S).status_code == 200
    except httpx.TransportError:
        return False


def eventually(get: Callable[[], list[str]], what: str) -> None:
    """Wait until a list is empty, and name what is left of it if it stays."""
    left = [""]

    def is_empty() -> bool:
        left[:] = get()
        return not left

    try:
        wait_until(is_empty, what)
    except TimeoutError:
        raise AssertionError(f"{what}: {left}") from None


def test_queries_of_panels_and_alerts_return_series(scraper: Scraper) -> None:
    eventually(lambda: [] if scraper.series('up{job="kvferry"} == 1') else ["up"], "the service is scraped")
    variables = [one["definition"] for one in dashboard()["templating"]["list"] if one["type"] == "query"]
    read = [selector for alert in alerts() for selector in SELECTOR.findall(alert["expr"])]
    read += [selector.replace("$engine", ".*") for query in variables for selector in SELECTOR.findall(query)]
    assert len(read) > len(alerts())
    left = [*dict.fromkeys([*read, *(query for _, query in panel_queries())])]
    number = 0

    def without_series() -> list[str]:
        nonlocal number
        # Load all the time: some panels show rates that are not 0.
        scraper.served.complete([3 + (number % 5 * 17 + index * 7) % 240 for index in range(200)], max_tokens=1)
        number += 1
        left[:] = [query for query in left if not scraper.series(query)]
        return left

    eventually(without_series, "every query returns series")


def test_alerts_of_a_working_service_are_quiet(scraper: Scraper) -> None:
    def not_evaluated() -> list[str]:
        (group,) = scraper.api("rules")["groups"]
        return [rule["name"] for rule in group["rules"] if rule["health"] != "ok"]

    eventually(not_evaluated, "every alert is evaluated")
    (group,) = scraper.api("rules")["groups"]
    assert len(group["rules"]) == len(alerts())
    assert [rule["name"] for rule in group["rules"] if rule["state"] != "inactive"] == []
