"""A toy engine's device: one pool of blocks for all groups, a cache of what is free again, values for bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence


class Junk:
    """Numbers that no block should hold, never the same twice."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last -= 1
        return self._last


class ToyDevice:
    """A `DeviceView`. Every rank has the same blocks, with bytes of its own: `values[rank][block]`.

    `refs` counts everyone who keeps a block, `held` only what the offload scheduler keeps. Free blocks are given out
    in the order in which they became free, and are found by their hash until then. Those that cannot be found are given
    out first, the last one freed before all others, as in vLLM.
    """

    def __init__(self, num_blocks: int, num_ranks: int, null_block: int) -> None:
        self.null_block = null_block
        self.junk = Junk()
        self.refs = [0] * num_blocks
        self.held = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(b for b in range(num_blocks) if b != null_block)
        self.cached: dict[tuple[int, bytes], int] = {}
        self.names: dict[int, tuple[int, bytes]] = {}
        self.values = [[self.junk.next() for _ in range(num_blocks)] for _ in range(num_ranks)]
        self.num_usable = len(self.free)
        self.allocated: dict[int, tuple[int, bytes] | None] = {}
        self.outdated: set[int] = set()
        self.behind: dict[int, list[int]] = {}
        self.hides: Callable[[int, bytes], bool] = lambda group, block_hash: False

    # --- what the offload scheduler asks ----------------------------------------------------------------------------

    def hold(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            assert block_id != self.null_block, "a placeholder is held"
            self.held[block_id] += 1
            self.refs[block_id] += 1
            if block_id in self.free:
                queue = list(self.free)
                self.behind[block_id] = queue[queue.index(block_id) + 1 :]
                del self.free[block_id]

    def release(self, block_ids: Sequence[int], *, reuse_first: bool = False) -> None:
        for block_id in block_ids:
            self.held[block_id] -= 1
            assert self.held[block_id] >= 0, "released more often than held"
        self.drop(block_ids)
        for block_id in reversed(block_ids) if reuse_first else ():
            if block_id in self.free and block_id in self.behind:
                self._return_to_place(block_id)

    def free_blocks(self) -> Iterator[int]:
        return iter(list(self.free))

    def contents(self, block_ids: Sequence[int]) -> list[bytes | None]:
        names = (self.allocated.get(block_id, self.names.get(block_id)) for block_id in block_ids)
        return [name[1] + bytes([name[0]]) if name is not None else None for name in names]

    def resident(self, keys: Sequence[bytes]) -> list[bool]:
        return [(key[-1], key[:-1]) in self.cached for key in keys]

    def take_allocated(self, among: Container[int]) -> dict[int, bytes | None]:
        taken, self.allocated = self.allocated, {}
        return {b: None if name is None else name[1] + bytes([name[0]]) for b, name in taken.items() if b in among}

    # --- what its engine does ---------------------------------------------------------------------------------------

    def keep(self, block_ids: Iterable[int]) -> None:
        for block_id in self._real(block_ids):
            self.refs[block_id] += 1
            self.free.pop(block_id, None)
            self.behind.pop(block_id, None)

    def drop(self, block_ids: Iterable[int]) -> None:
        for block_id in self._real(block_ids):
            self.refs[block_id] -= 1
            assert self.refs[block_id] >= 0, "a block was given back too often"
            if self.refs[block_id] == 0:
                self.free[block_id] = None
                if block_id not in self.names:
                    self.free.move_to_end(block_id, last=False)

    def take(self, count: int) -> list[int]:
        """The blocks that were free for longest, kept once. What they held cannot be found any more, and is there until
        `overwrite`."""
        taken = []
        for _ in range(count):
            block_id, _ = self.free.popitem(last=False)
            self.allocated.setdefault(block_id, self.names.get(block_id))
            self.forget(block_id)
            self.outdated.add(block_id)
            self.keep([block_id])
            taken.append(block_id)
        return taken

    def overwrite(self) -> None:
        """The step begins to write to what was given out for it."""
        self.spoil(sorted(self.outdated))
        self.outdated.clear()

    def cache(self, group: int, block_hash: bytes, block_id: int) -> None:
        """Let a block be found; the first of a hash wins, and a block has one name."""
        name = (group, block_hash)
        if self.hides(group, block_hash):
            return
        if block_id != self.null_block and block_id not in self.names and name not in self.cached:
            self.cached[name] = block_id
            self.names[block_id] = name

    def forget(self, block_id: int) -> None:
        """Let a block be found no more."""
        name = self.names.pop(block_id, None)
        if name is not None:
            del self.cached[name]

    def forget_all(self) -> None:
        """Let nothing be found."""
        self.cached.clear()
        self.names.clear()

    def spoil(self, block_ids: Iterable[int]) -> None:
        """Have blocks hold nothing that makes sense, on every rank."""
        for block_id in self._real(block_ids):
            for values in self.values:
                values[block_id] = self.junk.next()

    def _return_to_place(self, block_id: int) -> None:
        """Put a free block before the first of those that were behind it when it was held."""
        del self.free[block_id]
        queue = list(self.free)
        behind = self.behind.pop(block_id)
        place = next((queue.index(other) for other in behind if other in self.free), 0 if behind else len(queue))
        self.free = OrderedDict.fromkeys([*queue[:place], block_id, *queue[place:]])

    def _real(self, block_ids: Iterable[int]) -> Iterator[int]:
        null_block = self.null_block
        return (block_id for block_id in block_ids if block_id != null_block)
