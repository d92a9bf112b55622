"""A small engine for tests: a thread that drives the real scheduler, with real copies between real bytes."""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvferry.core.engine_api import StepProgress
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.policy import PolicyResolver, RequestPolicy
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.records import PoolRecord
from kvferry.core.scheduler.scheduler import Hit, Later, OffloadScheduler
from kvferry.core.transfers import Direction, TransferJob, TransferResult
from kvferry.cuda_ops.copy.cpu_copy import CpuCopyEngine
from kvferry.cuda_ops.copy.layout import DeviceLayout
from kvferry.cuda_ops.pool.host_pool import HostPool

BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
DEVICE_BLOCKS = 4096
IDLE_POLL_S = 0.05


@dataclass
class LoopRequest:
    """A request whose tokens are made from a seed; equal seeds share a prefix, whatever the lengths."""

    request_id: str
    num_prompt_tokens: int
    seed: int = 0
    num_output_tokens: int = 0
    tenant: str | None = None
    lora: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    aliases: Sequence[str] = ()
    priority: int | None = None
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    ready: bool = False
    hold: threading.Event | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.block_hashes = [
            hashlib.sha256(f"{self.seed}/{self.tenant}/{self.lora}/{index}".encode()).digest()
            for index in range((self.num_prompt_tokens + self.num_output_tokens) // BLOCK_TOKENS)
        ]

    @property
    def may_run(self) -> bool:
        return self.ready and (self.hold is None or self.hold.is_set())

    @property
    def num_tokens(self) -> int:
        return max(self.num_prompt_tokens, self.num_computed)


class GatedCopies:
    """The CPU copy engine behind a gate, so that a test can keep jobs in flight for as long as it likes."""

    def __init__(self, inner: CpuCopyEngine) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._held: list[TransferJob] | None = None
        self._directions: dict[int, Direction] = {}
        self.failing: Direction | None = None
        """Transfers that way fail."""

    def submit(self, job: TransferJob) -> None:
        with self._lock:
            self._directions[job.job_id] = job.direction
            if self._held is not None:
                self._held.append(job)
                return
        self._inner.submit(job)

    def poll(self) -> list[TransferResult]:
        return [
            replace(result, error="the test's") if self._directions.pop(result.job_id) is self.failing else result
            for result in self._inner.poll()
        ]

    def shut(self) -> None:
        """Keep what is submitted from now on in flight."""
        with self._lock:
            self._held = []

    def open(self) -> None:
        """Let everything through again."""
        with self._lock:
            held, self._held = self._held or [], None
        for job in held:
            self._inner.submit(job)

    @property
    def num_held(self) -> int:
        with self._lock:
            return len(self._held or ())

    def close(self) -> None:
        self.open()
        self._inner.close()


class LoopEngine:
    """Steps whenever there is something to do or somebody calls `wake`. It is the scheduler's `DeviceView` as well."""

    def __init__(
        self, num_slots: int, sink: Any = None, max_pinned_fraction: float = 0.25, record: PoolRecord | None = None
    ) -> None:
        self.manager = OffloadManager(num_slots, BLOCK_BYTES, sink=sink, record=record)
        self.manager.operator_pins.set_max_fraction(max_pinned_fraction)
        sources = {"offload_prompt_only": "env"}
        layout = GroupLayout([GroupSpec(BLOCK_TOKENS, BLOCK_BYTES)])
        policies = PolicyResolver(RequestPolicy(), sources, self.manager.lock)
        self.scheduler = OffloadScheduler(self.manager, policies, self, layout)
        self._pool = HostPool(num_slots, BLOCK_BYTES)
        self._device = np.zeros((DEVICE_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self._wake = threading.Event()
        self.copies = GatedCopies(CpuCopyEngine(DeviceLayout.of_arrays([self._device]), self._pool, self._wake.set))
        self._free = list(range(DEVICE_BLOCKS))
        self._held: Counter[int] = Counter()
        self._zombies: set[int] = set()
        self._arriving: list[LoopRequest] = []
        self._waiting: list[LoopRequest] = []
        self._running: list[LoopRequest] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.failure: BaseException | None = None
        self.num_steps = 0
        self._thread = threading.Thread(target=self._run, name="loop-engine", daemon=True)
        self._thread.start()

    # --- DeviceView

    def hold(self, block_ids: Sequence[int]) -> None:
        self._held.update(block_ids)

    def free_blocks(self, after: int | None) -> None:
        return None

    def contents(self, block_ids: Sequence[int]) -> list[bytes | None]:
        return [None] * len(block_ids)

    def resident(self, keys: Sequence[bytes]) -> list[bool]:
        return [False] * len(keys)

    def take_allocated(self, among: object) -> dict[int, bytes | None]:
        return {}

    def release(self, block_ids: Sequence[int], *, reuse_first: bool = False) -> None:
        for block in block_ids:
            self._held[block] -= 1
            if self._held[block] == 0:
                del self._held[block]
                if block in self._zombies:
                    self._zombies.discard(block)
                    self._free.append(block)

    @property
    def num_held(self) -> int:
        return len(self._held)

    # --- what tests call

    def wake(self) -> None:
        self._wake.set()

    def submit(self, request: LoopRequest) -> LoopRequest:
        with self._lock:
            self._arriving.append(request)
        self._wake.set()
        return request

    def run(self, request: LoopRequest, timeout_s: float = 20.0) -> LoopRequest:
        """Submit and wait until it has finished."""
        self.submit(request)
        if not request.done.wait(timeout_s):
            raise TimeoutError(f"{request.request_id} did not finish: {self.failure!r}")
        return request

    def close(self) -> None:
        self._stop.set()
        self._wake.set()
        self._thread.join(10)
        self.copies.close()
        if self.failure is not None:
            raise self.failure

    # --- the loop

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._step()
                self.num_steps += 1
                if not any(request.may_run for request in self._running):
                    self._wake.wait(IDLE_POLL_S if self.scheduler.has_open_work() else None)
                self._wake.clear()
        except BaseException as exc:
            self.failure = exc

    def _step(self) -> None:
        now_s = time.time()
        for outcome in self.scheduler.on_transfers_finished(self.copies.poll(), now_s):
            for request in self._running:
                if request.request_id == outcome.request_id:
                    request.ready = True
                    if outcome.ok:
                        request.num_computed += outcome.num_tokens
        with self._lock:
            arriving, self._arriving = self._arriving, []
        for request in arriving:
            self.scheduler.on_new_request(request, now_s)
        self._waiting = [request for request in self._waiting + arriving if not self._admit(request, now_s)]
        progress = []
        for request in self._running:
            if request.may_run:
                self._compute(request)
                progress.append(StepProgress(request.request_id, (request.block_ids,), request.num_computed))
        plan = self.scheduler.plan_step(progress, now_s)
        for job in (*plan.loads, *plan.stores):
            self.copies.submit(job)
        for request in list(self._running):
            end = request.num_prompt_tokens + request.num_output_tokens
            if request.ready and request.num_computed >= end:
                self.scheduler.on_request_finished(request.request_id, now_s)
                self._running.remove(request)
                self._give_back(request.block_ids)
                request.done.set()

    def _admit(self, request: LoopRequest, now_s: float) -> bool:
        found = self.scheduler.match(request.request_id, 0, now_s)
        if isinstance(found, Later):
            return False
        num_blocks = -(-(request.num_prompt_tokens + request.num_output_tokens) // BLOCK_TOKENS)
        request.block_ids = [self._free.pop() for _ in range(num_blocks)]
        loaded = found.num_tokens if isinstance(found, Hit) else 0
        self.scheduler.commit(request.request_id, (request.block_ids,), loaded, now_s)
        request.ready = loaded == 0
        self._running.append(request)
        return True

    def _compute(self, request: LoopRequest) -> None:
        target = request.num_prompt_tokens
        if request.num_computed >= target:
            target = request.num_computed + min(BLOCK_TOKENS, request.num_output_tokens)
        first, last = request.num_computed // BLOCK_TOKENS, target // BLOCK_TOKENS
        for index in range(first, min(last, len(request.block_hashes))):
            digest = np.frombuffer(request.block_hashes[index], dtype=np.uint8)
            self._device[request.block_ids[index]] = np.resize(digest, BLOCK_BYTES)
        request.num_computed = min(target, request.num_prompt_tokens + request.num_output_tokens)

    def _give_back(self, block_ids: Sequence[int]) -> None:
        for block in block_ids:
            if self._held[block]:
                self._zombies.add(block)
            else:
                self._free.append(block)
