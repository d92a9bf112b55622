"""The tables `engines` and `tenant_use`: what each engine that uses the database reports in its heartbeat.

What an engine reports about itself holds nothing secret: any engine of the database shows it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from sqlalchemy import Connection, delete, select, update

from kvferry.app.store.database import clean, time_on_host, upsert
from kvferry.app.store.retention import LOST_S, HistoryLimits
from kvferry.app.store.schema import ENGINES, TENANT_USE
from kvferry.app.store.transaction import RowWriter, insert_rows

HEARTBEAT_S = 5.0
MAX_GAP_S = LOST_S / 2
"""Time without a heartbeat after which other engines may have begun to delete rows."""
MAX_TENANTS = 1000
"""Tenants that an engine reports, those with the most bytes in its pool."""


@dataclass(frozen=True, slots=True)
class TierReport:
    """A tier of an engine. Engines that have the same `namespace` in a tier exchange blocks through it.

    It is a digest of an identifier that the tier's store has for the namespace, None for a tier that is not shared or
    was not reached yet.
    """

    name: str
    type: str
    namespace: str | None


@dataclass(frozen=True, slots=True)
class RecentHits:
    """Prompt tokens of the last `window_s` seconds by what served them, and hit rates of the last minutes.

    `hit_rates` has a share of prompt tokens for each minute, the oldest first, None for a minute without prompts.
    """

    window_s: float
    device_hit: int
    host_hit: int
    tier_hit: int
    recomputed: int
    hit_rates: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class EngineReport:
    """State of an engine for its heartbeat. `kind` is the engine's, `url` the address of its admin API."""

    kind: str
    model: str
    version: str
    url: str | None
    slots: int
    used_slots: int
    pool_bytes: int
    recent: RecentHits
    tiers: Sequence[TierReport]
    tenants: Mapping[str | None, int]
    """Bytes of the pool by tenant, None for requests without one: of the largest tenants."""


Report = Callable[[], EngineReport]


class Registration:
    """The row of one engine, and those of its tenants. Times of heartbeats are those of the database's host."""

    def __init__(
        self, engine: str, pool_kind: str, limits: HistoryLimits, on_gap: Callable[[], None] = lambda: None
    ) -> None:
        """`on_gap` is called when another engine may have deleted rows of this one, which it held to be lost."""
        self._on_gap = on_gap
        self._engine = engine
        self._pool_kind = pool_kind
        self._limits = limits
        self._written_s = float("-inf")
        self._row: Mapping[str, Any] = {}
        self._tenants: Mapping[str, int] = {}
        self._written_tenants: Mapping[str, int] | None = None
        """What the database has; None before the first heartbeat, when it may have rows of an earlier process."""

    def set_limits(self, limits: HistoryLimits) -> None:
        """Write other limits soon. Thread: any."""
        self._limits = limits
        self._written_s = float("-inf")

    def writer(
        self, started_s: float, epoch: Callable[[], int], clock: Callable[[], float], report: Report | None
    ) -> RowWriter:
        """Return the writer of the row in the journal's transactions, once in `HEARTBEAT_S`.

        Args:
            started_s: when the process started, Unix time.
            epoch: returns the pool's.
            clock: returns the Unix time.
            report: describes the engine; None leaves that out. Must not block.
        """
        return RowWriter(
            "registration",
            partial(self._prepare, started_s, epoch, clock, report),
            self._write,
            self._confirm,
            lambda: True,
        )

    def write_end(self, connection: Connection, now_s: float) -> None:
        """Note that the engine ended cleanly."""
        ended = update(ENGINES).where(ENGINES.c.name == self._engine)
        now_s = time_on_host(connection, now_s)
        connection.execute(ended.values(seen_at=now_s, ended_at=now_s))

    def _prepare(
        self, started_s: float, epoch: Callable[[], int], clock: Callable[[], float], report: Report | None
    ) -> bool:
        if time.monotonic() - self._written_s < HEARTBEAT_S:
            return False
        reported = None if report is None else report()
        self._tenants = {} if reported is None else {clean(name) or "": n for name, n in reported.tenants.items()}
        self._row = {
            "name": self._engine,
            "pool_kind": self._pool_kind,
            "epoch": epoch(),
            "started_at": started_s,
            "seen_at": clock(),
            "eviction_rows": self._limits.eviction_rows,
            "eviction_days": self._limits.eviction_days,
            "host": clean(socket.gethostname()),
            "ended_at": None,
        } | ({} if reported is None else _columns(reported))
        return True

    def _write(self, connection: Connection) -> None:
        now_s = time_on_host(connection, self._row["seen_at"])
        if self._written_tenants is not None:
            seen_s = connection.scalar(select(ENGINES.c.seen_at).where(ENGINES.c.name == self._engine))
            if seen_s is None or now_s - seen_s > MAX_GAP_S:
                self._written_tenants = None
                self._on_gap()
        upsert(connection, ENGINES, [{**self._row, "seen_at": now_s}])
        own, written = TENANT_USE.c.engine == self._engine, self._written_tenants or {}
        if self._written_tenants is None:
            connection.execute(delete(TENANT_USE).where(own))
        changed = {name for name, num_bytes in self._tenants.items() if written.get(name) != num_bytes}
        outdated = list((changed & written.keys()) | (written.keys() - self._tenants.keys()))
        if outdated:
            connection.execute(delete(TENANT_USE).where(own, TENANT_USE.c.tenant.in_(outdated)))
        rows = [{"engine": self._engine, "tenant": name, "pool_bytes": self._tenants[name]} for name in changed]
        insert_rows(connection, TENANT_USE, rows)

    def _confirm(self) -> bool:
        self._written_tenants = self._tenants
        self._written_s = time.monotonic()
        return False


def _columns(report: EngineReport) -> dict[str, Any]:
    return {
        "kind": clean(report.kind),
        "model": clean(report.model),
        "version": clean(report.version),
        "url": clean(report.url),
        "slots": report.slots,
        "used_slots": report.used_slots,
        "pool_bytes": report.pool_bytes,
        "recent": asdict(report.recent),
        "tiers": [asdict(tier) for tier in report.tiers],
    }
