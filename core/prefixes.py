"""Prefixes: the keys of a request's slots, and the longest hit that the pool, or the pool and the tiers, can give."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from core.groups import Group, GroupLayout
from core.hits import PrefixHit, find_hit
from core.keys import Key
from core.manager import OffloadManager
from core.requests import RequestState
from core.transfers import Slots


class PrefixFinder:
    """Looks a request's keys up. Called under the manager's lock."""

    def __init__(self, manager: OffloadManager, layout: GroupLayout) -> None:
        self._manager = manager
        self._layout = layout

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
                return self._manager.find_prefix(keys)
            slots = self._slots(keys, also)
            gaps = np.flatnonzero(slots < 0)
            return slots[: gaps[0]] if len(gaps) else slots

        def find_each(group: Group, first: int, end: int) -> Slots:
            keys = self.keys(state, group, first, end)
            missing = np.full(end - first - len(keys), -1, dtype=np.int64)
            return np.concatenate((self._slots(keys, also or ()), missing))

        return find_hit(self._layout, first_token, limit, find_prefix, find_each)

    def _slots(self, keys: Sequence[Key], also: Container[Key]) -> NDArray[np.int64]:
        slots = self._manager.find_each(keys)
        if also:
            for i in np.flatnonzero(slots < 0).tolist():
                if keys[i] in also:
                    slots[i] = self.elsewhere
        return slots
