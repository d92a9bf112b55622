"""A manager started warm from a kept file and a database: headers say what there is, rows how recent and whose."""

from __future__ import annotations

import sqlite3
import sys
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest

from kvferry.app.pool.recovery import BootVerification, warm_start
from kvferry.app.store import MetadataStore
from kvferry.core.keys import RequestFilter, RequestIdentity
from kvferry.core.policy import PRIORITY_CLASS, Priority
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.cuda_ops.persistent import pool_file as kept_file
from kvferry.cuda_ops.persistent.header_writer import HeaderWriter
from tests.harness.kept_pools import SHAPE, attached, bytes_of, key_of
from tests.harness.stores import shell
from tests.harness.waiting import DEADLINE_S, wait_until

NUM_SLOTS = SHAPE.num_slots
TENANT = "0123456789abcdef"


class Engine:
    """A pool that is kept, its manager and its store; `die` leaves the file as a killed process does."""

    def __init__(self, folder: Path, journal: bool = True) -> None:
        self._undo = ExitStack()
        kept = self._undo.enter_context(attached(folder / "e.pool", recovers=False))
        self.file, self.pool, self.headers = kept.file, kept.pool, kept.headers
        num_kept = NUM_SLOTS if self.file.found.is_kept else 0
        self.store = MetadataStore(f"sqlite:///{folder / 'e.db'}", "e", "file", num_recovered_slots=num_kept)
        self.manager = OffloadManager(
            NUM_SLOTS,
            SHAPE.slot_bytes,
            sink=self.store.journal.append,
            header_queue=kept.writer,
        )
        self.started = warm_start(self.file, self.store, self.manager)
        if journal:
            self.store.start(Inventory(self.manager))

    def put(
        self,
        numbers: list[int],
        request: str,
        now_s: float,
        aliases: tuple[str, ...] = (),
        priority: Priority = Priority.NORMAL,
        session: str | None = None,
    ) -> None:
        keys = [key_of(number) for number in numbers]
        origin = RequestIdentity(request, TENANT, aliases=aliases, session=session)
        offer = self.manager.prepare_store(keys, origin, np.arange(len(keys)), PRIORITY_CLASS[priority], now_s)
        labels = self.manager.labels(offer.slots)
        assert labels is not None
        self.headers.begin(labels)
        for number, slot in zip(numbers, offer.slots.tolist(), strict=True):
            self.pool.slot(slot)[:] = bytes_of(number)
        self.manager.complete_store(offer.slots, now_s)
        self.headers.seal(labels)

    def present(self) -> set[int]:
        rows = Inventory(self.manager).list_blocks(0, NUM_SLOTS)
        return {int.from_bytes(key[:-1], "big") for key in rows.keys}

    def die(self) -> None:
        self.store.close(DEADLINE_S)
        self.let_go()

    def let_go(self) -> None:
        """Leave the file once all invalidations are written."""
        self._undo.close()


def test_recovered_slots_without_rows_are_evicted_first(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    first.put([1, 2, 3, 4], "early", 10.0)
    first.put([5, 6, 7, 8], "late", 20.0)
    hit = first.manager.pin(first.manager.lookup([key_of(1), key_of(2)]))
    assert first.manager.prepare_load(hit, 30.0)
    first.manager.complete_load(hit)
    assert first.store.journal.flush(DEADLINE_S)
    first.store.close(DEADLINE_S)
    first.put([9, 10, 11, 12], "unwritten", 40.0)
    first.let_go()
    second = Engine(tmp_path)
    assert (second.started.recovered, second.started.known, second.started.dropped) == (12, 8, {})
    assert second.manager.counts().unverified == 12
    found = Inventory(second.manager).find_block(key_of(2))
    assert found is not None
    assert (found.origins[0].request_id, found.records["hits"].tolist(), found.records["hit_s"].tolist()) == (
        "early",
        [1],
        [30.0],
    )
    for gone, number in zip(([12, 11, 10, 9], [4, 3], [8, 7, 6, 5], [2, 1]), (100, 200, 300, 400), strict=True):
        for i in range(len(gone)):
            second.put([number + i], "new", 50.0)
            assert second.present().isdisjoint(gone[: i + 1]), "the coldest goes first, a prefix from its end"
            assert second.present().issuperset(gone[i + 1 :])
    assert second.store.journal.flush(DEADLINE_S)
    assert len(shell(tmp_path / "e.db", "SELECT slot FROM slots WHERE request = 'new'")) == 12
    second.die()


def test_account_of_a_start_has_every_slot_of_the_file(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    assert (first.started.slots, str(first.started)) == (
        0,
        "new pool: there was no file of an earlier process with this name",
    )
    first.put([1, 2, 3, 4, 5], "r", 10.0)
    unsealed = first.manager.prepare_store([key_of(9)], RequestIdentity("r"), np.arange(1), 1, 20.0).slots
    labels = first.manager.labels(unsealed)
    assert labels is not None
    first.headers.begin(labels)
    first.manager.drop_key(key_of(2), 1.0)
    (damaged,) = first.manager.lookup([key_of(3)]).tolist()
    first.file.headers(0)["length"][damaged] += 1
    first.die()
    second = Engine(tmp_path)
    assert (second.started.recovered, second.started.empty, second.started.slots) == (3, NUM_SLOTS - 6, NUM_SLOTS)
    assert second.started.dropped == {"left": 1, "unsealed": 1, "damaged": 1}
    told = str(second.started)
    assert f"; dropped: 1 damaged, 1 left, 1 unsealed; empty: {NUM_SLOTS - 6}; in all: {NUM_SLOTS}" in told
    second.die()
    third = Engine(tmp_path)
    assert (third.started.dropped, third.started.empty) == ({}, NUM_SLOTS - 3), "a start empties what it drops"
    third.die()


def test_account_of_a_file_that_is_no_pool_names_the_loss(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    first.put([1, 2, 3], "r", 10.0)
    first.die()
    with (tmp_path / "e.pool").open("r+b") as file:
        file.write(b"torn")
    second = Engine(tmp_path)
    assert (second.started.recovered, second.started.slots, second.started.is_new) == (0, 0, False)
    assert "magic" in str(second.started.foreign)
    assert str(second.started).endswith("; the pool was dropped as a whole")
    second.die()


def test_warm_start_makes_rows_match_headers(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    first.put([1, 2, 3], "r", 10.0)
    assert first.store.journal.flush(DEADLINE_S)
    first.store.close(DEADLINE_S)
    first.put([4], "r", 20.0)
    first.manager.drop_key(key_of(2), 1.0)
    first.let_go()
    second = Engine(tmp_path)
    assert second.present() == {1, 3, 4}
    assert second.store.journal.flush(DEADLINE_S)
    rows = shell(tmp_path / "e.db", "SELECT key, request FROM slots ORDER BY slot")
    assert rows == [(key_of(1).hex(), "r"), (key_of(3).hex(), "r"), (key_of(4).hex(), "")]
    second.die()


def test_recovered_slots_without_rows_are_as_old_as_the_restart(tmp_path: Path) -> None:
    """In history it would be as old as Unix time, and with it the mean of all ages."""
    first = Engine(tmp_path, journal=False)
    first.put([1, 2, 3], "r", time.time())
    first.die()
    before_s = time.time()
    second = Engine(tmp_path)
    assert (second.started.recovered, second.started.known) == (3, 0)
    rows = Inventory(second.manager).list_blocks(0, NUM_SLOTS)
    assert (rows.records["stored_s"] >= before_s).all()
    assert (rows.records["hit_s"] == 0).all()
    second.manager.drop_key(key_of(1), time.time())
    assert second.store.journal.flush(DEADLINE_S)
    ((age_s, idle_s),) = shell(tmp_path / "e.db", "SELECT age_s, idle_s FROM evictions")
    assert age_s == idle_s <= time.time() - before_s
    second.die()


def test_warm_start_reports_its_progress(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    first.put([1, 2, 3], "r", 10.0)
    first.die()
    second = Engine(tmp_path, journal=False)
    told: list[str] = []
    manager = OffloadManager(NUM_SLOTS, SHAPE.slot_bytes, header_queue=HeaderWriter(second.file))
    warm_start(second.file, second.store, manager, told.append)
    assert told == [
        f"recovering the pool: reading {NUM_SLOTS} headers and their rows",
        "recovering the pool: adding 3 slots, 3 of them with history",
    ]
    second.die()


def test_reset_by_match_finds_recovered_blocks_by_every_alias(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    first.put([1, 2], "cmpl-a-0-12345678", 10.0, aliases=("a", 'ask "b"\ud800'))
    first.put([3], "c", 20.0)
    first.die()
    second = Engine(tmp_path)
    assert second.started.known == 3
    assert second.manager.drop_matching(RequestFilter(request="d").matches, 0, 30.0) == (0, None)
    assert second.manager.drop_matching(RequestFilter(request='ask "b"*').matches, 0, 30.0) == (2, None)
    assert second.present() == {3}
    second.die()


def test_reset_by_session_finds_recovered_blocks_of_that_session_only(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    first.put([1, 2], "a", 10.0, session='agent "7"/é')
    first.put([3], "b", 20.0, session="agent 8")
    first.put([4], "c", 30.0)
    first.die()
    second = Engine(tmp_path)
    assert second.started.known == 4
    assert second.manager.drop_matching(RequestFilter(session='agent "7"*').matches, 0, 40.0) == (2, None)
    assert second.present() == {3, 4}
    assert second.manager.drop_matching(RequestFilter(session="*").matches, 0, 50.0) == (1, None)
    assert second.present() == {4}, "without a session no glob matches"
    second.die()


def test_priorities_survive_a_restart(tmp_path: Path) -> None:
    first = Engine(tmp_path)
    first.put([1, 2], "kept", 10.0, priority=Priority.HIGH)
    first.put([3, 4], "raised", 20.0)
    assert first.store.journal.flush(DEADLINE_S)
    again = [key_of(3), key_of(4)]
    first.manager.prepare_store(again, RequestIdentity("again"), np.arange(2), PRIORITY_CLASS[Priority.HIGH], 30.0)
    first.put([5, 6], "plain", 40.0)
    first.put([7, 8], "let go", 50.0, priority=Priority.LOW)
    first.die()
    priorities = dict(shell(tmp_path / "e.db", "SELECT request, priority FROM slots"))
    assert priorities == {"kept": "high", "raised": "high", "plain": "normal", "let go": "low"}
    second = Engine(tmp_path)
    assert second.started.known == 8
    second.put(list(range(100, 100 + NUM_SLOTS - 8)), "fills the pool", 60.0, priority=Priority.HIGH)
    for number, gone in ((200, 8), (201, 7), (202, 6), (203, 5), (204, 2)):
        second.put([number], "needs room", 70.0, priority=Priority.HIGH)
        assert second.present().isdisjoint([gone])
    assert second.present().issuperset([1, 3, 4])
    second.die()


def test_a_broken_database_costs_the_rows_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Engine(tmp_path)
    first.put([1, 2, 3], "r", 10.0)
    first.die()
    second = Engine(tmp_path, journal=False)
    second.store.database.close()
    manager = OffloadManager(NUM_SLOTS, SHAPE.slot_bytes, header_queue=HeaderWriter(second.file))
    assert warm_start(second.file, second.store, manager).recovered == 3
    assert "recovered without history" in caplog.text
    second.let_go()


@pytest.mark.parametrize(
    "spoil", ["key = 'a,b'", "slot = 'x'", "hits = 'x,y'", "aliases = '[\"a'", "aliases = '5'", "priority = 'x'"]
)
def test_recovery_with_invalid_rows_ignores_them_only(
    tmp_path: Path, spoil: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = Engine(tmp_path)
    first.put([1, 2, 3], "r", 10.0)
    first.die()
    with closing(sqlite3.connect(tmp_path / "e.db", isolation_level=None)) as database:
        database.execute(f"UPDATE slots SET {spoil} WHERE slot = 1")
    second = Engine(tmp_path)
    assert (second.started.recovered, second.present()) == (3, {1, 2, 3})
    assert second.store.journal.flush(DEADLINE_S)
    assert second.store.degraded() == []
    assert "Traceback" not in caplog.text
    second.die()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_slots_after_a_reboot_are_all_verified_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Engine(tmp_path)
    first.put([1, 2, 3, 4], "r", 10.0)
    first.pool.slot(2)[5] ^= 1
    first.die()
    boot = tmp_path / "boot_id"
    boot.write_text("another\n")
    monkeypatch.setattr(kept_file, "BOOT_ID", boot)
    second = Engine(tmp_path)
    verification = BootVerification(second.file, [second.headers], second.manager, threading.Event())
    assert verification.reasons() == ["verifying the pool after a reboot: 0 of 4 slots"]
    with monkeypatch.context() as patch:
        patch.setattr(second.file, "record_boot", lambda: sys.exit(1))
        verification.thread.start()
        wait_until(lambda: verification.thread.is_dead, "its thread is dead")
    assert verification.reasons() == ["verifying the pool after a reboot: 4 of 4 slots"]
    assert verification.thread.degraded() == [
        "the thread kvferry-verify does not run: recovered blocks are not verified"
    ]
    # As the supervisor does.
    verification.thread.start()
    wait_until(lambda: verification.thread.is_done, "verified")
    assert verification.reasons() == []
    wait_until(lambda: not verification.thread.is_alive(), "its thread has ended")
    assert not verification.thread.is_dead
    assert second.present() == {1, 2, 4}
    assert second.manager.counts().unverified == 0
    assert second.manager.evictions.by_reason == {"failed_verification": 1}
    assert second.store.journal.flush(DEADLINE_S)
    assert shell(tmp_path / "e.db", "SELECT reason FROM evictions") == [("failed_verification",)]
    second.die()
    third = Engine(tmp_path)
    assert BootVerification(third.file, [third.headers], third.manager, threading.Event()).reasons() == []
    third.die()
