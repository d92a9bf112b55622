"""The seam to `cuda_ops`: from vLLM's tensors to a host pool and a copy engine that knows their bytes.

All tensors are seen as bytes, and none is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvferry.app.engines.cuda import CudaSide
from kvferry.app.engines.vllm.extents import RankExtents
from kvferry.app.engines.vllm.layout import Stretch, VllmLayout
from kvferry.app.engines.vllm.options import ConnectorRefused
from kvferry.app.engines.vllm.pool import MappedPool
from kvferry.app.service.startup import StartProgress
from kvferry.app.settings import Settings
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


class Copies:
    """A rank's copy engine and its view of the pool; a `CopyEngine`. `extents` gives the pool another size under it."""

    def __init__(
        self,
        layout: VllmLayout,
        settings: Settings,
        caches: Mapping[str, Any],
        mapped: MappedPool,
        on_finished: Callable[[], None],
        cuda: CudaSide | None = None,
        cpus: Collection[int] | None = None,
    ) -> None:
        """Start copying between the caches, which `check_caches` has seen, and the pool; it is closed with this, and
        so is `cuda`, by which they are copied where they are in a CUDA device's memory. `cpus` are the processors that
        copy, compute checksums and map memory, by default those of the calling thread. Raises `ConnectorRefused`."""
        self._layout = layout
        self._settings = settings
        self._caches = caches
        self._on_finished = on_finished
        self._cpus = cpus
        self._pool = mapped.pool
        self._rank = mapped.rank
        self._cuda = cuda
        self._headers = None if mapped.file is None else SlotHeaders(mapped.file, mapped.pool)
        self._left: list[TransferResult] = []
        self._is_released = False
        try:
            self._engine = self._make_engine()
        except CudaUnavailable as error:
            self._pool.close()
            if cuda is not None:
                cuda.close()
            raise ConnectorRefused(str(error)) from error
        self.extents = RankExtents(mapped.pool, mapped.rank, self._settle, on_finished, cpus)

    def submit(self, job: TransferJob) -> None:
        """See `CopyEngine`."""
        self._engine.submit(job)

    def submit_ahead(self, job: TransferJob) -> None:
        """See `CopyEngine`."""
        self._engine.submit_ahead(job)

    def poll(self) -> list[TransferResult]:
        """See `CopyEngine`."""
        left, self._left = self._left, []
        return left + self._engine.poll()

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """See `CopyEngine`."""
        return self._engine.wait(job_ids, timeout_s)

    def is_alive(self) -> bool:
        """See `CopyEngine`."""
        return self._engine.is_alive()

    def release_caches(self) -> None:
        """Stop using the caches, whose memory may be unmapped after this. May be called again.

        Jobs under way end first. Later jobs fail, until `restore_caches`. The pool stays mapped and pinned.
        """
        self._is_released = True
        self._engine.close()

    def restore_caches(self) -> None:
        """Use the caches again, at the addresses that their tensors have now. Does nothing unless they were released.

        Raises `ConnectorRefused` and `CudaUnavailable`; jobs fail from then on.
        """
        if not self._is_released:
            return
        check_caches(self._layout, self._caches)
        self._left += self._engine.poll()
        self._engine = self._make_engine()
        self._is_released = False

    def close(self) -> None:
        """See `CopyEngine`; the pool goes with it."""
        self.extents.close()
        self._engine.close()
        self._pool.close()
        if self._cuda is not None:
            self._cuda.close()

    def slot(self, slot: int) -> NDArray[np.uint8]:
        """The bytes of one slot, not a copy."""
        return self._pool.slot(slot)

    def _make_engine(self) -> CopyEngine:
        """Make a copy engine for the caches where they are now. Raises `CudaUnavailable`."""
        layout, pool, headers, settings = self._layout, self._pool, self._headers, self._settings
        regions = DeviceLayout(
            tuple(
                GroupRegions(tuple(_region(self._caches, stretch) for stretch in group.stretches), slot_blocks)
                for group, slot_blocks in zip(layout.groups, layout.slot_blocks(settings.blocks_per_slot), strict=True)
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

    def _settle(self, timeout_s: float) -> bool:
        """Wait until nobody looks at slots that have left the pool."""
        return self._engine.settle(timeout_s) if isinstance(self._engine, KeptCopies) else True


def device_side(layout: VllmLayout, caches: Mapping[str, Any]) -> CudaSide | None:
    """What is to be had of the device that the caches are on, which `check_caches` has seen; None where that is the
    host. Raises `ConnectorRefused`."""
    device = _tensor_of(caches, layout.groups[0].stretches[0]).device
    if device.type == "cpu":
        return None
    try:
        return CudaSide(device, instead="run vLLM's CPU backend, or vLLM without kvferry")
    except CudaUnavailable as error:
        raise ConnectorRefused(str(error)) from error


def preparation_for(cuda: CudaSide | None, *, is_own: bool = True) -> Preparation:
    """How the pool is made ready for that device; the log says how far it is.

    A pool that is the rank's own memory (`is_own`) is taken before requests come: the kernel gives it more slowly than
    blocks are copied. Files are taken as their kind needs it.
    """
    how = Preparation(touch=is_own) if cuda is None else cuda.preparation()
    return replace(how, progress=StartProgress().note_pool)


def check_caches(layout: VllmLayout, caches: Mapping[str, Any]) -> None:
    """Refuse memory that this version cannot copy, before anything is allocated."""
    devices = {_tensor_of(caches, stretch).device for group in layout.groups for stretch in group.stretches}
    if len(devices) != 1 or next(iter(devices)).type not in DEVICE_TYPES:
        raise ConnectorRefused(
            f"the KV cache is on {', '.join(sorted(map(str, devices)))}: this version carries blocks to and from one "
            "CUDA device a rank, or CPU memory; run vLLM on one of them"
        )
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
