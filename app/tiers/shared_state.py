"""State of a namespace in a store that engines share: its epoch, and the filters of its resets by match.

The epoch is a number and a random id, which each whole reset replaces. It is part of the name of each block, so that a
block of an earlier epoch is never found. Each reset by match appends a filter. A block contains the number of filters
that preceded its store, and is a miss if a later filter matches its origin. See "Resets" in docs/tiers.md.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvferry.core.keys import RANDOM_SEED, RequestFilter, RequestIdentity

MAX_RESETS_BY_MATCH = 1000
"""Filters of an epoch that every engine keeps; one more reset by match drops everything."""
_ID_BYTES = 8
_EPOCH = re.compile(rb"([0-9a-f]{1,16})-[0-9a-f]{16}")
_MAX_GLOB_CHARS = 512
_MAX_KNOWN = 4096


@dataclass(frozen=True, slots=True)
class SharedState:
    """One version of the state. Each item is unique, so that the last one identifies a version."""

    items: tuple[bytes, ...] = ()
    """The epoch, then packed filters; empty if there is no state."""
    filters: tuple[RequestFilter, ...] = ()
    _known: dict[tuple[int, RequestIdentity], bool] = field(default_factory=dict, compare=False, repr=False)
    """Results of `is_reset`: the blocks of a request have the same, and a thousand filters take a millisecond."""

    @classmethod
    def of(cls, items: Iterable[bytes]) -> SharedState:
        """Return the state of these items, which another program may have written: an unreadable filter matches all."""
        found = tuple(items)
        return cls(found, tuple(map(_unpack_filter, found[1:])))

    @classmethod
    def unpack(cls, data: bytes) -> SharedState:
        """Return the state that `pack` returned; an empty one if it cannot be read."""
        try:
            return cls.of(str(item).encode() for item in json.loads(data))
        except (ValueError, TypeError, RecursionError):
            return cls()

    def pack(self) -> bytes:
        """Return the state as one value."""
        return json.dumps([item.decode() for item in self.items]).encode()

    @property
    def epoch(self) -> bytes:
        """The epoch; empty for none."""
        return self.items[0] if self.items else b""

    @property
    def last(self) -> bytes:
        """Last item; empty for none."""
        return self.items[-1] if self.items else b""

    @property
    def number(self) -> int:
        """Number of the epoch, higher than those of earlier ones; 0 for none, and for what is no epoch."""
        found = _EPOCH.fullmatch(self.epoch)
        return 0 if found is None else int(found[1], 16)

    def next_epoch(self) -> SharedState:
        """Return a state with a new epoch and no filters."""
        epoch = b"%x-%s" % (self.number + 1, secrets.token_hex(_ID_BYTES).encode())
        return SharedState((epoch,))

    def is_reset(self, num_resets: int, origin: RequestIdentity | None) -> bool:
        """Return whether a reset by match concerns a block that was stored after `num_resets` of them.

        A number that is too high belongs to filters that the server has lost.
        """
        if origin is None or num_resets >= len(self.filters):
            return num_resets != len(self.filters)
        is_reset = self._known.get((num_resets, origin))
        if is_reset is None:
            is_reset = any(match.matches(origin) for match in self.filters[num_resets:])
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[num_resets, origin] = is_reset
        return is_reset

    def find_loss(self, known: SharedState, place: str = "the server") -> str | None:
        """Return why this state, read in `place` after `known`, has to be replaced by a new epoch; None to adopt it."""
        if not self.number:
            return f"{place} has no state of its namespace"
        same = self.epoch == known.epoch
        has_lost = self.items[: len(known.items)] != known.items if same else self.number <= known.number
        return f"{place} has lost its latest writes, among which may have been resets" if has_lost else None


def sharing_problems(fingerprint: Mapping[str, object]) -> list[str]:
    """Return why engines with this fingerprint share nothing, for `BlockStore.health`."""
    if not str(fingerprint.get("hash_seed", "")).startswith(RANDOM_SEED):
        return []
    return [
        "block hashes are random, so no block is shared with other engines or found after a restart; set "
        "PYTHONHASHSEED to the same value for all engines"
    ]


def pack_filter(match: RequestFilter) -> bytes:
    """Return the item of a reset by match."""
    return json.dumps([match.request, match.tenant, match.lora, secrets.token_hex(_ID_BYTES)]).encode()


def _unpack_filter(packed: bytes) -> RequestFilter:
    try:
        *globs, _ = json.loads(packed)
        if not all(glob is None or (isinstance(glob, str) and len(glob) <= _MAX_GLOB_CHARS) for glob in globs):
            return RequestFilter()
        return RequestFilter(*globs)
    except (ValueError, TypeError, RecursionError):
        return RequestFilter()
