"""Mooncake tier: blocks as objects in a Mooncake Store, shared by engines with the same fingerprint."""

from __future__ import annotations

from importlib.util import find_spec

from kvferry.app.tiers.mooncake.libraries import missing_packages

# The client itself is never loaded into this process, see `client`.
if find_spec("mooncake") is None:
    raise ImportError("its client is not installed: pip install 'kvferry[mooncake]'")
if missing_packages():
    raise ImportError(f"libraries of its client are not installed: apt-get install {' '.join(missing_packages())}")

from kvferry.app.tiers.mooncake.tier import MooncakeTier

__all__ = ["MooncakeTier"]
