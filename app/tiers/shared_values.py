"""Store that engines share, and that keeps each block as one value; the base of such stores.

A call names its blocks by the epoch that it knows (`begun`), and reads the epoch in the store as well (`read`). If they
differ, it finds nothing and stores nothing. See `kvferry.app.tiers.shared_epoch`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from kvferry.app.settings.tiers import TierSettings
from kvferry.app.telemetry.logs import RateLimitedLogger
from kvferry.app.tiers.block_format import (
    HEADER_BYTES,
    OVERHEAD_BYTES,
    BadBlock,
    encode,
    shared_namespace_of,
    split,
    verify,
)
from kvferry.app.tiers.block_store import MISS, BlockResult, Outcome, StoreUnavailable, TierContext, TierRefused
from kvferry.app.tiers.shared_epoch import Epoch, SharedEpoch, sharing_problems
from kvferry.core.keys import Key, RequestIdentity
from kvferry.core.tiers.base import TierCounts

_log = logging.getLogger(__name__)

FULL_S = 5.0
"""Seconds for which nothing is written to a store that had no space for a block."""

Value = tuple[bytes | memoryview, ...]
"""A value in pieces."""


class SettingsRefused(StoreUnavailable):
    """Settings are wrong, such as credentials, or do not fit the server."""


class StoreFull(StoreUnavailable):
    """The store has no space, and makes none; blocks can be loaded all the same."""


def check_block_bytes(settings: TierSettings, slot_bytes: int | None, max_bytes: int, what: str) -> None:
    """Raise `TierRefused` for blocks that are too long for one value; `slot_bytes` is None where it is not known."""
    if slot_bytes is not None and slot_bytes + OVERHEAD_BYTES > max_bytes:
        raise TierRefused(
            f"KVFERRY_TIERS: tier {settings.name}: a block of {slot_bytes:,} bytes is longer than {what} can be "
            f"({max_bytes:,} bytes); reduce KVFERRY_BLOCKS_PER_SLOT"
        )


class ValueStore:
    """Values of blocks under an epoch, and what this engine has stored. Thread-safe."""

    place = "the server"
    """Where the epoch is, for the log."""
    full = "the store is full"
    """What operators read of a store without space."""

    def __init__(self, context: TierContext) -> None:
        self._name = context.name
        self._epoch = SharedEpoch(self._name, self._on_epoch, self.place)
        self._namespace = shared_namespace_of(context.fingerprint)
        self._sharing_problems = sharing_problems(context.fingerprint)
        self._max_bytes = 0
        self._is_first_probe = True
        self._counting = threading.Lock()
        self._stored = (0, 0)
        """Blocks and bytes; those that the store has evicted, or that have expired, are included."""
        self._full_until_s = 0.0
        self._limited_log = RateLimitedLogger(_log)

    def probe(self) -> None:
        """See `BlockStore`. Only the first call refuses settings: later the store has changed, not they."""
        try:
            self._probe()
        except SettingsRefused as refusal:
            if self._is_first_probe:
                raise TierRefused(f"KVFERRY_TIERS: tier {self._name}: {refusal.text}") from None
            raise
        finally:
            self._is_first_probe = False

    def _probe(self) -> None:
        """Test whether blocks can be stored and loaded now. Raises `StoreUnavailable`, also `SettingsRefused`."""
        raise NotImplementedError

    def reset(self, stop: Callable[[], bool]) -> tuple[int, int]:
        """See `BlockStore`. Returns the blocks and bytes that this engine had stored."""
        dropped = self._stored
        try:
            self._begin_epoch()
        except StoreFull:
            # A full store accepts deletions. Without an epoch no block is served before a new one has begun.
            self._remove_everything(stop)
        return dropped

    def health(self) -> Sequence[str]:
        """See `BlockStore`."""
        texts = [f"{self.full}; new blocks are not kept"] if self._is_full() else []
        return texts + self._sharing_problems

    def shared_epoch(self) -> bytes:
        """See `SharedStore`."""
        return self._epoch.latest.name

    def _begin_epoch(self) -> None:
        """Begin a new epoch. Raises `StoreFull` if the store has no space for that."""
        raise NotImplementedError

    def _remove_everything(self, stop: Callable[[], bool]) -> None:
        """Remove the epoch, and then all blocks of the namespace. Raises `Interrupted`."""
        raise NotImplementedError

    def _is_full(self) -> bool:
        return time.monotonic() < self._full_until_s

    def _set_full(self) -> None:
        self._limited_log.log(
            logging.WARNING, "full", "tier %s: full, and new blocks are not kept: %s", self._name, self.full
        )
        self._full_until_s = time.monotonic() + FULL_S

    def size(self) -> TierCounts:
        """See `BlockStore`. Counts the blocks that this engine stored, of which some may be evicted or expired."""
        return TierCounts(*self._stored, self._max_bytes)

    def _encode(
        self, epoch: Epoch, keys: Sequence[Key], data: Sequence[memoryview], origins: Sequence[RequestIdentity]
    ) -> list[Value]:
        """Return the values of blocks that are stored in an epoch."""
        seed = self._namespace + epoch.name
        return [encode(seed, *block) for block in zip(keys, data, origins, strict=True)]

    def _decode(
        self,
        begun: Epoch,
        read: Epoch,
        keys: Sequence[Key],
        values: Sequence[object],
        into: Sequence[memoryview],
        *,
        copies: bool = False,
    ) -> list[BlockResult]:
        """Return the results of a load.

        `values` are what the store has, and None where it has nothing. If it `copies`, bytes are copied into `into`
        before they are verified; otherwise nothing may write to the values any more.
        """
        if read != begun:
            return [MISS] * len(keys)
        return [self._decode_one(read, *one, copies) for one in zip(keys, values, into, strict=True)]

    def _decode_one(self, epoch: Epoch, key: Key, value: object, into: memoryview, copies: bool) -> BlockResult:
        if value is None:
            return MISS
        try:
            if not isinstance(value, bytes | memoryview):
                raise BadBlock("it is no string")
            head, data, packed = split(value, HEADER_BYTES, len(into))
            if copies:
                # By numpy, which releases the interpreter's lock while it copies.
                np.copyto(np.frombuffer(into, dtype=np.uint8), np.frombuffer(data, dtype=np.uint8))
                data = into
            origin = verify(self._namespace + epoch.name, key, head, data, packed)
        except BadBlock as error:
            self._limited_log.log(
                logging.WARNING, "corrupt", "tier %s: block %s is dropped: %s", self._name, key.hex(), str(error)
            )
            return BlockResult(Outcome.CORRUPT)
        return BlockResult(Outcome.LOADED, origin, data)

    def _count_stored(self, values: Sequence[Value], outcomes: Sequence[Outcome]) -> None:
        sizes = [sum(map(len, value)) for value, one in zip(values, outcomes, strict=True) if one is Outcome.STORED]
        with self._counting:
            self._stored = self._stored[0] + len(sizes), self._stored[1] + sum(sizes)

    def _count_removed(self, num_removed: int) -> None:
        """Subtract blocks of unknown, average length."""
        with self._counting:
            blocks, num_bytes = self._stored
            left = max(blocks - num_removed, 0)
            self._stored = left, num_bytes * left // max(blocks, 1)

    def _on_epoch(self) -> None:
        """Count the blocks of a new epoch."""
        with self._counting:
            self._stored = (0, 0)
