"""Claims of names: one process at a time writes under a name, and a killed one has none."""

from __future__ import annotations

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from sqlalchemy.exc import SQLAlchemyError

from kvferry.app.store import NameClaim, StoreError, claim_name, name_claim
from kvferry.app.store.errors import raising_store_error
from kvferry.core.pool.inventory import Inventory
from tests.harness.commands import Command, running_script
from tests.harness.postgres import new_database, own_server
from tests.harness.stores import Where, open_store, running, url_of
from tests.harness.waiting import DEADLINE_S, wait_until

CLAIMING = """
import mmap, signal, sys
from kvferry.app.store import claim_name
claim = claim_name(sys.argv[1], "e")
memory = mmap.mmap(-1, int(sys.argv[2]), flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_POPULATE", 0))
print("claimed", flush=True)
signal.pause()
"""


@contextmanager
def other_process(where: Where, memory_bytes: int = 4096) -> Iterator[Command]:
    """A process that has claimed the name e, and memory."""
    with running_script(CLAIMING, url_of(where), memory_bytes) as (process, out):
        assert out.readline() == "claimed\n"
        yield process


def test_claim_when_another_process_has_the_name_is_refused(where: Where) -> None:
    with other_process(where) as other:
        refusal = rf"^KVFERRY_ENGINE_NAME=e: another process \(pid {other.pid} on .+\) uses this name on the database "
        with pytest.raises(StoreError, match=refusal):
            claim_name(url_of(where), "e")
        claim_name(url_of(where), "f").close()
        other.kill()
        other.wait()
        claim_name(url_of(where), "e").close()


def test_claim_when_a_default_name_is_taken_appends_a_number(where: Where, caplog: pytest.LogCaptureFixture) -> None:
    url = url_of(where)
    claims = [claim_name(url, "model-1a2b", is_default=True) for _ in range(3)]
    assert [claim.name for claim in claims] == ["model-1a2b", "model-1a2b-2", "model-1a2b-3"]
    assert caplog.text.count("KVFERRY_ENGINE_NAME is not set") == 2
    claims[0].close()
    claims.append(claim_name(url, "model-1a2b", is_default=True))
    assert claims[-1].name == "model-1a2b", "a restart finds its name again"
    for claim in claims:
        claim.close()
        claim.close()


def test_claim_when_its_process_was_just_killed_waits_for_its_end(path: Path) -> None:
    """The kernel frees memory before it releases locks. With another name, a start would not find its pool."""
    for is_default in (True, False):
        with other_process(path, 256 << 20) as other:
            other.kill()
            with closing(claim_name(url_of(path), "e", is_default=is_default)) as claim:
                assert claim.name == "e"


def test_claim_when_the_process_of_a_numbered_name_ends_waits_for_it(path: Path) -> None:
    with (
        closing(claim_name(url_of(path), "e")),
        closing(claim_name(url_of(path), "e-2")) as ending,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner,
        ThreadPoolExecutor(1) as threads,
    ):
        owner.kill()
        # Until it is waited for, its end is not over.
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        path.with_name("kvferry.db.e-2.lock").write_text(f"pid {owner.pid} on {socket.gethostname()}")
        claiming = threads.submit(claim_name, url_of(path), "e", is_default=True)
        with pytest.raises(TimeoutError):
            # For a second, the claim waits for the process that has the name without a number.
            claiming.result(1.5)
        ending.close()
        with closing(claiming.result(DEADLINE_S)) as claim:
            assert claim.name == "e-2"


def test_holder_on_a_host_with_a_long_name_is_known(where: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * 64)
    with closing(claim_name(url_of(where), "e")) as claim:
        assert name_claim._pid_here(claim) == os.getpid()


def test_claim_on_a_full_disk_is_made_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", fail)
    with closing(claim_name(url_of(path), "e")), pytest.raises(StoreError, match=r"another process \(unknown\) uses"):
        claim_name(url_of(path), "e")


def test_error_without_a_file_names_none() -> None:
    with pytest.raises(StoreError) as raised, raising_store_error("x"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "No space left on device; set KVFERRY_STATE_DIR" in str(raised.value)


def test_claim_when_its_file_is_deleted_is_made_again(path: Path) -> None:
    first = claim_name(url_of(path), "e")
    (lock,) = path.parent.iterdir()
    assert lock.stat().st_mode & 0o777 == 0o600
    lock.unlink()
    assert first.keep()
    with pytest.raises(StoreError):
        claim_name(url_of(path), "e")
    lock.unlink()
    second = claim_name(url_of(path), "e")
    assert not first.keep()
    second.close()
    assert first.keep()
    first.close()


def test_store_when_its_name_was_taken_is_degraded(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    claim = claim_name(url_of(path), "e")
    store, manager = open_store(path, claim=claim)
    (lock,) = path.parent.glob("*.lock")
    lock.unlink()
    with other_process(path) as other:
        store.start(Inventory(manager))
        wait_until(lambda: store.degraded() != [], "the other process shows")
        (told,) = store.degraded()
        assert f"pid {other.pid} on" in caplog.text
        assert "pid" not in told
        assert "KVFERRY_ENGINE_NAME" in told
    wait_until(lambda: store.degraded() == [], "the name is this store's again")
    store.close(DEADLINE_S)
    claim.close()


def test_claim_when_the_server_was_gone_is_made_again() -> None:
    with own_server() as server, new_database(server.url) as url:
        # A server that has just started may be slow to answer on a busy machine.
        claim = claim_name(url, "e", connect_s=DEADLINE_S)
        server.stop()
        with pytest.raises(SQLAlchemyError):
            claim.keep()
        server.start()
        assert claim.keep()
        assert refuses(url)
        server.stop()
        server.start()
        with closing(claim_name(url, "e", connect_s=DEADLINE_S)):
            wait_until(lambda: keeps(claim) is False, "another process has it")
        wait_until(lambda: keeps(claim) is True, "the server has released the lock")
        claim.close()


def test_claim_when_its_holder_is_paused_stays_until_it_ends(where: Where) -> None:
    with other_process(where) as other:
        other.send_signal(signal.SIGSTOP)
        assert refuses(url_of(where))
        other.kill()
        other.wait()
        claim_name(url_of(where), "e").close()


@pytest.mark.long
def test_name_when_the_server_restarts_is_claimed_before_rows_are_written() -> None:
    with own_server() as server, new_database(server.url) as url:
        claim = claim_name(url, "e")
        with running(url, claim=claim) as (store, _):
            wait_until(lambda: store.journal.flush(DEADLINE_S), "the name was checked")
            server.stop()
            wait_until(lambda: store.degraded() != [], "the journal fails")
            server.start()
            wait_until(lambda: store.degraded() == [], "the journal writes again")
            assert refuses(url), "another process cannot claim the name"
        claim.close()


@pytest.mark.long
def test_claim_when_the_database_ends_idle_sessions_is_kept(postgres_url: str) -> None:
    with new_database(postgres_url) as url, psycopg.connect(url, autocommit=True) as admin:
        admin.execute("SET idle_session_timeout = 0")
        name = admin.info.dbname
        admin.execute(f'ALTER DATABASE "{name}" SET idle_session_timeout = 100')
        with closing(claim_name(url, "e")) as claim, psycopg.connect(url) as idle:
            ended = "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = %s"
            pid = idle.info.backend_pid

            def has_ended() -> bool:
                (answer,) = admin.execute(ended, [pid]).fetchone() or (False,)
                return bool(answer)

            wait_until(has_ended, "the server has ended the other session")
            assert refuses(url)
            assert claim.keep()


def keeps(claim: NameClaim) -> bool | None:
    try:
        return claim.keep()
    except SQLAlchemyError:
        return None


def refuses(url: str) -> bool:
    try:
        claim_name(url, "e").close()
    except StoreError:
        return True
    return False


@pytest.mark.parametrize("host", ["db..example", "d" * 64])
def test_claim_when_the_servers_name_is_invalid_names_the_setting(host: str) -> None:
    with pytest.raises(StoreError, match=r"KVFERRY_DATABASE_URL: postgresql://\S+: .*correct the name of its host"):
        claim_name(f"postgresql://user:password@{host}/kvferry", "name")


@pytest.mark.parametrize("credentials", ["user:pa@ssword", "user:pa@ss/word", "user:pa/ss@word"])
@pytest.mark.parametrize("kind", ["postgresql", "postgresql+asyncpg", "mysql"])
def test_claim_when_the_password_is_not_encoded_does_not_show_it(kind: str, credentials: str) -> None:
    with pytest.raises(StoreError, match=r"^KVFERRY_DATABASE_URL has more than one @; percent-encode") as raised:
        claim_name(f"{kind}://{credentials}@localhost/kvferry", "name")
    assert not re.search("pa|ss|word", str(raised.value).replace("password", ""))


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("postgres://user:secret@localhost/kvferry", r"write postgresql://\.\.\."),
        ("nothing://user:secret@localhost/kvferry", "use sqlite or postgresql"),
    ],
)
def test_claim_when_the_database_is_of_no_known_kind_names_them(url: str, advice: str) -> None:
    with pytest.raises(StoreError, match=advice) as raised:
        claim_name(url, "name")
    assert "secret" not in str(raised.value)
