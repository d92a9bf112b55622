"""Object tier: blocks as objects in S3, GCS or Azure, shared by engines with the same fingerprint."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("obstore") is None:
    raise ImportError("its client is not installed: pip install 'kvferry[object]'")

from kvferry.app.tiers.object.store import ObjectTier

__all__ = ["ObjectTier"]
