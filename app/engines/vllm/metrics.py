"""Our numbers in vLLM's own statistics: its log line "KV Transfer metrics", and its `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.app.engines.vllm.scheduler import ConnectorScheduler
from kvferry.app.engines.vllm.versions import cache_source
from kvferry.core.scheduler.scheduler import OffloadScheduler
from kvferry.core.stats import Snapshot

PREFIX = "vllm:kvferry_"

COUNTERS = {
    "stored_blocks": "Blocks stored in host memory",
    "stored_bytes": "Bytes stored in host memory, all ranks together",
    "store_seconds": "Time that stores took",
    "store_failed_blocks": "Blocks whose store failed",
    "store_skipped_blocks": "Full blocks that were not stored, for whatever reason",
    "loaded_blocks": "Blocks loaded from host memory",
    "loaded_bytes": "Bytes loaded from host memory, all ranks together",
    "load_seconds": "Time that loads took",
    "load_failed_blocks": "Blocks whose load failed, and which were recomputed",
    "load_declined_blocks": "Hits not taken, since recomputing was faster or loading not allowed",
    "evicted_blocks": "Blocks that left host memory",
}
GAUGES = {
    "pool_slots": "Slots of the host pool",
    "pool_free_slots": "Free slots of the host pool",
}


TIER_SOURCES = {"fs": "DISK"}
"""vLLM's name for the source of a hit, by type of tier; it has none for stores on other hosts."""


def hits_by_source(num_tokens: int, by_tier: Mapping[str, int], tier_types: Mapping[str, str]) -> dict[Any, int]:
    """Return loaded tokens by vLLM's `CacheHitSource`; what no tier brought was in host memory."""
    sources: dict[Any, int] = {}
    for name, count in by_tier.items():
        source = cache_source(TIER_SOURCES.get(tier_types.get(name, ""), "EXTERNAL_UNSPECIFIED"))
        sources[source] = sources.get(source, 0) + count
    of_host = num_tokens - sum(sources.values())
    return {cache_source("HOST"): of_host, **sources} if of_host else sources


class KVFerryStats(KVConnectorStats):
    """What happened in a while (counters) and how it stands (gauges), as plain numbers by name."""

    def reset(self) -> None:
        """Nothing happened yet."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVFerryStats:
        """This while and the next, as one."""
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """For the log."""
        return {name: round(value, 3) for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not self.data


class KVFerryPromMetrics(KVConnectorPromMetrics):
    """The same numbers as Prometheus metrics of vLLM's."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics: dict[str, Any] = {
            name: metric_types[Counter](f"{PREFIX}{name}", text, labelnames=labelnames)
            for name, text in COUNTERS.items()
        }
        self._metrics |= {
            name: metric_types[Gauge](f"{PREFIX}{name}", text, labelnames=labelnames, multiprocess_mode="mostrecent")
            for name, text in GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what an engine reports."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            metric = self._metrics.get(name)
            if metric is None:
                continue
            if name in GAUGES:
                metric.labels(*labels).set(value)
            else:
                metric.labels(*labels).inc(value)


class StatsSource:
    """Core's counters as differences from one look to the next."""

    def __init__(self, core: OffloadScheduler, scheduler: ConnectorScheduler) -> None:
        self._core = core
        self._scheduler = scheduler
        self._seen_changes = -1
        self._before = dict.fromkeys(COUNTERS, 0.0)

    def take(self) -> KVFerryStats | None:
        """What happened since the last call; None when no transfer has started or ended."""
        if self._scheduler.num_changes == self._seen_changes:
            return None
        self._seen_changes = self._scheduler.num_changes
        now, gauges = _numbers(self._core.snapshot())
        changed = {name: value - self._before[name] for name, value in now.items() if value != self._before[name]}
        self._before = now
        return KVFerryStats(data=changed | gauges)


def _numbers(snapshot: Snapshot) -> tuple[dict[str, float], dict[str, float]]:
    store, load, pool = snapshot.store, snapshot.load, snapshot.pool
    counters: dict[str, float] = {
        "stored_blocks": store.stored,
        "stored_bytes": store.bytes,
        "store_seconds": store.seconds,
        "store_failed_blocks": store.failed,
        "store_skipped_blocks": sum(store.skipped.values()),
        "loaded_blocks": load.blocks,
        "loaded_bytes": load.bytes,
        "load_seconds": load.seconds,
        "load_failed_blocks": load.failed,
        "load_declined_blocks": load.declined,
        "evicted_blocks": snapshot.evictions.total,
    }
    return counters, {"pool_slots": pool.slots, "pool_free_slots": pool.free}
