"""Which slot holds a key: dictionaries that stay small enough to grow without anyone noticing.

When one dictionary grows past five million keys, that one insertion takes 0.3 s, under the lock; one of forty thousand
grows in under 2 ms. A small pool has one dictionary, since every further one costs cache misses. When a pool grows its
keys move into more of them, a batch at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from core.keys import Key
from core.transfers import NO_SLOTS, Slots

_MAX_SHARDS = 256
_SHARD_KEYS = 1 << 16
_PREFIX_CHUNK = 64


class KeyIndex:
    """Key to slot, spread over dictionaries by the key's first byte; keys are hashes, so they spread evenly."""

    def __init__(self, num_slots: int) -> None:
        count = _shards_for(num_slots)
        self._shards: list[dict[Key, int]] = [{} for _ in range(count)]
        # By first byte, whatever the number of shards: one list look-up finds the method to call.
        by_byte = [self._shards[byte % count] for byte in range(256)]
        self._gets = [shard.get for shard in by_byte]
        self._claims = [shard.setdefault for shard in by_byte]
        self._pops = [shard.pop for shard in by_byte]
        self._only = self._shards[0] if count == 1 else None

    def is_small_for(self, num_slots: int) -> bool:
        """Whether so many slots should have more dictionaries."""
        return len(self._shards) < _shards_for(num_slots)

    def __len__(self) -> int:
        return sum(len(shard) for shard in self._shards)

    def get(self, key: Key) -> int | None:
        """The slot of one key."""
        return self._gets[key[0]](key)

    def find(self, keys: Iterable[Key]) -> list[int | None]:
        """The slot of each key, None where there is none."""
        if self._only is not None:
            return list(map(self._only.get, keys))
        gets = self._gets
        return [gets[key[0]](key) for key in keys]

    def find_prefix(self, keys: Sequence[Key]) -> Slots:
        """The slots of the leading keys, up to the first key that is missing. Costs the hit, not the question."""
        parts = [NO_SLOTS]
        for start in range(0, len(keys), _PREFIX_CHUNK):
            chunk = self.find(keys[start : start + _PREFIX_CHUNK])
            try:
                parts.append(np.array(chunk, dtype=np.int64))
            except TypeError:
                # Quicker than to look for a None in every chunk.
                parts.append(np.array(chunk[: chunk.index(None)], dtype=np.int64))
                break
        return np.concatenate(parts) if len(parts) > 2 else parts[-1]

    def claim(self, keys: Iterable[Key], slots: Iterable[int]) -> list[int]:
        """Point each key at its slot unless it has one already; the slot that each key has then."""
        if self._only is not None:
            return list(map(self._only.setdefault, keys, slots))
        claims = self._claims
        return [claims[key[0]](key, slot) for key, slot in zip(keys, slots)]  # noqa: B905 - hot

    def remove(self, keys: Iterable[Key]) -> None:
        """Take out keys that are in the index."""
        if self._only is not None:
            deque(map(self._only.pop, keys), maxlen=0)
            return
        pops = self._pops
        for key in keys:
            pops[key[0]](key)

    def shards(self) -> list[dict[Key, int]]:
        """The dictionaries themselves, for whoever takes an abandoned index apart piece by piece."""
        return self._shards


class MovingIndex(KeyIndex):
    """An index whose keys are on their way from an old one to a new one; each key is in one of them."""

    def __init__(self, old: KeyIndex, new: KeyIndex) -> None:
        self.old = old
        self.new = new
        self._shards = [*old.shards(), *new.shards()]

    def get(self, key: Key) -> int | None:
        """See `KeyIndex`."""
        slot = self.new.get(key)
        return self.old.get(key) if slot is None else slot

    def find(self, keys: Iterable[Key]) -> list[int | None]:
        """See `KeyIndex`."""
        return [self.get(key) for key in keys]

    def claim(self, keys: Iterable[Key], slots: Iterable[int]) -> list[int]:
        """See `KeyIndex`."""
        holders: list[int] = []
        for key, slot in zip(keys, slots, strict=True):
            holder = self.old.get(key)
            holders += self.new.claim([key], [slot]) if holder is None else [holder]
        return holders

    def remove(self, keys: Iterable[Key]) -> None:
        """See `KeyIndex`."""
        for key in keys:
            (self.new if self.old.get(key) is None else self.old).remove([key])

    def move(self, keys: Sequence[Key], slots: Sequence[int]) -> None:
        """Move those of these keys, each of which has its slot here, that have not been moved yet."""
        left = [(key, slot) for key, slot in zip(keys, slots, strict=True) if self.old.get(key) is not None]
        moved = [key for key, _ in left]
        self.new.claim(moved, [slot for _, slot in left])
        self.old.remove(moved)


def _shards_for(num_slots: int) -> int:
    count = 1
    while count < _MAX_SHARDS and count * _SHARD_KEYS < num_slots:
        count *= 2
    return count
