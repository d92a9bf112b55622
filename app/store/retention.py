"""Retention of history: limits of age and rows, applied in batches so small that no lock is held for long."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sqlalchemy import Table, delete, func, select

from kvferry.app.store.database import Database
from kvferry.app.store.history import trim_sums
from kvferry.app.store.schema import AUDIT, ENGINES, EVICTIONS, OVERRIDES, RESETS

BATCH_ROWS = 1000
BATCHES_PER_STEP = 8
PASS_INTERVAL_S = 60.0
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """Limits of an engine's history; the first one reached counts."""

    eviction_rows: int = 1_000_000
    eviction_days: float = 30.0
    audit_rows: int = 1_000_000
    audit_days: float = 365.0


@dataclass(slots=True)
class _Task:
    """Rows of one engine in one table to delete: those before `before_s`, and the oldest beyond `max_rows`.

    `excess` is the number beyond `max_rows` once counted, which takes half a second in a large table.
    """

    table: Table
    engine: str
    before_s: float
    max_rows: int
    excess: int | None = None


class HistoryTrimmer:
    """Deletes rows beyond the limits, a bounded step at a time.

    Each engine that shares the database is held to the limits that it registered, so that the history of an engine that
    never returns expires, too. Between passes, history may exceed its limit of rows by a twentieth.
    """

    def __init__(self, engine: str, limits: HistoryLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._tasks: deque[_Task] = deque()
        self._next_pass_s = 0.0
        self._rows_at_pass = 0
        self.trimmed_rows = 0

    def set_limits(self, limits: HistoryLimits) -> None:
        """Apply other limits from the next pass on."""
        self._limits = limits
        self._next_pass_s = 0.0

    def step(self, database: Database, now_s: float, written_rows: int) -> bool:
        """Delete some rows if a pass is due.

        Args:
            database: where to delete.
            now_s: Unix time.
            written_rows: rows of history written so far by this process.

        Returns:
            Whether more rows are to be deleted.
        """
        grown = written_rows - self._rows_at_pass > self._limits.eviction_rows // 20
        if not self._tasks and (now_s >= self._next_pass_s or grown):
            self._tasks.extend(self._plan(database, now_s))
            self._delete_expired_overrides(database, now_s)
            self._next_pass_s = now_s + PASS_INTERVAL_S
            self._rows_at_pass = written_rows
        for _ in range(BATCHES_PER_STEP):
            if not self._tasks:
                return False
            if not self._trim(database, self._tasks[0]):
                self._tasks.popleft()
        return bool(self._tasks)

    def _plan(self, database: Database, now_s: float) -> list[_Task]:
        audit_from_s = now_s - self._limits.audit_days * DAY_S
        tasks = [_Task(AUDIT, self._engine, audit_from_s, self._limits.audit_rows)]
        with database.read() as connection:
            engines = connection.execute(select(ENGINES.c.name, ENGINES.c.eviction_rows, ENGINES.c.eviction_days)).all()
        for name, rows, days in engines:
            tasks.append(_Task(EVICTIONS, name, now_s - days * DAY_S, rows))
            tasks.append(_Task(RESETS, name, now_s - days * DAY_S, rows))
        return tasks

    def _trim(self, database: Database, task: _Task) -> bool:
        """Delete one batch; return False if nothing exceeded the limits."""
        table = task.table
        own = table.c.engine == task.engine
        oldest = select(table.c.id).where(own).order_by(table.c.time, table.c.id)
        with database.read() as connection:
            ids = connection.scalars(oldest.where(table.c.time < task.before_s).limit(BATCH_ROWS)).all()
            if not ids:
                if task.excess is None:
                    count = connection.scalar(select(func.count()).select_from(table).where(own)) or 0
                    task.excess = count - task.max_rows
                if task.excess > 0:
                    ids = connection.scalars(oldest.limit(min(task.excess, BATCH_ROWS))).all()
                    task.excess -= len(ids)
        if not ids:
            return False
        with database.write() as connection:
            connection.execute(delete(table).where(table.c.id.in_(ids)))
            if table is EVICTIONS:
                trim_sums(connection, task.engine)
        self.trimmed_rows += len(ids)
        return True

    def _delete_expired_overrides(self, database: Database, now_s: float) -> None:
        with database.read() as connection:
            expired = (OVERRIDES.c.engine == self._engine, OVERRIDES.c.expires_at <= now_s)
            requests = connection.scalars(select(OVERRIDES.c.request).where(*expired).limit(BATCH_ROWS)).all()
        if requests:
            with database.write() as connection:
                connection.execute(delete(OVERRIDES).where(*expired, OVERRIDES.c.request.in_(requests)))
