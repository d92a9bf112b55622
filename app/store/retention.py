"""Retention of history: limits of age and rows, applied in batches so small that no lock is held for long."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import Column, Row, Table, delete, exists, func, select

from kvferry.app.store.database import Database, time_on_host
from kvferry.app.store.schema import ALIVE_S, AUDIT, ENGINES, EVICTIONS, OVERRIDES, RESETS, SLOTS, STATS_ROWS

BATCH_ROWS = 1000
BATCHES_PER_STEP = 8
PASS_INTERVAL_S = 60.0
DAY_S = 86400.0
LOST_S = DAY_S
"""Time after the last heartbeat from which the rows of slots of a pool that ended with its process are deleted."""


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """Limits of an engine's history; the first one reached counts."""

    eviction_rows: int = 1_000_000
    eviction_days: float = 30.0
    audit_rows: int = 1_000_000
    audit_days: float = 365.0
    stats_days: float = 30.0


@dataclass(slots=True)
class _Task:
    """Rows of one engine in one table to delete: those before `before_s`, and the oldest beyond `max_rows`.

    `excess` is the number beyond `max_rows` once counted, which takes half a second in a large table.
    """

    table: Table
    engine: str
    before_s: float
    max_rows: int | None
    excess: int | None = None

    @property
    def columns(self) -> tuple[Column[Any], Column[Any]]:
        """The columns of time and number, both in the order in which rows are deleted."""
        if self.table is SLOTS:
            return SLOTS.c.stored_at, SLOTS.c.slot
        return self.table.c.time, self.table.c.id


class HistoryTrimmer:
    """Deletes rows beyond the limits, a bounded step at a time.

    Each engine deletes its own rows. Those of engines that are not alive are held to the limits that they registered,
    by the first of those that are: engines that delete the same rows would wait for each other. Between passes, history
    may exceed its limit of rows.
    """

    def __init__(self, engine: str, limits: HistoryLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._tasks: deque[Callable[[], bool]] = deque()
        """What is left of a pass: each call deletes a batch, and returns whether more may be left."""
        self._next_pass_s = 0.0
        """On the monotonic clock."""

    def set_limits(self, limits: HistoryLimits) -> None:
        """Apply other limits from the next pass on."""
        self._limits = limits
        self._next_pass_s = 0.0

    def step(self, database: Database, now_s: float) -> bool:
        """Delete some rows if a pass is due at the Unix time `now_s`; return whether more are to be deleted."""
        if not self._tasks and time.monotonic() >= self._next_pass_s:
            trims = [partial(self._trim, database, task) for task in self._plan(database, now_s)]
            self._tasks.extend([partial(self._delete_expired_overrides, database, now_s), *trims])
            self._next_pass_s = time.monotonic() + PASS_INTERVAL_S
        for _ in range(BATCHES_PER_STEP):
            if self._tasks and not self._tasks[0]():
                self._tasks.popleft()
        return bool(self._tasks)

    def _plan(self, database: Database, now_s: float) -> list[_Task]:
        audit_from_s = now_s - self._limits.audit_days * DAY_S
        tasks = [_Task(AUDIT, self._engine, audit_from_s, self._limits.audit_rows)]
        with database.read() as connection:
            engines = connection.execute(select(ENGINES)).all()
            host_s = time_on_host(connection, now_s)
        alive = [one.name for one in engines if one.ended_at is None and host_s - one.seen_at < ALIVE_S]
        is_first = self._engine <= min(alive, default=self._engine)
        for one in engines:
            if one.name == self._engine or (is_first and one.name not in alive):
                here_s = now_s if one.name == self._engine else host_s
                expired_s = here_s - one.eviction_days * DAY_S
                tasks.append(_Task(EVICTIONS, one.name, expired_s, one.eviction_rows))
                tasks.append(_Task(RESETS, one.name, expired_s, one.eviction_rows))
                tasks.append(_Task(STATS_ROWS, one.name, here_s - self._limits.stats_days * DAY_S, None))
        if is_first:
            lost = [one for one in engines if one.name != self._engine and host_s - one.seen_at > LOST_S]
            tasks += [_Task(SLOTS, one.name, math.inf, None) for one in lost if one.pool_kind == "pinned"]
            self._delete_engines(database, lost, host_s)
        return tasks

    def _delete_engines(self, database: Database, lost: Sequence[Row[Any]], now_s: float) -> None:
        """Delete engines of which no row is kept any more: until then, their limits are needed."""
        names = [one.name for one in lost if now_s - one.seen_at > one.eviction_days * DAY_S]
        if not names:
            return
        kept = [~exists().where(table.c.engine == ENGINES.c.name) for table in (EVICTIONS, RESETS, SLOTS, STATS_ROWS)]
        unused = delete(ENGINES).where(ENGINES.c.name.in_(names), *kept)
        database.write(lambda connection: connection.execute(unused).rowcount)

    def _trim(self, database: Database, task: _Task) -> bool:
        """Delete a batch of rows beyond the limits."""
        table, (time, number) = task.table, task.columns
        own = table.c.engine == task.engine
        oldest = select(number).where(own).order_by(*([number] if table is SLOTS else [time, number]))
        with database.read() as connection:
            numbers = connection.scalars(oldest.where(time < task.before_s).limit(BATCH_ROWS)).all()
            if not numbers and task.max_rows is not None:
                if task.excess is None:
                    count = connection.scalar(select(func.count()).select_from(table).where(own)) or 0
                    task.excess = count - task.max_rows
                if task.excess > 0:
                    numbers = connection.scalars(oldest.limit(min(task.excess, BATCH_ROWS))).all()
                    task.excess -= len(numbers)
        if not numbers:
            return False
        # Rows that another engine is deleting are not waited for. SQLite has one writer.
        free = select(number).where(own, number.in_(numbers)).with_for_update(skip_locked=True)
        database.write(lambda connection: connection.execute(delete(table).where(own, number.in_(free))).rowcount)
        return True

    def _delete_expired_overrides(self, database: Database, now_s: float) -> bool:
        """Delete a batch of overrides."""
        with database.read() as connection:
            expired = (OVERRIDES.c.engine == self._engine, OVERRIDES.c.expires_at <= now_s)
            requests = connection.scalars(select(OVERRIDES.c.request).where(*expired).limit(BATCH_ROWS)).all()
        if requests:
            old = delete(OVERRIDES).where(*expired, OVERRIDES.c.request.in_(requests))
            database.write(lambda connection: connection.execute(old).rowcount)
        return len(requests) == BATCH_ROWS
