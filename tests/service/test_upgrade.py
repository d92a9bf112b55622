"""An upgrade from an earlier version with a kept pool and a database, the way back, and what a removal leaves.

The earlier version is the commit before one that added a migration: what `docs/upgrading.md` says is done with both.
"""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import make_url

from tests.harness.debian import postgres_binaries
from tests.harness.postgres import new_database, own_server
from tests.harness.service_process import ROOT, Served, serving
from tests.harness.waiting import DEADLINE_S
from tests.service.test_restart import BLOCKS, PROMPTS, SETTINGS, kill, warm_up

pytestmark = pytest.mark.long

ADDED = "migrations/versions/0009_tenant_limits.py"
OLD_SCHEMA, NEW_SCHEMA = "0008", "0015"
RULE = {"match": {"tenant": "0123456789abcdef"}, "policy": {"store": False}}


def git(*words: str) -> bytes:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else b""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for import paths that has the earlier version."""
    added = git("log", "--diff-filter=A", "--format=%H", "--", ADDED).decode().split()
    files = git("archive", f"{added[-1]}^") if added else b""
    if not files:
        pytest.skip("the checkout has no history from before the last migrations")
    folder = tmp_path_factory.mktemp("old")
    (folder / "kvferry").mkdir()
    subprocess.run(["tar", "-x", "-C", folder / "kvferry"], input=files, check=True)
    return folder


@dataclass
class Sqlite:
    """The default database. Copied and put back as the page says, by Python's `sqlite3` instead of the program's."""

    folder: Path

    @property
    def settings(self) -> dict[str, object]:
        return {}

    def copy(self) -> None:
        source, target = (sqlite3.connect(self.folder / name) for name in ("kvferry.db", "kvferry-before.db"))
        with closing(source), closing(target):
            source.backup(target)

    def restore(self) -> None:
        for suffix in ("-wal", "-shm"):
            (self.folder / f"kvferry.db{suffix}").unlink(missing_ok=True)
        shutil.copy(self.folder / "kvferry-before.db", self.folder / "kvferry.db")


@dataclass
class Postgres:
    """A database of a server, copied by `pg_dump` and put into another one."""

    url: str
    other_url: str
    folder: Path
    used: str = ""

    @property
    def settings(self) -> dict[str, object]:
        return {"database_url": self.used or self.url}

    def copy(self) -> None:
        self._run("pg_dump", "--file", str(self.folder / "before.sql"), plain(self.url))

    def restore(self) -> None:
        self._run(
            "psql", "--quiet", "--set=ON_ERROR_STOP=1", "--file", str(self.folder / "before.sql"), plain(self.other_url)
        )
        self.used = self.other_url

    def _run(self, program: str, *words: str) -> None:
        done = subprocess.run([postgres_binaries() / program, *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def plain(url: str) -> str:
    """The URL as PostgreSQL's programs take it."""
    return make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)


Database = Sqlite | Postgres


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    if request.param == "sqlite":
        (tmp_path / "state").mkdir()
        yield Sqlite(tmp_path / "state")
        return
    with own_server() as server, new_database(server.url) as url, new_database(server.url) as other_url:
        yield Postgres(url, other_url, tmp_path)


Serve = Callable[[Path], AbstractContextManager[Served]]


@pytest.fixture
def serve(tmp_path: Path, database: Database) -> Serve:
    def serve(import_path: Path) -> AbstractContextManager[Served]:
        settings = SETTINGS | {"pool_path": tmp_path / "pool"} | database.settings
        return serving(tmp_path / "state", import_path=import_path, **settings)

    return serve


def rules(served: Served) -> list[Any]:
    return [(rule["name"], rule["policy"]["store"]) for rule in served.get("/admin/v1/rules")["items"]]


def check_warm(served: Served, answers: list[list[int]]) -> None:
    """All blocks were recovered with their history, and answer as before."""
    stats = served.stats()
    assert stats["recovery"]["dropped"] == {}
    assert stats["recovery"]["recovered"] == stats["recovery"]["known"] == len(PROMPTS) * (BLOCKS + 1)
    assert rules(served) == [("quiet", False)]
    assert warm_up(served) == answers
    assert served.stats()["prompt_tokens"]["host_hit"] >= (len(PROMPTS) - 1) * BLOCKS * 16


def test_an_upgrade_and_the_way_back_keep_pool_and_database(
    old: Path, serve: Serve, database: Database, tmp_path: Path
) -> None:
    with serve(old) as served:
        answers = warm_up(served)
        assert served.http.put("/admin/v1/rules/quiet", json=RULE).status_code == 201
        assert served.stop() == 0
    with serve(old) as served:
        database.copy()
        assert served.stop() == 0

    with serve(ROOT) as served:
        assert f"schema upgraded from {OLD_SCHEMA} to {NEW_SCHEMA}" in served.log()
        check_warm(served, answers)
        # Rows that the earlier version must not see are in the write-ahead log.
        assert served.http.delete("/admin/v1/rules/quiet").status_code == 204
        kill(served)

    refused = pytest.raises(AssertionError, match=r"exit code 2:\n(.|\n)*written by a newer version")
    with refused, serve(old):
        pass
    with serve(ROOT) as served:
        assert rules(served) == [], "the refused start has changed the database"
        assert served.stop() == 0

    database.restore()
    with serve(old) as served:
        check_warm(served, answers)
        assert served.stop() == 0


def test_a_removal_leaves_only_what_the_page_names(serve: Serve, database: Database, tmp_path: Path) -> None:
    before = {path.name for path in Path("/dev/shm").iterdir()}
    with serve(ROOT) as served:
        warm_up(served)
        process = served.process
        assert served.stop() == 0
    assert process.wait(DEADLINE_S) == 0
    assert {path.name for path in (tmp_path / "pool").iterdir()} == {"kept.pool", "kept.pool.lock"}
    left = {path.name for path in tmp_path.iterdir()} - {"postgres"}
    assert left == {"pool", "state"}
    assert {path.name for path in Path("/dev/shm").iterdir() if "kvferry" in path.name} <= before
