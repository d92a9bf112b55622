"""Tier type `redis`."""

from __future__ import annotations

from kvferry.app.settings.tiers import TierSettings
from kvferry.app.tiers.block_format import OVERHEAD_BYTES
from kvferry.app.tiers.block_store import TierContext, TierRefused
from kvferry.app.tiers.redis.settings import RedisTierSettings
from kvferry.app.tiers.redis.store import RedisStore

MAX_VALUE_BYTES = 512 << 20
"""The longest value of Redis, unless its proto-max-bulk-len was raised."""


class RedisTier:
    """Blocks as values in a Redis server or cluster, which engines with the same fingerprint share."""

    Settings = RedisTierSettings

    @staticmethod
    def open(settings: RedisTierSettings, context: TierContext) -> RedisStore:
        """Return a store that is not connected yet. Raises `TierRefused`."""
        RedisTier.check(settings, context.slot_bytes)
        return RedisStore(settings, context)

    @staticmethod
    def check(settings: TierSettings, slot_bytes: int | None) -> None:
        """Raise `TierRefused` for blocks that are too long for Redis."""
        if slot_bytes is not None and slot_bytes + OVERHEAD_BYTES > MAX_VALUE_BYTES:
            raise TierRefused(
                f"KVFERRY_TIERS: tier {settings.name}: a block of {slot_bytes:,} bytes is longer than a value of Redis "
                f"can be ({MAX_VALUE_BYTES:,} bytes); reduce KVFERRY_BLOCKS_PER_SLOT"
            )
