"""vLLM's block pool as core's `DeviceView`: a held block is one with an additional reference, as requests have."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from kvferry.app.engines.vllm.requests import Adapters
from kvferry.core.engine_api import OVERWRITTEN
from kvferry.core.keys import GROUP_BYTES, Key, group_of, hash_of

_log = logging.getLogger(__name__)

_VLLM_GROUP_BYTES = 4
"""Length of the big-endian group index at the end of vLLM's own keys."""
_END = -1
"""Number of the block that vLLM has at the end of the free queue."""
_MAX_HOPS = 64
"""Blocks in a row that other transfers hold, beyond which a block's place in the free queue is not looked for."""


class VllmDevice:
    """Implements `kvferry.core.engine_api.DeviceView`. Thread: engine."""

    def __init__(self, adapters: Adapters, hash_bytes: int, *, writes_early: bool = False) -> None:
        """Create a view that is not bound to a pool yet.

        Args:
            adapters: Maps vLLM's hashes of blocks computed with a LoRA adapter to extended hashes.
            hash_bytes: Length of vLLM's own hashes.
            writes_early: The model runner zeroes or copies blocks before it calls `handle_preemptions`.
        """
        self.adapters = adapters
        self.writes_early = writes_early
        self._hash_bytes = hash_bytes
        self._pool: Any = None
        self._touch: Callable[[Sequence[Any]], None] = lambda blocks: None
        self._holds: dict[int, int] = {}
        self._successors: dict[int, tuple[Any, int]] = {}
        """The block behind each held block in the free queue when it was held, and how often that had moved by then.

        Blocks that were in use then, or that requests have used since, have no place in the queue to return to.
        """
        self._moves: Counter[int] = Counter()
        """How often each block has left the free queue for a request; for its end, how often blocks were appended."""
        self._allocated: dict[int, bytes | None] = {}
        self._has_logged_release = False

    def bind(self, pool: Any) -> None:
        """Set vLLM's block pool, which vLLM creates after the connector."""
        self._pool = pool
        allocate, touch, free = pool.get_new_blocks, pool.touch, pool.free_blocks

        def get_new_blocks(num_blocks: int) -> Any:
            """Record the hashes of the blocks at the head of the free queue, then allocate them."""
            head = islice(pool.free_block_queue.iter_blocks_after(None), num_blocks)
            hashes = [(block.block_id, block.block_hash) for block in head]
            blocks = allocate(num_blocks)
            self._moves.update(block_id for block_id, _ in hashes)
            for block_id, block_hash in hashes:
                self._allocated.setdefault(block_id, block_hash)
            return blocks

        def touch_blocks(blocks: Sequence[Any]) -> None:
            """Record that requests use blocks, which leave the free queue or lose the place that they had in it."""
            for block in blocks:
                self._moves[block.block_id] += 1
                self._successors.pop(block.block_id, None)
            touch(blocks)

        def free_blocks(ordered_blocks: Iterable[Any]) -> None:
            """Record that blocks are appended to the free queue."""
            self._moves[_END] += 1
            free(ordered_blocks)

        # vLLM has no public hook for these: it clears a block's hash when it allocates the block.
        pool.get_new_blocks, pool.touch, pool.free_blocks = get_new_blocks, touch_blocks, free_blocks
        self._touch = touch

    @property
    def num_held(self) -> int:
        """Number of blocks that transfers read or write."""
        return len(self._holds)

    def hold(self, block_ids: Sequence[int]) -> None:
        """See `DeviceView`."""
        held = [self._pool.blocks[block] for block in block_ids]
        for block in held:
            successor = block.next_free_block
            self._touch((block,))
            self._holds[block.block_id] = self._holds.get(block.block_id, 0) + 1
            if successor is not None:
                self._successors[block.block_id] = successor, self._moves[successor.block_id]

    def release(self, block_ids: Sequence[int], *, reuse_first: bool = False) -> None:
        """See `DeviceView`. Of blocks without a place, the last is reused first, as when vLLM frees them."""
        blocks = self._pool.blocks
        released = [blocks[block] for block in reversed(block_ids) if self._drop_hold(block)]
        freed: list[Any] = []
        # In the reverse order of `hold`, so that each finds its place, unless what was behind it has moved.
        for block in released:
            if not reuse_first or block.block_id not in self._successors:
                freed.append(block)
                continue
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                self._requeue(block)
        if freed:
            self._moves.update(block.block_id for block in freed)
            self._pool.free_blocks(freed)
        for block in released:
            if block.block_id not in self._holds:
                self._successors.pop(block.block_id, None)

    def free_blocks(self) -> Iterator[int]:
        """See `DeviceView`."""
        return (block.block_id for block in self._pool.free_block_queue.iter_blocks_after(None))

    def contents(self, block_ids: Sequence[int]) -> Sequence[Key | None]:
        """See `DeviceView`."""
        blocks, allocated = self._pool.blocks, self._allocated
        return [
            self._content_of(allocated[block]) if block in allocated else self._key_of(blocks[block].block_hash)
            for block in block_ids
        ]

    def resident(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See `DeviceView`."""
        find = self._pool.cached_block_hash_to_block.get_one_block
        size = self._hash_bytes
        return [
            find(hash_of(key)[:size] + group_of(key).to_bytes(_VLLM_GROUP_BYTES, "big")) is not None for key in keys
        ]

    def take_allocated(self, among: Container[int]) -> Mapping[int, Key | None]:
        """See `DeviceView`."""
        allocated, self._allocated = self._allocated, {}
        return {block: self._content_of(hashed) for block, hashed in allocated.items() if block in among}

    def mark_overwritten(self, block_ids: Iterable[int] | None) -> None:
        """Mark allocated blocks that the model runner writes to before stores ahead of the step; None marks all."""
        for block in list(self._allocated) if block_ids is None else block_ids:
            if block in self._allocated:
                self._allocated[block] = OVERWRITTEN

    def _content_of(self, allocated_hash: bytes | None) -> Key | None:
        return OVERWRITTEN if allocated_hash == OVERWRITTEN else self._key_of(allocated_hash)

    def _key_of(self, block_hash: bytes | None) -> Key | None:
        if block_hash is None:
            return None
        group = int.from_bytes(block_hash[-_VLLM_GROUP_BYTES:], "big")
        return self.adapters.extended_hash(block_hash[:-_VLLM_GROUP_BYTES]) + group.to_bytes(GROUP_BYTES, "little")

    def _requeue(self, block: Any) -> None:
        """Put a free block before the one that was behind it in the free queue, or at the head if that has moved."""
        queue, successor = self._pool.free_block_queue, self._find_successor(block.block_id)
        if successor is None:
            queue.prepend_n([block])
            return
        block.prev_free_block, block.next_free_block = successor.prev_free_block, successor
        successor.prev_free_block.next_free_block = block
        successor.prev_free_block = block
        queue.num_free_blocks += 1

    def _find_successor(self, block: int) -> Any:
        """Return what is in the free queue, at the same place, of what was behind a block; None if that is unknown."""
        for _ in range(_MAX_HOPS):
            successor, num_moves = self._successors.get(block, (None, 0))
            if successor is None or self._moves[successor.block_id] != num_moves:
                return None
            block = successor.block_id
            if block not in self._holds:
                # Only blocks in the queue have neighbours; its end is one, too.
                return None if successor.prev_free_block is None else successor
        return None

    def _drop_hold(self, block: int) -> bool:
        """Undo one hold of a block; False if the block is not held."""
        count = self._holds.pop(block, 0)
        if count > 1:
            self._holds[block] = count - 1
        if not count and not self._has_logged_release:
            self._has_logged_release = True
            # Under the manager lock, which an error in kvferry may hold up once.
            _log.error("device block released without being held: %d; ignored, further ones are not logged", block)
        return count > 0
