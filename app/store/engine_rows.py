"""The table `engines`: which engines use the database, and to which limits their history is held once they are gone."""

from __future__ import annotations

import time

from sqlalchemy import Connection, update

from kvferry.app.store.database import time_on_host, upsert
from kvferry.app.store.retention import HistoryLimits
from kvferry.app.store.schema import ENGINES

HEARTBEAT_S = 5.0


class Registration:
    """The row of one engine. Times of heartbeats are those of the database's host."""

    def __init__(self, engine: str, pool_kind: str, limits: HistoryLimits) -> None:
        self._engine = engine
        self._pool_kind = pool_kind
        self._limits = limits
        self._written_s = float("-inf")

    def set_limits(self, limits: HistoryLimits) -> None:
        """Write other limits soon. Thread: any."""
        self._limits = limits
        self._written_s = float("-inf")

    def write_end(self, now_s: float, connection: Connection) -> None:
        """Note that the engine ended cleanly."""
        ended = update(ENGINES).where(ENGINES.c.name == self._engine)
        now_s = time_on_host(connection, now_s)
        connection.execute(ended.values(seen_at=now_s, ended_at=now_s))

    @property
    def is_due(self) -> bool:
        """Whether the row has to be written again, once in `HEARTBEAT_S`."""
        return time.monotonic() - self._written_s >= HEARTBEAT_S

    def write(self, now_s: float, connection: Connection) -> None:
        """Write the row. Thread: writer."""
        now_s = time_on_host(connection, now_s)
        row = {
            "name": self._engine,
            "pool_kind": self._pool_kind,
            "seen_at": now_s,
            "ended_at": None,
            "eviction_rows": self._limits.eviction_rows,
            "eviction_days": self._limits.eviction_days,
        }
        upsert(connection, ENGINES, row)

    def confirm(self) -> None:
        """Note that the row is committed."""
        self._written_s = time.monotonic()
