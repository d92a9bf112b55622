"""Prefixes: the keys of a request's slots, and the longest hit that the pool, or the pool and the tiers, can give."""

from __future__ import annotations

from collections.abc import Container, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kvferry.core.engine_api import DeviceView
from kvferry.core.groups import Group, GroupLayout
from kvferry.core.hits import PrefixHit, find_hit
from kvferry.core.keys import Key
from kvferry.core.pool.eviction.history import Ghosts
from kvferry.core.pool.index import hash_keys
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.requests import RequestState
from kvferry.core.transfers import Slots


class _Seen(Enum):
    COMPUTED = "computed"


class PrefixFinder:
    """Looks a request's keys up. Called under the manager's lock."""

    def __init__(self, manager: OffloadManager, layout: GroupLayout, device: DeviceView) -> None:
        self._manager = manager
        self._layout = layout
        self._device = device
        # Without full attention neither pool nor device has the blocks between two boundaries.
        self._computed = None if layout.full_groups else Ghosts(manager.num_slots, _Seen)

    @property
    def elsewhere(self) -> int:
        """What stands for the slot of a block that is not in the pool, but would be brought into it."""
        return self._manager.table.max_slots

    def keys(self, state: RequestState, group: Group, first: int, end: int) -> Sequence[Key]:
        """The keys of a request's slots `first` to `end` of a group, as far as they are hashed."""
        progress = state.groups[group.index]
        return progress.keys[first : progress.extend_keys(state.request.block_hashes, end)]

    def find(
        self,
        state: RequestState,
        first_token: int,
        limit_token: int | None = None,
        also: Container[Key] | None = None,
    ) -> PrefixHit:
        """What the pool has behind the first `first_token` tokens, up to `limit_token`; by default, all that the
        request may load.

        With `also`, what it would have with these keys besides, whose slots are `elsewhere`.
        """
        limit = state.loadable_tokens if limit_token is None else limit_token

        def find_prefix(group: Group, first: int, end: int) -> Slots:
            keys = self.keys(state, group, first, end)
            if also is None:
                return self._manager.lookup(keys)
            slots = self._slots(keys, also)
            gaps = np.flatnonzero(slots < 0)
            return slots[: gaps[0]] if len(gaps) else slots

        def find_each(group: Group, first: int, end: int) -> Slots:
            keys = self.keys(state, group, first, end)
            missing = np.full(end - first - len(keys), -1, dtype=np.int64)
            return np.concatenate((self._slots(keys, also or ()), missing))

        return find_hit(self._layout, first_token, limit, find_prefix, find_each)

    def find_boundary(self, state: RequestState, hit_end: int) -> int:
        """Find where a request leaves the prefixes that other requests computed before it.

        Full-attention groups have that prefix in the pool or on the device, though windows or states may be missing.
        Models without such a group have it if `note_computed` remembers it.

        Args:
            state: The request.
            hit_end: The end of its hit, in tokens.

        Returns:
            The number of tokens in that prefix, in whole slots of every group; 0 if it is not longer than the hit.
        """
        layout = self._layout
        if len(layout.full_groups) == len(layout):
            return 0
        end = state.request.num_tokens - 1
        for group in layout.full_groups or layout.groups[:1]:
            if end <= hit_end:
                return 0
            keys = self.keys(state, group, hit_end // group.slot_tokens, end // group.slot_tokens)
            end = min(end, (hit_end // group.slot_tokens + self._count_computed(keys)) * group.slot_tokens)
        end = end // layout.slot_alignment_tokens * layout.slot_alignment_tokens
        return end if end > hit_end else 0

    def note_computed(self, state: RequestState) -> None:
        """Remember the blocks of a request that is about to be computed, for models without full attention."""
        if self._computed is not None:
            group = self._layout.groups[0]
            keys = self.keys(state, group, 0, state.request.num_tokens // group.slot_tokens)
            self._computed.add(hash_keys(keys), _Seen.COMPUTED)

    def _count_computed(self, keys: Sequence[Key]) -> int:
        """Count the keys from the first on that are in the pool or on the device, or were computed at some time."""
        if self._computed is not None:
            seen = self._computed.reasons(hash_keys(keys))
            return next((i for i, known in enumerate(seen) if known is None), len(seen))
        count = len(self._manager.lookup(keys))
        if count == len(keys) or not self._device.resident([keys[count]])[0]:
            return count
        missing = np.flatnonzero(self._manager.lookup_each(keys) < 0).tolist()
        resident = self._device.resident([keys[i] for i in missing])
        return next((i for i, held in zip(missing, resident, strict=True) if not held), len(keys))

    def _slots(self, keys: Sequence[Key], also: Container[Key]) -> NDArray[np.int64]:
        slots = self._manager.lookup_each(keys)
        if also:
            for i in np.flatnonzero(slots < 0).tolist():
                if keys[i] in also:
                    slots[i] = self.elsewhere
        return slots
