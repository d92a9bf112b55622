"""Query latency of the eviction history: milliseconds per query, at ten million rows.

Run: python -m bench.history [--rows 10000000 100000] [--rounds 7]

A SQLite database is filled with rows like those of a busy pool (20 evictions a second, three reasons, 50 tenants, 64
blocks a request) by SQL alone; then the questions of the admin API are asked, and the journal's own work is done on it.
The baseline is the same at the first size given: what is read by an index costs the same at every size. Needs 4 GB of
disk at ten million rows, in the temporary folder.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

from bench.report import environment, spread
from kvferry.app.store import EvictionFilter, downgrade, upgrade
from kvferry.app.store.database import Database
from kvferry.app.store.history import HistoryQueue
from kvferry.app.store.reader import StoreReader
from kvferry.app.store.retention import HistoryLimits, HistoryTrimmer
from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.events import EvictionBatch, RegretBatch
from kvferry.core.pool.records import SLOT_RECORD, SlotRows, lines_of
from kvferry.core.stats import EvictionReason

ENGINE = "bench"
START_S = 1_700_000_000.0
SPACING_S = 0.05
DAY_S = 86400.0
BATCH = 1000

_FILL = """
INSERT INTO evictions (engine, time, key, group_index, reason, policy, age_s, idle_s, hits, position, size_bytes,
                       request, tenant, needed_by, regretted_at)
WITH RECURSIVE numbers(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM numbers WHERE i < :rows - 1)
SELECT :engine, :start + i * :spacing, printf('%064x', i) || '00', 0,
       CASE i % 50 WHEN 0 THEN 'operator' WHEN 1 THEN 'reset' ELSE 'capacity' END, 'lru',
       (i * 7919) % 90000 / 10.0, (i * 7919) % 50000 / 10.0, i % 3, i % 64, 131072,
       'request-' || (i / 64), CASE WHEN i % 4 THEN 'tenant-' || (i / 64 % 50) END, 'request-' || (i / 64 + 9),
       CASE WHEN i % 20 = 0 THEN :start + i * :spacing + 60 END
FROM numbers
"""


def fill(path: Path, rows: int) -> None:
    """Insert rows first and create indexes afterwards, which is faster; the migration computes the sums."""
    url = f"sqlite:///{path}"
    upgrade(url)
    downgrade(url, "0002")
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA synchronous=OFF")
        connection.execute("PRAGMA cache_size=-1000000")
        listed = (
            "SELECT name, sql FROM sqlite_master WHERE type = 'index' AND tbl_name = 'evictions' AND sql IS NOT NULL"
        )
        indexes = connection.execute(listed).fetchall()
        for name, _ in indexes:
            connection.execute(f'DROP INDEX "{name}"')
        values = {"rows": rows, "engine": ENGINE, "start": START_S, "spacing": SPACING_S}
        connection.execute(_FILL, values)
        for _, sql in indexes:
            connection.execute(sql)
        connection.execute(
            "INSERT INTO engines (name, pool_kind, epoch, started_at, seen_at, eviction_rows, eviction_days) "
            "VALUES (?, 'pinned', 0, ?, ?, ?, 1e6)",
            (ENGINE, START_S, START_S, rows),
        )
    upgrade(url)


def keys_of(numbers: list[int]) -> list[bytes]:
    return [bytes.fromhex(f"{number:064x}00") for number in numbers]


def batch(first: int, time_s: float) -> EvictionBatch:
    numbers = list(range(first, first + BATCH))
    records = np.zeros(BATCH, dtype=SLOT_RECORD)
    records["size"], records["stored_s"], records["priority_class"] = 131072, time_s - 30, 1
    rows = SlotRows(
        slots=np.zeros(BATCH, dtype=np.int64),
        keys=keys_of(numbers),
        live=np.ones(BATCH, dtype=np.bool_),
        origins=[RequestIdentity("request-new")] * BATCH,
        lines=lines_of(records),
    )
    return EvictionBatch(time_s, EvictionReason.CAPACITY, "lru", rows, None)


def bench(path: Path, rows: int, rounds: int, seed: int) -> dict[str, list[float]]:
    """Return the milliseconds of each round, by query."""
    fill(path, rows)
    database = Database(f"sqlite:///{path}")
    database.open()
    reader = StoreReader(database, ENGINE)
    queue = HistoryQueue(ENGINE, 1_000_000)
    rng = random.Random(seed)
    end_s = START_S + rows * SPACING_S
    times: dict[str, list[float]] = {}

    def timed(name: str, ask: Callable[[], object]) -> None:
        started = time.perf_counter()
        ask()
        times.setdefault(name, []).append((time.perf_counter() - started) * 1e3)

    def write_queue() -> None:
        queue.prepare()
        queue.confirm(database.write(queue.write))

    def page(wanted: EvictionFilter) -> Callable[[], object]:
        return lambda: reader.evictions(wanted)

    for number in range(rounds):
        somewhere_s = START_S + rng.random() * rows * SPACING_S
        request, tenant = f"request-{rng.randrange(rows // 64)}", f"tenant-{rng.randrange(50)}"
        timed("page of 100, newest", lambda: reader.evictions())
        timed("page, before some instant", page(EvictionFilter(until_s=somewhere_s)))
        timed("page, by reason", page(EvictionFilter(until_s=somewhere_s, reason="operator")))
        timed("page, by request", page(EvictionFilter(request=request)))
        timed("page, by tenant", page(EvictionFilter(until_s=somewhere_s, tenant=tenant)))
        timed("page, by tenant and reason", page(EvictionFilter(until_s=somewhere_s, tenant=tenant, reason="reset")))
        timed("summary of an hour", lambda: reader.eviction_summary(end_s - 3650, end_s - 50))
        timed("summary of a day", lambda: reader.eviction_summary(end_s - DAY_S - 50, end_s - 50))
        timed("summary of everything", lambda: reader.eviction_summary())
        queue.append(batch(rows + number * BATCH, end_s + number), BATCH)
        timed(f"journal: {BATCH:,} rows in", write_queue)
        queue.append(RegretBatch(end_s + number, keys_of(rng.sample(range(rows), BATCH))), BATCH)
        timed(f"journal: {BATCH:,} regrets", write_queue)
    trimmer = HistoryTrimmer(ENGINE, HistoryLimits(eviction_rows=rows, eviction_days=1e6))
    # The rows added above exceed the limit and are trimmed in steps.
    more = True
    while more:
        before = trimmer.trimmed_rows
        started = time.perf_counter()
        more = trimmer.step(database, end_s, 0)
        if trimmer.trimmed_rows > before:
            times.setdefault("journal: step of trimming", []).append((time.perf_counter() - started) * 1e3)
    database.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[100_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(environment("sqlalchemy"), f"SQLite {sqlite3.sqlite_version}, seed {options.seed}")
    print(f"milliseconds, SQLite, {options.rounds} rounds: median (min-max); a step of trimming is 8,000 rows at most")
    found: list[dict[str, list[float]]] = []
    for rows in options.rows:
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            found.append(bench(Path(folder) / "history.db", rows, options.rounds, options.seed))
            print(f"{rows:,} rows: {time.perf_counter() - started:.0f} s in all", flush=True)
    head = "".join(f"{f'{rows:,} rows':<26}" for rows in options.rows)
    print(f"\n{'':<30}{head}ratio of medians, last to first")
    for name in found[0]:
        medians = [statistics.median(times[name]) for times in found]
        columns = "".join(f"{spread(times[name], 1):<26}" for times in found)
        print(f"{name:<30}{columns}{medians[-1] / medians[0]:.1f}")


if __name__ == "__main__":
    main()
