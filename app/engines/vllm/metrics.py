"""kvferry's counters in vLLM's statistics: the log line "KV Transfer metrics" and vLLM's `/metrics`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvferry.app.engines.vllm.versions import cache_source
from kvferry.core.stats import Snapshot

_log = logging.getLogger(__name__)

PREFIX = "vllm:kvferry_"

_Metrics = dict[str, tuple[str, Callable[[Snapshot], float]]]
"""Description of each metric, and how it is read from core's statistics."""

COUNTERS: _Metrics = {
    "stored_blocks": ("Blocks stored in host memory", lambda s: s.store.stored),
    "stored_bytes": ("Bytes stored in host memory, all ranks together", lambda s: s.store.bytes),
    "store_seconds": ("Duration of stores", lambda s: s.store.seconds),
    "store_failed_blocks": ("Blocks whose store failed", lambda s: s.store.failed),
    "store_skipped_blocks": (
        "Full blocks that were not stored, for any reason",
        lambda s: sum(s.store.skipped.values()),
    ),
    "loaded_blocks": ("Blocks loaded from host memory", lambda s: s.load.blocks),
    "loaded_bytes": ("Bytes loaded from host memory, all ranks together", lambda s: s.load.bytes),
    "load_seconds": ("Duration of loads", lambda s: s.load.seconds),
    "load_failed_blocks": ("Blocks whose load failed and that were recomputed", lambda s: s.load.failed),
    "load_declined_blocks": (
        "Hits that were not loaded, because recomputing was faster or loading not allowed",
        lambda s: s.load.declined,
    ),
    "evicted_blocks": ("Blocks that left host memory", lambda s: s.evictions.total),
}
GAUGES: _Metrics = {
    "pool_slots": ("Slots of the host pool", lambda s: s.pool.slots),
    "pool_free_slots": ("Free slots of the host pool", lambda s: s.pool.free),
}

OFFLOAD_NAMES = {"vllm:kv_offload_store_bytes": "stored_bytes", "vllm:kv_offload_load_bytes": "loaded_bytes"}
"""Names of vLLM's own connector, which dashboards of vLLM draw, and the counters that they repeat."""
TIER_SOURCES = {"fs": "DISK"}
"""vLLM's name for the source of a hit, by type of tier; it has none for stores on other hosts."""


def read_metrics(counters: Snapshot) -> tuple[dict[str, float], dict[str, float]]:
    """Return the values of the counters and of the gauges."""
    values = [{name: read(counters) for name, (_, read) in metrics.items()} for metrics in (COUNTERS, GAUGES)]
    return values[0], values[1]


def hits_by_source(num_tokens: int, by_tier: Mapping[str, int], tier_types: Mapping[str, str]) -> dict[Any, int]:
    """Return loaded tokens by vLLM's `CacheHitSource`; tokens that no tier provided were in host memory."""
    sources: dict[Any, int] = {}
    for name, count in by_tier.items():
        source = cache_source(TIER_SOURCES.get(tier_types.get(name, ""), "EXTERNAL_UNSPECIFIED"))
        sources[source] = sources.get(source, 0) + count
    num_host = num_tokens - sum(sources.values())
    return {cache_source("HOST"): num_host, **sources} if num_host else sources


class KVFerryStats(KVConnectorStats):
    """Counters of an interval and gauges at its end, by name."""

    def reset(self) -> None:
        """Clear the statistics."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVFerryStats:
        """Add the statistics of the next interval."""
        for name, value in other.data.items():
            self.data[name] = value if name in GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the statistics for the log."""
        return {name: round(value, 3) for name, value in self.data.items() if value}

    def is_empty(self) -> bool:
        """Return whether there are no statistics."""
        return not self.data


class KVFerryPromMetrics(KVConnectorPromMetrics):
    """kvferry's Prometheus metrics in vLLM's registry."""

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
            for name, (text, _) in COUNTERS.items()
        }
        self._metrics |= {
            name: metric_types[Gauge](f"{PREFIX}{name}", text, labelnames=labelnames, multiprocess_mode="mostrecent")
            for name, (text, _) in GAUGES.items()
        }
        self._repeated: dict[str, Any] = {}
        """By counter: the metric that repeats it under a name of vLLM's own connector."""
        for metric, name in OFFLOAD_NAMES.items():
            try:
                self._repeated[name] = metric_types[Counter](metric, COUNTERS[name][0], labelnames=labelnames)
            except ValueError:
                # A second registration would end the server.
                _log.info("metric left out, another connector has it: %s", metric)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the statistics of an engine."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name in transfer_stats_data.keys() & self._metrics.keys():
            value = transfer_stats_data[name]
            if name in GAUGES:
                self._metrics[name].labels(*labels).set(value)
                continue
            for metric in filter(None, (self._metrics[name], self._repeated.get(name))):
                metric.labels(*labels).inc(value)
