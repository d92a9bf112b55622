"""All rows of a pool's slots at once, as a warm start reads them."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.app.store.slot_rows import SlotColumns
from kvferry.core.keys import RequestIdentity
from tests.harness.stores import DEADLINE_S, START_S, Where, fill, hit, key_of, running


def by_slot(rows: SlotColumns) -> dict[int, tuple[object, ...]]:
    columns = (rows.generations, rows.positions, rows.hits, rows.stored_s, rows.hit_s)
    return {
        int(slot): (key, rows.origins[number], *(column[i].item() for column in columns))
        for i, (slot, key, number) in enumerate(zip(rows.slots, rows.keys, rows.origin_numbers, strict=True))
    }


def test_rows_come_back_as_they_were_written(where: Where) -> None:
    odd = RequestIdentity("a,b'\x1f%", None, "lo,ra")
    with running(where, 8) as (store, manager), running(where, 8, "another") as (other, others):
        fill(manager, range(3), START_S + 0.25)
        fill(manager, range(10, 12), START_S + 1, odd)
        fill(others, range(5))
        hit(manager, [0, 1], START_S + 2)
        assert store.journal.flush(DEADLINE_S)
        assert other.journal.flush(DEADLINE_S)
        first = RequestIdentity("r", "t" * 16, "lora")
        assert by_slot(store.read_slots()) == {
            0: (key_of(0), first, 1, 0, 1, START_S + 0.25, START_S + 2),
            1: (key_of(1), first, 1, 1, 1, START_S + 0.25, START_S + 2),
            2: (key_of(2), first, 1, 2, 0, START_S + 0.25, 0.0),
            3: (key_of(10), odd, 2, 0, 0, START_S + 1, 0.0),
            4: (key_of(11), odd, 2, 1, 0, START_S + 1, 0.0),
        }
        assert len(other.read_slots().slots) == 5
        manager.reset(np.empty(0, dtype=np.int64), START_S + 3)
        assert store.journal.flush(DEADLINE_S)
        assert by_slot(store.read_slots()) == {}


def test_rows_are_read_in_parts_whatever_the_lengths_of_their_keys(
    where: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvferry.app.store.slot_rows._PART_ROWS", 3)
    keys = [bytes([number]) * length + b"\0" for number, length in enumerate((16, 16, 16, 16, 32, 24, 32), 1)]
    with running(where, 8) as (store, manager), running(where, 8, "another") as (other, others):
        fill(others, range(4))
        assert other.journal.flush(DEADLINE_S)
        for number, key in enumerate(keys):
            origin, positions = RequestIdentity(f"r{number % 2}"), np.array([number])
            manager.complete_store(manager.prepare_store([key], origin, positions, number % 3, START_S).slots, START_S)
        assert store.journal.flush(DEADLINE_S)
        rows = store.read_slots()
        found = sorted(zip(rows.positions, rows.keys, rows.origin_numbers, rows.classes, strict=True))
        assert [(position, key) for position, key, _, _ in found] == list(enumerate(keys))
        assert [rows.origins[number].request_id for _, _, number, _ in found] == [f"r{n % 2}" for n in range(7)]
        assert [priority_class for *_, priority_class in found] == [n % 3 for n in range(7)]
        assert len(rows.origins) == 6, "each origin and class once"
