"""Writing history: evictions, regrets about them, and resets, in batches and in the order in which they happened."""

from __future__ import annotations

from typing import Any

import numpy as np
from sqlalchemy import Connection, func, insert, select, update

from kvferry.app.store.database import Database
from kvferry.app.store.errors import is_refused
from kvferry.app.store.models import EvictionRow, ResetRow
from kvferry.app.store.queue import Entry, HistoryItem, HistoryQueue, Regrets
from kvferry.app.store.sums import add_evictions, add_regrets
from kvferry.app.store.text import clean
from kvferry.core.keys import group_of
from kvferry.core.pool.events import EvictionBatch, ResetEvent

BATCH_ROWS = 2000
BATCHES_A_STEP = 8


class HistoryWriter:
    """Moves entries from the queue into the database. An entry that the database refuses is dropped and counted."""

    def __init__(self, engine: str, queue: HistoryQueue) -> None:
        self._engine = engine
        self._queue = queue
        self._one_by_one = 0
        self.written_rows = 0
        self.refused_rows = 0

    def step(self, database: Database) -> bool:
        """Write some batches; True if more waits. Raises what the database raises, and keeps what was not written."""
        for _ in range(BATCHES_A_STEP):
            entries = self._queue.take(BATCH_ROWS)
            if not entries:
                return False
            if self._one_by_one:
                entries = entries[:1]
            self._write(database, entries)
            self._one_by_one = max(0, self._one_by_one - 1)
        return True

    def _write(self, database: Database, entries: list[Entry]) -> None:
        rows = sum(entry.rows for entry in entries)
        try:
            # What costs Python's time is done before the lock is taken.
            parts = [(entry.item, self._parameters(entry.item)) for entry in entries]
            with database.write() as connection:
                self._insert(connection, parts)
        except Exception as error:
            if not is_refused(error):
                raise
            if len(entries) > 1:
                # One of them is at fault: find it by writing each alone.
                self._one_by_one = len(entries) + 1
                return
            self.refused_rows += rows
            self._queue.settle(1)
            raise
        self.written_rows += rows
        self._queue.settle(len(entries))

    def _parameters(self, item: HistoryItem) -> list[dict[str, Any]]:
        if isinstance(item, EvictionBatch):
            return eviction_rows(self._engine, item)
        if isinstance(item, ResetEvent):
            return [{"engine": self._engine, "time": item.time_s, "epoch": item.epoch, "dropped": item.dropped}]
        return []

    def _insert(self, connection: Connection, parts: list[tuple[HistoryItem, list[dict[str, Any]]]]) -> None:
        evictions: list[dict[str, Any]] = []
        for item, rows in parts:
            if isinstance(item, EvictionBatch):
                evictions += rows
                continue
            # A regret is about an eviction before it, never about one behind it.
            self._insert_evictions(connection, evictions)
            evictions = []
            if isinstance(item, Regrets):
                _mark_regrets(connection, self._engine, item)
            else:
                connection.execute(insert(ResetRow), rows)
        self._insert_evictions(connection, evictions)

    def _insert_evictions(self, connection: Connection, rows: list[dict[str, Any]]) -> None:
        if rows:
            connection.execute(insert(EvictionRow), rows)
            add_evictions(connection, self._engine, rows)


def eviction_rows(engine: str, batch: EvictionBatch) -> list[dict[str, Any]]:
    """The rows of a batch as parameters. A block that was never hit has been idle since it was stored."""
    rows = batch.rows
    age_s = (batch.time_s - rows.stored_s).clip(min=0.0).tolist()
    idle_s = (batch.time_s - np.maximum(rows.stored_s, rows.hit_s)).clip(min=0.0).tolist()
    common = {
        "engine": engine,
        "time": batch.time_s,
        "reason": batch.reason.value,
        "policy": batch.policy,
        "needed_by": clean(batch.needed_by),
        "regretted_at": None,
    }
    columns = zip(
        rows.keys,
        age_s,
        idle_s,
        rows.hits.tolist(),
        rows.positions.tolist(),
        rows.sizes.tolist(),
        rows.origins,
        strict=True,
    )
    return [
        common
        | {
            "key": key.hex(),
            "group_index": group_of(key),
            "age_s": age,
            "idle_s": idle,
            "hits": hits,
            "position": position,
            "size_bytes": size,
            "request": clean(origin.request_id),
            "tenant": clean(origin.tenant),
        }
        for key, age, idle, hits, position, size, origin in columns
    ]


def _mark_regrets(connection: Connection, engine: str, regrets: Regrets) -> None:
    for start in range(0, len(regrets.keys), BATCH_ROWS):
        keys = [key.hex() for key in regrets.keys[start : start + BATCH_ROWS]]
        latest = (
            select(func.max(EvictionRow.id))
            .where(EvictionRow.engine == engine, EvictionRow.key.in_(keys))
            .group_by(EvictionRow.key)
        )
        which = (EvictionRow.id.in_(latest), EvictionRow.regretted_at.is_(None))
        marked = update(EvictionRow).where(*which).values(regretted_at=regrets.time_s)
        returned = connection.execute(marked.returning(EvictionRow.time, EvictionRow.reason, EvictionRow.age_s))
        add_regrets(connection, engine, ((row.time, row.reason, row.age_s) for row in returned.all()))
