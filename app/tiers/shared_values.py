"""Blocks of a namespace in a store that keeps each as one value, as this engine sees them; used by the store's calls.

A call names its blocks by the epoch that it knows (`begun`), and reads the epoch in the store as well (`read`). If they
differ, it finds nothing and stores nothing. See `kvferry.app.tiers.shared_epoch`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import numpy as np

from kvferry.app.logs import RateLimitedLogger
from kvferry.app.tiers.block_format import HEADER_BYTES, BadBlock, encode, shared_namespace_of, split, verify
from kvferry.app.tiers.block_store import MISS, BlockResult, Outcome, TierContext
from kvferry.app.tiers.shared_epoch import Epoch, sharing_problems
from kvferry.core.keys import Key, RequestIdentity
from kvferry.core.tiers.base import TierCounts

_log = logging.getLogger(__name__)


class SharedValues:
    """What may be found, stored and loaded under which epoch, and how much this engine has stored. Thread-safe."""

    def __init__(self, context: TierContext) -> None:
        self.namespace = shared_namespace_of(context.fingerprint)
        self._name = context.name
        self._counting = threading.Lock()
        self._blocks = self._bytes = 0
        self._seldom = RateLimitedLogger(_log)

    def pack(self, epoch: Epoch, key: Key, data: memoryview, origin: RequestIdentity) -> tuple[bytes | memoryview, ...]:
        """Return the value of a block, in pieces, that is stored in an epoch."""
        return encode(self.namespace + epoch.name, key, data, origin)

    def load(
        self,
        begun: Epoch,
        read: Epoch,
        keys: Sequence[Key],
        values: Sequence[object],
        into: Sequence[memoryview],
        *,
        copies: bool = False,
    ) -> list[BlockResult]:
        """Return the results.

        `values` are what the store has, and None where it has nothing. If it `copies`, bytes are copied into `into`
        before they are verified; otherwise nothing may write to the values any more.
        """
        if read != begun:
            return [MISS] * len(keys)
        return [self._load(read, *one, copies) for one in zip(keys, values, into, strict=True)]

    def _load(self, epoch: Epoch, key: Key, value: object, into: memoryview, copies: bool) -> BlockResult:
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
            origin = verify(self.namespace + epoch.name, key, head, data, packed)
        except BadBlock as error:
            self._seldom.log(
                logging.WARNING, "corrupt", "tier %s: block %s is dropped: %s", self._name, key.hex(), str(error)
            )
            return BlockResult(Outcome.CORRUPT)
        return BlockResult(Outcome.LOADED, origin, data)

    # --- what this engine has stored ----------------------------------------------------------------------------

    @property
    def size(self) -> tuple[int, int]:
        """Blocks and bytes; those that the store has evicted, or that have expired, are included."""
        with self._counting:
            return self._blocks, self._bytes

    def count(self, blocks: int, num_bytes: int) -> None:
        """Add to the size; negative numbers subtract."""
        with self._counting:
            self._blocks, self._bytes = max(self._blocks + blocks, 0), max(self._bytes + num_bytes, 0)

    def uncount(self, blocks: int) -> None:
        """Subtract blocks of unknown, average length."""
        with self._counting:
            num_bytes = blocks * self._bytes // max(self._blocks, 1)
        self.count(-blocks, -num_bytes)

    def begin_epoch(self) -> None:
        """Count from zero."""
        with self._counting:
            self._blocks = self._bytes = 0


class ValueStore:
    """The part that stores of such values have in common."""

    def __init__(self, context: TierContext) -> None:
        self._name = context.name
        self._values = SharedValues(context)
        self._sharing_problems = sharing_problems(context.fingerprint)
        self._max_bytes = 0
        self._may_refuse = True

    def size(self) -> TierCounts:
        """See `BlockStore`. Counts the blocks that this engine stored, of which some may be evicted or expired."""
        return TierCounts(*self._values.size, self._max_bytes)
