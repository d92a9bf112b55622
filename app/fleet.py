"""What an engine reports about itself to the other engines of its metadata store."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from kvferry.app.api.context import EngineInfo
from kvferry.app.stats_history import COUNTERS, MINUTE_S, StatsHistory
from kvferry.app.store import EngineReport, RecentHits, TierReport
from kvferry.core.stats import Snapshot

WINDOW_S = 300.0
"""Time over which an engine reports what served its prompt tokens."""
NUM_RATES = 30
"""Minutes of which it reports the hit rate."""
HITS = ("device_hit", "host_hit", "tier_hit")
_SOURCES = [list(COUNTERS).index(name) for name in (*HITS, "recomputed")]


def report_of(
    engine: EngineInfo,
    version: str,
    url: str | None,
    now: Snapshot,
    samples: StatsHistory,
    tiers: Sequence[TierReport],
    tenants: Mapping[str | None, int],
) -> EngineReport:
    """Return the report of an engine; `url` is the address of its admin API, `tenants` bytes of the pool by tenant."""
    window_s, increases = samples.increases(now, WINDOW_S)
    _, rows = samples.rows(NUM_RATES * MINUTE_S)
    rates = [_rate([row.increases[index] for index in _SOURCES]) for row in rows]
    tokens = {name: int(increases[name]) for name in (*HITS, "recomputed")}
    return EngineReport(
        kind=engine.name,
        model=engine.model,
        version=version,
        url=None if url is None else _reachable(url),
        slots=now.pool.slots,
        used_slots=now.pool.slots - now.pool.free,
        pool_bytes=now.pool.bytes,
        recent=RecentHits(window_s=window_s, hit_rates=rates, **tokens),
        tiers=tiers,
        tenants=tenants,
    )


def _rate(tokens: Sequence[float]) -> float | None:
    total = sum(tokens)
    return round(sum(tokens[: len(HITS)]) / total, 4) if total else None


def _reachable(url: str) -> str:
    """Return the URL with the name of this host instead of an address that means all of its addresses."""
    parts = urlsplit(url)
    if not ip_address((parts.hostname or "").partition("%")[0]).is_unspecified:
        return url
    return parts._replace(netloc=f"{socket.gethostname()}:{parts.port}").geturl()
