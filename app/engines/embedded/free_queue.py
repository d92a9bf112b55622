"""The free queue: device blocks in the order in which they will be given out, as a list linked both ways.

Any block can leave it, and it can be read from any block on, in O(1) a block, which an ordered dictionary cannot do.
"""

from __future__ import annotations

from collections.abc import Iterator

_OUTSIDE = -1


class FreeQueue:
    """Some of the blocks 0 to `num_blocks - 1`, each at most once; at first all of them, by number."""

    def __init__(self, num_blocks: int) -> None:
        # The end of the list is an entry of its own, so that nothing has to ask whether a neighbor exists.
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
        """The blocks behind one of the queue, first the one that goes next. The queue may not change meanwhile."""
        block = self._next[block]
        while block != self._end:
            yield block
            block = self._next[block]

    def append(self, block: int) -> None:
        """Put a block that is not in the queue at its end: it goes last."""
        self._insert(block, self._end)

    def prepend(self, block: int) -> None:
        """Put a block that is not in the queue at its head: it goes next."""
        self._insert(block, self._next[self._end])

    def discard(self, block: int) -> None:
        """Take a block out, wherever it is; nothing happens if it is not in the queue."""
        if block not in self:
            return
        before, behind = self._previous[block], self._next[block]
        self._next[before], self._previous[behind] = behind, before
        self._next[block] = self._previous[block] = _OUTSIDE
        self._length -= 1

    def take_first(self) -> int:
        """Take out the block that goes next. The queue may not be empty."""
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
