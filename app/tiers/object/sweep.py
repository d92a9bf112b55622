"""Removal of objects that are too old, or of an earlier epoch.

Of the engines that share a prefix, one lists it in each interval: the one that replaces the object `sweep`, which has
not changed since that engine looked an interval ago. No clock but the server's is compared with another one.
"""

from __future__ import annotations

import random
import re
import secrets
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from kvferry.app.tiers.object.bucket import Bucket, version_of
from kvferry.app.tiers.object.connection import ConditionFailed
from kvferry.app.tiers.shared_epoch import Epoch

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta

MAX_INTERVAL_S = 3600.0
_PAGES_PER_SECOND = 5
_BLOCK = re.compile(r"[0-9a-f]{16}/b/[0-9a-f]+-[0-9a-f]+/[0-9a-f]+")
_TEST = re.compile(r"[0-9a-f]{16}/epoch-test-[0-9a-f]+")


class Sweep:
    """Lists the prefix at intervals and removes old objects."""

    def __init__(
        self,
        bucket: Bucket,
        prefix: str,
        folder: str,
        latest_epoch: Callable[[], Epoch],
        read_epoch: Callable[[], Epoch],
        ttl_s: int,
    ) -> None:
        """`folder` is that of the namespace's blocks, below `prefix`."""
        self._bucket = bucket
        self._prefix = prefix
        self._folder = folder
        self._latest_epoch = latest_epoch
        self._read_epoch = read_epoch
        self._ttl = timedelta(seconds=ttl_s)
        self._interval_s = min(max(ttl_s / 10, 1.0), MAX_INTERVAL_S)
        self._listing: ListStream[Sequence[ObjectMeta]] | None = None
        self._oldest: datetime | None = None
        self._seen: str | None = None
        self._next_s = 0.0

    def begin_after_reset(self) -> None:
        """List the blocks of this namespace soon: those of earlier epochs are removed."""
        self._listing, self._oldest = self._bucket.listing_of(self._folder), None

    def step(self) -> None:
        """Do some of it. Called about once a second. Raises `StoreUnavailable`; what was begun is begun again later."""
        if self._listing is None and time.monotonic() >= self._next_s:
            # Engines that were started together do not look together.
            self._next_s = time.monotonic() + self._interval_s * random.uniform(0.9, 1.1)
            self._bucket.run(self._take_turn())
        for _ in range(_PAGES_PER_SECOND):
            if self._listing is None:
                return
            listing, self._listing = self._listing, None
            page = self._bucket.run(self._bucket.next_page(listing))
            if page:
                self._remove_old(page)
                self._listing = listing

    async def _take_turn(self) -> None:
        """Begin a listing unless another engine has begun one within the last interval."""
        name = f"{self._prefix}/sweep"
        meta = await self._bucket.meta_of(name)
        seen, self._seen = self._seen, "" if meta is None else str(meta["e_tag"])
        if seen != self._seen:
            return
        try:
            version = None if meta is None else version_of(meta)
            await self._bucket.put_if(name, secrets.token_hex(8).encode(), version)
        except ConditionFailed:
            return
        written = await self._bucket.meta_of(name)
        if written is None:
            return
        self._seen = str(written["e_tag"])
        self._oldest = written["last_modified"] - self._ttl
        self._listing = self._bucket.listing_of(self._prefix)

    def _remove_old(self, page: Sequence[ObjectMeta]) -> None:
        """Remove objects of a page that are too old, in any namespace, and of earlier epochs, in this namespace."""
        epoch = self._latest_epoch()
        current = f"{self._folder}/{epoch.name.decode()}/"
        names = []
        for stored in page:
            name = stored["path"]
            inner = name.removeprefix(f"{self._prefix}/")
            is_old = self._oldest is not None and stored["last_modified"] < self._oldest
            is_earlier = name.startswith(f"{self._folder}/") and not name.startswith(current)
            if (_BLOCK.fullmatch(inner) and (is_old or is_earlier)) or (_TEST.fullmatch(inner) and is_old):
                names.append(name)
        # The epoch is read after the names: those of another one are of earlier ones.
        if names and self._read_epoch() == epoch:
            self._bucket.run(self._bucket.delete(names))
