"""Duration of a restart until the pool is recovered, and the cost of keeping it.

Run: OMP_NUM_THREADS=1 python -m bench.restart [--only recovery|sealing|deciding|serving] [--pairs 24]

recovery   a pool of so many slots, every one valid and with a row in SQLite, attached, read, joined with its rows and
           handed to an empty manager, each time in a new process; the slots are small, since their bytes are not read
sealing    blocks stored through the CPU copy engine without and with headers and seals, in turns
deciding   what core does for a store into a full pool without and with headers of what left, in turns
serving    what the journal and the checksums cost an engine's traffic (see bench/keeping.py)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.report import environment, spread
from kvferry.app.pool.recovery import warm_start
from kvferry.app.store import MetadataStore
from kvferry.app.store.schema import SLOTS
from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.transfers import BlockRun, Direction, SlotLabels, TransferJob
from kvferry.cuda_ops.copy.cpu_copy import CpuCopyEngine
from kvferry.cuda_ops.copy.layout import DeviceLayout
from kvferry.cuda_ops.persistent.format import MAX_KEY_BYTES, HeaderState, PoolShape, header_checksums
from kvferry.cuda_ops.persistent.header_writer import HeaderWriter
from kvferry.cuda_ops.persistent.headers import SlotHeaders
from kvferry.cuda_ops.persistent.pool_file import KeptFile
from kvferry.cuda_ops.persistent.sealing import KeptCopies
from kvferry.cuda_ops.pool.host_pool import HostPool

FINGERPRINT: dict[str, object] = {"model": "bench"}
SLOT_BYTES = 64
KEY_BYTES = 33
REQUEST_BLOCKS = 50
COPIED_BYTES = 64 << 10
COPIED_SLOTS = 64


def shape_of(num_slots: int) -> PoolShape:
    return PoolShape(num_slots, SLOT_BYTES, 1, num_slots)


def keys_of(num_slots: int) -> np.ndarray:
    texts = np.random.default_rng(1).integers(0, 256, (num_slots, KEY_BYTES), dtype=np.uint8)
    texts[:, -1] = 0
    return texts


def fill(folder: Path, num_slots: int) -> None:
    file = KeptFile(folder / "bench.pool", shape_of(num_slots), FINGERPRINT)
    file.reserve(shape_of(num_slots).payload_bytes)
    headers, keys = file.headers(0), keys_of(num_slots)
    padded = np.zeros((num_slots, MAX_KEY_BYTES), dtype=np.uint8)
    padded[:, :KEY_BYTES] = keys
    headers["generation"] = np.arange(num_slots) // REQUEST_BLOCKS + 1
    headers["length"] = SLOT_BYTES
    headers["key"] = padded.view(f"V{MAX_KEY_BYTES}").ravel()
    headers["key_length"] = KEY_BYTES
    headers["state"] = HeaderState.VALID
    headers["checksum"] = header_checksums(headers)
    file.close()
    store = open_store(folder, num_slots)
    rows = [
        {
            "engine": "bench",
            "slot": slot,
            "key": keys[slot].tobytes().hex(),
            "group_index": 0,
            "generation": slot // REQUEST_BLOCKS + 1,
            "epoch": 0,
            "size_bytes": SLOT_BYTES,
            "position": slot % REQUEST_BLOCKS,
            "request": f"cmpl-{slot // REQUEST_BLOCKS:032x}",
            "tenant": None,
            "lora": None,
            "stored_at": 1e9 + slot,
            "last_hit_at": None,
            "hits": 0,
        }
        for slot in range(num_slots)
    ]
    store.database.write(lambda connection: connection.execute(SLOTS.insert(), rows).rowcount)
    store.database.close()


def open_store(folder: Path, num_slots: int) -> MetadataStore:
    return MetadataStore(f"sqlite:///{folder / 'bench.db'}", "bench", "file", num_recovered_slots=num_slots)


def recover(folder: Path, num_slots: int) -> None:
    """Print how long a new process takes from attaching to a filled manager, with and without rows."""
    store = open_store(folder, num_slots)
    started_s, used_s = time.perf_counter(), time.process_time()
    file = KeptFile(folder / "bench.pool", shape_of(num_slots), FINGERPRINT)
    manager = OffloadManager(num_slots, SLOT_BYTES, header_queue=HeaderWriter(file))
    begun = warm_start(file, store, manager)
    seconds = time.perf_counter() - started_s
    used_s = time.process_time() - used_s
    print(json.dumps({"seconds": seconds, "used_s": used_s, "recovered": begun.recovered, "known": begun.known}))


def measure_recovery(num_slots: int, rounds: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder, num_slots)
        times: dict[str, list[float]] = {"rows": [], "rows used": [], "no rows": [], "no rows used": []}
        for kind in ("rows", "no rows"):
            if kind == "no rows":
                for path in folder.glob("bench.db*"):
                    path.unlink()
            for _ in range(rounds):
                command = [sys.executable, "-m", "bench.restart", "--recover", str(folder), "--slots", str(num_slots)]
                done = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                if done["recovered"] != num_slots or done["known"] != (num_slots if kind == "rows" else 0):
                    raise SystemExit(f"not all came back: {done}")
                times[kind].append(done["seconds"])
                times[f"{kind} used"].append(done["used_s"])
    cells = [spread(each, 2) for each in times.values()]
    print(f"| {num_slots:,} | {' | '.join(cells)} |", flush=True)


def measure_cost(rounds: int) -> None:
    """Measure the engine thread's time in `submit` and `poll`, and the latency of a job of 64 slots of 64 KiB."""
    with tempfile.TemporaryDirectory() as name:
        shape = PoolShape(8 * COPIED_SLOTS, COPIED_BYTES, 1, 8 * COPIED_SLOTS)
        file = KeptFile(Path(name) / "cost.pool", shape, FINGERPRINT)
        pool = HostPool(shape.num_slots, COPIED_BYTES, shape.extent_slots * COPIED_BYTES, backing=file)
        blocks = np.random.default_rng(1).integers(0, 256, (COPIED_SLOTS, COPIED_BYTES), dtype=np.uint8)
        layout = DeviceLayout.of_arrays([blocks])
        bare = CpuCopyEngine(layout, pool, lambda: None)
        headers = SlotHeaders(file, pool)
        marking = CpuCopyEngine(layout, pool, lambda: None, before=headers.before_copy)
        kept = KeptCopies(marking, headers, lambda: None)
        keys = [key.tobytes() for key in keys_of(COPIED_SLOTS)]
        every, zeros = np.arange(COPIED_SLOTS), np.zeros(COPIED_SLOTS, dtype=np.int64)
        times: dict[str, list[tuple[float, float]]] = {"bare": [], "kept": []}
        for number in range(1, rounds + 1):
            slots = every + number % 8 * COPIED_SLOTS
            labels = SlotLabels(slots, keys, zeros + number, zeros, zeros + COPIED_BYTES)
            for kind, copies in (("bare", bare), ("kept", kept)):
                job = TransferJob(
                    number,
                    Direction.STORE,
                    (BlockRun(0, every, slots, zeros),),
                    labels=labels if kind == "kept" else None,
                )
                started_s = time.perf_counter()
                copies.submit(job)
                on_thread_s = time.perf_counter() - started_s
                copies.wait([number], 60)
                ended_s = time.perf_counter()
                copies.poll()
                times[kind].append((on_thread_s + time.perf_counter() - ended_s, ended_s - started_s))
        for kind, pairs in times.items():
            on_thread, whole = (statistics.median(column) * 1e6 / COPIED_SLOTS for column in zip(*pairs, strict=True))
            print(f"| {kind} | {on_thread:.2f} | {whole:.2f} |")
        bare.close()
        kept.close()
        file.close()


def measure_deciding(num_slots: int, rounds: int) -> None:
    """Measure the manager's store path through a full pool, with and without a file that evictions are written to."""
    with tempfile.TemporaryDirectory() as name:
        file = KeptFile(Path(name) / "deciding.pool", shape_of(num_slots), FINGERPRINT)
        writer = HeaderWriter(file)
        writer.start()
        managers = {
            "bare": OffloadManager(num_slots, SLOT_BYTES),
            "kept": OffloadManager(num_slots, SLOT_BYTES, header_queue=writer),
        }
        random, origin, positions = np.random.default_rng(2), RequestIdentity("r"), np.arange(COPIED_SLOTS)
        for manager in managers.values():
            for _ in range(num_slots // COPIED_SLOTS + 1):
                fresh = random.bytes(KEY_BYTES * COPIED_SLOTS)
                store_through(manager, fresh, origin, positions)
        times: dict[str, list[float]] = {kind: [] for kind in managers}
        for _ in range(rounds):
            batches = [random.bytes(KEY_BYTES * COPIED_SLOTS) for _ in range(500)]
            for kind, manager in managers.items():
                started_s = time.perf_counter()
                for fresh in batches:
                    store_through(manager, fresh, origin, positions)
                times[kind].append((time.perf_counter() - started_s) * 1e6 / len(batches) / COPIED_SLOTS)
        ratios = [kept / bare for kept, bare in zip(times["kept"], times["bare"], strict=True)]
        print(
            f"| {num_slots:,} | {spread(times['bare'])} | {spread(times['kept'])} | {statistics.median(ratios):.2f} |"
        )
        writer.close()
        file.close()


def store_through(manager: OffloadManager, fresh: bytes, origin: RequestIdentity, positions: np.ndarray) -> None:
    keys = [fresh[at : at + KEY_BYTES] for at in range(0, len(fresh), KEY_BYTES)]
    slots = manager.prepare_store(keys, origin, positions, 1, 1.0).slots
    manager.labels(slots)
    manager.complete_store(slots, 1.0)


def measure_all_recoveries(args: argparse.Namespace) -> None:
    print("\n| slots | with rows, s | of the processor's | without, s | of the processor's |")
    print("| ---: | --- | --- | --- | --- |")
    for num_slots in args.slots:
        measure_recovery(num_slots, args.rounds)


def measure_sealing(args: argparse.Namespace) -> None:
    print("\n| 64 slots of 64 KiB | engine's thread, us a slot | until stored, us a slot |\n| --- | ---: | ---: |")
    measure_cost(40 * args.rounds)


def measure_all_deciding(args: argparse.Namespace) -> None:
    print(
        "\n| slots | deciding without, us a slot | with header writer and labels | ratio |\n| ---: | --- | --- | ---: |"
    )
    for num_slots in (50_000, 1_000_000):
        measure_deciding(num_slots, 2 * args.rounds)


def measure_serving(args: argparse.Namespace) -> None:
    # Imported late because it loads torch, which recovering processes do not need.
    from bench.keeping import measure_keeping

    measure_keeping(args.pairs, args.round_s, args.hidden)


MEASURES: dict[str, Callable[[argparse.Namespace], None]] = {
    "recovery": measure_all_recoveries,
    "sealing": measure_sealing,
    "deciding": measure_all_deciding,
    "serving": measure_serving,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=MEASURES, action="append")
    parser.add_argument("--rounds", type=int, default=5, help="of all but `serving`")
    parser.add_argument("--slots", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--pairs", type=int, default=24, help="rounds of `serving`")
    parser.add_argument("--round-s", type=float, default=3.0, help="about how long a round of `serving` takes an arm")
    parser.add_argument("--hidden", type=int, nargs="+", default=[0, 512], help="models of `serving`; 0 is tiny")
    parser.add_argument("--recover", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.recover is not None:
        recover(args.recover, args.slots[0])
        return
    print(environment("numpy", "sqlalchemy", "xxhash", "torch"), f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS')}")
    for name in args.only or MEASURES:
        MEASURES[name](args)


if __name__ == "__main__":
    main()
