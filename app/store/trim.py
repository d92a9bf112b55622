"""Keeping history within its limits of age and rows, in batches so small that no lock is held for long."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sqlalchemy import delete, func, select

from kvferry.app.store.database import Database
from kvferry.app.store.models import AuditRow, EngineRow, EvictionRow, OverrideRow, ResetRow
from kvferry.app.store.sums import trim_sums

BATCH_ROWS = 1000
BATCHES_A_STEP = 8
PASS_INTERVAL_S = 60.0
DAY_S = 86400.0

_History = type[EvictionRow] | type[ResetRow] | type[AuditRow]


@dataclass(frozen=True, slots=True)
class HistoryLimits:
    """How much history is kept for an engine; whichever limit is met first counts."""

    eviction_rows: int = 1_000_000
    eviction_days: float = 30.0
    audit_rows: int = 1_000_000
    audit_days: float = 365.0


@dataclass(slots=True)
class _Task:
    """Rows of one engine in one table: those before `before_s` go, and the oldest beyond `max_rows`.

    `excess` is how many those are, once they were counted: in a large table that takes half a second.
    """

    table: _History
    engine: str
    before_s: float
    max_rows: int
    excess: int | None = None


class HistoryTrimmer:
    """Deletes what is over the limits, a bounded step at a time.

    Engines that share a database are each held to the limits that they registered, so that history of one that never
    comes back still goes by its age. Between passes, history may be over its limit of rows by a twentieth.
    """

    def __init__(self, engine: str, limits: HistoryLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._tasks: deque[_Task] = deque()
        self._next_pass_s = 0.0
        self._rows_at_pass = 0
        self.trimmed_rows = 0

    def set_limits(self, limits: HistoryLimits) -> None:
        """Hold history to other limits, from the next pass on."""
        self._limits = limits
        self._next_pass_s = 0.0

    def step(self, database: Database, now_s: float, written_rows: int) -> bool:
        """Trim some, if it is time to; True if there is more. `written_rows` counts the rows written so far."""
        grown = written_rows - self._rows_at_pass > self._limits.eviction_rows // 20
        if not self._tasks and (now_s >= self._next_pass_s or grown):
            self._tasks.extend(self._plan(database, now_s))
            self._purge_overrides(database, now_s)
            self._next_pass_s = now_s + PASS_INTERVAL_S
            self._rows_at_pass = written_rows
        for _ in range(BATCHES_A_STEP):
            if not self._tasks:
                return False
            if not self._trim(database, self._tasks[0]):
                self._tasks.popleft()
        return bool(self._tasks)

    def _plan(self, database: Database, now_s: float) -> list[_Task]:
        audit_from_s = now_s - self._limits.audit_days * DAY_S
        tasks = [_Task(AuditRow, self._engine, audit_from_s, self._limits.audit_rows)]
        with database.read() as connection:
            engines = connection.execute(select(EngineRow.name, EngineRow.eviction_rows, EngineRow.eviction_days)).all()
        for name, rows, days in engines:
            tasks.append(_Task(EvictionRow, name, now_s - days * DAY_S, rows))
            tasks.append(_Task(ResetRow, name, now_s - days * DAY_S, rows))
        return tasks

    def _trim(self, database: Database, task: _Task) -> bool:
        """Delete one batch; False if there was nothing over the limits."""
        table = task.table
        mine = table.engine == task.engine
        oldest = select(table.id).where(mine).order_by(table.time, table.id)
        with database.read() as connection:
            victims = connection.scalars(oldest.where(table.time < task.before_s).limit(BATCH_ROWS)).all()
            if not victims:
                if task.excess is None:
                    task.excess = (
                        connection.scalar(select(func.count()).select_from(table).where(mine)) or 0
                    ) - task.max_rows
                if task.excess > 0:
                    victims = connection.scalars(oldest.limit(min(task.excess, BATCH_ROWS))).all()
                    task.excess -= len(victims)
        if not victims:
            return False
        with database.write() as connection:
            connection.execute(delete(table).where(table.id.in_(victims)))
            if table is EvictionRow:
                trim_sums(connection, task.engine)
        self.trimmed_rows += len(victims)
        return True

    def _purge_overrides(self, database: Database, now_s: float) -> None:
        """Delete overrides whose time is over. They are few: an operator made each of them."""
        with database.read() as connection:
            over = (OverrideRow.engine == self._engine, OverrideRow.expires_at <= now_s)
            expired = connection.scalars(select(OverrideRow.request).where(*over).limit(BATCH_ROWS)).all()
        if expired:
            with database.write() as connection:
                connection.execute(delete(OverrideRow).where(*over, OverrideRow.request.in_(expired)))
