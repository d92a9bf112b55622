"""Negative cache of a tier: keys that it was just looked up for and does not have.

Other engines may store them in a shared tier at any time, so that an entry holds for a short time only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvferry.core.keys import Key

MISSING_S = 2.0
"""Time for which a key is not looked up again."""
MAX_KEYS = 16_384
"""Most keys that are remembered as missing, and as just stored."""


class KnownMissing:
    """Keys that a tier lacks, as far as its answers and this engine's stores tell. Requires: manager lock held."""

    def __init__(self) -> None:
        self._answered_s: OrderedDict[Key, float] = OrderedDict()
        """When the tier answered that it lacks each key, the oldest first."""
        self._stored_s: OrderedDict[Key, float] = OrderedDict()
        """When keys were stored: the answer to an earlier look-up says nothing about them."""

    def __len__(self) -> int:
        return len(self._answered_s)

    def holds(self, key: Key, now_s: float) -> bool:
        """Return whether a key is missing by a recent answer."""
        answered_s = self._answered_s.get(key)
        # An answer of the future came before the clock was set back.
        return answered_s is not None and 0 <= now_s - answered_s < MISSING_S

    def add(self, keys: Iterable[Key], began_s: float, now_s: float) -> None:
        """Remember the missing keys of a look-up that began at `began_s`."""
        for key in keys:
            if self._stored_s.get(key, began_s - 1.0) < began_s:
                self._answered_s.pop(key, None)
                self._answered_s[key] = now_s
        _trim(self._answered_s)

    def discard(self, keys: Iterable[Key]) -> None:
        """Forget keys that the tier has."""
        for key in keys:
            self._answered_s.pop(key, None)

    def record_stored(self, keys: Iterable[Key], now_s: float) -> None:
        """Forget keys that were just stored, also of look-ups that have not ended."""
        for key in keys:
            self._answered_s.pop(key, None)
            self._stored_s.pop(key, None)
            self._stored_s[key] = now_s
        _trim(self._stored_s)


def _trim(entries: OrderedDict[Key, float]) -> None:
    """Remove the oldest entries beyond the limit."""
    while len(entries) > MAX_KEYS:
        # A `dict` would pass over all entries that were removed before, which takes 24 ms for a thousand keys.
        entries.popitem(last=False)
