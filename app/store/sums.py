"""Sums of the eviction history, so that a summary of ten million rows reads some thousand.

For each five minutes, reason and bucket of ages there is one row in `eviction_sums`, kept in the transactions that
write the rows which it counts. History is trimmed from its old end only, so the sums of a span are right when it began
after the oldest row that is left; the spans at both ends of a window, and the oldest one, are counted row by row.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, case, delete, func, select

from kvferry.app.store.models import EvictionRow, EvictionSumRow, ResetRow
from kvferry.app.store.records import AgeBucket, EvictionSummary
from kvferry.app.store.upsert import accumulate

AGE_BOUNDS_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 86400.0, 7 * 86400.0)
"""Upper bounds of the buckets in which ages at eviction are counted; one more is without end."""
SPAN_S = 300.0

_Key = tuple[int, str, int]


def span_of(time_s: float) -> int:
    """The number of the span that holds an instant."""
    return int(time_s // SPAN_S)


def bucket_of(age_s: float) -> int:
    """The number of the bucket that holds an age."""
    return bisect_left(AGE_BOUNDS_S, age_s)


def add_evictions(connection: Connection, engine: str, rows: Iterable[dict[str, Any]]) -> None:
    """Count rows of `evictions` that were just inserted."""
    sums: dict[_Key, dict[str, Any]] = {}
    for row in rows:
        age_s = row["age_s"]
        key = (span_of(row["time"]), row["reason"], bucket_of(age_s))
        found = sums.get(key)
        if found is None:
            found = sums[key] = _empty(engine, key, age_s)
        found["number"] += 1
        found["never_hit"] += not row["hits"]
        found["age_sum"] += age_s
        found["age_min"] = min(found["age_min"], age_s)
        found["age_max"] = max(found["age_max"], age_s)
    accumulate(
        connection,
        EvictionSumRow,
        list(sums.values()),
        sums=("number", "never_hit", "regretted", "age_sum"),
        least=("age_min",),
        greatest=("age_max",),
    )


def add_regrets(connection: Connection, engine: str, evictions: Iterable[tuple[float, str, float]]) -> None:
    """Count evictions (time, reason, age) that were just found to be regretted."""
    sums: dict[_Key, dict[str, Any]] = {}
    for time_s, reason, age_s in evictions:
        key = (span_of(time_s), reason, bucket_of(age_s))
        sums.setdefault(key, _empty(engine, key, age_s))["regretted"] += 1
    accumulate(connection, EvictionSumRow, list(sums.values()), sums=("regretted",))


def trim_sums(connection: Connection, engine: str) -> None:
    """Delete the sums of spans of which no row is left."""
    oldest_s = _oldest(connection, engine)
    gone = [EvictionSumRow.engine == engine]
    if oldest_s is not None:
        gone.append(EvictionSumRow.span < span_of(oldest_s))
    connection.execute(delete(EvictionSumRow).where(*gone))


def summarize(connection: Connection, engine: str, since_s: float | None, until_s: float | None) -> EvictionSummary:
    """Counts by reason, ages at eviction and the rate of regrets, within a window, on one snapshot."""
    oldest_s = _oldest(connection, engine)
    groups: list[Row[Any]] = []
    if oldest_s is not None:
        start_s = oldest_s if since_s is None else max(since_s, oldest_s)
        # The first and last of the spans that are counted by their sums, the last one excluded.
        first = span_of(start_s) + 1
        last = None if until_s is None else span_of(until_s)
        # Each edge has one bound a side: of two, a database may take the wider one to read by.
        if last is not None and last <= first:
            edges = [(since_s, until_s)]
        else:
            edges = [(since_s, first * SPAN_S)]
            spans = [EvictionSumRow.engine == engine, EvictionSumRow.span >= first]
            if last is not None:
                edges.append((last * SPAN_S, until_s))
                spans.append(EvictionSumRow.span < last)
            groups += connection.execute(_from_sums(*spans)).all()
        for edge in edges:
            rows = _from_rows(EvictionRow.engine == engine, *window(EvictionRow.time, *edge))
            groups += connection.execute(rows).all()
    resets = select(func.count(), func.coalesce(func.sum(ResetRow.dropped), 0)).where(
        ResetRow.engine == engine, *window(ResetRow.time, since_s, until_s)
    )
    num_resets, reset_blocks = connection.execute(resets).one()
    return _add_up(groups, num_resets, int(reset_blocks))


def window(column: Any, since_s: float | None, until_s: float | None) -> list[ColumnElement[bool]]:
    """Conditions for instants from `since_s` on and before `until_s`."""
    conditions: list[ColumnElement[bool]] = []
    if since_s is not None:
        conditions.append(column >= since_s)
    if until_s is not None:
        conditions.append(column < until_s)
    return conditions


def _empty(engine: str, key: _Key, age_s: float) -> dict[str, Any]:
    span, reason, bucket = key
    counted = {"number": 0, "never_hit": 0, "regretted": 0, "age_sum": 0.0, "age_min": age_s, "age_max": age_s}
    return {"engine": engine, "span": span, "reason": reason, "bucket": bucket, **counted}


def _oldest(connection: Connection, engine: str) -> float | None:
    # By the index; `min` over a filter is not read from one everywhere.
    first = select(EvictionRow.time).where(EvictionRow.engine == engine)
    return connection.scalar(first.order_by(EvictionRow.time, EvictionRow.id).limit(1))


def _from_rows(*conditions: ColumnElement[bool]) -> Any:
    steps = [(EvictionRow.age_s <= bound, index) for index, bound in enumerate(AGE_BOUNDS_S)]
    bucket = case(*steps, else_=len(AGE_BOUNDS_S)).label("bucket")
    age = EvictionRow.age_s
    return (
        select(
            EvictionRow.reason,
            bucket,
            func.count().label("number"),
            func.count(EvictionRow.regretted_at).label("regretted"),
            func.sum(case((EvictionRow.hits == 0, 1), else_=0)).label("never_hit"),
            func.min(age).label("age_min"),
            func.sum(age).label("age_sum"),
            func.max(age).label("age_max"),
        )
        .where(*conditions)
        .group_by(EvictionRow.reason, bucket)
    )


def _from_sums(*conditions: ColumnElement[bool]) -> Any:
    row = EvictionSumRow
    return (
        select(
            row.reason,
            row.bucket,
            func.sum(row.number).label("number"),
            func.sum(row.regretted).label("regretted"),
            func.sum(row.never_hit).label("never_hit"),
            func.min(row.age_min).label("age_min"),
            func.sum(row.age_sum).label("age_sum"),
            func.max(row.age_max).label("age_max"),
        )
        .where(*conditions)
        .group_by(row.reason, row.bucket)
    )


def _add_up(groups: Sequence[Row[Any]], num_resets: int, reset_blocks: int) -> EvictionSummary:
    by_reason: dict[str, int] = {}
    regretted: dict[str, int] = {}
    ages = [0] * (len(AGE_BOUNDS_S) + 1)
    for group in groups:
        # A database may answer a sum of integers as a decimal.
        number = int(group.number)
        by_reason[group.reason] = by_reason.get(group.reason, 0) + number
        regretted[group.reason] = regretted.get(group.reason, 0) + int(group.regretted)
        ages[group.bucket] += number
    count, regrets = sum(by_reason.values()), sum(regretted.values())
    return EvictionSummary(
        count=count,
        by_reason=by_reason,
        regretted=regrets,
        regret_rate=regrets / count if count else 0.0,
        regretted_by_reason=regretted,
        ages=[AgeBucket(bound, number) for bound, number in zip((*AGE_BOUNDS_S, None), ages, strict=True)],
        age_min_s=min((group.age_min for group in groups), default=None),
        age_mean_s=sum(group.age_sum for group in groups) / count if count else None,
        age_max_s=max((group.age_max for group in groups), default=None),
        never_hit=sum(int(group.never_hit) for group in groups),
        resets=num_resets,
        reset_blocks=reset_blocks,
    )
