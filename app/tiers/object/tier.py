"""Tier type `object`."""

from __future__ import annotations

from kvferry.app.settings.tiers import TierSettings
from kvferry.app.tiers.block_format import OVERHEAD_BYTES
from kvferry.app.tiers.block_store import StoreUnavailable, TierContext, TierRefused
from kvferry.app.tiers.object.settings import ObjectTierSettings
from kvferry.app.tiers.object.store import ObjectStore

MAX_OBJECT_BYTES = 5 << 30
"""The longest object that S3 accepts in one request."""


class ObjectTier:
    """Blocks as objects in a bucket of S3, GCS or Azure, which engines with the same fingerprint share."""

    Settings = ObjectTierSettings

    @staticmethod
    def open(settings: ObjectTierSettings, context: TierContext) -> ObjectStore:
        """Return a store that is not connected yet. Raises `TierRefused`."""
        ObjectTier.check(settings, context.slot_bytes)
        try:
            return ObjectStore(settings, context)
        except StoreUnavailable as error:
            raise TierRefused(f"KVFERRY_TIERS: tier {context.name}: {error.text}") from None

    @staticmethod
    def check(settings: TierSettings, slot_bytes: int | None) -> None:
        """Raise `TierRefused` for blocks that are too long for an object."""
        if slot_bytes is not None and slot_bytes + OVERHEAD_BYTES > MAX_OBJECT_BYTES:
            raise TierRefused(
                f"KVFERRY_TIERS: tier {settings.name}: a block of {slot_bytes:,} bytes is longer than an object can be "
                f"({MAX_OBJECT_BYTES:,} bytes); reduce KVFERRY_BLOCKS_PER_SLOT"
            )
