"""A layout is read off arrays and tensors as they lie, and what cannot be described is refused with its numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvferry.cuda_ops.copy.layout import DeviceLayout, GroupRegions, Region


def test_region_of_an_array_has_its_address_and_strides() -> None:
    blocks = np.zeros((5, 3, 4), dtype=np.float32)[:, :2]
    region = Region.of_array(blocks)
    assert (region.address, region.num_blocks, region.block_bytes, region.stride_bytes) == (
        blocks.ctypes.data,
        5,
        32,
        48,
    )
    assert Region.of_array(np.zeros((1, 8), np.uint8)[:, :4]).stride_bytes == 4


def test_region_of_a_tensor_has_its_address_and_strides() -> None:
    cache = torch.zeros((6, 2, 16, 4), dtype=torch.bfloat16)
    keys = Region.of_tensor(cache[:, 0])
    values = Region.of_tensor(cache[:, 1])
    assert (keys.address, keys.num_blocks, keys.block_bytes, keys.stride_bytes) == (cache.data_ptr(), 6, 128, 256)
    assert values.address - keys.address == 128
    layout = DeviceLayout.of_tensors([[cache[:, 0], cache[:, 1]]], slot_blocks=2)
    assert layout.groups[0].block_bytes == 256
    assert layout.slot_bytes == 512


def test_a_slot_has_room_for_the_largest_group() -> None:
    layout = DeviceLayout.of_arrays([np.zeros((2, 8), np.uint8), np.zeros((2, 24), np.uint8)], slot_blocks=3)
    assert layout.slot_bytes == 72


def test_blocks_that_are_no_run_of_bytes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \(4, 3, 8\) are not contiguous"):
        Region.of_array(np.zeros((4, 3, 16), np.uint8)[:, :, :8])
    with pytest.raises(ValueError, match=r"shape \(4, 8, 3\) are not contiguous"):
        Region.of_tensor(torch.zeros(4, 3, 8).transpose(1, 2))


def test_blocks_that_overlap_or_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match="stride_bytes=7: blocks of 8 bytes would overlap"):
        Region(0, 4, 8, 7)
    with pytest.raises(ValueError, match="stride_bytes=-8: blocks of 8 bytes would overlap"):
        Region.of_array(np.zeros((4, 8), np.uint8)[::-1])
    with pytest.raises(ValueError, match="num_blocks=0"):
        Region.of_array(np.zeros((0, 8), np.uint8))


def test_a_layout_without_groups_blocks_or_one_number_of_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one group"):
        DeviceLayout(())
    with pytest.raises(ValueError, match="slot_blocks=0"):
        DeviceLayout.of_arrays([np.zeros((1, 8), np.uint8)], slot_blocks=0)
    with pytest.raises(ValueError, match=r"\[2, 3\]"):
        GroupRegions((Region(0, 2, 8, 8), Region(0, 3, 8, 8)))
