"""Many engines on one PostgreSQL: what each sends to it, and how many rows a second it takes.

Run: python -m bench.engines [--seconds 15] [--only statements|writers]

`statements`: three `kvferry serve` with the built-in model under load, each with prompts that have nothing in common
and a full pool. The server logs each statement; transactions are those of `pg_stat_database`.

`writers`: the journals of 1, 4 and 8 engines, each in a process of its own, with the rows of the engine that
docs/scale.md calculates with (602 evictions and as many changed slots a second), and then with as many rows as are
taken. The processor time is that of all processes of PostgreSQL, of which fsync is on.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import psutil
import psycopg

from bench.report import environment
from kvferry.app.store import MetadataStore
from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from tests.harness.postgres import NO_SYNC, Server, new_database, own_server
from tests.harness.service_process import Served, serving
from tests.harness.stores import SLOT_BYTES

NUM_SERVICES = 3
PROMPT_TOKENS = 512
WRITERS = (1, 4, 8)
BLOCKS_PER_S = 602
"""Blocks that the engine of docs/scale.md stores a second, and so evicts from a full pool."""
SLOTS = 20_000
BLOCKS_PER_STORE = 43
"""Blocks of one request: fourteen requests a second."""
MAX_QUEUED = 20_000
SETTLE_S = 120.0
SEED = 5

_STATEMENT = re.compile(r" (\S+) LOG:  (?:statement|execute \S+): *(.*)")
_TRANSACTIONS = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"


@contextmanager
def under_load(service: Served, number: int) -> Iterator[None]:
    """Send prompts of which no two begin alike, one after the other, until the block ends."""
    is_over = threading.Event()

    def send() -> None:
        prompts = random.Random(number)
        while not is_over.is_set():
            service.complete([prompts.randrange(3, 250) for _ in range(PROMPT_TOKENS)], max_tokens=1)

    with ThreadPoolExecutor(1) as threads:
        sending = threads.submit(send)
        try:
            yield
        finally:
            is_over.set()
    sending.result()


def transactions(url: str) -> int:
    """Return the transactions of a database so far. Sessions report theirs about once a second."""
    with psycopg.connect(url, autocommit=True) as connection:
        return int(connection.execute(_TRANSACTIONS).fetchone()[0])  # type: ignore[index]


def measure_statements(seconds: float) -> None:
    """Print how many statements and transactions an engine sends a second."""
    options = f"{NO_SYNC} -c log_statement=all -c log_line_prefix='%p %a '"
    with (
        own_server(options) as server,
        new_database(server.url) as url,
        TemporaryDirectory() as folder,
        ExitStack() as running,
    ):
        services = [
            running.enter_context(
                serving(
                    Path(folder) / str(number),
                    True,
                    engine_name=f"engine-{number}",
                    database_url=url,
                    pool_bytes="4MiB",
                    device_blocks=128,
                )
            )
            for number in range(NUM_SERVICES)
        ]
        for name in ("idle", "load"):
            with ExitStack() as load:
                if name == "load":
                    for number, service in enumerate(services):
                        load.enter_context(under_load(service, number))
                    time.sleep(2)
                before = [service.stats()["journal"]["written"] for service in services]
                length, num_before = server.log_path.stat().st_size, transactions(url)
                started_s = time.monotonic()
                time.sleep(seconds)
                sent = server.log_path.read_bytes()[length:].decode(errors="replace")
                engine_s = (time.monotonic() - started_s) * NUM_SERVICES
                num_transactions = transactions(url) - num_before
                rows = sum(one.stats()["journal"]["written"] for one in services) - sum(before)
            kinds = Counter(_kind_of(text) for _, text in _STATEMENT.findall(sent))
            print(f"\n{name}, {NUM_SERVICES} services, {seconds:g} s, for one engine and second:")
            print(f"  history rows {rows / engine_s:.1f}")
            print(f"  transactions {num_transactions / engine_s:.2f}")
            print(f"  statements {kinds.total() / engine_s:.2f}")
            for kind, number in kinds.most_common():
                print(f"    {number / engine_s:8.2f}  {kind}")


def _kind_of(statement: str) -> str:
    """Return the first words of a statement, with its table."""
    found = re.match(r"(INSERT INTO|DELETE FROM|UPDATE|SELECT|BEGIN|COMMIT|ROLLBACK|SET)\b(.*)", statement)
    if found is None:
        return statement[:30]
    table = re.search(r"\bFROM (\w+)", found[2]) if found[1] == "SELECT" else re.match(r" (\w+)", found[2])
    return f"{found[1]} {table[1]}" if table else statement[:30]


@dataclass(frozen=True)
class Written:
    """What one writer wrote, and its own processor time."""

    evictions: int
    slots: int
    dropped: int
    cpu_s: float


def write(url: str, number: int, rate: float | None, pipe: Connection) -> None:
    """Store blocks in a full pool, at a rate or as fast as the journal follows, from one message to the next."""
    store = MetadataStore(url, f"engine-{number}", "pinned")
    manager = OffloadManager(SLOTS, SLOT_BYTES, sink=store.journal.append)
    keys = random.Random(SEED + number)
    positions = np.arange(BLOCKS_PER_STORE, dtype=np.int64)

    def put() -> None:
        now_s = time.time()
        origin = RequestIdentity(f"request-{keys.getrandbits(40)}", f"tenant-{keys.randrange(20)}")
        offer = manager.prepare_store(
            [keys.randbytes(32) + b"\0" for _ in range(BLOCKS_PER_STORE)], origin, positions, 1, now_s
        )
        manager.complete_store(offer.slots, now_s)

    for _ in range(SLOTS // BLOCKS_PER_STORE + 1):
        put()
    store.start(Inventory(manager))
    store.journal.flush(SETTLE_S)
    pipe.send("ready")
    pipe.recv()
    first, cpu_s = store.journal.stats(), time.process_time()
    changed = 0
    next_s = time.monotonic()
    while not pipe.poll():
        put()
        changed += BLOCKS_PER_STORE
        if rate is None:
            while store.journal.stats().queued > MAX_QUEUED and not pipe.poll():
                time.sleep(0.005)
        else:
            next_s += BLOCKS_PER_STORE / rate
            time.sleep(max(0.0, next_s - time.monotonic()))
    last = store.journal.stats()
    pipe.send(Written(last.written - first.written, changed, last.dropped - first.dropped, time.process_time() - cpu_s))
    pipe.recv()
    store.close(SETTLE_S)


def server_cpu_s(server: Server) -> float:
    """Return the processor time of all processes of a server that still run."""
    postmaster = psutil.Process(server.pid)
    times = [process.cpu_times() for process in (postmaster, *postmaster.children(recursive=True))]
    return sum(one.user + one.system for one in times) + times[0].children_user + times[0].children_system


def measure_writers(seconds: float) -> None:
    """Print rows a second and processor time, by number of writers."""
    print("writers  offered  evictions/s  dropped/s  PostgreSQL: cores  ms CPU per 1,000 rows  writer: cores, each")
    spawn = multiprocessing.get_context("spawn")
    for rate in (BLOCKS_PER_S, None):
        for num_writers in WRITERS:
            with own_server("-c fsync=on") as server, new_database(server.url) as url:
                MetadataStore(url, "first", "pinned").close(SETTLE_S)
                pipes, processes = [], []
                for number in range(num_writers):
                    pipe, other = spawn.Pipe()
                    process = spawn.Process(target=write, args=(url, number, rate, other), daemon=True)
                    process.start()
                    pipes.append(pipe)
                    processes.append(process)
                for pipe in pipes:
                    pipe.recv()
                started_s, before_s = time.monotonic(), server_cpu_s(server)
                for pipe in pipes:
                    pipe.send("go")
                time.sleep(seconds)
                for pipe in pipes:
                    pipe.send("stop")
                written: list[Written] = [pipe.recv() for pipe in pipes]
                took_s, cpu_s = time.monotonic() - started_s, server_cpu_s(server) - before_s
                for pipe in pipes:
                    pipe.send("close")
                for process in processes:
                    process.join(SETTLE_S)
            rows = sum(one.evictions for one in written)
            print(
                f"{num_writers:>7}  {'all' if rate is None else f'{rate}/s':>7}  {rows / took_s:>11,.0f}  "
                f"{sum(one.dropped for one in written) / took_s:>9,.0f}  {cpu_s / took_s:>17.2f}  "
                f"{1e6 * cpu_s / max(rows, 1):>21.0f}  {sum(one.cpu_s for one in written) / took_s / num_writers:.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--only", choices=("statements", "writers"))
    options = parser.parse_args()
    print(environment("sqlalchemy", "psycopg"))
    if options.only != "writers":
        measure_statements(options.seconds)
    if options.only != "statements":
        measure_writers(options.seconds)


if __name__ == "__main__":
    main()
