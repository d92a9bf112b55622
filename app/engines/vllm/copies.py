"""The seam to `cuda_ops`: from vLLM's tensors to a host pool and a copy engine that knows their bytes.

All tensors are seen as bytes, and none is copied.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from app.engines.vllm.layout import Stretch, VllmLayout
from app.engines.vllm.pool import MappedPool
from app.engines.vllm.refusal import ConnectorRefused
from core.transfers import TransferJob, TransferResult
from cuda_ops.copy_engine import CopyEngine
from cuda_ops.cpu_copy import CpuCopyEngine
from cuda_ops.kept_copies import KeptCopies
from cuda_ops.layout import DeviceLayout, GroupRegions, Region
from cuda_ops.slot_headers import SlotHeaders

if TYPE_CHECKING:
    from torch import Tensor


class Copies:
    """A rank's copy engine and its view of the pool; a `CopyEngine`."""

    def __init__(
        self,
        layout: VllmLayout,
        blocks_per_slot: int,
        caches: Mapping[str, Any],
        mapped: MappedPool,
        on_finished: Callable[[], None],
    ) -> None:
        """Start copying between the caches, which `check_caches` has seen, and the pool, which is closed with this."""
        regions = DeviceLayout(
            tuple(
                GroupRegions(tuple(_region(caches, stretch) for stretch in group.stretches), slot_blocks)
                for group, slot_blocks in zip(layout.groups, layout.slot_blocks(blocks_per_slot), strict=True)
            )
        )
        self._pool = pool = mapped.pool
        # vLLM pins a worker to the processors that compute; copies had better go elsewhere.
        self._engine: CopyEngine = CpuCopyEngine(regions, pool, on_finished, pool.rank, cpus=range(os.cpu_count() or 1))
        if mapped.file is not None:
            headers = SlotHeaders(mapped.file.headers(pool.rank), pool)
            self._engine = KeptCopies(self._engine, headers, on_finished, pool.rank)

    def submit(self, job: TransferJob) -> None:
        """See `CopyEngine`."""
        self._engine.submit(job)

    def poll(self) -> list[TransferResult]:
        """See `CopyEngine`."""
        return self._engine.poll()

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """See `CopyEngine`."""
        return self._engine.wait(job_ids, timeout_s)

    def is_alive(self) -> bool:
        """See `CopyEngine`."""
        return self._engine.is_alive()

    def close(self) -> None:
        """See `CopyEngine`; the pool goes with it."""
        self._engine.close()
        self._pool.close()

    def slot(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of one slot, not a copy."""
        return self._pool.slot(slot)


def check_caches(layout: VllmLayout, caches: Mapping[str, Any]) -> None:
    """Refuse memory that this version cannot copy, before anything is allocated."""
    for group in layout.groups:
        for stretch in group.stretches:
            tensor = _tensor_of(caches, stretch)
            if any(
                other.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
                for other in _parts(caches, stretch)
            ):
                raise ConnectorRefused(
                    f"the KV cache of layer {stretch.layer} is made of several pieces of memory; kvferry does not know "
                    "such a layout"
                )
            if tensor.device.type != "cpu":
                raise ConnectorRefused(
                    f"the KV cache is on {tensor.device}: this version carries blocks between CPU memory only; run "
                    "vLLM's CPU backend"
                )
            have = tensor.untyped_storage().nbytes()
            if have < stretch.end:
                raise ConnectorRefused(
                    f"the KV cache of layer {stretch.layer} has {have:,} bytes, and its configuration says that blocks "
                    f"lie up to byte {stretch.end:,}; kvferry does not know such a layout"
                )


def _parts(caches: Mapping[str, Any], stretch: Stretch) -> Sequence[Tensor]:
    """A layer's tensors: one, or several where it keeps states of different shapes."""
    cache = caches.get(stretch.layer)
    if cache is None:
        raise ConnectorRefused(f"vLLM registered no KV cache for layer {stretch.layer}, which its configuration names")
    parts: Sequence[Tensor] = cache if isinstance(cache, (list, tuple)) else (cache,)
    return parts


def _tensor_of(caches: Mapping[str, Any], stretch: Stretch) -> Tensor:
    return _parts(caches, stretch)[0]


def _region(caches: Mapping[str, Any], stretch: Stretch) -> Region:
    """A stretch as addresses. Not a copy; the tensor keeps the memory."""
    tensor = _tensor_of(caches, stretch)
    address = tensor.untyped_storage().data_ptr() + stretch.offset
    return Region(address, stretch.num_blocks, stretch.block_bytes, stretch.stride_bytes, tensor)
