"""Eviction history: its queue, its rows, and their summary.

The queue is bounded: entries beyond it are dropped and counted. A summary counts the rows of its window.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Connection, Row, Table, case, func, insert, select, update

from kvferry.app.store.database import clean, insert_rows, write_accepted
from kvferry.app.store.schema import EVICTIONS, RESETS, STATS_ROWS
from kvferry.app.telemetry.history import Row as StatsRow
from kvferry.core.keys import group_of
from kvferry.core.pool.events import EvictionBatch, RegretBatch, ResetEvent

BATCH_ROWS = 2000
AGE_BOUNDS_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 86400.0, 7 * 86400.0)
"""Upper bounds of the buckets of ages at eviction; one more bucket is unbounded."""

HistoryItem = EvictionBatch | ResetEvent | RegretBatch | StatsRow
_Write = Callable[[Connection, Sequence[Any]], None]


@dataclass(frozen=True, slots=True)
class Entry:
    """An item, its number of rows, and the time when it was queued on the monotonic clock."""

    item: HistoryItem
    rows: int
    queued_s: float


class HistoryQueue:
    """Bounded queue to the journal, which writes its entries in order, in batches.

    Appending requires the manager lock; the journal's thread prepares and confirms. No lock is needed: each
    counter has one writer, and the deque's operations are atomic. An entry counts as queued until it is written, so
    that `appended = queued + removed` always. Rows that the database rejects are dropped and counted.
    """

    def __init__(self, engine: str, max_rows: int) -> None:
        self.max_rows = max_rows
        self.written_rows = 0
        self.rejected_rows = 0
        self._engine = engine
        self.appended_rows = 0
        self.dropped_rows = 0
        self.removed_rows = 0
        self._entries: deque[Entry] = deque()
        self._taken: list[Entry] = []
        """Entries of the transaction under way, or of one that failed."""
        self._runs: list[tuple[_Write, Sequence[Any]]] = []
        """Their rows, those of consecutive evictions together, and how to write them."""
        self._num_rejected = 0
        """Rows of them that cannot be made."""

    def append(self, item: HistoryItem, rows: int) -> None:
        """Queue an item, or drop and count it if the queue is full. Never waits."""
        if not rows:
            return
        if self.queued_rows + rows > self.max_rows:
            self.dropped_rows += rows
            return
        self.appended_rows += rows
        self._entries.append(Entry(item, rows, time.monotonic()))

    @property
    def queued_rows(self) -> int:
        """Rows that are not removed."""
        return self.appended_rows - self.removed_rows

    @property
    def is_ready(self) -> bool:
        """Whether entries are taken."""
        return bool(self._taken)

    def oldest_s(self) -> float | None:
        """Return when the oldest queued entry was appended, on the monotonic clock."""
        for entries in (self._taken, self._entries):
            try:
                return entries[0].queued_s
            except IndexError:
                continue
        return None

    def prepare(self) -> None:
        """Take the oldest entries, `BATCH_ROWS` rows or a single larger entry, and make their rows."""
        rows = sum(entry.rows for entry in self._taken)
        while self._entries and rows < BATCH_ROWS:
            entry = self._entries.popleft()
            rows += entry.rows
            self._taken.append(entry)
            # Python's work is done before the database is locked.
            try:
                self._add_rows(entry.item)
            except Exception:
                self._num_rejected += entry.rows
                raise

    def write(self, connection: Connection) -> int:
        """Write the rows made; return how many of them the database rejected. Thread: writer."""
        return sum(write_accepted(connection, rows, partial(write, connection)) for write, rows in self._runs)

    def confirm(self, num_rejected: int) -> bool:
        """Remove the entries whose rows are committed; return whether more are queued."""
        rows, rejected = sum(entry.rows for entry in self._taken), self._num_rejected + num_rejected
        self._taken, self._runs, self._num_rejected = [], [], 0
        self.removed_rows += rows
        self.rejected_rows += rejected
        self.written_rows += rows - rejected
        return bool(self._entries)

    def _add_rows(self, item: HistoryItem) -> None:
        if isinstance(item, RegretBatch):
            # A regret concerns evictions before it only.
            regretted = list(zip(item.evicted_s, [key.hex() for key in item.keys], strict=True))
            self._runs.append((partial(self._mark_regrets, item.time_s), regretted))
        elif isinstance(item, ResetEvent):
            row = {"engine": self._engine, "time": item.time_s, "epoch": item.epoch, "dropped": item.dropped}
            self._runs.append((partial(_insert, RESETS), [row]))
        elif isinstance(item, StatsRow):
            row = {
                "engine": self._engine,
                "time": item.time_s,
                "started_at": item.started_s,
                "counts": item.to_json(),
            }
            self._runs.append((partial(_insert, STATS_ROWS), [row]))
        else:
            if not self._runs or self._runs[-1][0] is not _insert_evictions:
                self._runs.append((_insert_evictions, []))
            evictions: Any = self._runs[-1][1]
            evictions += _eviction_rows(self._engine, item)

    def _mark_regrets(self, time_s: float, connection: Connection, regretted: Sequence[tuple[float, str]]) -> None:
        """Mark the latest evictions at some times of these keys, one batch of evictions after another."""
        keys_at: dict[float, list[str]] = {}
        for evicted_s, key in regretted:
            keys_at.setdefault(evicted_s, []).append(key)
        parts = [
            (evicted_s, keys[start : start + BATCH_ROWS])
            for evicted_s, keys in keys_at.items()
            for start in range(0, len(keys), BATCH_ROWS)
        ]
        for evicted_s, keys in parts:
            # By time, as an index of keys would cost each eviction more than everything else.
            latest = (
                select(func.max(EVICTIONS.c.id))
                .where(EVICTIONS.c.engine == self._engine, EVICTIONS.c.time == evicted_s, EVICTIONS.c.key.in_(keys))
                .group_by(EVICTIONS.c.key)
            )
            which = (EVICTIONS.c.id.in_(latest), EVICTIONS.c.regretted_at.is_(None))
            connection.execute(update(EVICTIONS).where(*which).values(regretted_at=time_s))


def _insert(table: Table, connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    connection.execute(insert(table), rows)


def _insert_evictions(connection: Connection, rows: Sequence[dict[str, Any]]) -> None:
    insert_rows(connection, EVICTIONS, rows)


def _eviction_rows(engine: str, batch: EvictionBatch) -> list[dict[str, Any]]:
    """Return a batch as parameters. A block without hits has been idle since it was stored."""
    rows = batch.rows
    age_s = (batch.time_s - rows.records["stored_s"]).clip(min=0.0).tolist()
    idle_s = (batch.time_s - np.maximum(rows.records["stored_s"], rows.records["hit_s"])).clip(min=0.0).tolist()
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
        rows.records["hits"].tolist(),
        rows.records["position"].tolist(),
        rows.records["size"].tolist(),
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
            "session": clean(origin.session),
        }
        for key, age, idle, hits, position, size, origin in columns
    ]


@dataclass(frozen=True, slots=True)
class AgeBucket:
    """Evictions of blocks at most `upto_s` old and older than the bucket before; null is unbounded."""

    upto_s: float | None
    count: int


@dataclass(frozen=True, slots=True)
class Ages:
    """Ages at eviction, from when the block was stored; null without evictions."""

    min_s: float | None
    mean_s: float | None
    max_s: float | None
    buckets: list[AgeBucket]


@dataclass(frozen=True, slots=True)
class EvictionSummary:
    """Summary of evictions. Whole resets have no rows of their own, and are counted separately."""

    total: int
    by_reason: dict[str, int]
    regretted: int
    regret_rate: float = field(metadata={"description": "share of the evicted blocks that were requested again"})
    regretted_by_reason: dict[str, int]
    never_hit: int
    age: Ages
    resets: int = field(metadata={"description": "whole resets"})
    reset_blocks: int = field(metadata={"description": "blocks dropped by whole resets"})


def summarize(connection: Connection, engine: str, since_s: float | None, until_s: float | None) -> EvictionSummary:
    """Return counts by reason, ages at eviction and the rate of regrets, within a window, on one snapshot."""
    row = EVICTIONS.c
    steps = [(row.age_s <= bound, index) for index, bound in enumerate(AGE_BOUNDS_S)]
    bucket = case(*steps, else_=len(AGE_BOUNDS_S)).label("bucket")
    sums = {
        "number": func.count(),
        "regretted": func.count(row.regretted_at),
        "never_hit": func.sum(case((row.hits == 0, 1), else_=0)),
        "age_min": func.min(row.age_s),
        "age_sum": func.sum(row.age_s),
        "age_max": func.max(row.age_s),
    }
    window = in_window(row.time, since_s, until_s)
    grouped = select(row.reason, bucket, *(value.label(name) for name, value in sums.items()))
    groups = connection.execute(grouped.where(row.engine == engine, *window).group_by(row.reason, bucket)).all()
    resets = select(func.count(), func.coalesce(func.sum(RESETS.c.dropped), 0)).where(
        RESETS.c.engine == engine, *in_window(RESETS.c.time, since_s, until_s)
    )
    num_resets, reset_blocks = connection.execute(resets).one()
    return _add_up(groups, num_resets, int(reset_blocks))


def in_window(column: Any, since_s: float | None, until_s: float | None) -> list[ColumnElement[bool]]:
    """Return the conditions for instants from `since_s` on and before `until_s`."""
    conditions: list[ColumnElement[bool]] = []
    if since_s is not None:
        conditions.append(column >= since_s)
    if until_s is not None:
        conditions.append(column < until_s)
    return conditions


def _add_up(groups: Sequence[Row[Any]], num_resets: int, reset_blocks: int) -> EvictionSummary:
    by_reason: dict[str, int] = {}
    regretted: dict[str, int] = {}
    ages = [0] * (len(AGE_BOUNDS_S) + 1)
    for group in groups:
        # A database may return a sum of integers as a decimal.
        number = int(group.number)
        by_reason[group.reason] = by_reason.get(group.reason, 0) + number
        regretted[group.reason] = regretted.get(group.reason, 0) + int(group.regretted)
        ages[group.bucket] += number
    count, regrets = sum(by_reason.values()), sum(regretted.values())
    age = Ages(
        min_s=min((group.age_min for group in groups), default=None),
        mean_s=sum(group.age_sum for group in groups) / count if count else None,
        max_s=max((group.age_max for group in groups), default=None),
        buckets=[AgeBucket(bound, number) for bound, number in zip((*AGE_BOUNDS_S, None), ages, strict=True)],
    )
    return EvictionSummary(
        total=count,
        by_reason=by_reason,
        regretted=regrets,
        regret_rate=regrets / count if count else 0.0,
        regretted_by_reason=regretted,
        age=age,
        never_hit=sum(int(group.never_hit) for group in groups),
        resets=num_resets,
        reset_blocks=reset_blocks,
    )
