"""A database call that takes too long has no effect after its 503, whenever its thread goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from sqlalchemy import Connection

from kvferry.app.store import AuditEntry, DatabaseUnavailable, OutcomeUnknown, StoreThreads
from kvferry.core.policy import Override
from kvferry.core.rules import Rule, RuleMatch
from tests.api.test_store_gone import locked
from tests.harness.loop_service import Service
from tests.harness.stores import items_of
from tests.harness.waiting import DEADLINE_S

SOON_S = 0.1


def override(request_id: str) -> Override:
    return Override(request_id, {"store": False}, time.time() + 3600)


WRITES: dict[str, Callable[[Service], Any]] = {
    "set override": lambda service: service.context.policies.set_override(override("new"), time.time()),
    "drop override": lambda service: service.context.policies.drop_override("kept", time.time()),
    "add rule": lambda service: service.context.policies.add_rule(rule("new"), time.time()),
    "put rule": lambda service: service.context.policies.put_rule(rule("kept", 7), time.time()),
    "drop rule": lambda service: service.context.policies.drop_rule("kept", time.time()),
    "audit": lambda service: service.store.writer.begin_audit(
        AuditEntry(1.0, "none", "127.0.0.1", "late", "PUT", "/late", None)
    ),
}


def rule(name: str, order: int = 1) -> Rule:
    return Rule(name, order, RuleMatch(), {"store": False})


def state(service: Service) -> tuple[Any, ...]:
    """Overrides, rules and audit, in memory and in the database."""
    policies = service.engine.offload.policies
    reader = service.store.reader
    return (
        sorted(found.request_id for found in policies.overrides()),
        [(found.name, found.order) for found in policies.rules()],
        sorted(record.request for record in reader.load_overrides(time.time())),
        [(record["name"], record["order"]) for record in reader.load_rules()],
        len(items_of(reader.audit(None, 100))),
    )


@pytest.fixture
def patient(fresh: Service) -> Service:
    """A service whose database waits for a lock for longer than its callers."""
    fresh.context.policies.set_override(override("kept"), time.time())
    fresh.context.policies.add_rule(rule("kept"), time.time())
    fresh.store.database.busy_timeout_s = DEADLINE_S
    fresh.store.database.open()
    return fresh


@pytest.mark.parametrize("name", WRITES)
def test_a_write_that_was_answered_503_has_no_effect_later(patient: Service, name: str) -> None:
    before = state(patient)
    begun, ended = threading.Event(), threading.Event()
    failures: list[Exception] = []

    def write() -> None:
        begun.set()
        try:
            WRITES[name](patient)
        except Exception as error:
            failures.append(error)
            raise
        finally:
            ended.set()

    # On a busy machine a call may be given up before its thread runs.
    while not begun.is_set():
        with locked(patient), pytest.raises(DatabaseUnavailable):
            asyncio.run(StoreThreads(timeout_s=SOON_S).run(write))
    assert ended.wait(DEADLINE_S)
    assert [type(error) for error in failures] == [DatabaseUnavailable]
    assert state(patient) == before
    with suppress(DatabaseUnavailable):
        WRITES[name](patient)
    assert state(patient) != before, "the same write takes effect when it is not abandoned"


def test_a_write_that_has_been_committed_is_not_answered_503(patient: Service) -> None:
    released = threading.Event()

    def write() -> str:
        patient.context.policies.set_override(override("new"), time.time())
        released.wait(DEADLINE_S)
        return "written"

    async def run() -> str:
        threads = StoreThreads(timeout_s=0.5)
        asyncio.get_running_loop().call_later(0.6, released.set)
        return await threads.run(write)

    assert asyncio.run(run()) == "written"


def test_a_commit_that_does_not_end_is_answered_504(patient: Service) -> None:
    released = threading.Event()

    def write() -> None:
        patient.context.policies.set_override(override("new"), time.time())
        released.wait(DEADLINE_S)

    async def run() -> None:
        try:
            await StoreThreads(timeout_s=0.5).run(write)
        finally:
            released.set()

    with pytest.raises(OutcomeUnknown):
        asyncio.run(run())


def test_two_writes_of_one_call_are_both_committed(patient: Service) -> None:
    def write() -> None:
        patient.context.policies.set_override(override("new"), time.time())
        patient.context.policies.drop_override("kept", time.time())

    records: list[Connection] = []
    asyncio.run(StoreThreads().run(write, records.append))
    assert [found.request for found in patient.store.reader.load_overrides(time.time())] == ["new"]
    assert len(records) == 1, "the call is recorded once"


def test_calls_that_hang_when_repeated_share_few_daemon_threads() -> None:
    released = threading.Event()
    taken: list[threading.Thread] = []

    def hang() -> None:
        taken.append(threading.current_thread())
        released.wait(DEADLINE_S)

    async def run() -> None:
        threads = StoreThreads(max_threads=2, timeout_s=SOON_S)
        # On a busy machine a call may be given up before its thread runs.
        while len(taken) < 2:
            with suppress(DatabaseUnavailable):
                await threads.run(hang)
        for _ in range(3):
            with pytest.raises(DatabaseUnavailable):
                await threads.run(hang)
        assert len(taken) == 2

    try:
        asyncio.run(run())
    finally:
        released.set()
    assert all(thread.daemon for thread in taken), "the process does not wait for them when it ends"


def test_call_when_the_threads_are_free_again_runs() -> None:
    threads, released = StoreThreads(max_threads=1, timeout_s=SOON_S), threading.Event()

    async def run() -> str:
        with pytest.raises(DatabaseUnavailable):
            await threads.run(lambda: released.wait(DEADLINE_S))
        released.set()
        while True:
            with suppress(DatabaseUnavailable):
                return await threads.run(lambda: "ran")

    assert asyncio.run(run()) == "ran"


def test_reset_when_no_database_thread_can_start_is_answered(fresh: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kvferry-database":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    client = fresh.client()
    assert client.put("/admin/v1/requests/new/policy", json={"store": False, "ttl_s": 60}).status_code == 503
    assert client.post("/admin/v1/reset").status_code == 200
    assert client.get("/admin/v1/audit").status_code == 503
