"""Block store: the interface of a place whose calls may block. `ThreadedTier` makes a tier of one.

Several threads call it at once, at most one of them `maintain` or `reset`. A call may block, fail or never return; only
`find_in_memory`, `is_writable`, `drop`, `health` and `size`, which the engine thread calls, answer from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Protocol

from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.tiers.base import TierCounts


class Outcome(StrEnum):
    """Result of one block; the values are the names of counters in `kvferry.core.tiers.base.TierCounts`."""

    STORED = "stored"
    PRESENT = "present"
    DROPPED = "dropped"
    LOADED = "loaded"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FAILED = "failed"


class Interrupted(Exception):
    """Raised by long work when its `stop` turns true. The work is requested again."""


class BlockStore(Protocol):
    """Blocks by key, bounded in bytes. A block whose call raises counts as failed; the error is logged at intervals."""

    def find_in_memory(self, keys: Sequence[Key]) -> Sequence[bool] | None:
        """Return which keys are present, from memory; None if that takes a call of `find`."""

    def find(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Return which keys are present. Called when `find_in_memory` returned None."""

    def is_writable(self) -> bool:
        """Return whether `put` can succeed now; otherwise no block is copied for it."""

    def put(self, key: Key, data: memoryview, origin: RequestIdentity) -> Outcome:
        """Store a block completely or not at all; `data` must not be used after the call returned."""

    def get(self, key: Key, into: memoryview) -> tuple[Outcome, RequestIdentity | None]:
        """Fill `into`, whose length is the block's; return the outcome, and the origin of a block that was loaded.

        `LOADED` means: verified bytes that were put under this key.
        """

    def drop(self, keys: Sequence[Key]) -> None:
        """Remove keys: at once from memory, also those that are being put; later from the medium."""

    def reset(self, match: RequestFilter | None, stop: Callable[[], bool]) -> tuple[int, int]:
        """Remove everything, or what matching requests stored, durably. No `put` or `get` runs meanwhile.

        Returns the blocks and bytes that were dropped. Raises `Interrupted` once `stop` turns true half-way.
        """

    def maintain(self, stop: Callable[[], bool]) -> None:
        """Do housekeeping. Called about once a second. Raises `Interrupted` once `stop` turns true half-way."""

    def health(self) -> Sequence[str]:
        """Return what impairs the store, one reason an item."""

    def size(self) -> TierCounts:
        """Return blocks, bytes, their limit, and how many blocks were evicted; the other counts are ignored."""

    def close(self) -> None:
        """Release all resources. No other call runs or follows."""
