"""Tiers beside the raw calls of the same library, and what cascading to a tier costs the serving path.

Run: OMP_NUM_THREADS=1 python -m bench.tiers [--kinds fs redis object mooncake] [--folder /dev/shm] [--rounds 9]
[--serving]

The tier moves blocks between slots and its store, through its queue and threads. The raw contender does the same with
as many threads and nothing else: per block a copy between slot and buffer, the same checksum, and the library's own
calls (`os`: open, writev or readv, posix_fadvise, close and rename; `redis`: a pipeline of SET or GET with as many
blocks; `obstore`: put or get, to moto's server, which takes most of the wall time; `mooncake`: batch_put_from or
batch_get_into with registered buffers, in this process). Both move equal amounts, alternately and to new names each
time. Throughput is of jobs of `--job-mib`, latency of jobs of one block. A load takes from its submission until its
result is polled, a store until its last block is stored: nothing waits for it, and the interval of the polls is not the
tier's. The ratio compares times of the same round; that of CPU times, with the client's process of `mooncake` and
without servers, is steadier on a machine that others use. CPU time of the thread that waits for a job is not counted:
a tier is polled for the end of a store, as often as an engine steps, and the raw contender is not.

In memory (`--folder /dev/shm`, the default) the difference is the tier's own work. On a disk both wait for it.

With `--serving`, an embedded engine answers new prompts, in turns without a tier and with one that is attached for the
turn and takes every block. What the tier adds to the CPU time of the engine's hooks is divided by that of the engine
thread: the rest of it is the model, which differs by more from turn to turn. What the tier's own threads cost the
engine by sharing processors and the interpreter's lock is not included.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import random
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import obstore
import psutil
import redis
import xxhash
from numpy.typing import NDArray

from bench.report import environment, median_interval, spread, thread_times_s, verdict
from kvferry.app.serve.process import Process
from kvferry.app.settings import Settings
from kvferry.app.settings.tiers import TierSettings, TierType
from kvferry.app.telemetry.logs import LogPipe
from kvferry.app.tiers.block_store import TierContext
from kvferry.app.tiers.fs import FileTier
from kvferry.app.tiers.mooncake import MooncakeTier
from kvferry.app.tiers.mooncake import store as mooncake_store_module
from kvferry.app.tiers.object import ObjectTier
from kvferry.app.tiers.object.connection import connect
from kvferry.app.tiers.object.settings import ObjectTierSettings
from kvferry.app.tiers.redis import RedisTier
from kvferry.app.tiers.redis.store import BATCH_BYTES, MAX_BATCH_BLOCKS
from kvferry.app.tiers.threaded import ThreadedTier, new_buffer
from kvferry.core.keys import Key, RequestIdentity, make_keys
from kvferry.core.tiers.base import Tier, TierJob, TierResetResult, TierResult
from tests.harness.embedded import ask_all, greedy
from tests.harness.mooncake_server import mooncake_store
from tests.harness.object_server import BUCKET, credentials_file, object_server
from tests.harness.redis_server import redis_server

KIB = 1 << 10
MIB = 1 << 20
GOAL = 0.90
SERVING_GOAL = 1.02
ORIGIN = RequestIdentity("bench", "0123456789abcdef")
PROMPT_TOKENS = 512
TIMEOUT_S = 600.0
NUM_FOLDERS = 1 << 12
"""Of a tier of files, by the first bits of a key."""
HEAD_BYTES = 64
"""Of the raw files. With the eight bytes of a checksum alone some processors copy five times slower."""
_POLL_S = 0.01
"""A tier sends no notice of the end of a store. Polling more often would take CPU time from its threads."""


class Slots:
    """A pool of slots of one size that begins with a page, as pools do; a `SlotBytes`."""

    def __init__(self, count: int, num_bytes: int) -> None:
        self.rows = new_buffer(count * num_bytes).reshape(count, num_bytes)
        self.rows[:] = np.random.default_rng(1).integers(0, 256, (count, num_bytes), dtype=np.uint8)

    def views(self, slot: int, num_bytes: int) -> Sequence[NDArray[np.uint8]]:
        """Return the one part of a slot."""
        return [self.rows[slot, :num_bytes]]


class Contender(Protocol):
    """Stores and loads the first slots under keys, and returns the seconds that it took."""

    def store(self, keys: Sequence[Key]) -> float: ...

    def load(self, keys: Sequence[Key]) -> float: ...

    def cpu_s(self) -> float: ...


class CpuClock:
    """CPU time of this process, without what waiting for the end of a job takes."""

    def __init__(self) -> None:
        self._waiting_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Leave out what this thread takes meanwhile."""
        began_s = time.thread_time()
        yield
        self._waiting_s += time.thread_time() - began_s

    def read_s(self) -> float:
        return time.process_time() - self._waiting_s


class TierContender:
    """A tier, by jobs."""

    def __init__(
        self,
        kind: TierType,
        entry: TierSettings,
        slots: Slots,
        other_cpu_s: Callable[[Tier], float] = lambda tier: 0.0,
    ) -> None:
        """`other_cpu_s` returns the CPU time of other processes that do work of the tier."""
        self._slots = slots
        self._other_cpu_s = other_cpu_s
        self._clock = CpuClock()
        self._ended = threading.Event()
        block_bytes = slots.rows.shape[1]
        context = TierContext("bench", {"model": "bench"}, block_bytes)
        self.tier = ThreadedTier(kind.open(entry, context), entry, context, slots, self._ended.set)
        self._numbers = itertools.count(1)
        end_s = time.monotonic() + TIMEOUT_S
        while self.tier.health():
            if time.monotonic() > end_s:
                raise RuntimeError(f"the tier does not work: {self.tier.health()}")
            time.sleep(0.01)

    def store(self, keys: Sequence[Key]) -> float:
        self.tier.store(self._job(keys, [ORIGIN] * len(keys)))
        return self._wait()

    def load(self, keys: Sequence[Key]) -> float:
        started_s = time.perf_counter()
        self.tier.load(self._job(keys))
        self._wait()
        return time.perf_counter() - started_s

    def drop(self, keys: Sequence[Key]) -> None:
        """Delete the blocks of these keys."""
        self.tier.drop(next(self._numbers), keys)
        self._result()

    def cpu_s(self) -> float:
        return self._clock.read_s() + self._other_cpu_s(self.tier)

    def store_first(self) -> None:
        """Store a byte under each beginning of a key, so that a tier of files has made its folders."""
        count = len(self._slots.rows)
        for first in range(0, NUM_FOLDERS, count):
            numbers = range(first, min(first + count, NUM_FOLDERS))
            keys = make_keys([(number << 244).to_bytes(32, "big") for number in numbers], 0)
            self.tier.store(self._job(keys, [ORIGIN] * len(keys), 1))
            self._wait()

    def _job(self, keys: Sequence[Key], origins: Sequence[RequestIdentity] = (), num_bytes: int = 0) -> TierJob:
        count, block_bytes = len(keys), num_bytes or self._slots.rows.shape[1]
        return TierJob(
            next(self._numbers), keys, np.arange(count), np.full(count, block_bytes, dtype=np.int64), origins
        )

    def _wait(self) -> float:
        """Wait for the result, and return the seconds that the job took by it."""
        result = self._result()
        if not isinstance(result, TierResult) or not np.all(result.ok):
            raise RuntimeError(f"blocks failed: {self.tier.counts()}")
        return result.seconds

    def _result(self) -> TierResult | TierResetResult:
        with self._clock.waiting():
            while not (results := self.tier.poll()):
                self._ended.wait(_POLL_S)
        self._ended.clear()
        (result,) = results
        return result


class RawContender:
    """The same work by a pool of threads: a copy, a checksum, and calls of the library for a batch of blocks."""

    def __init__(self, slots: Slots, batch_blocks: int, num_threads: int) -> None:
        self._slots = slots
        self._batch_blocks = batch_blocks
        self._threads = ThreadPoolExecutor(num_threads)
        self._own = threading.local()
        self._clock = CpuClock()

    def store(self, keys: Sequence[Key]) -> float:
        return self._run(self._store_batch, keys)

    def load(self, keys: Sequence[Key]) -> float:
        return self._run(self._load_batch, keys)

    def cpu_s(self) -> float:
        return self._clock.read_s()

    def _run(self, work: Callable[[list[tuple[int, Key]]], None], keys: Sequence[Key]) -> float:
        started_s = time.perf_counter()
        numbered = list(enumerate(keys))
        starts = range(0, len(keys), self._batch_blocks)
        futures = [self._threads.submit(work, numbered[start : start + self._batch_blocks]) for start in starts]
        with self._clock.waiting():
            wait(futures)
        ended_s = time.perf_counter()
        for future in futures:
            future.result()
        return ended_s - started_s

    def _buffer(self) -> NDArray[np.uint8]:
        if not hasattr(self._own, "buffer"):
            shape = self._batch_blocks, self._slots.rows.shape[1]
            self._own.buffer = new_buffer(shape[0] * shape[1]).reshape(shape)
        buffer: NDArray[np.uint8] = self._own.buffer
        return buffer

    def _store_batch(self, batch: list[tuple[int, Key]]) -> None:
        blocks: list[tuple[Key, memoryview, bytes]] = []
        for row, (slot, key) in zip(self._buffer(), batch, strict=False):
            np.copyto(row, self._slots.rows[slot])
            blocks.append((key, row.data, xxhash.xxh3_64_digest(row.data)))
        self.put(blocks)

    def _load_batch(self, batch: list[tuple[int, Key]]) -> None:
        rows = list(zip(self._buffer(), batch, strict=False))
        checksums = self.get([(key, row) for row, (_, key) in rows])
        for (row, (slot, _)), checksum in zip(rows, checksums, strict=True):
            if xxhash.xxh3_64_digest(row.data) != checksum:
                raise RuntimeError("a block came back changed")
            np.copyto(self._slots.rows[slot], row)

    def put(self, blocks: list[tuple[Key, memoryview, bytes]]) -> None:
        """Store keys, bytes and checksums."""
        raise NotImplementedError

    def get(self, blocks: list[tuple[Key, NDArray[np.uint8]]]) -> list[bytes]:
        """Fill the rows of keys; return the checksums stored with them."""
        raise NotImplementedError


class RawFiles(RawContender):
    """Files by `os`."""

    def __init__(self, slots: Slots, folder: Path, num_threads: int) -> None:
        super().__init__(slots, 1, num_threads)
        folder.mkdir()
        self._root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def drop(self, keys: Sequence[Key]) -> None:
        """Delete the files of these keys."""
        for key in keys:
            os.unlink(key.hex(), dir_fd=self._root)

    def put(self, blocks: list[tuple[Key, memoryview, bytes]]) -> None:
        for key, data, checksum in blocks:
            temporary = f"{threading.get_ident()}"
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=self._root)
            os.writev(fd, [checksum.ljust(HEAD_BYTES), data])
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            os.rename(temporary, key.hex(), src_dir_fd=self._root, dst_dir_fd=self._root)

    def get(self, blocks: list[tuple[Key, NDArray[np.uint8]]]) -> list[bytes]:
        checksums: list[bytes] = []
        for key, row in blocks:
            fd = os.open(key.hex(), os.O_RDONLY, dir_fd=self._root)
            head = bytearray(HEAD_BYTES)
            os.readv(fd, [head, row.data])
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
            checksums.append(bytes(head[:8]))
        return checksums


class RawRedis(RawContender):
    """Values by pipelines of the client."""

    def __init__(self, slots: Slots, port: int, num_threads: int) -> None:
        block_bytes = slots.rows.shape[1]
        super().__init__(slots, max(1, min(MAX_BATCH_BLOCKS, BATCH_BYTES // block_bytes)), num_threads)
        self._client = redis.Redis(port=port, protocol=2)
        self._checksums: dict[Key, bytes] = {}

    def put(self, blocks: list[tuple[Key, memoryview, bytes]]) -> None:
        with self._client.pipeline(transaction=False) as pipeline:
            for key, data, checksum in blocks:
                self._checksums[key] = checksum
                pipeline.execute_command("SET", key, data)  # type: ignore[no-untyped-call]
            pipeline.execute()

    def get(self, blocks: list[tuple[Key, NDArray[np.uint8]]]) -> list[bytes]:
        with self._client.pipeline(transaction=False) as pipeline:
            for key, _ in blocks:
                pipeline.execute_command("GET", key)  # type: ignore[no-untyped-call]
            values = pipeline.execute()
        for (_, row), value in zip(blocks, values, strict=True):
            row[:] = np.frombuffer(value, dtype=np.uint8)
        return [self._checksums[key] for key, _ in blocks]


class RawObjects(RawContender):
    """Objects by the client's own calls, one at a time in each thread."""

    def __init__(self, slots: Slots, settings: ObjectTierSettings, num_threads: int) -> None:
        super().__init__(slots, 1, num_threads)
        self._client = connect(settings)
        self._checksums: dict[Key, bytes] = {}

    def put(self, blocks: list[tuple[Key, memoryview, bytes]]) -> None:
        for key, data, checksum in blocks:
            self._checksums[key] = checksum
            obstore.put(self._client, f"raw/{key.hex()}", bytes(data), use_multipart=False)

    def get(self, blocks: list[tuple[Key, NDArray[np.uint8]]]) -> list[bytes]:
        for key, row in blocks:
            row[:] = np.frombuffer(obstore.get(self._client, f"raw/{key.hex()}").bytes(), dtype=np.uint8)
        return [self._checksums[key] for key, _ in blocks]


class RawMooncake(RawContender):
    """Objects by batches of the client, from and into registered buffers."""

    def __init__(self, slots: Slots, master: str, num_threads: int) -> None:
        from mooncake.store import MooncakeDistributedStore

        block_bytes = slots.rows.shape[1]
        most = min(mooncake_store_module.MAX_BATCH_BLOCKS, mooncake_store_module.BATCH_BYTES // block_bytes)
        super().__init__(slots, max(1, most), num_threads)
        self._client = MooncakeDistributedStore()
        if self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master):
            raise RuntimeError("the client cannot be set up")
        self._checksums: dict[Key, bytes] = {}

    def _buffer(self) -> NDArray[np.uint8]:
        is_new = not hasattr(self._own, "buffer")
        buffer = super()._buffer()
        if is_new and self._client.register_buffer(buffer.ctypes.data, buffer.nbytes):
            raise RuntimeError("a buffer cannot be registered")
        return buffer

    def put(self, blocks: list[tuple[Key, memoryview, bytes]]) -> None:
        rows = self._buffer()
        self._checksums.update({key: checksum for key, _, checksum in blocks})
        names, starts = [key.hex() for key, *_ in blocks], [row.ctypes.data for row in rows[: len(blocks)]]
        if any(self._client.batch_put_from(names, starts, [rows.shape[1]] * len(blocks))):
            raise RuntimeError("blocks were not stored")

    def get(self, blocks: list[tuple[Key, NDArray[np.uint8]]]) -> list[bytes]:
        starts, sizes = [row.ctypes.data for _, row in blocks], [len(row) for _, row in blocks]
        if self._client.batch_get_into([key.hex() for key, _ in blocks], starts, sizes) != sizes:
            raise RuntimeError("blocks were not loaded")
        return [self._checksums[key] for key, _ in blocks]


def client_cpu_s(tier: Any) -> float:
    """Return the CPU time of the client's process of a Mooncake tier."""
    used = psutil.Process(tier._store._client._process.pid).cpu_times()
    return float(used.user + used.system)


@contextmanager
def contenders(kind: str, slots: Slots, folder: Path, num_threads: int, max_bytes: int) -> Iterator[dict[str, Any]]:
    """Yield the tier of a kind, and its raw contender."""
    own = folder / f"kvferry-bench-{os.getpid()}"
    own.mkdir()
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, own, ignore_errors=True)
        common: dict[str, Any] = {"name": "bench", "threads": num_threads, "queue_blocks": 100_000, "timeout_s": 600}
        raw: RawContender
        if kind == "object":
            given = {"url": f"s3://{BUCKET}/bench", "region": "us-east-1", "ttl_s": 86400}
            given |= {"endpoint": stack.enter_context(object_server()).url, "credentials_file": credentials_file()}
            bucket = ObjectTier.Settings(type="object", io_timeout_s=TIMEOUT_S, **common, **given)
            tier, raw = TierContender(ObjectTier, bucket, slots), RawObjects(slots, bucket, num_threads)
        elif kind == "mooncake":
            # Less than the node's 90%, from which on it evicts.
            master, _ = stack.enter_context(mooncake_store(own, num_bytes=max_bytes * 3 // 2 + 64 * MIB))
            entry: TierSettings = MooncakeTier.Settings(type="mooncake", master=master.address, **common)
            tier = TierContender(MooncakeTier, entry, slots, client_cpu_s)
            raw = RawMooncake(slots, master.address, num_threads)
        elif kind == "redis":
            server = stack.enter_context(redis_server(own, maxmemory=str(4 * max_bytes)))
            entry = RedisTier.Settings(type="redis", url=server.url, **common)  # type: ignore[arg-type]
            tier, raw = TierContender(RedisTier, entry, slots), RawRedis(slots, server.port, num_threads)
        else:
            given = {"path": own / "tier", "max_bytes": 4 * max_bytes, "shared": kind == "fs shared"}
            entry = FileTier.Settings(type="fs", **common, **given)
            tier, raw = TierContender(FileTier, entry, slots), RawFiles(slots, own / "raw", num_threads)
        if kind.startswith("fs"):
            tier.store_first()
        stack.callback(tier.tier.close, 10.0)
        yield {"raw": raw, "tier": tier}


@dataclass(frozen=True)
class Times:
    """Seconds of a job of many blocks, of wall time and of CPU time, and of a job of one block."""

    job_s: float
    cpu_s: float
    block_s: float


def times_of(contender: Contender, work: Callable[[Sequence[Key]], float], keys: Sequence[Key]) -> Times:
    """Measure a job of all keys but the last, and one of the last."""
    cpu_s = contender.cpu_s()
    job_s = work(keys[:-1])
    cpu_s = contender.cpu_s() - cpu_s
    return Times(job_s, cpu_s, work(keys[-1:]))


def measure(kind: str, block_bytes: int, options: argparse.Namespace) -> list[str]:
    """Return the rows of one kind and block size: stores and loads."""
    count = max(options.job_mib * MIB // block_bytes, 1)
    max_bytes = (count + 1) * block_bytes * (options.rounds + 1) * 2
    slots = Slots(count, block_bytes)
    times: dict[tuple[str, str], list[Times]] = {}
    rng = random.Random(1)
    with contenders(kind, slots, options.folder, options.threads, max_bytes) as found:
        for number in range(options.rounds + 1):
            for name in rng.sample(sorted(found), len(found)):
                contender: Contender = found[name]
                # Random, as hashes are, so that they spread over the folders.
                keys = make_keys([rng.randbytes(32) for _ in range(count + 1)], 0)
                for what, work in (("store", contender.store), ("load", contender.load)):
                    taken = times_of(contender, work, keys)
                    # The first round warms up.
                    if number:
                        times.setdefault((what, name), []).append(taken)
                if kind.startswith("fs"):
                    # Both use the same memory again: memory of a virtual machine differs in speed by up to a half.
                    found[name].drop(keys)
    rows = []
    for what in ("store", "load"):
        pairs = list(zip(times[what, "tier"], times[what, "raw"], strict=True))
        rates = [[count * block_bytes / one.job_s / 1e9 for one in side] for side in zip(*pairs, strict=True)]
        blocks = [[one.block_s * 1e6 for one in side] for side in zip(*pairs, strict=True)]
        ratios = [raw.job_s / tier.job_s for tier, raw in pairs]
        low, high = median_interval(ratios)
        judged = verdict(ratios, GOAL, at_most=False) if block_bytes >= MIB else "-"
        rows.append(
            f"| {kind} | {block_bytes // KIB} | {what} | {spread(rates[1], 2)} | {spread(rates[0], 2)} | "
            f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f}) | {judged} | "
            f"{spread([raw.cpu_s / tier.cpu_s for tier, raw in pairs], 2)} | "
            f"{spread(blocks[1], 0)} | {spread(blocks[0], 0)} |"
        )
    return rows


def measure_serving(options: argparse.Namespace) -> None:
    """Print the CPU time that a tier adds to the hooks of an engine, as a share of its thread's."""
    hooks: dict[str, list[float]] = {"no tier": [], "tier": []}
    thread_ms: list[float] = []
    rng = random.Random(7)
    with tempfile.TemporaryDirectory(dir=options.folder) as place, ExitStack() as stack:
        settings = Settings(_env_file=None, state_dir=place, pool_bytes=options.pool, log_level="error")  # type: ignore[call-arg]
        process = Process(settings, stack.enter_context(LogPipe(settings)))
        stack.callback(process.close)
        process.start()
        engine, service, taken = process.engine, process.service, service_times(process)
        if engine is None:
            raise RuntimeError("the process has no engine")
        for number in range(options.rounds + 1):
            for name in rng.sample(sorted(hooks), 2):
                if name == "tier":
                    entry = {"type": "fs", "path": f"{place}/{number}", "max_bytes": "4GiB", "shared": options.shared}
                    service.tier_registry.attach("bench", entry | {"when": options.when})
                began = taken()
                for _ in range(options.requests):
                    ask_all(engine, [[rng.randrange(3, 250) for _ in range(PROMPT_TOKENS)]], greedy(16))
                while service.scheduler.has_open_work():
                    time.sleep(_POLL_S)
                ended = taken()
                # The first round warms up.
                if number:
                    hooks[name].append(1e3 * (ended[0] - began[0]) / options.requests)
                    thread_ms.append(1e3 * (ended[1] - began[1]) / options.requests)
                if name == "tier":
                    num_stored = service.scheduler.snapshot().tiers["bench"].use.cascaded
                    service.tier_registry.detach("bench")
                    shutil.rmtree(f"{place}/{number}")
    whole_ms = statistics.median(thread_ms)
    ratios = [1 + (mine - plain) / whole_ms for mine, plain in zip(hooks["tier"], hooks["no tier"], strict=True)]
    low, high = median_interval(ratios)
    print("\nCPU ms of the engine thread for a request: all of it, and in the hooks without a tier and with one:\n")
    print(f"| blocks to the tier | engine thread | no tier | fs, {options.when} | ratio | {SERVING_GOAL} |")
    print(f"|{' --- |' * 6}")
    shown = [spread(one, 2) for one in (thread_ms, hooks["no tier"], hooks["tier"])]
    print(
        f"| {num_stored / options.requests:.0f} | {' | '.join(shown)} | "
        f"{statistics.median(ratios):.4f} ({low:.4f} to {high:.4f}) | {verdict(ratios, SERVING_GOAL)} |"
    )


def service_times(process: Process) -> Callable[[], tuple[float, float]]:
    """Return a function that returns the CPU seconds of an engine's hooks, and of its thread, so far."""
    process.service.guard.hook_timer._timer = time.thread_time
    (thread,) = [one for one in threading.enumerate() if one.name == "kvferry-engine"]
    return lambda: (
        process.service.scheduler.balance.hook_s,
        thread_times_s(os.getpid())[str(thread.native_id)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="*", default=["fs", "fs shared", "redis", "object", "mooncake"])
    parser.add_argument("--blocks-kib", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--job-mib", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--serving", action="store_true", help="measure what cascading costs the serving path as well")
    parser.add_argument("--requests", type=int, default=8, help="requests of a turn with --serving")
    parser.add_argument("--pool", default="256MiB", help="pool of --serving")
    parser.add_argument(
        "--when", default="store", help="`when` of the tier of --serving; evict needs a pool that fills"
    )
    parser.add_argument("--shared", action="store_true", help="share the folder of --serving")
    options = parser.parse_args()
    # As the service does: otherwise collections of imported modules' objects fall on the contender that allocates more.
    gc.collect()
    gc.freeze()
    print(environment("numpy", "redis", "obstore", "xxhash"))
    if options.kinds:
        print(f"{options.rounds} rounds, {options.threads} threads, jobs of {options.job_mib} MiB, {options.folder}\n")
        print("| tier | KiB | job | raw GB/s | tier GB/s | tier / raw | 0.9 | by CPU | raw, one block us | tier |")
        print("|" + " --- |" * 10)
    for kind in options.kinds:
        for block_kib in options.blocks_kib:
            print("\n".join(measure(kind, block_kib * KIB, options)), flush=True)
    if options.serving:
        measure_serving(options)


if __name__ == "__main__":
    main()
