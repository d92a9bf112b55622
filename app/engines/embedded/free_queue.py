"""Free queue: device blocks in the order in which they will be allocated, as a doubly linked list.

Any block can be removed, and the list read from any block on, in O(1) per block, which an `OrderedDict` does not
support.
"""

from __future__ import annotations

from collections.abc import Iterator

_OUTSIDE = -1


class FreeQueue:
    """A subset of the blocks 0 to `num_blocks - 1` in order; initially all of them, by number."""

    def __init__(self, num_blocks: int) -> None:
        # A sentinel entry ends the list, so that every block has neighbors.
        self._end = num_blocks
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._previous: list[int] = [num_blocks, *range(num_blocks)]
        self._length = num_blocks

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block: int) -> bool:
        return self._next[block] != _OUTSIDE

    def __iter__(self) -> Iterator[int]:
        return self.behind(self._end)

    def behind(self, block: int) -> Iterator[int]:
        """Yield the blocks after this one. The queue must not change meanwhile."""
        block = self._next[block]
        while block != self._end:
            yield block
            block = self._next[block]

    def append(self, block: int) -> None:
        """Append a block that is not in the queue: it is allocated last."""
        self._insert(block, self._end)

    def prepend(self, block: int) -> None:
        """Prepend a block that is not in the queue: it is allocated next."""
        self._insert(block, self._next[self._end])

    def discard(self, block: int) -> None:
        """Remove a block, if it is in the queue."""
        if block not in self:
            return
        before, behind = self._previous[block], self._next[block]
        self._next[before], self._previous[behind] = behind, before
        self._next[block] = self._previous[block] = _OUTSIDE
        self._length -= 1

    def take_first(self) -> int:
        """Remove and return the first block. Requires: queue not empty."""
        block = self._next[self._end]
        if block == self._end:
            raise IndexError("no device block is free")
        self.discard(block)
        return block

    def _insert(self, block: int, behind: int) -> None:
        before = self._previous[behind]
        self._next[block], self._previous[block] = behind, before
        self._next[before] = self._previous[behind] = block
        self._length += 1
