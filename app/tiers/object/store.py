"""Tier type `object`: a block store in a bucket of an object store, shared by all engines with the same fingerprint.

    <prefix>/<namespace>/epoch              the epoch, see `kvferry.app.tiers.shared_epoch`
    <prefix>/<namespace>/b/<epoch>/<key>    one block, see `kvferry.app.tiers.block_format`
    <prefix>/sweep                          replaced by the engine that removes old objects, see `sweep`

The namespace is a digest of the fingerprint. Every call reads the epoch in the server after the call has begun, at the
same time as its blocks, and discards its results if it has changed: a call that begins after a reset was answered
returns no block of before. See docs/tier-guarantees.md.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvferry.app.settings.tiers import TierSettings
from kvferry.app.tiers.block_format import OVERHEAD_BYTES
from kvferry.app.tiers.block_store import BlockResult, Outcome, StoreUnavailable, TierContext, TierRefused, interrupt_if
from kvferry.app.tiers.object.bucket import Bucket, EventLoop, gather
from kvferry.app.tiers.object.connection import ConditionFailed
from kvferry.app.tiers.object.epoch import EpochObject
from kvferry.app.tiers.object.settings import ObjectTierSettings
from kvferry.app.tiers.object.sweep import Sweep
from kvferry.app.tiers.shared_epoch import Epoch
from kvferry.app.tiers.shared_values import StoreFull, ValueStore, check_block_bytes
from kvferry.core.keys import Key, RequestIdentity

_log = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
MAX_BATCH_BLOCKS = 32
MAX_OBJECT_BYTES = 5 << 30
"""The longest object that S3 accepts in one request."""
FULL_PAUSE_S = 5.0
"""Seconds between attempts to write to a full store."""

T = TypeVar("T")


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
        self._slot_bytes = context.slot_bytes
        self._timeout_s = settings.timeout_s
        self._folder = f"{settings.prefix}/{self._namespace.hex()}"
        self._bucket = Bucket(settings)
        self._epoch = EpochObject(self._bucket, f"{self._folder}/epoch", self._name, self._count_from_zero)
        self._sweep = Sweep(
            self._bucket, settings.prefix, lambda: self._blocks_of(self._epoch.latest), self._epoch, settings.ttl_s or 1
        )
        self._full_until_s: float | None = None
        """When to write to a full store again; None if it is not full."""
        self._loop = EventLoop(self._name)

    # --- calls of the server ------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """See `ValueStore`."""
        self._run(self._test())

    def find_many(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See `BlockStore`."""
        epoch = self._epoch.latest
        metas, read = self._run(self._with_epoch([self._bucket.meta_of(name) for name in self._names(epoch, keys)]))
        return [meta is not None and read == epoch for meta in metas]

    def put_many(
        self, keys: Sequence[Key], data: Sequence[memoryview], origins: Sequence[RequestIdentity]
    ) -> Sequence[Outcome]:
        """See `BlockStore`.

        Reads no epoch: what is written in one that has ended is never found.
        """
        if self._full_until_s is not None:
            return [Outcome.DROPPED] * len(keys)
        epoch = self._epoch.latest
        values = self._encode(epoch, keys, data, origins)
        outcomes = self._run(gather(map(self._put, self._names(epoch, keys), values), self._timeout_s))
        self._count_stored(values, outcomes)
        return outcomes

    def get_many(self, keys: Sequence[Key], into: Sequence[memoryview]) -> Sequence[BlockResult]:
        """See `BlockStore`."""
        epoch = self._epoch.latest
        names = self._names(epoch, keys)
        values, read = self._run(
            self._with_epoch([self._bucket.get(n, len(i) + OVERHEAD_BYTES) for n, i in zip(names, into, strict=True)])
        )
        return self._decode(epoch, read, keys, values, into)

    def drop(self, keys: Sequence[Key]) -> None:
        """See `BlockStore`."""
        self._run(self._drop(keys))

    def reset(self, stop: Callable[[], bool]) -> tuple[int, int]:
        """See `BlockStore`. Returns the blocks and bytes that this engine had stored."""
        dropped = self._stored
        self._run(self._reset_all(stop))
        return dropped

    def maintain(self, stop: Callable[[], bool]) -> None:
        """See `BlockStore`."""
        self._run(self._maintain())

    def health(self) -> Sequence[str]:
        """See `BlockStore`."""
        texts = [] if self._full_until_s is None else ["the store is full; new blocks are not kept"]
        return texts + self._sharing_problems + self._loop.thread.degraded()

    def shared_epoch(self) -> bytes:
        """See `SharedStore`."""
        return self._epoch.latest.name

    def close(self) -> None:
        """See `BlockStore`."""
        self._loop.close()

    # --- inside -------------------------------------------------------------------------------------------------

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._loop.run(work)

    def _names(self, epoch: Epoch, keys: Sequence[Key]) -> list[str]:
        prefix = self._blocks_of(epoch)
        return [prefix + key.hex() for key in keys]

    def _blocks_of(self, epoch: Epoch) -> str:
        return f"{self._folder}/b/{epoch.name.decode()}/"

    # --- on the event loop --------------------------------------------------------------------------------------

    async def _with_epoch(self, works: Sequence[Coroutine[Any, Any, T]]) -> tuple[list[T], Epoch]:
        """Return results of requests, and the epoch in the server at some time after the call."""
        results: list[Any] = await gather([*works, self._epoch.read()], self._timeout_s)
        return results[:-1], results[-1]

    async def _test(self) -> None:
        try:
            await self._epoch.test_conditions()
        except StoreFull:
            # Blocks can be loaded all the same.
            self._set_full()
        await self._epoch.read()

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

    def _set_full(self) -> None:
        if self._full_until_s is None:
            _log.warning("tier %s: the store is full", self._name)
        self._full_until_s = time.monotonic() + FULL_PAUSE_S

    async def _drop(self, keys: Sequence[Key]) -> None:
        # Read after the drop: blocks of a later epoch were stored after it.
        await self._bucket.delete(self._names(await self._epoch.read(), keys))
        self._count_removed(len(keys))

    async def _maintain(self) -> None:
        if self._full_until_s is not None and time.monotonic() >= self._full_until_s:
            await self._test_space()
        await self._sweep.step()

    async def _test_space(self) -> None:
        """Use a store that was full again if it has space for a block."""
        name = f"{self._folder}/space-test-{secrets.token_hex(8)}"
        try:
            await self._bucket.put(name, [bytes(self._slot_bytes)])
            await self._epoch.test_conditions()
        except StoreFull:
            self._set_full()
        else:
            self._full_until_s = None
        finally:
            await self._bucket.discard(name)

    async def _reset_all(self, stop: Callable[[], bool]) -> None:
        try:
            await self._epoch.replace_epoch()
        except StoreFull:
            # A full server accepts deletions.
            await self._epoch.remove()
            async for page in self._bucket.pages(f"{self._folder}/b"):
                interrupt_if(stop)
                await self._bucket.delete([found["path"] for found in page])
            await self._epoch.replace_epoch()
        self._sweep.begin_after_reset()
