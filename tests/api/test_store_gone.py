"""What works, and what says 503, while the database is locked by somebody else, can only be read, or is gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import Service, fill, locked, start_service
from tests.harness.stores import SHORT_WAITS, read_only
from tests.harness.waiting import wait_until


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Service]:
    """A service of a test's own that does not wait long for a lock."""
    with start_service(tmp_path, waits=SHORT_WAITS) as running:
        yield running


@contextmanager
def moved_away(service: Service) -> Iterator[None]:
    """Take the file away from under the process."""
    away = service.database.with_name("away.db")
    service.database.rename(away)
    try:
        yield
    finally:
        away.rename(service.database)


@contextmanager
def only_read(service: Service) -> Iterator[None]:
    """Have the file refuse every write."""
    with read_only():
        yield


NEEDS_NO_DATABASE = (
    "/healthz",
    "/metrics",
    "/admin/v1/stats",
    "/admin/v1/policy",
    "/admin/v1/rules",
    "/admin/v1/requests",
    "/admin/v1/requests/one",
    "/admin/v1/blocks",
    "/admin/v1/slots/map",
    "/admin/v1/config",
)
Trouble = Callable[[Service], Any]


@pytest.mark.parametrize("trouble", [locked, moved_away, only_read])
def test_write_is_refused_and_not_applied(fresh: Service, client: httpx.Client, trouble: Trouble) -> None:
    client.put("/admin/v1/requests/kept/policy", json={"store": False})
    kept = client.put("/admin/v1/rules/kept", json={"order": 1}).json()
    with trouble(fresh):
        calls: list[tuple[str, str, dict[str, Any]]] = [
            ("PUT", "/admin/v1/requests/r/policy", {"json": {"store": False}}),
            ("DELETE", "/admin/v1/requests/kept/policy", {}),
            ("POST", "/admin/v1/rules", {"json": {"name": "r"}}),
            ("PUT", "/admin/v1/rules/kept", {"json": {"order": 5}}),
            ("DELETE", "/admin/v1/rules/kept", {}),
        ]
        for method, path, sent in calls:
            answer = client.request(method, path, **sent)
            assert answer.status_code == 503, (path, answer.text)
            assert answer.headers["Content-Type"] == "application/problem+json"
            assert answer.json()["type"] == "urn:kvferry:problem:store-unavailable"
            assert answer.headers["Retry-After"]
        assert client.get("/admin/v1/requests/r").status_code == 404
        assert client.get("/admin/v1/requests/kept").json()["policy"]["store"]["source"] == "override"
        assert client.get("/admin/v1/rules").json()["items"] == [kept]


@pytest.mark.parametrize("trouble", [locked, moved_away, only_read])
def test_runtime_changes_when_the_database_fails_apply_and_are_logged(
    fresh: Service, client: httpx.Client, trouble: Trouble, caplog: pytest.LogCaptureFixture
) -> None:
    with trouble(fresh), caplog.at_level(logging.WARNING, logger="kvferry.app.api.audit"):
        assert client.patch("/admin/v1/policy", json={"store": False}).json()["store"]["source"] == "runtime"
        changed = client.patch("/admin/v1/config", json={"max_pinned_fraction": 0.5})
        assert changed.json()["max_pinned_fraction"]["value"] == 0.5
        lines = [record.getMessage() for record in caplog.records if record.name == "kvferry.app.api.audit"]
        assert [line.count('"status": 200, "outcome": "applied"') for line in lines] == [1, 1]
        assert '"what": {"store": false}' in lines[0]
    wait_until(lambda: client.get("/admin/v1/audit").status_code == 200, "the database is used again")
    page = client.get("/admin/v1/audit").json()
    assert page["logged_only"] == 2
    assert page["logged_only_since"] is not None


@pytest.mark.parametrize("trouble", [locked, moved_away, only_read])
def test_drops_and_resets_when_the_database_fails_work_and_are_logged(
    fresh: Service, client: httpx.Client, trouble: Trouble, caplog: pytest.LogCaptureFixture
) -> None:
    first, second, *_ = fill(fresh, LoopRequest("one", 160, seed=1))
    with (
        trouble(fresh),
        caplog.at_level(logging.WARNING, logger="kvferry.app.api.audit"),
    ):
        assert client.put(f"/admin/v1/blocks/{first}/pin").status_code == 200
        assert client.delete(f"/admin/v1/blocks/{first}/pin").status_code == 204
        assert client.delete(f"/admin/v1/blocks/{second}").status_code == 204
        answer = client.post("/admin/v1/reset", json={"reason": "wrong text"}, headers={"X-Request-ID": "emergency-1"})
        assert (answer.status_code, answer.json()["dropped_blocks"]) == (200, 9)
        lines = [record.getMessage() for record in caplog.records if record.name == "kvferry.app.api.audit"]
        assert len(lines) == 4
        assert "emergency-1" in lines[3]
        assert "wrong text" in lines[3]
        assert '"status": 200, "outcome": "applied"' in lines[3]


def test_tier_when_its_open_resets_cannot_be_read_is_not_attached(
    fresh: Service, client: httpx.Client, tmp_path: Path
) -> None:
    near, far = "/admin/v1/tiers/near", "/admin/v1/tiers/far"
    folder = tmp_path / "tiers"
    folder.mkdir()
    definition = {"type": "fs", "path": str(folder / "tier"), "max_bytes": "1GiB"}
    assert client.put(near, json=definition).status_code == 201
    with moved_away(fresh):
        answer = client.put(far, json=definition)
        assert (answer.status_code, answer.json()["type"]) == (503, "urn:kvferry:problem:store-unavailable")
        assert client.put(near, json={"enabled": False}).json()["enabled"] is False
        assert [tier["name"] for tier in client.get("/admin/v1/tiers").json()["items"]] == ["near"]
    assert client.put(far, json=definition).status_code == 201


@pytest.mark.parametrize("trouble", [locked, moved_away, only_read])
def test_reads_when_the_database_fails_are_answered(fresh: Service, client: httpx.Client, trouble: Trouble) -> None:
    with trouble(fresh):
        fresh.engine.answer(LoopRequest("one", 160, seed=1))
        for path in NEEDS_NO_DATABASE:
            assert client.get(path).status_code == 200, path


def test_lists_from_a_database_that_is_gone_are_503(fresh: Service, client: httpx.Client) -> None:
    fresh.store.close(0.1)
    for path in ("/admin/v1/audit", "/admin/v1/evictions", "/admin/v1/evictions/summary"):
        answer: httpx.Response = client.get(path)
        assert answer.status_code == 503
        assert answer.json()["type"] == "urn:kvferry:problem:store-unavailable"
        assert "nothing was changed" not in answer.json()["detail"]
