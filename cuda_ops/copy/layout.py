"""Device memory layout of the groups: which bytes make up block b of each group.

A block has one piece in each of the group's regions; its slot holds those pieces one after another, in the order of the
regions. Engines that keep keys and values, or layers, apart have one region each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of each block: block b has `block_bytes` contiguous bytes at `address + b * stride_bytes`.

    `owner` keeps the memory allocated.
    """

    address: int
    num_blocks: int
    block_bytes: int
    stride_bytes: int
    owner: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise `ValueError` for impossible sizes."""
        if self.num_blocks < 1 or self.block_bytes < 1:
            raise ValueError(f"num_blocks={self.num_blocks}, block_bytes={self.block_bytes}: both must be at least 1")
        if self.stride_bytes < self.block_bytes:
            raise ValueError(f"stride_bytes={self.stride_bytes}: blocks of {self.block_bytes} bytes would overlap")

    @classmethod
    def of_array(cls, blocks: NDArray[np.generic]) -> Region:
        """Return the region of an array `[num_blocks, ...]` whose blocks are each contiguous. Not a copy."""
        first = blocks[:1]
        _check_contiguous(first.flags.c_contiguous, blocks.shape)
        stride_bytes = blocks.strides[0] if len(blocks) > 1 else first.nbytes
        return cls(blocks.ctypes.data, len(blocks), first.nbytes, stride_bytes, blocks)

    @classmethod
    def of_tensor(cls, blocks: Tensor) -> Region:
        """Return the region of a tensor `[num_blocks, ...]`, on any device, whose blocks are each contiguous."""
        first = blocks[:1]
        _check_contiguous(first.is_contiguous(), blocks.shape)
        stride_bytes = blocks.stride(0) * blocks.element_size() if len(blocks) > 1 else first.nbytes
        return cls(blocks.data_ptr(), len(blocks), first.nbytes, stride_bytes, blocks)


@dataclass(frozen=True, slots=True)
class GroupRegions:
    """The regions of one group and its number of blocks per slot.

    Part p of a slot starts p times the block bytes into it. Regions of different groups may be the same memory.
    """

    regions: tuple[Region, ...]
    slot_blocks: int = 1

    def __post_init__(self) -> None:
        """Raise `ValueError` if the regions differ in their number of blocks, or a slot has none."""
        counts = {region.num_blocks for region in self.regions}
        if len(counts) != 1:
            raise ValueError(f"regions of a group must have equal numbers of blocks: {sorted(counts)}")
        if self.slot_blocks < 1:
            raise ValueError(f"slot_blocks={self.slot_blocks}: must be at least 1")

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks that the group's ids may name."""
        return self.regions[0].num_blocks

    @property
    def block_bytes(self) -> int:
        """Return the bytes of one block, all regions together."""
        return sum(region.block_bytes for region in self.regions)

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of a slot that the group's blocks take."""
        return self.slot_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """The device memory of all groups of one worker."""

    groups: tuple[GroupRegions, ...]

    def __post_init__(self) -> None:
        """Raise `ValueError` without groups."""
        if not self.groups:
            raise ValueError("a device layout needs at least one group")

    @classmethod
    def of_arrays(cls, groups: Sequence[NDArray[np.generic]], slot_blocks: int = 1) -> DeviceLayout:
        """Return a layout of one array `[num_blocks, ...]` per group, whose blocks are each contiguous."""
        return cls(tuple(GroupRegions((Region.of_array(blocks),), slot_blocks) for blocks in groups))

    @classmethod
    def of_tensors(cls, groups: Sequence[Sequence[Tensor]], slot_blocks: int = 1) -> DeviceLayout:
        """Return a layout of several tensors `[num_blocks, ...]` per group, in the order of their pieces in a slot."""
        return cls(tuple(GroupRegions(tuple(map(Region.of_tensor, tensors)), slot_blocks) for tensors in groups))

    @property
    def slot_bytes(self) -> int:
        """Return the bytes that a slot must have."""
        return max(group.slot_bytes for group in self.groups)

    def check_fits(self, slot_bytes: int) -> None:
        """Raise `ValueError`, with the sizes, if a slot of `slot_bytes` is too small for a group."""
        for index, group in enumerate(self.groups):
            if group.slot_bytes > slot_bytes:
                raise ValueError(
                    f"{group.slot_blocks} blocks of group {index} have {group.slot_bytes:,} bytes: more "
                    f"than a slot of {slot_bytes:,}"
                )


def _check_contiguous(contiguous: bool, shape: Sequence[int]) -> None:
    if not contiguous:
        raise ValueError(
            f"blocks of an array of shape {tuple(shape)} are not contiguous: pass each contiguous part as a region"
        )
