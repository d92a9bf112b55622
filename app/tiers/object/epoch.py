"""Epoch of a namespace as one object, which engines change by conditional writes only."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

from kvferry.app.tiers.object.bucket import Bucket
from kvferry.app.tiers.object.connection import ConditionFailed
from kvferry.app.tiers.shared_epoch import Epoch, KnownEpoch
from kvferry.app.tiers.shared_values import SettingsRefused

if TYPE_CHECKING:
    from obstore import UpdateVersion

_NUM_TRIES = 10
"""Conditional writes of one change, of which others may fail because of changes by other engines."""


class ConditionsIgnored(SettingsRefused):
    """The server does not honour conditional writes."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the server {what}, without which resets would not hold for all engines; use another server, or a version "
            "with conditional writes (If-None-Match, If-Match)",
            is_transient=False,
        )


class EpochObject:
    """The epoch as this engine read it last. All methods run on the event loop and raise `StoreUnavailable`."""

    def __init__(self, bucket: Bucket, name: str, tier: str, on_epoch: Callable[[], None]) -> None:
        """`name` is the object's. `on_epoch` is called after each change of the epoch."""
        self._bucket = bucket
        self._name = name
        self._known = KnownEpoch(tier, on_epoch)
        self._version: UpdateVersion | None = None
        """Version of the object that has exactly this epoch; None if it is not known to have it."""
        self._has_plain_tags = False
        """Whether the server expects entity tags in conditions without the quotes that it sends them with."""
        self._changing = asyncio.Lock()
        """Held while the epoch is compared with the server's, including the requests for that."""

    @property
    def latest(self) -> Epoch:
        """The epoch that was read last."""
        return self._known.latest

    async def read(self) -> Epoch:
        """Return the epoch in the server at some time after the call.

        Begins a new one if the server has none, or has lost its latest writes.
        """
        known, version = self._known.latest, self._version
        if version is not None and await self._bucket.get_changed(self._name, version.get("e_tag")) is True:
            return known
        async with self._changing:
            return await self._follow()

    async def replace_epoch(self) -> None:
        """Begin a new epoch."""
        async with self._changing:
            for _ in range(_NUM_TRIES):
                await self._follow()
                if await self._change(self._known.latest.next(), self._version, None):
                    return
        raise _CONTENDED

    async def remove(self) -> None:
        """Remove the object, which is possible on a full server. No block is served before a new epoch has begun."""
        async with self._changing:
            await self._bucket.delete([self._name])

    async def test_conditions(self) -> None:
        """Raise `ConditionsIgnored` unless the server refuses wrong conditions and accepts right ones."""
        name = f"{self._name}-test-{secrets.token_hex(8)}"
        try:
            first = await self._bucket.put_if(name, b"1", None)
            if await self._accepts(name, None):
                raise ConditionsIgnored("ignores If-None-Match: *")
            second = await self._replace(name, first)
            if await self._accepts(name, self.condition(first)):
                raise ConditionsIgnored("ignores If-Match")
            if await self._bucket.get_changed(name, second.get("e_tag")) is False:
                raise ConditionsIgnored("does not return what was written")
            if await self._bucket.get_changed(name, first.get("e_tag")) is True:
                raise ConditionsIgnored("answers conditional reads wrongly")
        finally:
            await self._bucket.discard(name)

    async def _replace(self, name: str, version: UpdateVersion) -> UpdateVersion:
        """Write an object under the right condition, with the spelling of tags that the server accepts."""
        for self._has_plain_tags in (False, True):
            try:
                return await self._bucket.put_if(name, b"2", self.condition(version))
            except ConditionFailed:
                continue
        raise ConditionsIgnored("refuses If-Match with the tag of the object")

    async def _accepts(self, name: str, version: UpdateVersion | None) -> bool:
        """Return whether a write under a wrong condition succeeds."""
        try:
            await self._bucket.put_if(name, b"3", version)
        except ConditionFailed:
            return False
        return True

    def condition(self, version: UpdateVersion | None) -> UpdateVersion | None:
        """Return a version as the server expects it in conditions."""
        e_tag = None if version is None else version.get("e_tag")
        if version is None or e_tag is None or not self._has_plain_tags:
            return version
        return {**version, "e_tag": e_tag.strip('"')}

    async def _follow(self) -> Epoch:
        """Adopt the epoch in the server. Requires: `_changing` held."""
        for _ in range(_NUM_TRIES):
            known = self._known.latest
            # Without a condition, and read again: another coroutine may have adopted a later epoch.
            changed = await self._bucket.get_changed(self._name, None)
            version: UpdateVersion | None = None
            epoch = Epoch()
            if not isinstance(changed, bool):
                epoch, version = Epoch(changed[0]), changed[1]
            reason = epoch.find_loss(known)
            if reason is None:
                self._version = version
                self._known.adopt(epoch)
                return epoch
            # Until the loss is repaired, every call reads without a condition, and tries that again.
            self._version = None
            if await self._change(known.next(), version, reason):
                return self._known.latest
        raise _CONTENDED

    async def _change(self, epoch: Epoch, replaced: UpdateVersion | None, loss: str | None) -> bool:
        """Write an epoch if the server still has that version; return whether it was written.

        `loss` is why, without a reset. Requires: `_changing` held.
        """
        try:
            version = await self._bucket.put_if(self._name, epoch.name, self.condition(replaced))
        except ConditionFailed:
            return False
        self._version = version
        if loss is not None:
            self._known.warn_of_loss(loss)
        self._known.adopt(epoch)
        return True


_CONTENDED = ConditionFailed("the epoch of the namespace is being changed by other engines")
