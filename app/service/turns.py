"""Items of clients, whose addresses take turns."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Turns(Generic[T]):
    """Items by address, each address's in order of arrival. All but `take_of_most` take constant time.

    An address that begins to have items is the last one; after each turn it is again.
    """

    def __init__(self) -> None:
        self._items_of: dict[str, dict[T, None]] = {}
        self._num_items = 0

    def __len__(self) -> int:
        return self._num_items

    def add(self, address: str, item: T) -> None:
        """Add the newest item of an address."""
        self._items_of.setdefault(address, {})[item] = None
        self._num_items += 1

    def discard(self, address: str, item: T) -> None:
        """Remove an item, if it is there."""
        items = self._items_of.get(address, {})
        if item in items:
            del items[item]
            self._num_items -= 1
            if not items:
                del self._items_of[address]

    def take_oldest(self) -> T:
        """Remove and return the oldest item of the address whose turn it is. Requires: there is one."""
        address = next(iter(self._items_of))
        return self._take_turn(address, next(iter(self._items_of[address])))

    def take_newest(self) -> T:
        """Remove and return the newest item of the address whose turn it is. Requires: there is one."""
        address = next(iter(self._items_of))
        return self._take_turn(address, next(reversed(self._items_of[address])))

    def num_of_most(self) -> int:
        """Return the number of items of the address that has the most."""
        return max(map(len, self._items_of.values()), default=0)

    def take_of_most(self, *, newest: bool) -> T:
        """Remove and return the newest or oldest item of the address that has the most. Requires: there is one."""
        address, items = max(self._items_of.items(), key=lambda one: len(one[1]))
        item = next(reversed(items) if newest else iter(items))
        self.discard(address, item)
        return item

    def _take_turn(self, address: str, item: T) -> T:
        items = self._items_of.pop(address)
        del items[item]
        self._num_items -= 1
        if items:
            self._items_of[address] = items
        return item
