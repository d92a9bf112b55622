"""All rows of a pool's slots at once, as a warm start reads them."""

from __future__ import annotations

import numpy as np

from kvferry.app.store.slot_rows import read_slots
from kvferry.core.keys import RequestIdentity
from tests.harness.stores import START_S, Where, fill, running
from tests.harness.waiting import DEADLINE_S


def test_rows_are_read_in_parts_whatever_the_lengths_of_their_keys(where: Where) -> None:
    keys = [bytes([number]) * length + b"\0" for number, length in enumerate((16, 16, 16, 16, 32, 24, 32), 1)]
    with running(where, 8) as (store, manager), running(where, 8, "another") as (other, others):
        fill(others, range(4))
        assert other.journal.flush(DEADLINE_S)
        for number, key in enumerate(keys):
            origin, positions = RequestIdentity(f"r{number % 2}"), np.array([number])
            manager.complete_store(manager.prepare_store([key], origin, positions, number % 3, START_S).slots, START_S)
        assert store.journal.flush(DEADLINE_S)
        rows = read_slots(store.database, store.engine, part_rows=3)
        found = sorted(zip(rows.positions, rows.keys, rows.origin_numbers, rows.classes, strict=True))
        assert [(position, key) for position, key, _, _ in found] == list(enumerate(keys))
        assert [rows.origins[number].request_id for _, _, number, _ in found] == [f"r{n % 2}" for n in range(7)]
        assert [priority_class for *_, priority_class in found] == [n % 3 for n in range(7)]
        assert len(rows.origins) == 6, "each origin and class once"
