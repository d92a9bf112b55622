"""Mooncake tier: blocks as objects in a Mooncake Store, shared by engines with the same fingerprint."""

from __future__ import annotations

from kvferry.app.tiers.mooncake.store import MooncakeTier

__all__ = ["MooncakeTier"]
