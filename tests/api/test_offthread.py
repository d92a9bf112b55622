"""A database call that takes too long has no effect after its 503, whenever its thread goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
from sqlalchemy import Connection

from kvferry.app.store import AuditEntry, Change, DatabaseUnavailable, OutcomeUnknown, StoreThreads, database_only
from kvferry.app.store.database import Waits
from kvferry.core.policy import Override
from kvferry.core.rules import Rule, RuleMatch
from tests.harness.loop_service import Service, locked, start_service
from tests.harness.stores import items_of
from tests.harness.waiting import DEADLINE_S

T = TypeVar("T")
SOON_S = 0.1


def override(request_id: str) -> Override:
    return Override(request_id, {"store": False}, time.time() + 3600)


WRITES: dict[str, Callable[[Service], Change[Any]]] = {
    "set override": lambda service: partial(service.context.policies.set_override, override("new"), time.time()),
    "drop override": lambda service: partial(service.context.policies.drop_override, "kept", time.time()),
    "add rule": lambda service: partial(service.context.policies.add_rule, rule("new"), time.time()),
    "put rule": lambda service: partial(service.context.policies.put_rule, rule("kept", 7), time.time()),
    "drop rule": lambda service: partial(service.context.policies.drop_rule, "kept", time.time()),
    "audit": lambda service: database_only(
        partial(service.store.writer.begin_audit, AuditEntry(1.0, "none", "127.0.0.1", "late", "PUT", "/late", None))
    ),
}


def change(service: Service, wanted: Change[T], timeout_s: float = DEADLINE_S) -> T:
    return asyncio.run(service.store.database.change(wanted, timeout_s))


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
    change(fresh, partial(fresh.context.policies.set_override, override("kept"), time.time()))
    change(fresh, partial(fresh.context.policies.add_rule, rule("kept"), time.time()))
    fresh.store.database.waits = Waits(busy_s=DEADLINE_S)
    fresh.store.database.open()
    return fresh


def test_write_that_waited_for_a_lock_has_no_effect_after_503(patient: Service) -> None:
    for name, make in WRITES.items():
        before = state(patient)
        with locked(patient), pytest.raises(DatabaseUnavailable):
            change(patient, make(patient), SOON_S)
        patient.store.database.write(lambda connection: None)
        assert state(patient) == before, name
        change(patient, make(patient))
        assert state(patient) != before, f"{name} takes effect when it is not abandoned"


def executed_until(patient: Service, executed: threading.Event, released: threading.Event) -> Change[Any]:
    """A write that is executed, and not committed before the event."""

    def write(connection: Connection) -> Callable[[], Any]:
        apply = WRITES["put rule"](patient)(connection)
        executed.set()
        released.wait(DEADLINE_S)
        return apply

    return write


def test_write_that_was_executed_has_no_effect_after_503(patient: Service) -> None:
    before, executed, released = state(patient), threading.Event(), threading.Event()
    late = executed_until(patient, executed, released)
    # On a busy machine a call may be given up before the thread takes it.
    while not executed.is_set():
        with pytest.raises(DatabaseUnavailable) as raised:
            change(patient, late, SOON_S)
        assert not isinstance(raised.value, OutcomeUnknown)
    released.set()
    patient.store.database.write(lambda connection: None)
    assert state(patient) == before


def test_call_that_was_canceled_before_its_commit_has_no_effect(patient: Service) -> None:
    before, executed, released = state(patient), threading.Event(), threading.Event()

    async def cancel() -> None:
        late = executed_until(patient, executed, released)
        call = asyncio.create_task(patient.store.database.change(late, DEADLINE_S))
        await asyncio.to_thread(executed.wait, DEADLINE_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(cancel())
    released.set()
    patient.store.database.write(lambda connection: None)
    assert state(patient) == before


def committed_until(patient: Service, released: threading.Event) -> Change[str]:
    """A write whose call does not end before the event, although it is committed."""

    def write(connection: Connection) -> Callable[[], str]:
        apply = WRITES["set override"](patient)(connection)

        def finish() -> str:
            apply()
            released.wait(DEADLINE_S)
            return "written"

        return finish

    return write


def test_a_write_that_has_been_committed_is_not_answered_503(patient: Service) -> None:
    released = threading.Event()

    async def run() -> str:
        asyncio.get_running_loop().call_later(0.6, released.set)
        return await patient.store.database.change(committed_until(patient, released), 0.5)

    assert asyncio.run(run()) == "written"


def test_a_commit_that_does_not_end_is_answered_504(patient: Service) -> None:
    released = threading.Event()
    try:
        with pytest.raises(OutcomeUnknown):
            change(patient, committed_until(patient, released), 0.5)
    finally:
        released.set()


def test_change_in_memory_when_it_raises_is_still_committed(patient: Service) -> None:
    def write(connection: Connection) -> Callable[[], None]:
        WRITES["set override"](patient)(connection)

        def fail() -> None:
            raise RuntimeError("a bug of ours")

        return fail

    with pytest.raises(RuntimeError, match="a bug of ours"):
        change(patient, write)
    assert [found.request for found in patient.store.reader.load_overrides(time.time())] == ["kept", "new"]
    change(patient, WRITES["drop override"](patient))


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


def test_reset_when_no_database_thread_can_start_is_answered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name in ("kvferry-database", "kvferry-writer"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with start_service(tmp_path) as service:
        client = service.shared_client
        assert client.put("/admin/v1/requests/new/policy", json={"store": False, "ttl_s": 60}).status_code == 503
        assert client.post("/admin/v1/reset").status_code == 200
        assert client.get("/admin/v1/audit").status_code == 503
