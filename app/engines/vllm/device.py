"""vLLM's block pool as core's view of the device: to hold a block is to take a reference, as requests do."""

from __future__ import annotations

import logging
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from kvferry.app.engines.vllm.adapters import Adapters
from kvferry.core.engine_api import OVERWRITTEN
from kvferry.core.keys import GROUP_BYTES, Key, group_of, hash_of

_log = logging.getLogger(__name__)

_GROUP_BYTES = 4
"""vLLM's own keys end with the group in so many bytes, the highest first."""


class VllmDevice:
    """Implements `kvferry.core.engine_api.DeviceView`. On the engine's thread only."""

    def __init__(self, adapters: Adapters, hash_bytes: int) -> None:
        """vLLM's own hashes have `hash_bytes` bytes; `adapters` knows which of them have others with us."""
        self._adapters = adapters
        self._hash_bytes = hash_bytes
        self._pool: Any = None
        self._holds: dict[int, int] = {}
        self._given_out: dict[int, bytes | None] = {}
        self._complained = False

    def bind(self, pool: Any) -> None:
        """Work on this pool from now on. vLLM makes it after the connector."""
        self._pool = pool
        give_out = pool.get_new_blocks

        def get_new_blocks(num_blocks: int) -> Any:
            """Record what the blocks at the head of the free queue hold, and give them out."""
            head = islice(pool.free_block_queue.iter_blocks_after(None), num_blocks)
            held = [(block.block_id, block.block_hash) for block in head]
            blocks = give_out(num_blocks)
            for block_id, block_hash in held:
                self._given_out.setdefault(block_id, block_hash)
            return blocks

        # vLLM forgets the hash of a block as it gives it out and has no public hook for that.
        pool.get_new_blocks = get_new_blocks

    @property
    def num_held(self) -> int:
        """Blocks that some transfer reads or writes."""
        return len(self._holds)

    def hold(self, block_ids: Sequence[int]) -> None:
        """See `DeviceView`."""
        blocks = self._pool.blocks
        self._pool.touch([blocks[block] for block in block_ids])
        for block in block_ids:
            self._holds[block] = self._holds.get(block, 0) + 1

    def release(self, block_ids: Sequence[int], *, reuse_first: bool = False) -> None:
        """See `DeviceView`. The tail is reused first, as vLLM does with a request's blocks."""
        held = [block for block in reversed(block_ids) if self._drop_hold(block)]
        blocks = self._pool.blocks
        if not reuse_first:
            self._pool.free_blocks([blocks[block] for block in held])
            return
        freed = []
        for block in held:
            blocks[block].ref_cnt -= 1
            if blocks[block].ref_cnt == 0:
                freed.append(blocks[block])
        self._pool.free_block_queue.prepend_n(freed[::-1])

    def free_blocks(self, after: int | None) -> Iterator[int] | None:
        """See `DeviceView`."""
        queue = self._pool.free_block_queue
        if after is None:
            return (block.block_id for block in queue.iter_blocks_after(None))
        cursor = self._pool.blocks[after]
        # A block that is in use is in no list.
        if cursor.ref_cnt or cursor.next_free_block is None:
            return None
        return (block.block_id for block in queue.iter_blocks_after(cursor))

    def contents(self, block_ids: Sequence[int]) -> Sequence[Key | None]:
        """See `DeviceView`."""
        blocks = self._pool.blocks
        return [self._key_of(blocks[block].block_hash) for block in block_ids]

    def resident(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See `DeviceView`."""
        find = self._pool.cached_block_hash_to_block.get_one_block
        size = self._hash_bytes
        return [find(hash_of(key)[:size] + group_of(key).to_bytes(_GROUP_BYTES, "big")) is not None for key in keys]

    def take_given_out(self, among: Container[int]) -> Mapping[int, Key | None]:
        """See `DeviceView`."""
        given_out, self._given_out = self._given_out, {}
        return {
            block: OVERWRITTEN if block_hash == OVERWRITTEN else self._key_of(block_hash)
            for block, block_hash in given_out.items()
            if block in among
        }

    def note_overwritten(self, block_ids: Iterable[int] | None) -> None:
        """The model runner writes to these of the blocks given out, or to any (None), before it lets others read."""
        for block in list(self._given_out) if block_ids is None else block_ids:
            if block in self._given_out:
                self._given_out[block] = OVERWRITTEN

    def _key_of(self, block_hash: bytes | None) -> Key | None:
        if block_hash is None:
            return None
        group = int.from_bytes(block_hash[-_GROUP_BYTES:], "big")
        return self._adapters.ours(block_hash[:-_GROUP_BYTES]) + group.to_bytes(GROUP_BYTES, "little")

    def _drop_hold(self, block: int) -> bool:
        count = self._holds.get(block, 0)
        if not count:
            if not self._complained:
                self._complained = True
                _log.error("device block %d was released without being held; ignored, further ones silently", block)
            return False
        if count == 1:
            del self._holds[block]
        else:
            self._holds[block] = count - 1
        return True
