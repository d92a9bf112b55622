"""A rank's copy engine, built from vLLM's KV cache tensors and the rank's mapping of the host pool.

Tensors are accessed as bytes in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvferry.app.engines.cuda import CudaDevice
from kvferry.app.engines.vllm.extents import RankExtents
from kvferry.app.engines.vllm.layout import BlockRegion, VllmLayout
from kvferry.app.engines.vllm.pool import MappedPool
from kvferry.app.service.startup import StartProgress
from kvferry.app.settings import Settings
from kvferry.core.errors import StartError
from kvferry.core.transfers import TransferJob, TransferResult
from kvferry.cuda_ops.copy.cpu_copy import CpuCopyEngine
from kvferry.cuda_ops.copy.engine import CopyEngine
from kvferry.cuda_ops.copy.layout import DeviceLayout, GroupRegions, Region
from kvferry.cuda_ops.cuda.driver import CudaUnavailable
from kvferry.cuda_ops.persistent.headers import SlotHeaders
from kvferry.cuda_ops.persistent.sealing import KeptCopies
from kvferry.cuda_ops.pool.prepare import Preparation

if TYPE_CHECKING:
    from torch import Tensor

DEVICE_TYPES = ("cpu", "cuda")


class RankCopies:
    """A `CopyEngine` between a rank's KV caches and its mapping of the pool, which `extents` resizes."""

    def __init__(
        self,
        layout: VllmLayout,
        settings: Settings,
        caches: Mapping[str, Any],
        mapped: MappedPool,
        on_finished: Callable[[], None],
        cuda: CudaDevice | None = None,
        cpus: Collection[int] | None = None,
    ) -> None:
        """Start copying.

        Args:
            layout: Layout of the KV caches.
            settings: Settings of the connector.
            caches: vLLM's KV cache tensors by layer, checked by `check_caches`.
            mapped: The rank's mapping of the pool; closed with this.
            on_finished: Called when a job or a resize command has ended.
            cuda: Device of the caches, None for host memory; closed with this.
            cpus: CPUs for copies, checksums and mapping, by default those of the calling thread.

        Raises:
            CudaUnavailable: The device cannot be used.
        """
        self._layout = layout
        self._settings = settings
        self._caches = caches
        self._on_finished = on_finished
        self._cpus = cpus
        self._pool = mapped.pool
        self._rank = mapped.rank
        self._cuda = cuda
        self._headers = None if mapped.persistent is None else SlotHeaders(mapped.persistent, mapped.pool)
        self._released_results: list[TransferResult] = []
        self._is_released = False
        try:
            self._engine = self._make_engine()
        except CudaUnavailable:
            self._pool.close()
            if cuda is not None:
                cuda.close()
            raise
        self.extents = RankExtents(mapped.pool, mapped.rank, self._wait_for_readers, on_finished, cpus)

    def submit(self, job: TransferJob) -> None:
        """See `CopyEngine`."""
        self._engine.submit(job)

    def submit_ahead(self, job: TransferJob) -> None:
        """See `CopyEngine`."""
        self._engine.submit_ahead(job)

    def poll(self) -> list[TransferResult]:
        """See `CopyEngine`."""
        results, self._released_results = self._released_results, []
        return results + self._engine.poll()

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """See `CopyEngine`."""
        return self._engine.wait(job_ids, timeout_s)

    def is_alive(self) -> bool:
        """See `CopyEngine`."""
        return self._engine.is_alive()

    def release_caches(self) -> None:
        """Stop accessing the caches, whose memory may then be unmapped; may be called again.

        Waits for the current jobs. Later jobs fail until `restore_caches`. The pool stays mapped and page-locked.
        """
        self._is_released = True
        self._engine.close()

    def restore_caches(self) -> None:
        """Access the caches again, at the current addresses of their tensors; no effect unless they were released.

        Raises:
            StartError: The caches cannot be used; jobs continue to fail.
        """
        if not self._is_released:
            return
        check_caches(self._layout, self._caches)
        self._released_results += self._engine.poll()
        self._engine = self._make_engine()
        self._is_released = False

    def close(self) -> None:
        """Stop copying and close the pool."""
        self.extents.close()
        self._engine.close()
        self._pool.close()
        if self._cuda is not None:
            self._cuda.close()

    def slot(self, slot: int) -> NDArray[np.uint8]:
        """Return a view of the bytes of one slot."""
        return self._pool.slot(slot)

    def _make_engine(self) -> CopyEngine:
        """Create a copy engine for the current addresses of the caches. Raises `CudaUnavailable`."""
        layout, pool, headers, settings = self._layout, self._pool, self._headers, self._settings
        groups = layout.group_layout(settings.blocks_per_slot, 1).groups
        regions = DeviceLayout(
            tuple(
                GroupRegions(tuple(_region(self._caches, region) for region in group.regions), core_group.slot_blocks)
                for group, core_group in zip(layout.groups, groups, strict=True)
            )
        )
        before = None if headers is None else headers.before_copy
        engine: CopyEngine
        if self._cuda is None:
            engine = CpuCopyEngine(regions, pool, self._on_finished, self._rank, cpus=self._cpus, before=before)
        else:
            engine = self._cuda.copies(
                regions, pool, self._on_finished, settings.state_dir, settings.kernel_below_bytes, before, self._rank
            )
        if headers is None:
            return engine
        return KeptCopies(engine, headers, self._on_finished, self._rank, self._cpus)

    def _wait_for_readers(self, timeout_s: float) -> bool:
        """Wait until slots removed from the pool are no longer accessed; return whether it is so."""
        return self._engine.wait_for_readers(timeout_s) if isinstance(self._engine, KeptCopies) else True


def cuda_device(layout: VllmLayout, caches: Mapping[str, Any]) -> CudaDevice | None:
    """Return the CUDA device of the caches, or None if they are in host memory.

    Raises:
        CudaUnavailable: The device cannot be used.
    """
    device = _tensor_of(caches, layout.groups[0].regions[0]).device
    if device.type == "cpu":
        return None
    return CudaDevice(device, alternative="run vLLM's CPU backend, or vLLM without kvferry")


def pool_preparation(cuda: CudaDevice | None, *, is_private: bool = True) -> Preparation:
    """Return how the pool's memory is prepared for the device; progress is logged.

    Private memory is allocated at start, because the kernel allocates pages more slowly than blocks are copied.
    """
    preparation = Preparation(touch=is_private) if cuda is None else cuda.preparation()
    return replace(preparation, progress=StartProgress().note_pool)


def check_caches(layout: VllmLayout, caches: Mapping[str, Any]) -> None:
    """Refuse KV caches whose memory does not match the layout or is on an unsupported device."""
    regions = [region for group in layout.groups for region in group.regions]
    devices = {_tensor_of(caches, region).device for region in regions}
    if len(devices) != 1 or next(iter(devices)).type not in DEVICE_TYPES:
        raise StartError(
            f"the KV cache is on {', '.join(sorted(map(str, devices)))}; kvferry supports one CUDA device per rank, or "
            "CPU memory"
        )
    for region in regions:
        storages = [part.untyped_storage() for part in _parts(caches, region)]
        if len({storage.data_ptr() for storage in storages}) > 1:
            raise StartError(
                f"the KV cache of layer {region.layer} has several separate allocations; kvferry does not support this"
            )
        if storages[0].nbytes() < region.end:
            raise StartError(
                f"the KV cache of layer {region.layer} has {storages[0].nbytes():,} bytes, but its configuration has "
                f"blocks up to byte {region.end:,}; kvferry does not support this"
            )


def _parts(caches: Mapping[str, Any], region: BlockRegion) -> Sequence[Tensor]:
    """Return a layer's tensors: one, or several for a layer with states of different shapes."""
    cache = caches.get(region.layer)
    if cache is None:
        raise StartError(f"vLLM registered no KV cache for layer {region.layer} of its configuration")
    parts: Sequence[Tensor] = cache if isinstance(cache, (list, tuple)) else (cache,)
    return parts


def _tensor_of(caches: Mapping[str, Any], region: BlockRegion) -> Tensor:
    return _parts(caches, region)[0]


def _region(caches: Mapping[str, Any], region: BlockRegion) -> Region:
    """Convert a region to addresses; the tensor keeps the memory alive."""
    tensor = _tensor_of(caches, region)
    address = tensor.untyped_storage().data_ptr() + region.offset
    return Region(address, region.num_blocks, region.block_bytes, region.stride_bytes, tensor)
