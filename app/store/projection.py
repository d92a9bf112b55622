"""The `slots` table as a projection of memory: what changed is asked for, written in batches, and never lost.

Rows that could not be written stay here until they are; nothing more is asked for meanwhile, so that this is
one batch at most, and the rest waits as dirty bits in the manager, which tells the newest of each slot.
"""

from __future__ import annotations

import json
from typing import Any, Protocol

import numpy as np
from sqlalchemy import ColumnElement, delete, insert, select

from kvferry.app.store.database import Database
from kvferry.app.store.errors import is_refused
from kvferry.app.store.models import SlotRow
from kvferry.app.store.text import clean
from kvferry.core.keys import group_of
from kvferry.core.policy import PRIORITY_CLASS
from kvferry.core.pool.records import SlotRows

BATCH_ROWS = 1000
BATCHES_A_STEP = 16
_PRIORITIES = {priority_class: priority.value for priority, priority_class in PRIORITY_CLASS.items()}


class DirtySource(Protocol):
    """Memory, as the projection sees it. Both calls come from the journal's thread."""

    def dirty_rows(self, limit: int) -> SlotRows | None:
        """Rows that changed since they were last asked for, at most `limit`; None when there are none."""

    def mark_all_dirty(self) -> None:
        """Have the row of every slot told again, of those that hold a block at least."""


class SlotProjection:
    """Brings one engine's rows of `slots` up to date, a bounded step at a time."""

    def __init__(self, engine: str, num_kept_slots: int) -> None:
        """Of rows left from before, those of slots from `num_kept_slots` on are deleted first: they did not survive."""
        self._engine = engine
        self._pending: dict[int, dict[str, Any] | None] = {}
        self._wiping_from: int | None = num_kept_slots
        self._min_epoch = 0
        self._swept_epoch = 0
        self._sweeping_for = 0
        self._sweeping_from = 0
        self.written_rows = 0
        self.refused_rows = 0
        self.up_to_date = False
        """Whether the last step ended with nothing left to write."""

    @property
    def pending_rows(self) -> int:
        """Rows that were asked for and not yet written."""
        return len(self._pending)

    @property
    def epoch(self) -> int:
        """The epoch of the last reset heard of."""
        return self._min_epoch

    def forget_before(self, epoch: int) -> None:
        """Rows of epochs before this one are to go. May be called from any thread; only notes it."""
        self._min_epoch = max(self._min_epoch, epoch)

    def start_over(self, source: DirtySource) -> None:
        """The database is another one: delete what it has of this engine and write all of memory again."""
        self._wiping_from = 0
        self._pending.clear()
        source.mark_all_dirty()

    def step(self, database: Database, source: DirtySource) -> bool:
        """Write some; True if there is more. Raises what the database raises, and keeps what was not written."""
        self.up_to_date = False
        if not self._delete_forgotten(database):
            return True
        for _ in range(BATCHES_A_STEP):
            rows = None if self._pending else source.dirty_rows(BATCH_ROWS)
            if rows is not None:
                self._absorb(rows)
            if not self._pending:
                self.up_to_date = self._swept_epoch == self._min_epoch
                return not self.up_to_date
            self._write(database)
        return True

    def _absorb(self, rows: SlotRows) -> None:
        try:
            self._pending.update(_parameters(self._engine, rows))
        except Exception:
            self.refused_rows += len(rows.slots)
            raise

    def _write(self, database: Database) -> None:
        min_epoch = self._min_epoch
        live = [row for row in self._pending.values() if row is not None and row["epoch"] >= min_epoch]
        # Two statements, however many rows: many to a statement cannot be had with an upsert.
        old = delete(SlotRow).where(SlotRow.engine == self._engine, SlotRow.slot.in_(list(self._pending)))
        try:
            with database.write() as connection:
                connection.execute(old)
                if live:
                    connection.execute(insert(SlotRow), live)
        except Exception as error:
            if is_refused(error):
                # Trying for ever would keep every other slot out.
                self.refused_rows += len(self._pending)
                self._pending.clear()
            raise
        self.written_rows += len(self._pending)
        self._pending.clear()

    def _delete_forgotten(self, database: Database) -> bool:
        """Delete some of what a wipe or a reset left; True once writing may go on."""
        if self._wiping_from is not None:
            self._wiping_from = self._delete_some(database, self._wiping_from)
            return self._wiping_from is None
        epoch = self._min_epoch
        if self._swept_epoch < epoch:
            if self._sweeping_for < epoch:
                self._sweeping_for, self._sweeping_from = epoch, 0
            goes_on_at = self._delete_some(database, self._sweeping_from, SlotRow.epoch < epoch)
            if goes_on_at is None:
                self._swept_epoch = epoch
            else:
                self._sweeping_from = goes_on_at
        return True

    def _delete_some(self, database: Database, start: int, *which: ColumnElement[bool]) -> int | None:
        """Delete a bounded number of rows from slot `start` on; where to go on, or None at the end."""
        for _ in range(BATCHES_A_STEP):
            mine = (SlotRow.engine == self._engine, SlotRow.slot >= start, *which)
            with database.write() as connection:
                found = connection.scalars(
                    select(SlotRow.slot).where(*mine).order_by(SlotRow.slot).limit(BATCH_ROWS)
                ).all()
                if found:
                    connection.execute(delete(SlotRow).where(*mine, SlotRow.slot <= found[-1]))
            if len(found) < BATCH_ROWS:
                return None
            start = found[-1] + 1
        return start


def _parameters(engine: str, rows: SlotRows) -> dict[int, dict[str, Any] | None]:
    """By slot, the row as parameters, or None for a slot that no longer holds a block."""
    slots = rows.slots.tolist()
    parameters: dict[int, dict[str, Any] | None] = dict.fromkeys(slots)
    generations, epochs = rows.generations.tolist(), rows.epochs.tolist()
    sizes, positions, hits = rows.sizes.tolist(), rows.positions.tolist(), rows.hits.tolist()
    stored_s, hit_s, classes = rows.stored_s.tolist(), rows.hit_s.tolist(), rows.classes.tolist()
    for i in np.flatnonzero(rows.live).tolist():
        key, origin = rows.keys[i], rows.origins[i]
        parameters[slots[i]] = {
            "engine": engine,
            "slot": slots[i],
            "key": key.hex(),
            "group_index": group_of(key),
            "generation": generations[i],
            "epoch": epochs[i],
            "size_bytes": sizes[i],
            "position": positions[i],
            "request": clean(origin.request_id),
            "tenant": clean(origin.tenant),
            "lora": clean(origin.lora),
            "stored_at": stored_s[i],
            "last_hit_at": hit_s[i] or None,
            "hits": hits[i],
            "priority": _PRIORITIES[classes[i]],
            "aliases": json.dumps([clean(alias) for alias in origin.aliases]) if origin.aliases else None,
        }
    return parameters
