"""A block store: the seam for places whose calls take their time. `ThreadedTier` makes a tier of one.

Its calls come from several threads at once, at most one of them about `tend` or `reset`. Each may block, fail or never
return, which is what the tier around it is for; but `glance`, `is_writable`, `drop`, `health` and `size` are asked by
those who cannot wait, and answer from memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from kvferry.core.keys import Key
from kvferry.core.origins import Origin, OriginMatch


class Outcome(StrEnum):
    """What became of one block; the names are those of the counters in `kvferry.core.tiers.TierCounts`."""

    STORED = "stored"
    PRESENT = "present"
    DROPPED = "dropped"
    LOADED = "loaded"
    MISSING = "missing"
    CORRUPT = "corrupt"
    FAILED = "failed"


class Got(NamedTuple):
    """The end of one `get`, and whom the block came from if it was loaded."""

    outcome: Outcome
    origin: Origin | None = None


class Dropped(NamedTuple):
    """What a reset dropped."""

    blocks: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class StoreSize:
    """What a store holds, and what it threw out to make room."""

    blocks: int
    num_bytes: int
    max_bytes: int
    evicted: int


class Interrupted(Exception):
    """Long work was stopped half-way, since its `stop` turned true. It is asked for again."""


class BlockStore(Protocol):
    """Blocks by key, bounded in bytes. What raises is counted as failed, and logged now and then."""

    def glance(self, keys: Sequence[Key]) -> Sequence[bool] | None:
        """Which keys are here, from memory and at once; None if somebody has to be asked."""

    def find(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Which keys are here. Called where `glance` does not know."""

    def is_writable(self) -> bool:
        """Whether it is worth while to copy blocks for `put`."""

    def put(self, key: Key, data: memoryview, origin: Origin) -> Outcome:
        """Keep a block, wholly or not at all; `data` is the caller's again afterwards."""

    def get(self, key: Key, into: memoryview) -> Got:
        """Fill `into`, whose length is the block's. `LOADED` means these bytes were put under this key, verified."""

    def drop(self, keys: Sequence[Key]) -> None:
        """Forget keys. In memory at once, also those that are being put; elsewhere later."""

    def reset(self, match: OriginMatch | None, stop: Callable[[], bool]) -> Dropped:
        """Forget everything, or what matching requests stored, for good; no `put` or `get` runs meanwhile.

        Raises `Interrupted` once `stop` turns true half-way.
        """

    def tend(self, stop: Callable[[], bool]) -> None:
        """Keep house: called about once a second. Raises `Interrupted` once `stop` turns true half-way."""

    def health(self) -> Sequence[str]:
        """Why it does less than it should."""

    def size(self) -> StoreSize:
        """What it holds now."""

    def close(self) -> None:
        """Let go of what is open; no other call runs, or follows."""
