"""Prefixes in the pool: which block precedes each one, and choices of blocks that keep prefixes whole.

A block is of use only with all blocks before it. The block before it, its parent, is known by the hash of its key: 0
for the first block of a prompt, and for blocks that an earlier process left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key, Prefix, group_of
from kvferry.core.pool.native import KeyHashes, hash_keys

NO_PARENT = 0


def key_before(keys: Sequence[Key], positions: NDArray[np.int64], prefix: Prefix) -> Key | None:
    """Return the block of a request before some of one group, None where that is not known."""
    if not len(keys) or (position := int(positions[0])) <= 0:
        return None
    known = prefix.groups.get(group_of(keys[0]), ((), 0))[0]
    return known[position - 1] if position <= len(known) else None


def find_parents(
    keys: Sequence[Key], hashes: KeyHashes, positions: NDArray[np.int64], prefix: Prefix
) -> NDArray[np.uint64]:
    """Return the hash of the block before each of a request's blocks, `NO_PARENT` where that is not known.

    Args:
        keys: Blocks of one group, in order.
        hashes: Their hashes.
        positions: Their positions in the request.
        prefix: The request's blocks.
    """
    count = len(keys)
    parents: NDArray[np.uint64] = np.empty(count, dtype=np.uint64)
    if count > 1:
        parents[1:] = hashes[:-1]
    for i in (0, *((np.diff(positions) != 1).nonzero()[0] + 1).tolist()):
        before = key_before(keys[i:], positions[i:], prefix)
        parents[i] = NO_PARENT if before is None else hash_keys([before])[0]
    return parents


class BlockColumns(NamedTuple):
    """Blocks as columns of one length. `tokens` is where each begins in its prompt, `used_s` when it was used last."""

    hashes: KeyHashes
    parents: KeyHashes
    tokens: NDArray[np.int64]
    sizes: NDArray[np.int64]
    classes: NDArray[np.uint8]
    used_s: NDArray[np.float64]


def choose_whole(blocks: BlockColumns, is_wanted: NDArray[np.bool_], max_bytes: int | None = None) -> NDArray[np.int64]:
    """Return the wanted blocks and all known ones before them, in an order in which no block precedes its parent.

    Blocks of a higher priority class come first, then those that were used later. A block counts as used whenever one
    behind it was. `blocks` and `is_wanted` are changed.

    Args:
        blocks: All blocks that may be chosen.
        is_wanted: Which of them are wanted.
        max_bytes: The most bytes to choose; the choice ends before the first block that exceeds it.
    """
    _raise_parents(blocks, is_wanted)
    chosen = is_wanted.nonzero()[0]
    # Negative, as the last key is the most significant, and all sort ascending.
    ranks = (blocks.tokens[chosen], -blocks.used_s[chosen], -blocks.classes[chosen].astype(np.int64))
    chosen = chosen[np.lexsort(ranks)]
    if max_bytes is not None:
        chosen = chosen[np.cumsum(blocks.sizes[chosen]) <= max_bytes]
    return chosen


def _raise_parents(blocks: BlockColumns, is_wanted: NDArray[np.bool_]) -> None:
    """Give each parent at least the class and the time of use of its children, from the end of prompts on."""
    order = np.argsort(blocks.hashes)
    at = np.searchsorted(blocks.hashes, blocks.parents, sorter=order)
    at[at == len(order)] = 0
    parents = order[at] if len(order) else at
    has_parent = (blocks.parents != NO_PARENT) & (blocks.hashes[parents] == blocks.parents)
    children = has_parent.nonzero()[0]
    children = children[np.argsort(-blocks.tokens[children], kind="stable")]
    ends = (np.diff(blocks.tokens[children]) != 0).nonzero()[0] + 1
    for level in np.split(children, ends):
        above = parents[level]
        np.maximum.at(blocks.classes, above, blocks.classes[level])
        np.maximum.at(blocks.used_s, above, blocks.used_s[level])
        np.logical_or.at(is_wanted, above, is_wanted[level])
