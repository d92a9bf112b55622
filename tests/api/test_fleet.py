"""The list of engines: what heartbeats report, pages, states, what cannot be read, and the tenants of all pools."""

from __future__ import annotations

import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvferry.app.fleet import report_of
from kvferry.app.stats_history import StatsHistory
from kvferry.core.pool.inventory import Inventory
from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import ENGINE_NAME, READ, Service, start_service
from tests.harness.postgres import own_server
from tests.harness.service_process import serving
from tests.harness.stores import NAMESPACE, engine_report, open_store
from tests.harness.waiting import DEADLINE_S


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with start_service(tmp_path, admin_token="an-admin-token-0123", read_token=READ, num_slots=16) as running:
        running.shared_client.headers["Authorization"] = f"Bearer {READ}"
        running.settle_history()
        yield running


def listed(service: Service, **query: Any) -> dict[str, Any]:
    answer = service.shared_client.get("/admin/v1/fleet", params=query)
    assert answer.status_code == 200, answer.text
    return {one["name"]: one for one in answer.json()["items"]}


def test_fleet_lists_what_each_engine_reports(service: Service) -> None:
    store, manager = open_store(service.database, engine="other")
    store.start(Inventory(manager), engine_report)
    assert store.journal.flush(DEADLINE_S)
    found = listed(service)
    assert list(found) == ["other", ENGINE_NAME]
    other, own = found["other"], found[ENGINE_NAME]
    assert (other["state"], other["answering"], own["answering"]) == ("alive", False, True)
    assert (other["kind"], other["model"], other["version"], other["url"]) == ("vllm", "m", "1", "http://h:1")
    assert other["pool"] == {"kind": "pinned", "bytes": 64, "slots": 8, "used_slots": 2}
    assert (other["recent"]["hit_rate"], other["recent"]["hit_rates"]) == (0.6, [None, 0.5, 0.6])
    assert other["tiers"] == [
        {"name": "redis", "type": "redis", "namespace": NAMESPACE, "engines": 1},
        {"name": "disk", "type": "fs", "namespace": None, "engines": 0},
    ]
    assert own["recent"] is None, "it does not describe itself"
    assert store.close(DEADLINE_S)
    ended = listed(service)["other"]
    assert ended["state"] == "ended"
    assert ended["ended_at"] == ended["seen_at"]


def test_fleet_when_an_engine_is_silent_calls_it_lost_for_a_day(service: Service) -> None:
    def silent_for(seconds: float) -> None:
        with closing(sqlite3.connect(service.database, isolation_level=None)) as connection:
            connection.execute(
                "INSERT INTO engines (name, pool_kind, epoch, started_at, seen_at, eviction_rows, eviction_days) "
                "VALUES ('old', 'pinned', 0, 1, ?, 1000, 30) "
                "ON CONFLICT DO UPDATE SET seen_at = excluded.seen_at",
                (time.time() - seconds,),
            )

    silent_for(20)
    assert listed(service)["old"]["state"] == "alive"
    silent_for(60)
    old = listed(service)["old"]
    assert old["state"] == "lost"
    assert (old["host"], old["url"], old["model"], old["recent"], old["tiers"]) == (None, None, None, None, [])
    silent_for(100_000)
    assert "old" not in listed(service)


def test_fleet_is_paged_by_name(service: Service) -> None:
    names = [f"engine-{number}" for number in range(5)] + ["ümlaut"]
    for name in names:
        store, manager = open_store(service.database, engine=name)
        store.start(Inventory(manager), engine_report)
        assert store.close(DEADLINE_S)
    found: list[str] = []
    cursor = None
    while True:
        query = {"limit": 2} | ({} if cursor is None else {"cursor": cursor})
        page = service.shared_client.get("/admin/v1/fleet", params=query).json()
        found += [one["name"] for one in page["items"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert found == [*names[:5], ENGINE_NAME, "ümlaut"]
    assert service.shared_client.get("/admin/v1/fleet", params={"cursor": "engines_xyz"}).status_code == 422


@pytest.mark.long
def test_cursor_with_a_nul_is_answered_by_postgresql(tmp_path: Path) -> None:
    with (
        own_server() as server,
        serving(tmp_path, engine="none", engine_name="one", pool_bytes="2MiB", database_url=server.url) as served,
    ):
        for name, found in (("", ["one"]), ("z", [])):
            page = served.get(f"/admin/v1/fleet?cursor=engines_{name.encode().hex()}00")
            assert [engine["name"] for engine in page["items"]] == found


def test_engine_row_changed_by_hand_is_listed_as_unreadable(service: Service) -> None:
    for name, column, value in (
        ("a", "recent", '{"window_s": "x"}'),
        ("b", "seen_at", "1e999"),
        ("c", "tiers", "nonsense"),
    ):
        store, manager = open_store(service.database, engine=name)
        store.start(Inventory(manager), engine_report)
        assert store.close(DEADLINE_S)
        with closing(sqlite3.connect(service.database, isolation_level=None)) as connection:
            connection.execute(f"UPDATE engines SET {column} = ? WHERE name = ?", (value, name))
    found = listed(service)
    assert found["a"] == {"name": "a", "unreadable": ["recent"]}
    assert "seen_at" in found["b"]["unreadable"]
    assert found["c"] == {"name": "c", "unreadable": ["tiers"]}


def test_tenants_are_summed_over_engines_that_are_alive(service: Service) -> None:
    stores = []
    reported: dict[str, dict[str | None, int]] = {"one": {"a" * 16: 30, None: 20, "b" * 16: 2}, "two": {"a" * 16: 5}}
    for name, tenants_of_engine in reported.items():
        store, manager = open_store(service.database, engine=name)
        store.start(Inventory(manager), partial(engine_report, tenants=tenants_of_engine))
        assert store.journal.flush(DEADLINE_S)
        stores.append(store)

    def tenants(**query: Any) -> list[dict[str, Any]]:
        answer = service.shared_client.get("/admin/v1/fleet/tenants", params=query)
        assert answer.status_code == 200, answer.text
        return list(answer.json()["items"])

    found = [
        {"tenant": "a" * 16, "pool_bytes": 35, "engines": 2},
        {"tenant": None, "pool_bytes": 20, "engines": 1},
        {"tenant": "b" * 16, "pool_bytes": 2, "engines": 1},
    ]
    assert tenants() == found
    assert tenants(limit=1) == found[:1]
    assert stores[1].close(DEADLINE_S)
    assert [one["pool_bytes"] for one in tenants()] == [30, 20, 2], "an engine that ended does not count"
    assert stores[0].close(DEADLINE_S)


def test_report_counts_recent_hits_and_names_a_reachable_host(service: Service) -> None:
    engine, samples = service.engine, StatsHistory()
    samples.add(engine.offload.snapshot(), 0.0)
    for number in range(2):
        engine.answer(LoopRequest(f"r{number}", 128, seed=1))
        service.settle()
    for second in range(1, 121):
        samples.add(engine.offload.snapshot(), float(second))
    now = engine.offload.snapshot()
    found = report_of(service.context.process.engine, "1", "http://0.0.0.0:8787", now, samples, [], {"a": 5})
    recent, tokens = found.recent, now.prompt_tokens
    assert tokens.total == 256
    assert (recent.device_hit, recent.host_hit, recent.tier_hit) == (tokens.device_hit, tokens.host_hit, 0)
    rate = (tokens.device_hit + tokens.host_hit) / 256
    assert rate > 0.4
    assert recent.hit_rates == [pytest.approx(rate, abs=1e-4), None]
    assert (found.slots, found.used_slots) == (now.pool.slots, now.pool.slots - now.pool.free)
    assert found.tenants == {"a": 5}
    assert found.url == f"http://{socket.gethostname()}:8787"
    local = report_of(service.context.process.engine, "1", "http://[::1]:1", now, samples, [], {})
    assert local.url == "http://[::1]:1"
