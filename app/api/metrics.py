"""Prometheus metrics: the counters of `stats`, from one snapshot per scrape.

Core's counters become metrics by the declarations at their fields. No label has a value that traffic can choose.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvferry.app.api.context import AdminContext
from kvferry.core.counters import metric_of
from kvferry.core.stats import Histogram, Latencies, Snapshot

PREFIX = "kvferry_"


def declared(parts: Iterable[tuple[Any, Mapping[str, str]]]) -> Iterator[Metric]:
    """Return the metrics of counters.

    Args:
        parts: dataclasses of counters, each with labels of all its metrics.
    """
    families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
    for counts, labels in parts:
        for one in fields(counts):
            metric = metric_of(one)
            if metric is None:
                continue
            name, prefix = metric.label or ("", "")
            if metric.name not in families:
                kind = GaugeMetricFamily if metric.is_gauge else CounterMetricFamily
                families[metric.name] = kind(
                    PREFIX + metric.name, metric.help, labels=[*labels, *([name] if name else [])]
                )
            value = getattr(counts, one.name)
            numbers = value if isinstance(value, dict) else {"": value}
            for key, number in numbers.items():
                families[metric.name].add_metric([*labels.values(), *([prefix + key] if name else [])], number)
    yield from families.values()


def _collect(context: AdminContext) -> Iterator[Metric]:
    now, engine = context.cache.scheduler.snapshot(), context.process.engine
    info = {"name": engine.name, "model": engine.model, "device": engine.device}
    yield InfoMetricFamily(PREFIX + "engine", "The engine that hosts the cache", value=info)
    yield _gauge("engine_block_size_tokens", "Tokens per block", engine.block_size)
    yield _gauge("engine_workers", "Ranks that move bytes", engine.workers)
    yield _gauge("epoch", "Resets of the whole pool since it was created, also by earlier processes", now.epoch)
    yield _gauge("open_jobs", "Transfer jobs under way", now.open_jobs)
    yield _gauge(
        "uptime_seconds", "Seconds since the service started", max(0.0, time.time() - context.process.started_s)
    )
    parts = [now.pool, now.requests, now.prompt_tokens, now.missed_tokens, now.store, now.load, now.evictions]
    parts += [context.store.journal_stats(), context.cache.guard.status, *filter(None, [context.process.warm_start])]
    yield from declared((part, {}) for part in parts)
    policy = {"policy": now.pool.eviction_policy}
    yield InfoMetricFamily(PREFIX + "eviction_policy", "The eviction policy in use", value=policy)
    yield from _transfers(now)
    yield from _latencies(now.latencies)
    tiers = now.tiers.items()
    yield from declared((part, {"tier": name}) for name, tier in tiers for part in (tier.counts, tier.use))


def _transfers(now: Snapshot) -> Iterator[Metric]:
    """Return histograms of completed jobs. A job's seconds are the device's on CUDA, and a copy thread's on CPU."""
    for name, text, part in (
        ("transfer_job_bytes", "Bytes that a transfer job copied, all ranks together", "bytes"),
        ("transfer_job_seconds", "Time that the copies of a transfer job took, on the slowest rank", "seconds"),
    ):
        jobs = {direction.value: getattr(one, part) for direction, one in now.transfers.items()}
        yield _histogram(name, text, "direction", jobs)


def _latencies(found: Latencies) -> Iterator[Metric]:
    text = "Time for which requests waited for loads, of those that had any"
    yield _histogram("load_wait_seconds", text, None, {"": found.load_wait})
    text = (
        "Time from a request's arrival to its first token, by what its prompt began with: blocks loaded from the pool "
        "or a tier, else blocks on the device, else none"
    )
    by_source = {source.value: one for source, one in found.first_token.items()}
    yield _histogram("time_to_first_token_seconds", text, "prefix", by_source)


def _histogram(name: str, text: str, label: str | None, by_value: Mapping[str, Histogram]) -> Metric:
    """Return one family with a histogram for each value of the label."""
    family = HistogramMetricFamily(PREFIX + name, text, labels=[] if label is None else [label])
    for value, found in by_value.items():
        bounds = [*map(floatToGoString, found.bounds), "+Inf"]
        counts = list(zip(bounds, accumulate(found.counts), strict=True))
        family.add_metric([] if label is None else [value], counts, sum_value=found.total)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


class _Cache(Collector):
    """Collector of the cache's metrics. It describes none, since that would take a snapshot before core is complete."""

    def __init__(self, context: AdminContext) -> None:
        self._context = context

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        return _collect(self._context)


def build_registry(context: AdminContext) -> CollectorRegistry:
    """Return a registry apart from that of another engine in this process."""
    registry = CollectorRegistry()
    registry.register(_Cache(context))
    ProcessCollector(namespace=PREFIX.rstrip("_"), registry=registry)
    return registry
