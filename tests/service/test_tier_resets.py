"""Resets that tiers have not completed: written to the metadata store, and repeated by the next process."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvferry.app.operations.tier_resets import TierResets
from kvferry.app.settings.tiers import read_tiers
from kvferry.app.store import DatabaseUnavailable, MetadataStore
from kvferry.app.tiers.registry import TierRegistry
from kvferry.core.keys import RequestFilter
from kvferry.core.scheduler.resets import TierReset
from kvferry.core.tiers.base import TierStats
from tests.harness.stores import busy_writer
from tests.harness.toy_engine import ToyEngine
from tests.harness.toy_tiers import ToyTier
from tests.harness.waiting import wait_until

MATCH = RequestFilter(tenant="0123*", lora="")
KEY = b"\x07" * 33


class Process:
    """An engine with a tier that does not answer, and the rows of its open resets."""

    def __init__(self, path: Path, names: tuple[str, ...] = ("far",)) -> None:
        self.engine = ToyEngine(8, 64, tiers=names)
        self.tier = self.engine.tiers[names[0]]
        self.tier.dead = True
        self.store = MetadataStore(f"sqlite:///{path}", "engine", "pinned")
        self.resets = self.engine.offload.resets
        self.rows = TierResets(self.store, self.resets)
        self.rows.load(self.engine.now_s)

    def open(self) -> list[tuple[str, RequestFilter | None, bytes | None]]:
        return [(reset.tier, reset.match, reset.key) for reset in self.resets.open_in_tiers()]

    def revive(self) -> None:
        """The tier answers."""
        self.tier.dead = False
        self.engine.now_s += 2.0
        self.engine.offload.tiers.poll(self.engine.now_s)


@contextmanager
def process(path: Path, *names: str) -> Iterator[Process]:
    running = Process(path, names or ("far",))
    try:
        yield running
    finally:
        running.store.close(5)


def rows_of(path: Path) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("SELECT tier, match, key FROM tier_resets ORDER BY id").fetchall()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kvferry.db"


def test_open_resets_are_repeated_by_the_next_process(path: Path) -> None:
    with process(path) as first:
        first.resets.reset(first.engine.now_s)
        first.resets.reset(first.engine.now_s, MATCH, ["far"])
        first.resets.drop_block(KEY, first.engine.now_s)
        first.rows.sync()
        wanted = first.open()
        assert wanted == [("far", None, None), ("far", MATCH, None), ("far", None, KEY)]
    with process(path) as second:
        assert second.open() == wanted
        stats = second.engine.offload.snapshot().tiers["far"]
        assert isinstance(stats, TierStats)
        assert stats.use.open_resets == stats.use.open_jobs == 3
        second.rows.sync()
        assert len(rows_of(path)) == 3
        second.revive()
        assert second.open() == []
        second.rows.sync()
        assert rows_of(path) == []
    with process(path) as third:
        assert third.open() == []


def test_reset_that_ends_at_once_is_never_written(path: Path) -> None:
    with process(path) as running:
        running.tier.dead = False
        running.resets.reset(running.engine.now_s)
        running.revive()
        # A write would wait for the thread that writes.
        with busy_writer(running.store):
            running.rows.sync()
        assert running.rows.degraded() == []


def test_resets_of_other_engines_and_unknown_tiers_stay(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with process(path) as first:
        first.resets.reset(first.engine.now_s)
        first.rows.sync()
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute("INSERT INTO tier_resets (engine, time, tier) VALUES ('other', 0, 'far')")
    with process(path, "near") as second:
        assert second.open() == []
        second.rows.sync()
    assert "reset of a tier that is not configured stays open: far" in caplog.text
    assert len(rows_of(path)) == 2
    with process(path) as third:
        assert third.open() == [("far", None, None)]


def test_open_reset_is_repeated_before_an_attached_tier_is_used(path: Path) -> None:
    with process(path) as first:
        first.resets.reset(first.engine.now_s, MATCH, ["far"])
        first.rows.sync()
    with process(path, "near") as second:
        engine, far = second.engine, ToyTier(second.engine)
        far.dead = True
        definition = {"type": "fs", "path": str(path.parent), "max_bytes": "1GiB"}
        registry = TierRegistry(
            read_tiers([definition | {"name": "near"}]),
            {"near": second.tier},
            engine.offload,
            second.rows.prepare,
            lambda entries: {entries[0].name: far},
        )
        assert registry.attach("far", definition).is_enabled
        assert second.open() == [("far", MATCH, None)]
        second.rows.sync()
        assert len(rows_of(path)) == 1
        far.dead = False
        second.revive()
        assert second.open() == []
        # Its row may stay for a second; it is not repeated again.
        registry.detach("far")
        registry.attach("far", definition)
        assert second.open() == []
        second.rows.sync()
        assert rows_of(path) == []
        # A definition that takes the place of one of the settings is not of the settings.
        registry.detach("far")
        assert registry.state("near").is_of_settings
        registry.detach("near")
        assert not registry.attach("near", definition).is_of_settings


@pytest.mark.parametrize("is_restarted", [False, True])
def test_resets_of_a_detached_tier_are_repeated_before_it_is_used(path: Path, is_restarted: bool) -> None:
    with process(path) as first:
        assert first.engine.offload.tiers.detach("far", first.engine.now_s)
        tickets = [
            first.resets.reset(first.engine.now_s, MATCH),
            first.resets.reset(first.engine.now_s, None, ["host"]),
            first.resets.drop_block(KEY, first.engine.now_s),
        ]
        assert [ticket.detached for ticket in tickets] == [("far",), (), ("far",)]
        assert first.open() == [("far", MATCH, None), ("far", None, KEY)]
        first.rows.sync()
        assert len(rows_of(path)) == 2
        if not is_restarted:
            first.engine.offload.tiers.attach("far", first.tier, is_enabled=False)
            first.resets.repeat_detached("far", first.engine.now_s)
            assert [reset.match for reset in first.engine.offload.tiers.named(["far"])[0].open_resets] == [MATCH, None]
            first.revive()
            first.rows.sync()
            assert (first.open(), rows_of(path)) == ([], [])
            return
    with process(path) as second:
        assert second.open() == [("far", MATCH, None), ("far", None, KEY)]


def test_many_resets_of_a_detached_tier_become_one_of_all_blocks(path: Path) -> None:
    with process(path) as running:
        running.engine.offload.tiers.detach("far", running.engine.now_s)
        for number in range(100):
            running.resets.reset(running.engine.now_s, RequestFilter(request=f"r{number}"))
        assert len(running.open()) == 100
        running.resets.drop_block(KEY, running.engine.now_s)
        running.resets.reset(running.engine.now_s, MATCH)
        assert running.open() == [("far", None, None)]


@pytest.mark.parametrize(
    ("match", "key"), [('{"tenant": 5}', None), ('{"what": "x"}', None), ("[1]", None), (None, "no hex")]
)
def test_stored_reset_that_cannot_be_read_is_one_of_all_blocks(path: Path, match: str | None, key: str | None) -> None:
    with process(path):
        pass
    with closing(sqlite3.connect(path)) as connection, connection:
        row = ("engine", 0, "far", match, key)
        connection.execute("INSERT INTO tier_resets (engine, time, tier, match, key) VALUES (?, ?, ?, ?, ?)", row)
    with process(path) as running:
        assert running.open() == [("far", None, None)]


def test_reset_that_cannot_be_written_shows_and_is_written_later(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with process(path) as running:
        running.rows = TierResets(running.store, running.resets, write_timeout_s=1.0)
        running.resets.reset(running.engine.now_s)
        with busy_writer(running.store):
            with pytest.raises(DatabaseUnavailable):
                running.rows.sync()
            running.rows.check()
            (text,) = running.rows.degraded()
            assert text.startswith("1 open resets of tiers are lost if this process ends: the database was busy")
            assert rows_of(path) == []

        def is_written() -> bool:
            running.rows.check()
            return not running.rows.degraded()

        wait_until(is_written, "the reset is written")
        assert rows_of(path) == [("far", None, None)]


def test_ticket_of_a_repeated_reset_names_its_tier() -> None:
    engine = ToyEngine(8, 64, tiers=("a", "b"))
    for tier in engine.tiers.values():
        tier.dead = True
    repeated = engine.offload.resets.repeat("b", None, KEY, engine.now_s)
    assert engine.offload.resets.open_in_tiers() == [repeated] == [TierReset("b", repeated.ticket, None, KEY)]
