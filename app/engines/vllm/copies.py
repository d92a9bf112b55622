"""The seam to `cuda_ops`: from vLLM's tensors to a host pool and a copy engine that knows their bytes.

A block of a group is several stretches of memory. In its slot they lie one behind the other, in the order of the
layout, so that a slot's bytes do not depend on where vLLM has put its tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from app.engines.vllm.layout import Stretch, VllmLayout
from app.engines.vllm.refusal import ConnectorRefused
from core.transfers import BlockRun, TransferJob, TransferResult
from cuda_ops.copy_engine import CopyEngine
from cuda_ops.cpu_copy import CpuCopyEngine
from cuda_ops.host_pool import HostPool

if TYPE_CHECKING:
    from torch import Tensor


class Copies:
    """A rank's pool and copy engine; a `CopyEngine`.

    The copy engine underneath knows pieces of one size only: stretches are cut into pieces of their common size, a slot
    is so many rows of its pool, and what core calls a run are as many runs as a block has pieces.
    """

    def __init__(
        self,
        layout: VllmLayout,
        slot_bytes: int,
        caches: Mapping[str, Any],
        num_slots: int,
        rank: int,
        on_finished: Callable[[], None],
    ) -> None:
        """Map the pool. Raises `ConnectorRefused` for memory that is not what the layout says, `NotEnoughMemory`."""
        stretches = [stretch for group in layout.groups for stretch in group.stretches]
        piece_bytes = math.gcd(*(stretch.block_bytes for stretch in stretches))
        arrays: dict[int, NDArray[np.uint8]] = {}
        numbers: list[list[int]] = []
        for group in layout.groups:
            numbers.append([])
            for stretch in group.stretches:
                memory = _bytes_of(caches, stretch)
                for start in range(0, stretch.block_bytes, piece_bytes):
                    piece = _rows(memory, stretch, start, piece_bytes)
                    # Groups may lie over each other: the same piece is one array.
                    number = next((at for at, known in arrays.items() if _same(known, piece)), len(arrays))
                    arrays[number] = piece
                    numbers[-1].append(number)
        self._numbers = numbers
        self._slot_pieces = slot_bytes // piece_bytes
        self._pool = HostPool(num_slots * self._slot_pieces, piece_bytes)
        self._engine: CopyEngine = CpuCopyEngine(list(arrays.values()), self._pool, on_finished, rank)

    def submit(self, job: TransferJob) -> None:
        """See `CopyEngine`."""
        runs = [piece for run in job.runs for piece in self._pieces(run)]
        self._engine.submit(TransferJob(job.job_id, job.direction, tuple(runs), job.request_id))

    def poll(self) -> list[TransferResult]:
        """See `CopyEngine`."""
        return self._engine.poll()

    def is_alive(self) -> bool:
        """See `CopyEngine`."""
        return self._engine.is_alive()

    def close(self) -> None:
        """See `CopyEngine`; the pool goes with it."""
        self._engine.close()
        self._pool.close()

    def slot(self, slot: int) -> list[NDArray[np.uint8]]:
        """The bytes of one slot piece by piece, not copies."""
        return [self._pool.slot(slot * self._slot_pieces + index) for index in range(self._slot_pieces)]

    def _pieces(self, run: BlockRun) -> Iterable[BlockRun]:
        numbers = self._numbers[run.group]
        first_rows = run.slots * self._slot_pieces + run.parts * len(numbers)
        parts = np.zeros_like(run.parts)
        for index, number in enumerate(numbers):
            yield BlockRun(number, run.block_ids, first_rows + index, parts)


def check_caches(layout: VllmLayout, caches: Mapping[str, Any]) -> None:
    """Refuse memory that this version cannot copy, before anything is allocated."""
    for group in layout.groups:
        for stretch in group.stretches:
            tensor = _tensor_of(caches, stretch)
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


def _tensor_of(caches: Mapping[str, Any], stretch: Stretch) -> Tensor:
    cache = caches.get(stretch.layer)
    if cache is None:
        raise ConnectorRefused(f"vLLM registered no KV cache for layer {stretch.layer}, which its configuration names")
    tensor: Tensor = cache[0] if isinstance(cache, (list, tuple)) else cache
    return tensor


def _bytes_of(caches: Mapping[str, Any], stretch: Stretch) -> NDArray[np.uint8]:
    """All of the memory that a stretch lies in, as bytes. Not a copy."""
    import torch

    tensor = _tensor_of(caches, stretch)
    memory: NDArray[np.uint8] = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    return memory


def _rows(memory: NDArray[np.uint8], stretch: Stretch, start: int, piece_bytes: int) -> NDArray[np.uint8]:
    return np.lib.stride_tricks.as_strided(
        memory[stretch.offset + start :],
        shape=(stretch.num_blocks, piece_bytes),
        strides=(stretch.stride_bytes, 1),
    )


def _same(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
    return one.ctypes.data == other.ctypes.data and one.strides == other.strides
