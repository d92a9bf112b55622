"""Device blocks: hashes of their contents, reference counts, prefix cache and free queue.

A block is free when no request references it and no transfer holds it. Free blocks keep their contents, and can be
found by hash, until they are allocated again, least recently used first. Every operation is O(1) per block.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence

import numpy as np

from kvferry.core.engine_api import UnknownAdapter
from kvferry.core.keys import Key, hash_of, make_keys

HASH_BYTES = 32
HASH_SEED = b"kvferry/blocks/1"


def chain_root(cache_salt: str | None, lora: str | None) -> bytes:
    """Return the parent hash of a request's first block. Parts are length-prefixed, so that no two pairs have equal
    roots.
    """
    root = hashlib.blake2b(HASH_SEED, digest_size=HASH_BYTES)
    for part in (cache_salt, lora):
        data = b"" if part is None else part.encode("utf-8", "surrogatepass")
        root.update((-1 if part is None else len(data)).to_bytes(8, "little", signed=True))
        root.update(data)
    return root.digest()


def extend_chain(hashes: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` lacks."""
    first, end = len(hashes) * block_size, len(token_ids) // block_size * block_size
    if first >= end:
        return
    data = np.asarray(token_ids[first:end], dtype="<u4").tobytes()
    parent = hashes[-1] if hashes else root
    step = block_size * 4
    for offset in range(0, len(data), step):
        parent = hashlib.blake2b(parent + data[offset : offset + step], digest_size=HASH_BYTES).digest()
        hashes.append(parent)


def hash_prompt(block_size: int, token_ids: Sequence[int], cache_salt: str | None, lora: str | None) -> list[bytes]:
    """Return the hashes of a prompt's full blocks, as a request has them. Raises `UnknownAdapter`."""
    if lora is not None:
        raise UnknownAdapter("the embedded engine has no adapters: leave it out")
    hashes: list[bytes] = []
    extend_chain(hashes, chain_root(cache_salt, None), token_ids, block_size)
    return hashes


class BlockPool:
    """Reference counts, prefix cache and free queue of blocks 0 to `num_blocks - 1`.

    Implements `kvferry.core.engine_api.DeviceView`. Thread: engine.
    """

    def __init__(self, num_blocks: int) -> None:
        """Create free blocks."""
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._holds = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._free = OrderedDict.fromkeys(range(num_blocks))
        """Free blocks in the order of their allocation."""
        self._reused_first: set[int] = set()
        """Held blocks that were free when they were held, and that no request has used since."""
        self._allocated: dict[int, bytes | None] = {}
        """Blocks allocated since the last `take_allocated`, with the hash that each had before."""

    @property
    def num_free(self) -> int:
        """Return the number of blocks that `allocate` can give out now."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Return the number of blocks that running transfers read or write."""
        return sum(map(bool, self._holds))

    def find_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the device's blocks of the longest prefix of `hashes`, without referencing them."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate(self, shared: Sequence[int], num_new: int) -> list[int] | None:
        """Reference the `shared` blocks that `find_prefix` found, and `num_new` free ones; None if too few are free."""
        num_shared_free = sum(block in self._free for block in shared)
        if len(self._free) - num_shared_free < num_new:
            return None
        for block in shared:
            self._references[block] += 1
            self._free.pop(block, None)
        self._reused_first.difference_update(shared)
        return [*shared, *(self._take_oldest() for _ in range(num_new))]

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each block of a table. The last blocks are reused first, so that prefixes shrink from
        the end.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            self._queue_if_free(block)

    def register(self, block: int, block_hash: bytes) -> None:
        """Make a full, computed block findable. The first block of a hash keeps it; later copies are not findable."""
        if self._hash_of[block] is None and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def hold(self, block_ids: Sequence[int]) -> None:
        """See `kvferry.core.engine_api.DeviceView`."""
        for block in block_ids:
            self._holds[block] += 1
            if block in self._free:
                del self._free[block]
                self._reused_first.add(block)

    def release(self, block_ids: Sequence[int], *, reuse_first: bool = False) -> None:
        """See `kvferry.core.engine_api.DeviceView`. The last blocks are reused first."""
        for block in reversed(block_ids):
            # Released once already, if a release that failed midway is repeated.
            if self._holds[block]:
                self._holds[block] -= 1
                self._queue_if_free(block, reuse_first=reuse_first)

    def free_blocks(self) -> Iterator[int]:
        """See `kvferry.core.engine_api.DeviceView`."""
        return iter(self._free)

    def contents(self, block_ids: Sequence[int]) -> Sequence[Key | None]:
        """See `kvferry.core.engine_api.DeviceView`. There is one group."""
        return [_key_of(self._allocated.get(block, self._hash_of[block])) for block in block_ids]

    def resident(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See `kvferry.core.engine_api.DeviceView`."""
        return [hash_of(key) in self._block_of for key in keys]

    def take_allocated(self, among: Container[int]) -> Mapping[int, Key | None]:
        """See `kvferry.core.engine_api.DeviceView`. There is one group."""
        allocated, self._allocated = self._allocated, {}
        return {block: _key_of(block_hash) for block, block_hash in allocated.items() if block in among}

    def _take_oldest(self) -> int:
        block, _ = self._free.popitem(last=False)
        block_hash = self._hash_of[block]
        self._allocated.setdefault(block, block_hash)
        if block_hash is not None:
            del self._block_of[block_hash]
            self._hash_of[block] = None
        self._references[block] = 1
        return block

    def _queue_if_free(self, block: int, *, reuse_first: bool = False) -> None:
        if self._references[block] or self._holds[block] or block in self._free:
            return
        self._free[block] = None
        if self._hash_of[block] is None or (reuse_first and block in self._reused_first):
            self._free.move_to_end(block, last=False)
        self._reused_first.discard(block)


def _key_of(block_hash: bytes | None) -> Key | None:
    return None if block_hash is None else make_keys((block_hash,), 0)[0]
