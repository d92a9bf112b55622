"""Tier type `mooncake`."""

from __future__ import annotations

from kvferry.app.tiers.mooncake.settings import MooncakeTierSettings
from kvferry.app.tiers.mooncake.store import MooncakeStore
from kvferry.app.tiers.threaded import ThreadedTier
from kvferry.core.tiers.base import TierContext


class MooncakeTier(ThreadedTier):
    """Blocks as objects in a Mooncake Store, which engines with the same fingerprint share."""

    Settings = MooncakeTierSettings

    def __init__(self, settings: MooncakeTierSettings, context: TierContext) -> None:
        """Start the client. Raises `TierRefused`; starts without a master that does not answer."""
        super().__init__(MooncakeStore(settings, context), settings, context)
