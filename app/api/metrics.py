"""Prometheus metrics: the counters of `stats`, from one snapshot per scrape.

Core's counters become metrics by the declarations at their fields. No label has a value that traffic can choose.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from importlib import metadata
from itertools import accumulate
from platform import python_version
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

from kvferry.app.api.context import AdminContext, EngineInfo
from kvferry.app.settings.settings import plain, written
from kvferry.core.counters import gauge, metric_of
from kvferry.core.stats import EvictionReason, Histogram, Latencies, NotStored, Snapshot

PREFIX = "kvferry_"


@dataclass(frozen=True, slots=True)
class ReadinessCounts:
    """The latest result of the check that `/readyz` makes."""

    is_ready: bool = gauge("Whether the service may receive traffic, as in /readyz", "ready", default=False)
    reasons: int = gauge("Reasons in /readyz why the service is not ready", "not_ready_reasons")
    degraded: int = gauge("Reasons in /readyz why the service does less than it should", "degraded_reasons")


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
                known = math.nan if number is None else number
                families[metric.name].add_metric([*labels.values(), *([prefix + key] if name else [])], known)
    yield from families.values()


def _collect(context: AdminContext, readiness: ReadinessCounts) -> Iterator[Metric]:
    now, engine = _with_all_reasons(context.scheduler.snapshot()), context.engine
    info = {"name": engine.name, "model": engine.model, "device": engine.device}
    yield InfoMetricFamily(PREFIX + "engine", "The engine that hosts the cache", value=info)
    yield _gauge("engine_block_size_tokens", "Tokens per block", engine.block_size)
    yield _gauge("engine_workers", "Ranks that move bytes", engine.workers)
    yield _gauge("epoch", "Raised by each reset of the whole pool, and when it is torn or truncated", now.epoch)
    yield _gauge("open_jobs", "Transfer jobs under way", now.open_jobs)
    uptime_s = time.monotonic() - context.started_s
    yield _gauge("uptime_seconds", "Seconds since the service started", uptime_s)
    parts: list[Any] = [
        readiness,
        now.pool,
        now.requests,
        now.prompt_tokens,
        now.missed_tokens,
        now.store,
        now.load,
        now.evictions,
        now.leases,
        now.balance,
        now.tier_waits,
    ]
    parts += [context.store.journal.stats(), context.guard.status]
    parts += filter(None, [context.threads(), context.warm_start, context.traces(), context.kv_events()])
    yield from declared((part, {}) for part in parts)
    yield _gauge("balance_paused", "Whether KVFERRY_AUTO_PAUSE has paused storing", context.balance.is_paused)
    text = "Prompt tokens that were computed behind the points at which prompts left earlier ones"
    yield CounterMetricFamily(PREFIX + "prompt_tokens_parted", text, value=context.partings.parted_tokens)
    policy = {"policy": now.pool.eviction_policy}
    yield InfoMetricFamily(PREFIX + "eviction_policy", "The eviction policy in use", value=policy)
    settings = context.settings.current
    config = {name: written(name, plain(name, getattr(settings, name))) for name in CONFIG_LABELS}
    yield InfoMetricFamily(PREFIX + "config", "The settings that decide what is stored, loaded and evicted", config)
    mode = {"mode": context.scheduler.store_mode.value}
    yield InfoMetricFamily(PREFIX + "store_mode", "The store mode in use", value=mode)
    yield from _transfers(now)
    yield from _latencies(now.latencies)
    tiers = now.tiers.items()
    yield from declared((part, {"tier": name}) for name, tier in tiers for part in (tier.counts, tier.use))


CONFIG_LABELS = (
    *("pool_bytes", "pool_kind", "blocks_per_slot", "store_mode", "eviction_policy", "store_threshold"),
    *("offload_prompt_only", "max_offload_tokens", "load_decision", "auto_pause", "max_pinned_fraction"),
)
"""Settings in `kvferry_config_info`."""


def _with_all_reasons(now: Snapshot) -> Snapshot:
    """Return the snapshot with a count for each reason: `rate` misses the increase with which a series begins."""
    evicted, missed = dict.fromkeys(EvictionReason, 0), now.missed_tokens
    return replace(
        now,
        evictions=replace(now.evictions, by_reason=evicted | now.evictions.by_reason),
        missed_tokens=replace(
            missed, evicted=evicted | missed.evicted, not_stored=dict.fromkeys(NotStored, 0) | missed.not_stored
        ),
    )


def _transfers(now: Snapshot) -> Iterator[Metric]:
    """Return histograms of completed jobs. A job's seconds are the device's on CUDA, and a copy thread's on CPU."""
    for name, text, part in (
        ("transfer_job_bytes", "Bytes that a transfer job copied, all ranks together", "bytes"),
        ("transfer_job_seconds", "Time that the copies of a transfer job took, on the slowest rank", "seconds"),
    ):
        jobs = [([direction.value], getattr(one, part)) for direction, one in now.transfers.items()]
        yield _histogram(name, text, ["direction"], jobs)


def _latencies(found: Latencies) -> Iterator[Metric]:
    text = "Time for which requests waited for loads, of those that had any"
    yield _histogram("load_wait_seconds", text, [], [((), found.load_wait)])
    text = "Time for which requests that could run waited for tiers, of those that did"
    yield _histogram("tier_wait_seconds", text, [], [((), found.tier_wait)])
    text = (
        "Time from a request's arrival to its first token, by what its prompt began with: blocks loaded from the pool "
        "or a tier, else blocks on the device, else none; and by the prompt's tokens"
    )
    yield _histogram("time_to_first_token_seconds", text, ["prefix", "length"], found.first_token.items())


def _histogram(
    name: str, text: str, labels: Sequence[str], by_values: Iterable[tuple[Sequence[str], Histogram]]
) -> Metric:
    """Return one family with a histogram for each combination of the labels' values."""
    family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
    for values, found in by_values:
        bounds = [*map(floatToGoString, found.bounds), "+Inf"]
        counts = list(zip(bounds, accumulate(found.counts), strict=True))
        family.add_metric(values, counts, sum_value=found.total)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


class _Collector(Collector):
    """A collector that describes no metric, since that would take a snapshot before core is complete."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return self._collect()


def _build(version: str, engine: EngineInfo) -> Metric:
    engine_version = version
    if engine.name == "vllm":
        with suppress(metadata.PackageNotFoundError):
            engine_version = metadata.version("vllm")
    value = {"version": version, "engine": engine.name, "engine_version": engine_version, "python": python_version()}
    return InfoMetricFamily(PREFIX + "build", "Versions of kvferry, of the engine that hosts it and of Python", value)


def build_registry(context: AdminContext, version: str, readiness: Callable[[], ReadinessCounts]) -> CollectorRegistry:
    """Return a registry apart from that of another engine in this process.

    Args:
        context: the service.
        version: version of kvferry.
        readiness: returns the latest result of the readiness check.
    """
    registry, build = CollectorRegistry(), _build(version, context.engine)
    registry.register(_Collector(lambda: [build, *_collect(context, readiness())]))
    # Names that dashboards of any process know, and the prefixed ones that were there first.
    ProcessCollector(registry=registry)
    ProcessCollector(namespace=PREFIX.rstrip("_"), registry=registry)
    return registry
