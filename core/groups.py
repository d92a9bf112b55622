"""Groups: layers of a model that share a block table, and the blocks of a prefix that each of them needs.

To continue after the first `n` tokens, a full-attention group needs the blocks of all of them, a sliding-window group
those of the window before `n`, and a recurrent group (such as Mamba) the state at `n`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class GroupKind(StrEnum):
    """Kind of a group's layers."""

    FULL = "full"
    SLIDING = "sliding"
    RECURRENT = "recurrent"


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group: `block_size` tokens and `block_bytes` bytes a block; `window_tokens` for sliding windows only.

    A token of a sliding window sees itself and the `window_tokens - 1` before it.
    """

    block_size: int
    block_bytes: int
    kind: GroupKind = GroupKind.FULL
    window_tokens: int | None = None

    @property
    def reach_tokens(self) -> int | None:
        """Number of latest tokens whose blocks are needed to continue after them; None for all."""
        if self.window_tokens is not None:
            return self.window_tokens - 1
        return 1 if self.kind is GroupKind.RECURRENT else None

    def needed_from(self, num_tokens: int) -> int:
        """Return the first token whose block is needed to continue after `num_tokens` tokens."""
        reach = self.reach_tokens
        return 0 if reach is None else max(num_tokens - reach, 0)


@dataclass(frozen=True, slots=True)
class Group:
    """A group and its slots. A slot is `slot_blocks` consecutive blocks, of `slot_tokens` tokens."""

    index: int
    spec: GroupSpec
    slot_blocks: int
    slot_tokens: int
    slot_bytes: int
    hashes_per_slot: int
    reach_tokens: int | None
    """`GroupSpec.reach_tokens`."""


class GroupLayout:
    """All groups of a model. Raises `ValueError` for inconsistent sizes."""

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        blocks_per_slot: int = 1,
        hash_block_size: int | None = None,
        null_block: int = -1,
        *,
        skips_last_block: bool = False,
        window_interval_tokens: int | None = 0,
        unsettled_tokens: int = 0,
    ) -> None:
        """Lay out the groups.

        Args:
            specs: The groups.
            blocks_per_slot: Blocks in a slot. A slot of a recurrent group holds one block, as its states are
                independent.
            hash_block_size: Tokens per block hash of the engine; by default the greatest common divisor of the block
                sizes.
            null_block: Block id that stands in a block table where there is no block.
            skips_last_block: Whether the KV of a block's last token depends on the token behind it, as that of EAGLE's
                draft layers does. A hit then ends before the last block of the prefix that is known.
            window_interval_tokens: Windows are also stored before multiples of this number of tokens, a multiple of
                the block sizes; None for wherever a hit may end, 0 for none.
            unsettled_tokens: Latest computed tokens of a request whose KV may be computed again, as that of several MTP
                modules, which read drafts. Slots that contain any of them are not stored yet.
        """
        if not specs:
            raise ValueError("a model has at least one group of layers, and none was given")
        if blocks_per_slot < 1:
            raise ValueError(f"blocks_per_slot={blocks_per_slot}: a slot holds at least one block")
        for index, spec in enumerate(specs):
            _check(index, spec)
        common = math.gcd(*(spec.block_size for spec in specs))
        self.hash_block_size = common if hash_block_size is None else hash_block_size
        if self.hash_block_size < 1 or common % self.hash_block_size:
            raise ValueError(f"hash_block_size={self.hash_block_size} does not divide block sizes of {common} tokens")
        self.blocks_per_slot = blocks_per_slot
        self.null_block = null_block
        self.groups = tuple(self._lay_out(index, spec) for index, spec in enumerate(specs))
        self.alignment_tokens = math.lcm(*(spec.block_size for spec in specs))
        """Hits end at multiples of this: whole blocks of every group."""
        self.skipped_tokens = self.alignment_tokens if skips_last_block else 0
        """Tokens at the end of a known prefix that are computed again."""
        self.window_interval_tokens = (
            self.alignment_tokens if window_interval_tokens is None else window_interval_tokens
        )
        self.unsettled_tokens = unsettled_tokens
        self.slot_bytes = max(group.slot_bytes for group in self.groups)
        """Size of the pool's slots, which is the same for all groups."""
        self.slot_alignment_tokens = math.lcm(*(group.slot_tokens for group in self.groups))
        """Prefixes of a multiple of this length are whole slots of every group."""
        self.full_groups = tuple(group for group in self.groups if group.spec.kind is GroupKind.FULL)
        """Groups that need every block of a prefix."""
        self.prefix_group = (self.full_groups or self.groups)[0]
        """Group whose keys show the part of a prompt that was computed before."""

    def __len__(self) -> int:
        return len(self.groups)

    def waste(self) -> float:
        """Return the share of slot bytes that is unused if every group stores as many slots."""
        return 1 - sum(group.slot_bytes for group in self.groups) / (self.slot_bytes * len(self.groups))

    def _lay_out(self, index: int, spec: GroupSpec) -> Group:
        slot_blocks = 1 if spec.kind is GroupKind.RECURRENT else self.blocks_per_slot
        slot_tokens = slot_blocks * spec.block_size
        hashes = slot_tokens // self.hash_block_size
        return Group(index, spec, slot_blocks, slot_tokens, slot_blocks * spec.block_bytes, hashes, spec.reach_tokens)


def _check(index: int, spec: GroupSpec) -> None:
    if spec.block_size < 1 or spec.block_bytes < 1:
        raise ValueError(
            f"group {index}: a block has at least one token and one byte, not {spec.block_size} and {spec.block_bytes}"
        )
    windowed = spec.kind is GroupKind.SLIDING
    if windowed != (spec.window_tokens is not None) or (spec.window_tokens or 1) < 1:
        raise ValueError(
            f"group {index}: window_tokens={spec.window_tokens}; a sliding group has a window of at least one token, "
            "and no other group has one"
        )
