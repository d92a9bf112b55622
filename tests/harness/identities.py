"""Identities of the contract that hold in every snapshot of the statistics."""

from __future__ import annotations

from typing import Any


def check_identities(stats: Any) -> None:
    """Check statistics as the API answers them, or a snapshot of core as a dictionary."""
    prompt, store, pool = stats["prompt_tokens"], stats["store"], stats["pool"]
    served = prompt["device_hit"] + prompt["host_hit"] + sum(prompt["tier_hit"].values()) + prompt["recomputed"]
    assert prompt["total"] == served
    assert prompt["recomputed"] == sum(sum(part.values()) for part in stats["missed_tokens"].values())
    assert store["offered"] == store["stored"] + sum(store["skipped"].values()) + store["failed"] + store["in_flight"]
    assert pool["slots"] == pool["free"] + pool["ready"] + pool["storing"]
    assert max(pool["loading"], pool["pinned"]) <= pool["ready"]
