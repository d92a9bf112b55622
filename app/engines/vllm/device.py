"""vLLM's block pool as core's `DeviceView`: a held block is one with an additional reference, as requests have."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from kvferry.app.engines.vllm.requests import Adapters
from kvferry.core.engine_api import OVERWRITTEN
from kvferry.core.keys import GROUP_BYTES, Key, group_of, hash_of

_log = logging.getLogger(__name__)

_VLLM_GROUP_BYTES = 4
"""Length of the big-endian group index at the end of vLLM's own keys."""


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
        self._holds: dict[int, int] = {}
        self._allocated: dict[int, bytes | None] = {}
        self._has_logged_release = False

    def bind(self, pool: Any) -> None:
        """Set vLLM's block pool, which vLLM creates after the connector."""
        self._pool = pool
        allocate = pool.get_new_blocks

        def get_new_blocks(num_blocks: int) -> Any:
            """Record the hashes of the blocks at the head of the free queue, then allocate them."""
            head = islice(pool.free_block_queue.iter_blocks_after(None), num_blocks)
            hashes = [(block.block_id, block.block_hash) for block in head]
            blocks = allocate(num_blocks)
            for block_id, block_hash in hashes:
                self._allocated.setdefault(block_id, block_hash)
            return blocks

        # vLLM clears a block's hash when it allocates the block and has no public hook for that.
        pool.get_new_blocks = get_new_blocks

    @property
    def num_held(self) -> int:
        """Number of blocks that transfers read or write."""
        return len(self._holds)

    def hold(self, block_ids: Sequence[int]) -> None:
        """See `DeviceView`."""
        blocks = self._pool.blocks
        self._pool.touch([blocks[block] for block in block_ids])
        for block in block_ids:
            self._holds[block] = self._holds.get(block, 0) + 1

    def release(self, block_ids: Sequence[int], *, reuse_first: bool = False) -> None:
        """See `DeviceView`. The last block is reused first, as when vLLM frees a request's blocks."""
        blocks = self._pool.blocks
        released = [blocks[block] for block in reversed(block_ids) if self._drop_hold(block)]
        if not reuse_first:
            self._pool.free_blocks(released)
            return
        freed = []
        for block in released:
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed.append(block)
        self._pool.free_block_queue.prepend_n(freed[::-1])

    def free_blocks(self, after: int | None) -> Iterator[int] | None:
        """See `DeviceView`."""
        cursor = None if after is None else self._pool.blocks[after]
        # A block in use is not in the free queue.
        if cursor is not None and (cursor.ref_cnt or cursor.next_free_block is None):
            return None
        return (block.block_id for block in self._pool.free_block_queue.iter_blocks_after(cursor))

    def contents(self, block_ids: Sequence[int]) -> Sequence[Key | None]:
        """See `DeviceView`."""
        blocks = self._pool.blocks
        return [self._key_of(blocks[block].block_hash) for block in block_ids]

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
        return {
            block: OVERWRITTEN if block_hash == OVERWRITTEN else self._key_of(block_hash)
            for block, block_hash in allocated.items()
            if block in among
        }

    def mark_overwritten(self, block_ids: Iterable[int] | None) -> None:
        """Mark allocated blocks that the model runner writes to before stores ahead of the step; None marks all."""
        for block in list(self._allocated) if block_ids is None else block_ids:
            if block in self._allocated:
                self._allocated[block] = OVERWRITTEN

    def _key_of(self, block_hash: bytes | None) -> Key | None:
        if block_hash is None:
            return None
        group = int.from_bytes(block_hash[-_VLLM_GROUP_BYTES:], "big")
        return self.adapters.extended_hash(block_hash[:-_VLLM_GROUP_BYTES]) + group.to_bytes(GROUP_BYTES, "little")

    def _drop_hold(self, block: int) -> bool:
        """Undo one hold of a block; False if the block is not held."""
        count = self._holds.pop(block, 0)
        if count > 1:
            self._holds[block] = count - 1
        if not count and not self._has_logged_release:
            self._has_logged_release = True
            _log.error("device block released without being held: %d; ignored, further ones are not logged", block)
        return count > 0
