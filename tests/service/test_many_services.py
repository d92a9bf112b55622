"""Many services on one PostgreSQL: they start at once, do not hinder each other, and outlive its faults."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import make_url

from tests.harness.postgres import Server, new_database, own_server
from tests.harness.server_process import stopped
from tests.harness.service_process import Served, serving
from tests.harness.stores import shell
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.long

NUM_SERVICES = 8


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with own_server() as server:
        yield server


@pytest.fixture
def url(server: Server) -> Iterator[str]:
    server.stop()
    server.start()
    with new_database(server.url) as url:
        yield url


def engine(folder: Path, name: str, url: str, **settings: object) -> Any:
    given = {"pool_bytes": "2MiB", "device_blocks": 64, "eviction_history_rows": 1000} | settings
    return serving(folder / name, engine_name=name, database_url=url, **given)


def prompts(service: Served, first: int, number: int) -> None:
    """Send prompts of which no two begin alike, so that blocks of earlier ones leave the full pool."""
    for one in range(first, first + number):
        service.complete([3 + (one * 31 + i * (one + 1)) % 240 for i in range(200)], max_tokens=1)


def engines(url: str) -> dict[str, str]:
    """The state of each engine of a database, by its name."""
    states = "CASE WHEN ended_at IS NOT NULL THEN 'ended' ELSE 'alive' END"
    return dict(shell(url, f"SELECT name, {states} FROM engines ORDER BY name"))


def is_written(service: Served) -> bool:
    return bool(service.stats()["journal"]["queued"] == 0)


def test_services_started_at_once_on_an_empty_database_serve(tmp_path: Path, url: str) -> None:
    names = [f"engine-{number}" for number in range(NUM_SERVICES)]
    with ExitStack() as running, ThreadPoolExecutor(NUM_SERVICES) as threads:
        starts = [engine(tmp_path, name, url, engine="none", pool_bytes="8MiB") for name in names]
        services = list(threads.map(lambda start: running.enter_context(start), starts))
        wait_until(lambda: engines(url) == dict.fromkeys(names, "alive"), "all have registered")
        assert shell(url, "SELECT version_num FROM alembic_version") == [("0015",)]
        assert services[0].stop() == 0
        wait_until(lambda: engines(url)[names[0]] == "ended", "it has ended cleanly")


def test_service_killed_while_it_writes_hinders_no_other(tmp_path: Path, url: str) -> None:
    with (
        psycopg.connect(url, autocommit=True) as other,
        engine(tmp_path, "killed", url) as killed,
        engine(tmp_path, "lives", url) as lives,
    ):
        prompts(killed, 0, 8)
        # Its next transaction waits for this lock when it is killed.
        with other.transaction():
            other.execute("SELECT 1 FROM engines WHERE name = 'killed' FOR UPDATE")
            prompts(killed, 20, 8)
            waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
            wait_until(lambda: shell(url, waiting) == [(1,)], "it writes")
            killed.process.kill()
            killed.process.wait()
            prompts(lives, 0, 12)
            wait_until(lambda: is_written(lives), "the other one writes meanwhile")
            assert lives.stats()["journal"]["written"] > 0
            assert lives.get("/readyz")["degraded"] == []
        with engine(tmp_path, "killed", url):
            wait_until(lambda: engines(url)["killed"] == "alive", "it writes again")


def test_services_when_the_database_is_restarted_catch_up(tmp_path: Path, url: str, server: Server) -> None:
    names = ("one", "two")
    with ExitStack() as running:
        services = [running.enter_context(engine(tmp_path, name, url)) for name in names]
        for service in services:
            prompts(service, 0, 8)
        server.stop()
        for service in services:
            prompts(service, 20, 8)
            wait_until(lambda service=service: service.get("/readyz")["degraded"] != [], "it shows")
            assert service.http.get("/admin/v1/evictions").status_code == 503
        server.start()
        for service in services:
            wait_until(lambda service=service: service.get("/readyz")["degraded"] == [], "it works again")
            wait_until(lambda service=service: is_written(service), "history catches up")
            stats = service.stats()
            assert stats["journal"]["dropped"] == 0
            evicted = stats["evictions"]["total"] + stats["evictions"]["regretted"]
            # A row of stats a minute, too.
            assert evicted < stats["journal"]["written"] <= evicted + len(shell(url, "SELECT id FROM stats_rows"))
        assert set(engines(url)) == set(names)


def test_readyz_when_the_database_fails_names_the_cause_alone(tmp_path: Path, url: str, server: Server) -> None:
    own = make_url(url).set(username="owner", password="sesame-1")
    troubles = {
        "is read-only (25006)": ("SET default_transaction_read_only = on", "RESET ALL"),
        "cannot be reached": ("PASSWORD 'sesame-2'", "PASSWORD 'sesame-1'"),
    }

    def causes() -> set[str]:
        answer = served.get("/readyz")
        assert answer["ready"]
        return {re.sub(r" \(for \d+ s\)$", "", text) for text in answer["degraded"]}

    with psycopg.connect(url, autocommit=True) as admin:
        admin.execute("CREATE ROLE owner LOGIN PASSWORD 'sesame-1'")
        admin.execute(f'ALTER DATABASE "{own.database}" OWNER TO owner')
        lines = "(VALUES ('host all owner all scram-sha-256'), ('host all all all trust'))"
        (path,) = admin.execute("SHOW hba_file").fetchone() or ("",)
        admin.execute(f"COPY {lines} TO '{path}'")
        admin.execute("SELECT pg_reload_conf()")
        with engine(tmp_path, "e", own.render_as_string(hide_password=False), engine="none") as served:
            for cause, changes in troubles.items():
                for change, wanted in zip(changes, ({f"the database {cause}"}, set()), strict=True):
                    admin.execute(f"ALTER ROLE owner {change}")
                    admin.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'owner'")
                    wait_until(lambda wanted=wanted: causes() == wanted, cause)
            server.stop()
            wait_until(lambda: causes() == {"the database cannot be reached"}, "it shows")
            log = served.log()
    server.start()
    assert all(text in log for text in (f"{own.host}:{own.port}", "authentication failed", *troubles))
    assert "sesame" not in log


def test_service_whose_connection_hangs_serves_and_others_write(tmp_path: Path, url: str) -> None:
    sessions = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    with engine(tmp_path, "slow", url) as slow:
        prompts(slow, 0, 8)
        own = [pid for (pid,) in shell(url, sessions)]
        with engine(tmp_path, "quick", url) as quick, stopped(own):
            before = quick.stats()["journal"]["written"]
            prompts(slow, 20, 8)
            prompts(quick, 0, 12)
            wait_until(lambda: quick.stats()["journal"]["written"] > before, "the other one writes")
            assert quick.get("/readyz") == {"ready": True, "reasons": [], "degraded": []}
            assert slow.stats()["journal"]["queued"] > 0
            degraded = slow.get("/readyz")
            assert degraded["ready"], "it serves"
            wait_until(lambda: "one write has taken" in json.dumps(slow.get("/readyz")), "it shows")
        wait_until(lambda: is_written(slow), "it catches up")
        wait_until(lambda: slow.get("/readyz")["degraded"] == [], "it works again")


def test_history_of_engines_that_are_gone_is_trimmed_by_the_first_alive(tmp_path: Path, url: str) -> None:
    with engine(tmp_path, "gone", url) as gone:
        prompts(gone, 0, 12)
        wait_until(lambda: is_written(gone) and shell(url, "SELECT id FROM evictions"), "it has history")
        assert gone.stop() == 0
    with psycopg.connect(url, autocommit=True) as other:
        long_ago = "seen_at = seen_at - 4000000, ended_at = ended_at - 4000000"
        other.execute(f"UPDATE engines SET {long_ago} WHERE name = 'gone'")
        for table in ("evictions", "stats_rows"):
            other.execute(f"UPDATE {table} SET time = time - 4000000")
    assert shell(url, "SELECT count(*) > 0 FROM slots WHERE engine = 'gone'") == [(True,)]
    names = ("a", "b")
    with ExitStack() as running:
        services = [running.enter_context(engine(tmp_path, name, url)) for name in names]
        for service in services:
            prompts(service, 0, 12)
        wait_until(lambda: shell(url, "SELECT count(*) FROM evictions WHERE engine = 'gone'") == [(0,)], "history")
        wait_until(lambda: shell(url, "SELECT count(*) FROM slots WHERE engine = 'gone'") == [(0,)], "its slots")
        # The next pass is a minute later.
        services[0].http.patch("/admin/v1/config", json={"eviction_history_rows": 999})
        wait_until(lambda: shell(url, "SELECT name FROM engines ORDER BY name") == [("a",), ("b",)], "its row")
        assert services[0].get("/readyz")["degraded"] == []
