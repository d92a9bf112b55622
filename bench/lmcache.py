"""Tiers beside the storage manager of LMCache, over the same Redis and the same folder.

Run, with the package `lmcache` installed beside kvferry's: python -m bench.lmcache [--kinds redis fs] [--mib 1 4]

LMCache's chunks are allocated in its memory, filled by a copy, put by `batched_put` and read by `batched_get`, and are
copied out; without its cache in host memory. The tier moves blocks of the same size between slots and its store.
Both run in this process. LMCache computes no checksum, the tier one for each block. Ratios are LMCache's time divided
by the tier's in the same round; that of CPU times, without the server's and without what waiting for the end of a store
takes, is steadier on a machine that others use: its median has a 95% interval.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.report import environment, median_interval, spread, verdict
from bench.tiers import KIB, MIB, CpuClock, Slots, TierContender
from kvferry.app.tiers.fs import FileTier
from kvferry.app.tiers.redis import RedisTier
from kvferry.core.keys import make_keys
from tests.harness.redis_server import RedisServer, redis_server

os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.event_manager import EventManager
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.storage_manager import StorageManager

CHUNK_TOKENS, HEADS, HEAD_SIZE = 256, 8, 64
LAYER_BYTES = 2 * CHUNK_TOKENS * HEADS * HEAD_SIZE * 2
POLL_S = 0.005
GOAL = 1.0


class StorageContender:
    """LMCache's storage manager with one backend."""

    def __init__(self, kind: str, folder: Path, server: RedisServer, count: int, chunk_bytes: int) -> None:
        given = {"remote_url": server.url, "remote_serde": "naive"}
        if kind == "fs":
            given = {"local_disk": f"file://{folder}/", "max_local_disk_size": 4.0}  # type: ignore[dict-item]
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK_TOKENS, local_cpu=False, max_local_cpu_size=0.5, **given
        )
        layers = chunk_bytes // LAYER_BYTES
        metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.float16,
            kv_shape=(layers, 2, CHUNK_TOKENS, HEADS, HEAD_SIZE),
            role="worker",
        )
        self._manager = StorageManager(config, metadata, EventManager())
        (self._name,) = [name for name in self._manager.storage_backends if name != "LocalCPUBackend"]
        self._shape = torch.Size((2, layers, CHUNK_TOKENS, HEADS * HEAD_SIZE))
        self._rows = torch.randint(0, 255, (count, chunk_bytes), dtype=torch.uint8)
        self._client = server.client if kind == "redis" else None
        self._clock = CpuClock()

    def keys(self, rng: random.Random) -> list[Any]:
        return [CacheEngineKey("bench", 1, 0, rng.getrandbits(62), torch.float16) for _ in self._rows]

    def store(self, keys: Sequence[Any]) -> None:
        before = 0 if self._client is None else int(self._client.dbsize())  # type: ignore[arg-type]
        chunks = []
        for row in self._rows:
            chunk = self._manager.allocate(self._shape, torch.float16, fmt=MemoryFormat.KV_2LTD)
            chunk.tensor.view(torch.uint8).view(-1).copy_(row)
            chunks.append(chunk)
        self._manager.batched_put(keys, chunks)
        with self._clock.waiting():
            while not self._has_stored(keys, before):
                time.sleep(POLL_S)

    def load(self, keys: Sequence[Any]) -> None:
        for row, chunk in zip(self._rows, self._manager.batched_get(keys, location=self._name), strict=True):
            row.copy_(chunk.tensor.view(torch.uint8).view(-1))
            chunk.ref_count_down()

    def cpu_s(self) -> float:
        return self._clock.read_s()

    def _has_stored(self, keys: Sequence[Any], before: int) -> bool:
        if self._client is not None:
            # Two values a chunk. Its own tasks seem to have ended before they are in the server.
            return int(self._client.dbsize()) >= before + 2 * len(keys)  # type: ignore[arg-type]
        backend = self._manager.storage_backends[self._name]
        return not any(backend.exists_in_put_tasks(key) for key in keys)


def measure(kind: str, block_bytes: int, options: argparse.Namespace) -> None:
    """Print the rows of one kind and block size."""
    count, rng = options.job_mib * MIB // block_bytes, random.Random(1)
    with tempfile.TemporaryDirectory(dir=options.folder) as place, redis_server(Path(place), maxmemory="8gb") as server:
        other = StorageContender(kind, Path(place) / "lmcache", server, count, block_bytes)
        common: dict[str, Any] = {"name": "bench", "threads": 2, "queue_blocks": 100_000, "timeout_s": 600}
        redis = RedisTier.Settings(type="redis", url=server.url, **common)  # type: ignore[arg-type]
        files = FileTier.Settings(type="fs", path=Path(place) / "tier", max_bytes=4 << 30, **common)
        tier = TierContender(
            lambda context: RedisTier(redis, context) if kind == "redis" else FileTier(files, context),
            Slots(count, block_bytes),
        )
        if kind == "fs":
            tier.store_first()
        times: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for number in range(options.rounds + 1):
            for name in rng.sample(("lmcache", "tier"), 2):
                one: Any = other if name == "lmcache" else tier
                keys: Any = other.keys(rng) if one is other else make_keys([rng.randbytes(32) for _ in range(count)], 0)
                for what, work in (("store", one.store), ("load", one.load)):
                    began_s, cpu_s = time.perf_counter(), one.cpu_s()
                    work(keys)
                    # The first round warms up.
                    if number:
                        taken = time.perf_counter() - began_s, one.cpu_s() - cpu_s
                        times.setdefault((what, name), []).append(taken)
        for what in ("store", "load"):
            pairs = list(zip(times[what, "lmcache"], times[what, "tier"], strict=True))
            rates = [[options.job_mib * MIB / one[0] / 1e9 for one in side] for side in zip(*pairs, strict=True)]
            wall, cpu = ([theirs[i] / ours[i] for theirs, ours in pairs] for i in range(2))
            low, high = median_interval(cpu)
            print(
                f"| {kind} | {block_bytes // KIB} | {what} | {spread(rates[0], 2)} | {spread(rates[1], 2)} | "
                f"{spread(wall, 2)} | {statistics.median(cpu):.2f} ({low:.2f} to {high:.2f}) | "
                f"{verdict(cpu, GOAL, at_most=False)} |",
                flush=True,
            )
        tier.tier.close(5.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=["redis", "fs"], default=["redis", "fs"])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--job-mib", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    options = parser.parse_args()
    # As in `bench.tiers`, and as vLLM does.
    gc.collect()
    gc.freeze()
    print(environment("lmcache", "torch", "redis", "xxhash"))
    print("\n| tier | KiB | job | LMCache GB/s | tier GB/s | LMCache / tier, wall | by CPU | ahead |\n|" + " --- |" * 8)
    for kind in options.kinds:
        for mib in options.mib:
            measure(kind, mib * MIB, options)
    # LMCache's threads do not end.
    os._exit(0)


if __name__ == "__main__":
    main()
