"""Block store: the interface that a type of tier implements. `ThreadedTier` makes a tier of one.

Every method runs on a thread of the tier's own, never on the engine's, and may block, fail or never return. Several
threads call at once; `probe`, `reset`, `drop_matching`, `drop`, `maintain`, `health`, `size` and `shared_epoch` are
called by one thread at a time.

Blocks are stored and loaded in batches, so that a store on a network can pipeline them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kvferry.core.errors import StartError
from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.tiers.base import TierCounts


class SlotBytes(Protocol):
    """Access of tiers to the bytes of the pool's slots. Thread: any."""

    def views(self, slot: int, num_bytes: int) -> Sequence[NDArray[np.uint8]]:
        """Return the first `num_bytes` bytes of a slot, in order, to be read or written in place.

        Usually one flat array; several if each rank holds a part of the slot. Must be called for each block of a job
        before its bytes are accessed, and not on the engine thread: it may write to the pool's file. If it raises, the
        block has failed.
        """


class TierRefused(StartError):
    """A tier cannot be used with its settings. The message names the tier, the problem and what to do."""


@dataclass(frozen=True, slots=True)
class TierContext:
    """The engine of a tier.

    `fingerprint` identifies the meaning of bytes: blocks stored under another fingerprint must never be found. No block
    is longer than `slot_bytes`. `engine` names the engine; engines with a common configuration (data parallel) have
    different names.
    """

    name: str
    fingerprint: Mapping[str, object]
    slot_bytes: int
    engine: str = "kvferry"


class Outcome(StrEnum):
    """Result of one block; the values are the names of counters in `kvferry.core.tiers.base.TierCounts`."""

    STORED = "stored"
    PRESENT = "present"
    DROPPED = "dropped"
    LOADED = "loaded"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FAILED = "failed"


class BlockResult(NamedTuple):
    """Outcome of a load; of a loaded block also its origin, unless that was too long to be stored, and its bytes."""

    outcome: Outcome
    origin: RequestIdentity | None = None
    data: memoryview | None = None


MISS = BlockResult(Outcome.MISSING)


class Interrupted(Exception):
    """Raised by long work when its `stop` turns true. The work is requested again."""


def interrupt_if(stop: Callable[[], bool]) -> None:
    """Raise `Interrupted` if `stop` is true."""
    if stop():
        raise Interrupted


class StoreUnavailable(Exception):
    """The store, or the server behind it, cannot do a call now.

    `text` is shown in `/readyz`, which needs no token, and in the log: a constant text about the store ("the server
    refuses connections"), never a message of a client library, which may contain an address or a password. A call that
    raised an `is_transient` one is repeated after a pause, within the time limit of its job. After one that
    `needs_probe` nothing but `probe` is called until that succeeds.
    """

    def __init__(self, text: str, *, is_transient: bool = True, needs_probe: bool = False) -> None:
        super().__init__(text)
        self.text = text
        self.is_transient = is_transient
        self.needs_probe = needs_probe


class BlockStore(Protocol):
    """Blocks by key, bounded in bytes, age or both. Blocks whose call raises count as failed.

    After several failed calls in a row only `probe` is called, about once a second, until it succeeds. Of exceptions
    other than `StoreUnavailable` operators see the type and the stack, not the message.

    `put_many` and `get_many` return one item for each key, in the order of `keys`, in which no key occurs twice. All
    these blocks are of one job; each has its own outcome.

    A class that derives from this one need not write the methods that have a default.
    """

    batch_blocks: int
    """The most blocks that `put_many` and `get_many` receive at once; constant."""

    def probe(self) -> None:
        """Test whether blocks can be stored and loaded now. Called first of all, and while the store is unavailable.

        Raises `TierRefused` if the settings are wrong, such as a password: kvferry does not
        start. Raises `StoreUnavailable` if the store may serve later: kvferry starts without it.
        """

    def find_many(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Return which keys are present. Receives all keys of a look-up."""

    def put_many(
        self, keys: Sequence[Key], data: Sequence[memoryview], origins: Sequence[RequestIdentity]
    ) -> Sequence[Outcome]:
        """Store each block completely or not at all; `data` must not be used after the call returned.

        `find_many` has just answered for the first of them, and some of the others may be present: `PRESENT` or
        `STORED`. A store that is full, or cannot be written, returns `DROPPED`.
        """

    def get_many(self, keys: Sequence[Key], into: Sequence[memoryview]) -> Sequence[BlockResult]:
        """Return outcomes, and what was loaded.

        `LOADED` means: verified bytes that were put under this key, of the length of their item of `into`. They are in
        `into`, where the store may write until it returns, or in memory that nothing writes any more. The tier drops
        blocks that are `CORRUPT`.
        """

    def drop(self, keys: Sequence[Key]) -> None:
        """Remove keys from the medium, durably, also those that an earlier process stored; some may not be there.

        The tier does not find or load them from the request of the drop on. It calls this again after an exception, and
        after a `put_many` of such a key that was under way.
        """

    def reset(self, stop: Callable[[], bool]) -> tuple[int, int]:
        """Remove everything, durably, for all engines that share the store.

        No other call runs meanwhile. Returns the blocks and bytes that were dropped, as far as they are
        known. Raises `Interrupted` once `stop` turns true half-way.
        """

    def maintain(self, stop: Callable[[], bool]) -> None:
        """Do housekeeping. Called about once a second. Raises `Interrupted` once `stop` turns true half-way."""

    def health(self) -> Sequence[str]:
        """Return what impairs the store, one reason an item; by default nothing. Called about once a second."""
        return ()

    def size(self) -> TierCounts:
        """Return blocks, bytes, their limit, and how many blocks were evicted; the other counts are ignored.

        Called about once a second, and after resets.
        """

    def close(self) -> None:
        """Release all resources. No other call runs or follows."""


@runtime_checkable
class FilteringStore(Protocol):
    """What a `BlockStore` has in addition if it can reset by match; one without drops everything instead."""

    def drop_matching(self, match: RequestFilter, stop: Callable[[], bool]) -> tuple[int, int]:
        """Remove what matching requests stored, and what has no readable origin, durably; see `BlockStore.reset`."""


@runtime_checkable
class SharedStore(Protocol):
    """What a `BlockStore` has in addition if engines share its blocks."""

    def shared_epoch(self) -> bytes:
        """Return the epoch of the namespace, the same for all engines that share it; empty until it was read.

        Called about once a second.
        """
