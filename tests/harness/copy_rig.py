"""Copy engines of every kind over a few blocks, and the results of the jobs that a test submits."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.core.transfers import TransferJob, TransferResult
from kvferry.cuda_ops.copy.cpu_copy import CpuCopyEngine
from kvferry.cuda_ops.copy.engine import CopyEngine
from kvferry.cuda_ops.copy.layout import DeviceLayout
from kvferry.cuda_ops.cuda.cuda_copy import ComputeDevice, CudaCopyEngine
from kvferry.cuda_ops.cuda.driver import CudaDriver
from kvferry.cuda_ops.cuda.movers import DmaMover
from kvferry.cuda_ops.pool.host_pool import HostPool, PoolTable
from tests.harness.fake_cuda import FakeCuda
from tests.harness.waiting import DEADLINE_S, wait_until


def copy_engine(kind: str, cuda: FakeCuda, layout: DeviceLayout, pool: HostPool, **options: Any) -> CopyEngine:
    """A CPU engine for the kind `cpu`, else a CUDA engine on a fake driver."""
    defaults: dict[str, Any] = {"on_finished": lambda: None}
    if kind == "cpu":
        return CpuCopyEngine(layout, pool, **{**defaults, "num_threads": 1, **options})
    driver = CudaDriver(cuda.resolve)
    device = ComputeDevice(driver, 0, options.pop("current_stream", lambda: cuda.compute))
    defaults |= {"device": device, "mover": DmaMover(driver)}
    return CudaCopyEngine(layout, pool, **{**defaults, **options})


class GatedPool(HostPool):
    """A pool of eight slots of 64 bytes that returns where they are once it is allowed to."""

    def __init__(self) -> None:
        super().__init__(8, 64)
        self.asked, self.go_on = threading.Event(), threading.Event()

    def hold(self) -> PoolTable:
        self.asked.set()
        assert self.go_on.wait(DEADLINE_S)
        return super().hold()


class CopyRig:
    """By default eight blocks of 64 bytes, block i all i + 1, and as many slots of zeros."""

    def __init__(
        self,
        kind: str = "batches",
        pool: HostPool | None = None,
        blocks: NDArray[np.uint8] | None = None,
        cuda: FakeCuda | None = None,
        **options: Any,
    ) -> None:
        self.kind = kind
        self.cuda = cuda or FakeCuda(batches=kind == "batches")
        self.blocks = np.repeat(np.arange(1, 9, dtype=np.uint8)[:, None], 64, axis=1) if blocks is None else blocks
        self.pool = HostPool(8, 64) if pool is None else pool
        self.copies = copy_engine(kind, self.cuda, DeviceLayout.of_arrays([self.blocks]), self.pool, **options)
        # What a test has fail from here on is a job's, not what the four copy threads begin with.
        began = "cuThreadExchangeStreamCaptureMode"
        wait_until(lambda: kind == "cpu" or self.cuda.calls[began] == 4, "the copy threads have begun")

    def results_of(self, *wanted: TransferJob) -> dict[int, TransferResult]:
        for one in wanted:
            self.copies.submit(one)
        return self.ends([one.job_id for one in wanted])

    def ends(self, wanted: list[int]) -> dict[int, TransferResult]:
        assert self.copies.wait(wanted, DEADLINE_S)
        results = self.copies.poll()
        assert sorted(result.job_id for result in results) == sorted(wanted)
        return {result.job_id: result for result in results}
