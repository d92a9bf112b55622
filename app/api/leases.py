"""Receipts of leases as responses show them, and the limit of `retain_s`."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from kvferry.app.api.context import AdminContext
from kvferry.app.api.errors import invalid_field
from kvferry.app.common.times import rfc3339_or_none
from kvferry.core.pool.leases import LeaseOutcome, LeaseReceipt


class LeaseView(BaseModel):
    """A lease when it began: blocks that are not evicted for a time, in slots of the pool."""

    outcome: LeaseOutcome = Field(description="for all blocks, for the first ones (`clipped`), or for none")
    blocks: int = Field(description="blocks of the lease, pending ones included")
    pending: int = Field(
        description="of these, those that were not in the pool yet: being stored, or in lazy mode on the device only"
    )
    bytes: int = Field(description="what all of them take in the pool")
    until: str | None = Field(
        description="when it ends, unless the session's next request, a reset or an operator ends it; null without one"
    )
    reason: str | None = Field(description="why it is not for all blocks; null if it is")


def lease_to_json(receipt: LeaseReceipt | None) -> dict[str, Any] | None:
    """Return a receipt in the form of `LeaseView`."""
    if receipt is None:
        return None
    return {
        "outcome": receipt.outcome.value,
        "blocks": receipt.num_blocks,
        "pending": receipt.num_pending,
        "bytes": receipt.num_bytes,
        "until": rfc3339_or_none(receipt.until_s),
        "reason": receipt.reason,
    }


def check_retain_s(context: AdminContext, retain_s: float | None, field: str = "retain_s") -> None:
    """Raise the 422 for a lease that is longer than the setting MAX_RETAIN_S allows."""
    most = context.scheduler.retention.max_retain_s
    if retain_s is not None and retain_s > most:
        raise invalid_field(field, f"must be at most {most:g} seconds (KVFERRY_MAX_RETAIN_S)")
