"""Test of conditional writes, by which engines change the epoch of a namespace."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from kvferry.app.tiers.object.bucket import Bucket
from kvferry.app.tiers.object.connection import ConditionFailed
from kvferry.app.tiers.shared_values import SettingsRefused

if TYPE_CHECKING:
    from obstore import UpdateVersion


class ConditionsIgnored(SettingsRefused):
    """The server does not honour conditional writes."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the server {what}, without which resets would not hold for all engines; use another server, or a version "
            "with conditional writes (If-None-Match, If-Match)",
            is_transient=False,
        )


async def check_conditions(bucket: Bucket, epoch: str) -> None:
    """Raise `ConditionsIgnored` unless the server refuses wrong conditions and accepts right ones.

    Finds out how it expects tags. Writes an object of its own, whose name begins with `epoch`.
    """
    name = f"{epoch}-test-{secrets.token_hex(8)}"
    try:
        first = await bucket.put_if(name, b"1", None)
        if await _accepts(bucket, name, None):
            raise ConditionsIgnored("ignores If-None-Match: *")
        for bucket.has_plain_tags in (False, True):
            if await _accepts(bucket, name, first):
                break
        else:
            raise ConditionsIgnored("refuses If-Match with the tag of the object")
        if await _accepts(bucket, name, first):
            raise ConditionsIgnored("ignores If-Match")
    finally:
        await bucket.discard(name)


async def _accepts(bucket: Bucket, name: str, version: UpdateVersion | None) -> bool:
    """Return whether a write under a condition succeeds, which differs from the earlier ones."""
    try:
        await bucket.put_if(name, secrets.token_bytes(8), version)
    except ConditionFailed:
        return False
    return True
