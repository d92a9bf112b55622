"""The real offload scheduler, host pool and copy engine around an engine, with a gate that tests can close."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

from kvferry.app.engines.cuda import CudaDevice
from kvferry.app.engines.embedded.engine import EmbeddedEngine
from kvferry.app.guard import ErrorLog, GuardedCopies, OffloadGuard
from kvferry.core.cost_model import LoadDecision, LoadOrCompute
from kvferry.core.engine_api import StoreMode
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.policy import PolicyResolver, RequestPolicy
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.scheduler import OffloadScheduler
from kvferry.core.stats import Snapshot
from kvferry.core.transfers import Direction, TransferJob, TransferResult
from kvferry.cuda_ops.copy.cpu_copy import CpuCopyEngine
from kvferry.cuda_ops.copy.engine import CopyEngine
from kvferry.cuda_ops.copy.layout import DeviceLayout
from kvferry.cuda_ops.cuda.cuda_copy import ComputeDevice, CudaCopyEngine
from kvferry.cuda_ops.cuda.driver import CudaDriver
from kvferry.cuda_ops.pool.host_pool import HostPool
from tests.harness.fake_cuda import FakeCuda


class GatedCopies:
    """A real copy engine behind a gate: what is submitted while the gate is closed starts when it opens.

    `fail` turns the results of a direction into failures after the bytes were spoilt; `refuse` makes `submit` raise.
    """

    def __init__(self, engine: EmbeddedEngine, inner: CopyEngine) -> None:
        self._engine = engine
        self._inner = inner
        self._open = threading.Event()
        self._open.set()
        self._kept: list[TransferJob] = []
        self._jobs: dict[int, TransferJob] = {}
        self.fail: set[Direction] = set()
        self.refuse: set[Direction] = set()

    def shut(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()
        self._engine.wake()

    def kept(self, direction: Direction) -> int:
        return sum(job.direction is direction for job in list(self._kept))

    def submit(self, job: TransferJob) -> None:
        if job.direction in self.refuse:
            raise OSError("refused")
        self._jobs[job.job_id] = job
        self._kept.append(job)
        self._pass_on()

    def submit_ahead(self, job: TransferJob) -> None:
        self._jobs[job.job_id] = job
        self._inner.submit_ahead(job)

    def poll(self) -> list[TransferResult]:
        self._pass_on()
        return [self._spoil(result) for result in self._inner.poll()]

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        behind_gate = {job.job_id for job in self._kept}
        return behind_gate.isdisjoint(job_ids) and self._inner.wait(job_ids, timeout_s)

    def is_alive(self) -> bool:
        return self._inner.is_alive()

    def close(self) -> None:
        self._inner.close()

    def _pass_on(self) -> None:
        if self._open.is_set():
            jobs, self._kept = self._kept, []
            for job in jobs:
                self._inner.submit(job)

    def _spoil(self, result: TransferResult) -> TransferResult:
        job = self._jobs[result.job_id]
        if job.direction not in self.fail:
            return result
        if job.direction is Direction.LOAD:
            for run in job.runs:
                self._engine.cache.blocks[run.block_ids] = 77
        return replace(result, error="spoilt by the test")


@dataclass
class CudaCopies:
    """Copies of a real device, by the kernel below a size; see `choose_mover`."""

    device: CudaDevice
    state_dir: Path
    kernel_below_bytes: int | None = None


class Offloaded:
    """An engine with everything attached; with a fake `cuda`, its blocks are copied as if they were on that device."""

    def __init__(
        self,
        engine: EmbeddedEngine,
        num_slots: int = 400,
        prompt_only: bool = False,
        cuda: FakeCuda | CudaCopies | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine = engine
        preparation = cuda.device.preparation() if isinstance(cuda, CudaCopies) else None
        self.pool = HostPool(num_slots, engine.block_bytes, preparation=preparation)
        self.manager = OffloadManager(num_slots, engine.block_bytes)
        policies = PolicyResolver(RequestPolicy(offload_prompt_only=prompt_only), {}, self.manager.lock)
        always = LoadOrCompute(LoadDecision.ALWAYS)
        layout = GroupLayout([GroupSpec(engine.settings.block_size, engine.block_bytes)])
        self.scheduler = OffloadScheduler(self.manager, policies, engine.block_pool, layout, cost_model=always)
        blocks = DeviceLayout.of_tensors([[engine.cache.blocks]])
        inner: CopyEngine
        if cuda is None:
            inner = CpuCopyEngine(blocks, self.pool, engine.wake)
        elif isinstance(cuda, CudaCopies):
            assert self.pool.is_page_locked
            inner = cuda.device.copies(blocks, self.pool, engine.wake, cuda.state_dir, cuda.kernel_below_bytes)
        else:
            driver = CudaDriver(cuda.resolve)
            inner = CudaCopyEngine(blocks, self.pool, engine.wake, ComputeDevice(driver, 0, lambda: cuda.compute))
        self.copies = GatedCopies(engine, inner)
        self.guard = OffloadGuard(self.scheduler, 1, ErrorLog(), timer=timer)
        engine.attach(self.guard, GuardedCopies(self.copies, self.guard.record_error, self.guard.hook_timer))
        engine.start()

    @property
    def stats(self) -> Snapshot:
        return self.scheduler.snapshot()

    def set_store_mode(self, mode: str) -> None:
        self.scheduler.set_store_mode(StoreMode(mode))

    def settled(self) -> bool:
        stats = self.stats
        return stats.open_jobs == 0 and stats.requests.running == 0 and not self.scheduler.has_open_work()

    def close(self) -> None:
        self.copies.open()
        self.engine.close()
        self.copies.close()
        self.pool.close()


MakeOffloaded = Callable[..., Offloaded]
