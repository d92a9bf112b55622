"""Prometheus metrics: the same numbers as `stats`, read from one snapshot a scrape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any, Protocol

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

from kvferry.app.api.context import EngineInfo
from kvferry.app.offload_guard import OffloadGuard
from kvferry.app.store import JournalStats
from kvferry.app.warm_start import WarmStart
from kvferry.core.stats import Histogram, Snapshot

PREFIX = "kvferry_"


class HasSnapshot(Protocol):
    """Whatever can take core's counters at one moment."""

    def snapshot(self) -> Snapshot: ...


class HasJournal(Protocol):
    """Whatever can say how far history is behind."""

    def journal_stats(self) -> JournalStats: ...


class SnapshotCollector(Collector):
    """Turns one snapshot into metric families. No label takes a value that traffic can make up."""

    def __init__(self, source: HasSnapshot, journal: HasJournal, engine: EngineInfo) -> None:
        self._source = source
        self._journal = journal
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        """Nothing: asking for it at registration would take a snapshot of a core that is not yet up."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All families, of one moment."""
        now = self._source.snapshot()
        engine = self._engine
        info = {"name": engine.name, "model": engine.model, "device": engine.device}
        yield InfoMetricFamily(PREFIX + "engine", "The engine that hosts the cache", value=info)
        yield _gauge("engine_block_size_tokens", "Tokens a block", engine.block_size)
        yield _gauge("engine_workers", "Ranks that move bytes", engine.workers)
        yield _gauge("epoch", "Resets of the whole pool since it was made, also by earlier processes", now.epoch)
        yield _gauge("open_jobs", "Transfer jobs under way", now.open_jobs)
        yield from _pool(now)
        yield from _requests(now)
        yield from _store(now)
        yield from _load(now)
        yield from _transfers(now)
        yield _counters("evictions", "Blocks that left the pool", "reason", now.evictions.by_reason)
        yield _counter("evictions_regretted", "Evicted blocks that were asked for again", now.evictions.regretted)
        yield from _tiers(now)
        journal = self._journal.journal_stats()
        yield _gauge("journal_queued", "History rows waiting to be written", journal.queued)
        yield _counter("journal_written", "History rows written", journal.written)
        yield _counter(
            "journal_dropped", "History rows dropped since the database was too slow or gone", journal.dropped
        )
        yield _gauge("journal_lag_seconds", "Age of the oldest history row not yet written", journal.lag_s)


def _pool(now: Snapshot) -> Iterator[Metric]:
    pool = now.pool
    states = {"free": pool.free, "ready": pool.ready, "storing": pool.storing}
    yield _gauges("pool_slots", "Slots by state; the states add up to the pool", "state", states)
    yield _gauge("pool_loading_slots", "Ready slots that are being loaded from", pool.loading)
    yield _gauge("pool_pinned_slots", "Ready slots that may not be evicted", pool.pinned)
    yield _gauge("pool_unverified_slots", "Recovered slots not yet verified", pool.unverified)
    yield _gauge("pool_slot_bytes", "Size of a slot", pool.slot_bytes)
    yield _gauge("pool_wanted_slots", "Slots that the pool will have once a resize is done", pool.wanted_slots)
    yield _gauge("pool_bytes", "Size of the pool", pool.bytes)
    yield InfoMetricFamily(
        PREFIX + "eviction_policy", "The eviction policy in use", value={"policy": pool.eviction_policy}
    )


def _requests(now: Snapshot) -> Iterator[Metric]:
    requests, tokens = now.requests, now.prompt_tokens
    yield _counter("requests_seen", "Requests announced", requests.seen)
    yield _counter("requests_finished", "Requests finished or aborted", requests.finished)
    yield _counter("requests_preempted", "Times that a request was preempted", requests.preempted)
    yield _gauge("requests_running", "Requests announced and not finished", requests.running)
    yield _gauge("requests_waiting_for_load", "Requests waiting for a load", requests.waiting_for_load)
    sources = {"device": tokens.device_hit, "host": tokens.host_hit, "recomputed": tokens.recomputed}
    sources.update({f"tier:{name}": count for name, count in tokens.tier_hit.items()})
    yield _counters("prompt_tokens", "Prompt tokens by what served them", "source", sources)
    causes = now.missed_tokens.flat()
    yield _counters("missed_prompt_tokens", "Prompt tokens computed, by why they were not loaded", "cause", causes)


def _store(now: Snapshot) -> Iterator[Metric]:
    store = now.store
    yield _counter("store_offered_blocks", "Blocks considered for storing", store.offered)
    yield _counter("store_stored_blocks", "Blocks stored", store.stored)
    yield _counter("store_bytes", "Bytes stored", store.bytes)
    yield _counter("store_failed_blocks", "Blocks whose store failed", store.failed)
    yield _gauge("store_in_flight_blocks", "Blocks being stored", store.in_flight)
    yield _counter("store_seconds", "Time spent in stores", store.seconds)
    yield _counters("store_skipped_blocks", "Blocks offered and not stored", "reason", store.skipped)


def _load(now: Snapshot) -> Iterator[Metric]:
    load = now.load
    yield _counter("load_blocks", "Blocks loaded", load.blocks)
    yield _counter("load_bytes", "Bytes loaded", load.bytes)
    yield _counter("load_failed_blocks", "Blocks whose load failed", load.failed)
    yield _counter("load_corrupt_blocks", "Blocks whose bytes did not match their checksum", load.corrupt)
    yield _counter(
        "load_declined_blocks", "Hits not taken: recomputing was faster, or loading not allowed", load.declined
    )
    yield _gauge("load_in_flight_blocks", "Blocks being loaded", load.in_flight)
    yield _counter("load_seconds", "Time spent in loads", load.seconds)


def _transfers(now: Snapshot) -> Iterator[Metric]:
    """Jobs that copied everything. A job's seconds are the device's on CUDA, and a copy thread's on CPU."""
    for name, text, part in (
        ("transfer_job_bytes", "Bytes that a transfer job copied, all ranks together", "bytes"),
        ("transfer_job_seconds", "Time that the copies of a transfer job took, on the slowest rank", "seconds"),
    ):
        family = HistogramMetricFamily(PREFIX + name, text, labels=["direction"])
        for direction, jobs in now.transfers.items():
            found: Histogram = getattr(jobs, part)
            bounds = [*map(floatToGoString, found.bounds), "+Inf"]
            family.add_metric(
                [direction.value], list(zip(bounds, accumulate(found.counts), strict=True)), sum_value=found.total
            )
        yield family


def _tiers(now: Snapshot) -> Iterator[Metric]:
    """One family a number, by tier; the names of tiers come from settings."""
    if not now.tiers:
        return
    held, used = ({name: getattr(tier, part) for name, tier in now.tiers.items()} for part in ("counts", "use"))

    def of(tiers: dict[str, Any], field: str) -> dict[str, int]:
        return {name: getattr(counts, field) for name, counts in tiers.items()}

    yield _gauges("tier_blocks", "Blocks in the tier", "tier", of(held, "blocks"))
    yield _gauges("tier_bytes", "Bytes in the tier", "tier", of(held, "bytes"))
    yield _gauges("tier_max_bytes", "Limit of the tier", "tier", of(held, "max_bytes"))
    yield _gauges("tier_open_jobs", "Jobs that the tier works on", "tier", of(used, "open_jobs"))
    for field, text in _TIER_COUNTERS["counts"].items():
        yield _counters(f"tier_{field}", text, "tier", of(held, field))
    for field, text in _TIER_COUNTERS["use"].items():
        yield _counters(f"tier_{field}", text, "tier", of(used, field))


_TIER_COUNTERS = {
    "counts": {
        "stored": "Blocks stored in the tier",
        "stored_bytes": "Bytes stored in the tier",
        "present": "Blocks given to the tier that it had already",
        "dropped": "Blocks that the tier was too busy, full or out of order to keep",
        "loaded": "Blocks loaded from the tier",
        "loaded_bytes": "Bytes loaded from the tier",
        "missing": "Blocks gone from the tier since they were looked up",
        "corrupt": "Blocks of the tier whose bytes did not verify",
        "failed": "Blocks that the tier could not store or load",
        "evicted": "Blocks that left the tier to make room",
    },
    "use": {
        "cascaded": "Blocks given to the tier",
        "cascades_dropped": "Blocks not given to the tier, since cascades held enough of the pool",
        "looked_up": "Blocks that the tier was asked about",
        "found": "Blocks that the tier said it has",
        "promoted": "Blocks that came from the tier into the pool",
        "promotions_failed": "Blocks asked of the tier that did not come",
        "declined": "Blocks of the tier not asked for, since recomputing was faster",
        "gave_up": "Requests that stopped waiting for the tier",
        "timed_out": "Jobs that the tier gave no answer to in time",
        "errors": "Calls of the tier that failed",
    },
}


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=value)


def _counters(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    return _labelled(CounterMetricFamily(PREFIX + name, text, labels=[label]), values)


def _gauges(name: str, text: str, label: str, values: dict[str, int]) -> Metric:
    return _labelled(GaugeMetricFamily(PREFIX + name, text, labels=[label]), values)


def _labelled(family: CounterMetricFamily | GaugeMetricFamily, values: dict[str, int]) -> Metric:
    for label_value, value in values.items():
        family.add_metric([label_value], value)
    return family


class _UptimeCollector(Collector):
    """Seconds since the service started, by the wall clock."""

    def __init__(self, started_s: float, clock: Callable[[], float] = time.time) -> None:
        self._started_s = started_s
        self._clock = clock

    def collect(self) -> Iterator[Metric]:
        """The one family."""
        yield _gauge("uptime_seconds", "Seconds since the service started", max(0.0, self._clock() - self._started_s))


class _OffloadingCollector(Collector):
    """Unexpected errors in kvferry's own code, and whether offloading is on."""

    def __init__(self, guard: OffloadGuard) -> None:
        self._guard = guard

    def collect(self) -> Iterator[Metric]:
        """Both families."""
        status = self._guard.status
        yield _gauge(
            "offloading_on", "Whether offloading is on (1), or off after repeated errors (0)", int(status.is_on)
        )
        yield _counter("unexpected_errors", "Unexpected errors in kvferry's own code", status.num_errors)


class _WarmStartCollector(Collector):
    """What this process began with; it does not change any more."""

    def __init__(self, begun: WarmStart) -> None:
        self._begun = begun

    def collect(self) -> Iterator[Metric]:
        """Slots that came back, and those that did not."""
        begun = self._begun
        yield _gauge("recovered_slots", "Slots of an earlier process that came back at start", begun.recovered)
        text = "Slots of an earlier process that did not come back at start"
        yield _gauges("recovery_dropped_slots", text, "reason", begun.dropped)
        yield _gauge("recovery_seconds", "Time that the start took to recover them", begun.seconds)


def build_registry(
    source: HasSnapshot,
    journal: HasJournal,
    engine: EngineInfo,
    guard: OffloadGuard,
    started_s: float,
    begun: WarmStart | None = None,
) -> CollectorRegistry:
    """A registry of our own: another engine's metrics in this process stay out of it, and ours out of theirs.

    `begun` is what a kept pool brought back.
    """
    registry = CollectorRegistry()
    registry.register(SnapshotCollector(source, journal, engine))
    registry.register(_OffloadingCollector(guard))
    registry.register(_UptimeCollector(started_s))
    if begun is not None:
        registry.register(_WarmStartCollector(begun))
    ProcessCollector(namespace=PREFIX.rstrip("_"), registry=registry)
    return registry
