"""What a copy engine has to know of device memory: which bytes make up block b of each group.

A block of a group is one piece of each of the group's regions, and lies in its slot as those pieces one after another,
in the order in which the regions are named. Engines that keep keys and values, or layers, apart have one region each.
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

    `owner` keeps the memory allocated for as long as somebody may copy.
    """

    address: int
    num_blocks: int
    block_bytes: int
    stride_bytes: int
    owner: object = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raises `ValueError` for what no memory can look like."""
        if self.num_blocks < 1 or self.block_bytes < 1:
            raise ValueError(f"a region of {self.num_blocks} blocks of {self.block_bytes} bytes holds nothing")
        if self.stride_bytes < self.block_bytes:
            raise ValueError(
                f"blocks of {self.block_bytes} bytes cannot lie {self.stride_bytes} bytes apart without overlapping"
            )

    @classmethod
    def of_array(cls, blocks: NDArray[np.generic]) -> Region:
        """The region of an array `[num_blocks, ...]` each of whose blocks is one run of bytes. Not a copy."""
        first = blocks[:1]
        _check_contiguous(first.flags.c_contiguous, blocks.shape)
        stride_bytes = blocks.strides[0] if len(blocks) > 1 else first.nbytes
        return cls(blocks.ctypes.data, len(blocks), first.nbytes, stride_bytes, blocks)

    @classmethod
    def of_tensor(cls, blocks: Tensor) -> Region:
        """The region of a tensor `[num_blocks, ...]`, on any device, each of whose blocks is one run of bytes."""
        first = blocks[:1]
        _check_contiguous(first.is_contiguous(), blocks.shape)
        stride_bytes = blocks.stride(0) * blocks.element_size() if len(blocks) > 1 else first.nbytes
        return cls(blocks.data_ptr(), len(blocks), first.nbytes, stride_bytes, blocks)


@dataclass(frozen=True, slots=True)
class GroupRegions:
    """The regions of one group, which share its block table, and how many of its blocks lie in a slot: number p starts
    p times the block bytes into it. Regions of different groups may be the same memory.
    """

    regions: tuple[Region, ...]
    slot_blocks: int = 1

    def __post_init__(self) -> None:
        """Raises `ValueError` where the regions do not have the same blocks, or a slot would have none."""
        counts = {region.num_blocks for region in self.regions}
        if len(counts) != 1:
            raise ValueError(f"the regions of a group must have one number of blocks, and have {sorted(counts)}")
        if self.slot_blocks < 1:
            raise ValueError(f"slot_blocks is {self.slot_blocks}: a slot holds at least one block")

    @property
    def num_blocks(self) -> int:
        """Blocks that the group's ids may name."""
        return self.regions[0].num_blocks

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, all regions together."""
        return sum(region.block_bytes for region in self.regions)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot that the group's blocks take."""
        return self.slot_blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class DeviceLayout:
    """All that one worker's copy engine moves."""

    groups: tuple[GroupRegions, ...]

    def __post_init__(self) -> None:
        """Raises `ValueError` where nothing could be copied."""
        if not self.groups:
            raise ValueError("a device layout needs at least one group")

    @classmethod
    def of_arrays(cls, groups: Sequence[NDArray[np.generic]], slot_blocks: int = 1) -> DeviceLayout:
        """One array `[num_blocks, ...]` a group, each block of which is one run of bytes."""
        return cls(tuple(GroupRegions((Region.of_array(blocks),), slot_blocks) for blocks in groups))

    @classmethod
    def of_tensors(cls, groups: Sequence[Sequence[Tensor]], slot_blocks: int = 1) -> DeviceLayout:
        """For each group its tensors `[num_blocks, ...]`, in the order in which their pieces are to lie in a slot."""
        return cls(tuple(GroupRegions(tuple(map(Region.of_tensor, tensors)), slot_blocks) for tensors in groups))

    @property
    def slot_bytes(self) -> int:
        """Bytes that a slot must have."""
        return max(group.slot_bytes for group in self.groups)

    def check_fits(self, slot_bytes: int) -> None:
        """Raise `ValueError`, with the sizes, if a slot of so many bytes is too small for a group."""
        for index, group in enumerate(self.groups):
            if group.slot_bytes > slot_bytes:
                raise ValueError(
                    f"{group.slot_blocks} blocks of group {index} have {group.slot_bytes:,} bytes, which do not fit a "
                    f"slot of {slot_bytes:,}"
                )


def _check_contiguous(contiguous: bool, shape: Sequence[int]) -> None:
    if not contiguous:
        raise ValueError(
            f"the blocks of an array of shape {tuple(shape)} are not contiguous: name each contiguous part as a region"
        )
