"""A database server that goes and comes: serving goes on, what was lost is counted, and the journal catches up."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest
from sqlalchemy import event
from sqlalchemy.pool import Pool

from kvferry.app.store import DatabaseUnavailable, OutcomeUnknown, StoreError, claim_name, upgrade
from kvferry.app.store.migrate import _LOCK_NUMBER
from tests.harness.postgres import LosingProxy, Server, new_database, own_server
from tests.harness.stores import (
    SHORT_WAITS,
    START_S,
    count,
    eviction,
    fill,
    in_file,
    in_memory,
    items_of,
    key_of,
    open_store,
    running,
    shell,
    write,
)
from tests.harness.waiting import DEADLINE_S, wait_until


@pytest.fixture(scope="module")
def own() -> Iterator[Server]:
    """One that only this module uses."""
    with own_server() as server:
        yield server


@pytest.fixture
def server(own: Server) -> Server:
    """It runs, whatever the test before has done with it."""
    own.start()
    return own


def test_server_when_down_is_reported_and_its_rows_follow(server: Server) -> None:
    with new_database(server.url) as url, running(url, 64, max_queued_rows=100) as (store, manager):
        fill(manager, range(32))
        assert store.journal.flush(DEADLINE_S)
        server.stop()
        fill(manager, range(100, 164), START_S + 1)
        for number in range(10):
            store.journal.append(eviction(range(number * 50, number * 50 + 50)))
        wait_until(lambda: store.degraded() != [], "the loss of the server shows")
        assert all(re.fullmatch(r"the database cannot be reached.*\(for \d+ s\)", text) for text in store.degraded())
        with pytest.raises(DatabaseUnavailable):
            write(store, store.writer.save_override, "r", {"store": False}, START_S, START_S + 60)
        with pytest.raises(DatabaseUnavailable):
            store.reader.evictions()
        server.start()
        wait_until(lambda: store.degraded() == [], "the server's return shows")
        assert store.journal.flush(DEADLINE_S)
        stats = store.journal.stats()
        assert stats.dropped > 0, "the queue is bounded"
        assert count(url, "evictions") == stats.written
        assert in_file(url) == in_memory(manager) != {}
        write(store, store.writer.save_override, "r", {"store": False}, START_S, START_S + 60)
        assert count(url, "overrides") == 1


@pytest.mark.long
def test_connections_to_a_server_that_vanishes_end_within_seconds(server: Server) -> None:
    opened: list[Any] = []

    def note(connection: Any, _: Any) -> None:
        opened.append(connection)

    event.listen(Pool, "connect", note)
    try:
        with new_database(server.url) as url, running(url, 8) as (store, _), closing(claim_name(url, "e")):
            store.reader.evictions()
            assert store.journal.flush(DEADLINE_S)
            for connection in (one for one in opened if not one.closed):
                with socket.socket(fileno=os.dup(connection.fileno())) as transport:
                    assert transport.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                    names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
                    idle_s, interval_s, number = (transport.getsockopt(socket.IPPROTO_TCP, name) for name in names)
                    assert idle_s + interval_s * number <= 15
            assert len(opened) >= 3
    finally:
        event.remove(Pool, "connect", note)


@pytest.mark.long
def test_write_when_the_answer_to_its_commit_is_lost_has_no_outcome(server: Server) -> None:
    with new_database(server.url) as url, closing(LosingProxy(url)) as proxy:
        store, _ = open_store(proxy.url)
        proxy.loses_commit = True
        with pytest.raises(OutcomeUnknown, match=r"during a commit"):
            write(store, store.writer.save_override, "r", {"store": False}, START_S, START_S + 60)
        assert count(url, "overrides") == 1
        write(store, store.writer.save_override, "r2", {"store": False}, START_S, START_S + 60)
        server.stop()
        with pytest.raises(DatabaseUnavailable) as raised:
            write(store, store.writer.save_override, "r3", {"store": False}, START_S, START_S + 60)
        assert not isinstance(raised.value, OutcomeUnknown)
        server.start()
        store.database.close()


def test_locked_table_is_waited_for_within_the_timeout(server: Server) -> None:
    with new_database(server.url) as url, running(url, 8) as (store, _), psycopg.connect(url) as other:
        other.execute("LOCK TABLE overrides, evictions IN ACCESS EXCLUSIVE MODE")
        store.journal.append(eviction([1]))
        with pytest.raises(DatabaseUnavailable, match="locked"):
            write(store, store.writer.save_override, "r", {"store": False}, START_S, START_S + 60)
        wait_until(lambda: any("locked" in reason for reason in store.degraded()), "the lock shows")
        other.rollback()
        wait_until(lambda: store.degraded() == [], "its end shows")
        assert store.journal.flush(DEADLINE_S)
        assert [item.key for item in items_of(store.reader.evictions())] == [key_of(1).hex()]


def test_upgrade_waits_for_that_of_another_process(server: Server) -> None:
    waiting = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
    with new_database(server.url) as url, psycopg.connect(url, autocommit=True) as other:
        other.execute("SELECT pg_advisory_lock(%s)", (_LOCK_NUMBER,))
        with ThreadPoolExecutor(1) as threads:
            upgraded = threads.submit(upgrade, url, SHORT_WAITS)
            wait_until(lambda: upgraded.done() or shell(url, waiting) == [(1,)], "it waits")
            # Longer than for any other lock.
            with pytest.raises(TimeoutError):
                upgraded.result(10 * SHORT_WAITS.open_s)
            other.execute("SELECT pg_advisory_unlock(%s)", (_LOCK_NUMBER,))
            assert upgraded.result(DEADLINE_S).before is None


def test_upgrade_when_the_server_refuses_advises_by_cause(server: Server) -> None:
    server.stop()
    with pytest.raises(StoreError, match=r"cannot be reached: .*; start its server, or correct host, port, database"):
        upgrade(server.url)
    server.start()
    with pytest.raises(
        StoreError,
        match=r"cannot be reached: .*\"nowhere\" does not exist; start its server, or correct host, port, database",
    ):
        upgrade(server.url.replace("/postgres", "/nowhere"))
    with psycopg.connect(server.url, autocommit=True) as connection:
        connection.execute("CREATE ROLE reader LOGIN")
    with pytest.raises(StoreError, match=r"refuses access \(42501\): .*permission denied"):
        upgrade(server.url.replace("kvferry@", "reader@"))
