"""Tier type `object`: a block store in a bucket of an object store, shared by all engines with the same fingerprint.

    <prefix>/<namespace>/epoch              the epoch, see `kvferry.app.tiers.shared_epoch`
    <prefix>/<namespace>/b/<epoch>/<key>    one block, see `kvferry.app.tiers.block_format`
    <prefix>/sweep                          replaced by the engine that removes old objects, see `sweep`

The namespace is a digest of the fingerprint. Every call reads the epoch in the server after the call has begun, at the
same time as its blocks, and discards its results if it has changed: a call that begins after a reset was answered
returns no block of before. See docs/tier-guarantees.md.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from kvferry.app.settings.tiers import TierSettings
from kvferry.app.tiers.block_format import OVERHEAD_BYTES
from kvferry.app.tiers.block_store import BlockResult, Outcome, StoreUnavailable, TierContext, TierRefused, interrupt_if
from kvferry.app.tiers.object.bucket import Bucket, gather
from kvferry.app.tiers.object.conditions import check_conditions
from kvferry.app.tiers.object.connection import ConditionFailed
from kvferry.app.tiers.object.settings import ObjectTierSettings
from kvferry.app.tiers.object.sweep import Sweep
from kvferry.app.tiers.shared_epoch import MAX_NAME_BYTES, Epoch
from kvferry.app.tiers.shared_values import StoreFull, ValueStore, check_block_bytes
from kvferry.core.keys import Key, RequestIdentity

if TYPE_CHECKING:
    from obstore import UpdateVersion

BATCH_BYTES = 16 << 20
MAX_BATCH_BLOCKS = 32
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
        check_block_bytes(settings, slot_bytes, MAX_OBJECT_BYTES, "an object")


class ObjectStore(ValueStore):
    """An `kvferry.app.tiers.block_store.BlockStore`."""

    def __init__(self, settings: ObjectTierSettings, context: TierContext) -> None:
        """`probe` makes the first request. Raises `StoreUnavailable` if a file of the settings cannot be read."""
        super().__init__(context)
        self.batch_blocks = max(1, min(MAX_BATCH_BLOCKS, settings.requests, BATCH_BYTES // context.slot_bytes))
        self._timeout_s = settings.timeout_s
        self._folder = f"{settings.prefix}/{self._namespace.hex()}"
        self._bucket = Bucket(settings)
        self._sweep = Sweep(
            self._bucket,
            settings.prefix,
            f"{self._folder}/b",
            lambda: self._epoch.latest,
            lambda: self._epoch.read(self),
            settings.ttl_s or 1,
        )

    # --- calls of the server ------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """See `ValueStore`."""
        try:
            self._bucket.run(check_conditions(self._bucket, self._epoch_name))
        except StoreFull:
            # Blocks can be loaded all the same.
            self._set_full()
        self._epoch.read(self)

    def find_many(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See `BlockStore`."""
        epoch = self._epoch.latest
        metas, read = self._run([self._bucket.meta_of(name) for name in self._names(epoch, keys)])
        return [meta is not None and read == epoch for meta in metas]

    def put_many(
        self, keys: Sequence[Key], data: Sequence[memoryview], origins: Sequence[RequestIdentity]
    ) -> Sequence[Outcome]:
        """See `BlockStore`.

        Reads no epoch: what is written in one that has ended is never found.
        """
        if self._is_full():
            return [Outcome.DROPPED] * len(keys)
        epoch = self._epoch.latest
        values = self._encode(epoch, keys, data, origins)
        outcomes = self._bucket.run(gather(map(self._put, self._names(epoch, keys), values), self._timeout_s))
        self._count_stored(values, outcomes)
        return outcomes

    def get_many(self, keys: Sequence[Key], into: Sequence[memoryview]) -> Sequence[BlockResult]:
        """See `BlockStore`."""
        epoch = self._epoch.latest
        names = self._names(epoch, keys)
        found, read = self._run(
            [self._bucket.get(n, len(i) + OVERHEAD_BYTES) for n, i in zip(names, into, strict=True)]
        )
        values = [one and one[0] for one in found]
        return self._decode(epoch, read, keys, values, into)

    def drop(self, keys: Sequence[Key]) -> None:
        """See `BlockStore`."""
        # Read after the drop: blocks of a later epoch were stored after it.
        self._bucket.run(self._bucket.delete(self._names(self._epoch.read(self), keys)))
        self._count_removed(len(keys))

    def maintain(self, stop: Callable[[], bool]) -> None:
        """See `BlockStore`."""
        self._sweep.step()

    def health(self) -> Sequence[str]:
        """See `BlockStore`."""
        return [*super().health(), *self._bucket.thread.degraded()]

    def read_epoch(self) -> tuple[bytes, UpdateVersion | None]:
        """See `EpochStore`."""
        return _name_and_version(self._bucket.run(self._get_epoch()))

    def replace_epoch(self, version: UpdateVersion | None, name: bytes) -> bool:
        """See `EpochStore`."""
        try:
            self._bucket.run(self._bucket.put_if(self._epoch_name, name, version))
        except ConditionFailed:
            return False
        return True

    def close(self) -> None:
        """See `BlockStore`."""
        self._bucket.close()

    # --- inside -------------------------------------------------------------------------------------------------

    @property
    def _epoch_name(self) -> str:
        return f"{self._folder}/epoch"

    def _run(self, works: Sequence[Coroutine[Any, Any, Any]]) -> tuple[list[Any], Epoch]:
        """Make requests; return their results, and the epoch in the server at some time after the call."""
        *results, read = self._bucket.run(gather([*works, self._get_epoch()], self._timeout_s))
        return results, self._epoch.confirm(_name_and_version(read)[0], self)

    def _get_epoch(self) -> Coroutine[Any, Any, tuple[memoryview, UpdateVersion] | None]:
        return self._bucket.get(self._epoch_name, MAX_NAME_BYTES)

    def _begin_epoch(self) -> None:
        """See `ValueStore`."""
        self._epoch.begin(self)
        self._sweep.begin_after_reset()

    def _remove_everything(self, stop: Callable[[], bool]) -> None:
        """See `ValueStore`."""
        bucket = self._bucket
        bucket.run(bucket.delete([self._epoch_name]))
        listing = bucket.listing_of(f"{self._folder}/b")
        while page := bucket.run(bucket.next_page(listing)):
            interrupt_if(stop)
            bucket.run(bucket.delete([found["path"] for found in page]))

    def _names(self, epoch: Epoch, keys: Sequence[Key]) -> list[str]:
        prefix = f"{self._folder}/b/{epoch.name.decode()}/"
        return [prefix + key.hex() for key in keys]

    async def _put(self, name: str, value: Sequence[bytes | memoryview]) -> Outcome:
        """Write a block, in pieces, unless it is there."""
        try:
            await self._bucket.put(name, value, is_new=True)
        except ConditionFailed:
            return Outcome.PRESENT
        except StoreFull:
            self._set_full()
            return Outcome.DROPPED
        return Outcome.STORED


def _name_and_version(found: tuple[memoryview, UpdateVersion] | None) -> tuple[bytes, UpdateVersion | None]:
    return (b"", None) if found is None else (bytes(found[0]), found[1])
