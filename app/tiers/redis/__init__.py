"""Redis tier: blocks as values in a Redis server or cluster, shared by engines with the same fingerprint."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("redis") is None:
    raise ImportError("its client is not installed: pip install 'kvferry[redis]'")

from kvferry.app.tiers.redis.store import RedisTier

__all__ = ["RedisTier"]
