"""The database fails under a service that works: answers go on and stay right, and history catches up by itself."""

from __future__ import annotations

import re
import resource
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests.harness.identities import check_identities
from tests.harness.mounts import tmpfs
from tests.harness.postgres import own_server
from tests.harness.server_process import stopped
from tests.harness.service_process import Served, serving
from tests.harness.waiting import wait_until

PROMPTS = [[(number * 31 + i) % 240 + 3 for i in range(200)] for number in range(6)]
DISK_BYTES = 8 << 20
FILE_LIMIT_BYTES = 8 << 10
"""Less than any transaction adds to the write-ahead log, wherever that begins anew; the log of a start is shorter."""

Trouble = Callable[[Served, Path], AbstractContextManager[None]]


@contextmanager
def locked(served: Served, database: Path) -> Iterator[None]:
    """By another process, as a shell left open would."""
    with closing(sqlite3.connect(database, isolation_level=None)) as locker:
        locker.execute("BEGIN EXCLUSIVE")
        yield
        locker.execute("ROLLBACK")


@contextmanager
def disk_full(served: Served, database: Path) -> Iterator[None]:
    """Fill the disk with another file."""
    ballast = database.with_name("ballast")
    # The journal may write meanwhile, so no size is known to fit.
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    ballast.unlink()


@contextmanager
def files_limited(served: Served, database: Path) -> Iterator[None]:
    """No file of the process may grow beyond so many bytes."""
    soft, hard = resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (FILE_LIMIT_BYTES, hard))
    yield
    resource.prlimit(served.process.pid, resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("trouble", "cause"),
    [
        (locked, r"is locked by another connection \(SQLITE_BUSY\)"),
        pytest.param(disk_full, r"is full \(SQLITE_FULL\); free disk space, .*", marks=pytest.mark.long),
        pytest.param(files_limited, r"cannot grow \(SQLITE_IOERR_WRITE\); free disk space, .*", marks=pytest.mark.long),
    ],
    ids=["locked", "full", "limited"],
)
def test_service_when_the_database_fails_serves_and_recovers(tmp_path: Path, trouble: Trouble, cause: str) -> None:
    with (
        tmpfs(tmp_path / "disk", DISK_BYTES) as disk,
        serving(
            tmp_path,
            dtype="float64",
            device_blocks=64,
            pool_bytes=65536 * 20,
            database_url=f"sqlite:///{disk}/kvferry.db",
        ) as served,
    ):
        database = disk / "kvferry.db"
        expected = [served.tokens(prompt, max_tokens=2) for prompt in PROMPTS]
        evicted = served.settle()["evictions"]["total"]
        with trouble(served, database):
            assert [served.tokens(prompt, max_tokens=2) for prompt in PROMPTS] == expected
            assert served.settle()["evictions"]["total"] > evicted > 0
            wait_until(lambda: served.get("/readyz")["degraded"], "degraded")
            assert re.fullmatch(rf"the database {cause} \(for \d+ s\)", *served.get("/readyz")["degraded"])
            assert served.http.put("/admin/v1/requests/r/policy", json={"store": False}).status_code == 503
            assert served.http.get("/admin/v1/requests/r").status_code == 404
            assert [served.tokens(prompt, max_tokens=2) for prompt in PROMPTS] == expected
        wait_until(lambda: not served.get("/readyz")["degraded"], "well again")
        stats = served.settle()
        check_identities(stats)
        wait_until(lambda: served.stats()["journal"]["queued"] == 0, "history is written")
        page = served.get("/admin/v1/evictions?limit=1000")
        assert len(page["items"]) + stats["journal"]["dropped"] == stats["evictions"]["total"] < 1000
        assert served.stop() == 0
        with closing(sqlite3.connect(database)) as rows:
            assert rows.execute("select count(*) from slots").fetchone() == (stats["pool"]["ready"],)
            assert rows.execute("pragma integrity_check").fetchone() == ("ok",)
        assert "Traceback" not in served.log()


@pytest.mark.long
def test_stop_when_the_server_hangs_under_a_call_ends_in_time(tmp_path: Path) -> None:
    with (
        own_server() as server,
        serving(tmp_path, engine="none", database_url=server.url) as served,
    ):
        assert served.http.get("/admin/v1/evictions").status_code == 200
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        # The kernel goes on to answer for them.
        with stopped([server.pid, *map(int, children)]):
            assert served.http.get("/admin/v1/evictions").status_code == 503
            assert served.stop() == 0
        assert "Traceback" not in served.log()
