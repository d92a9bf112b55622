"""A small engine around the real scheduler, whose blocks hold values derived from their tokens instead of KV.

A device block "computed" for a hash holds that hash's value; a copy moves values. So a load that brings anything but
the right bytes is seen at once, by comparing values. Transfers end when the test says so, in any order, well or badly.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.engine import StepProgress, StoreMode
from core.groups import GroupLayout, GroupSpec
from core.manager import OffloadManager
from core.policy import PolicyBook, RequestPolicy
from core.scheduler import Hit, Later, OffloadScheduler
from core.slots import SlotState
from core.transfers import Direction, StepPlan, TransferJob, TransferResult

BLOCK_SIZE = 4
SLOT_BYTES = 64
GARBAGE = 0


def hashes_of(tokens: Sequence[int]) -> list[bytes]:
    """Chained hashes of the full blocks of a token list."""
    hashes, parent = [], 0
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        parent = hash((parent, tuple(tokens[start : start + BLOCK_SIZE]))) & (2**63 - 1) | 1
        hashes.append(parent.to_bytes(8, "big") * 2)
    return hashes


def value_of(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "big")


@dataclass
class ToyRequest:
    request_id: str
    tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int
    tenant: str | None = None
    lora: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    aliases: tuple[str, ...] = ()
    block_hashes: list[bytes] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    state: str = "waiting"

    def __post_init__(self) -> None:
        self.block_hashes = hashes_of(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def append_token(self) -> None:
        self.tokens.append((self.tokens[-1] * 31 + len(self.tokens)) % 1009)
        self.block_hashes += hashes_of(self.tokens)[len(self.block_hashes) :]


def blocks_of(job: TransferJob) -> list[int]:
    return [block_id for run in job.runs for block_id in run.block_ids.tolist()]


def slots_of(job: TransferJob) -> list[int]:
    return [slot for run in job.runs for slot in run.slots.tolist()]


class ToyEngine:
    """Device blocks with reference counts, a prefix cache over free blocks, chunked prefill and preemption."""

    def __init__(
        self,
        num_slots: int,
        num_blocks: int,
        *,
        settings: RequestPolicy | None = None,
        num_workers: int = 1,
        sink=None,
        store_mode: StoreMode = StoreMode.EAGER,
        watermark_blocks: int = 64,
    ) -> None:
        self.manager = OffloadManager(num_slots, SLOT_BYTES, sink=sink)
        self.policies = PolicyBook(settings or RequestPolicy(), {})
        layout = GroupLayout([GroupSpec(BLOCK_SIZE, SLOT_BYTES)])
        self.offload = OffloadScheduler(
            self.manager,
            self.policies,
            self,
            layout,
            num_workers=num_workers,
            store_mode=store_mode,
            watermark_blocks=watermark_blocks,
        )
        self.num_workers = num_workers
        self.values = [GARBAGE] * num_blocks
        self.refs = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.cached: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.host = [GARBAGE] * num_slots
        self.requests: dict[str, ToyRequest] = {}
        self.jobs: dict[int, TransferJob] = {}
        self.reports: dict[int, list[TransferResult]] = {}
        self.wrong_loads: list[str] = []
        self.now_s = 1000.0

    # DeviceView
    def hold(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self.refs[block_id] += 1
            self.free.pop(block_id, None)

    def release(self, block_ids: Sequence[int], *, reuse_first: bool = False) -> None:
        for block_id in block_ids:
            self.refs[block_id] -= 1
            assert self.refs[block_id] >= 0, "released more often than held"
            if self.refs[block_id] == 0:
                self.free[block_id] = None
                if reuse_first:
                    self.free.move_to_end(block_id, last=False)

    def free_blocks(self, after: int | None) -> Iterator[int] | None:
        if after is None:
            return iter(list(self.free))
        if after not in self.free:
            return None
        queue = list(self.free)
        return iter(queue[queue.index(after) + 1 :])

    def contents(self, block_ids: Sequence[int]) -> list[bytes | None]:
        return [self.hash_of.get(block_id) for block_id in block_ids]

    def resident(self, keys: Sequence[bytes]) -> list[bool]:
        return [key[:-1] in self.cached for key in keys]

    # requests
    def add(self, request: ToyRequest) -> None:
        self.requests[request.request_id] = request
        self.offload.on_new_request(request, self.now_s)

    def finish(self, request: ToyRequest) -> None:
        self.offload.on_request_finished(request.request_id, self.now_s)
        self._drop_blocks(request)
        del self.requests[request.request_id]

    def preempt(self, request: ToyRequest) -> None:
        self.offload.on_preempted(request.request_id, self.now_s)
        self._drop_blocks(request)
        request.state = "waiting"
        request.num_computed = 0

    def _drop_blocks(self, request: ToyRequest) -> None:
        self.release(request.block_ids[::-1])
        request.block_ids = []

    def _device_prefix(self, request: ToyRequest) -> list[int]:
        found = []
        for block_hash in request.block_hashes[: (request.num_tokens - 1) // BLOCK_SIZE]:
            if block_hash not in self.cached:
                break
            found.append(self.cached[block_hash])
        return found

    def _allocate(self, count: int) -> list[int]:
        taken = []
        for _ in range(count):
            block_id, _ = self.free.popitem(last=False)
            old = self.hash_of.pop(block_id, None)
            if old is not None and self.cached.get(old) == block_id:
                del self.cached[old]
            self.values[block_id] = GARBAGE
            self.refs[block_id] = 1
            taken.append(block_id)
        return taken

    def admit(self, request: ToyRequest) -> bool:
        """Try to give a waiting request its blocks; False if the device is full."""
        prefix = self._device_prefix(request)
        answer = self.offload.match(request.request_id, len(prefix) * BLOCK_SIZE, self.now_s)
        if isinstance(answer, Later):
            return False
        to_load = answer.num_tokens if isinstance(answer, Hit) else 0
        assert to_load % BLOCK_SIZE == 0
        assert len(prefix) * BLOCK_SIZE + to_load <= request.num_tokens - 1
        needed = -(-request.num_tokens // BLOCK_SIZE) - len(prefix)
        if len(self.free) - sum(block_id in self.free for block_id in prefix) < needed:
            return False
        self.hold(prefix)
        request.block_ids = prefix + self._allocate(needed)
        request.num_computed = len(prefix) * BLOCK_SIZE
        self.offload.commit(request.request_id, (request.block_ids,), to_load, self.now_s)
        request.state = "loading" if to_load else "running"
        return True

    def _compute(self, request: ToyRequest, upto: int) -> None:
        """Fill blocks as a forward pass would: a block is right only if all before it are."""
        for index in range(request.num_computed // BLOCK_SIZE, upto // BLOCK_SIZE):
            if index >= len(request.block_hashes):
                break
            right = all(
                self.values[block_id] == value_of(block_hash)
                for block_id, block_hash in zip(request.block_ids[:index], request.block_hashes, strict=False)
            )
            self.values[request.block_ids[index]] = value_of(request.block_hashes[index]) if right else 13
        request.num_computed = upto
        for index in range(upto // BLOCK_SIZE):
            if index < len(request.block_hashes):
                self._cache(request.block_hashes[index], request.block_ids[index])

    def _cache(self, block_hash: bytes, block_id: int) -> None:
        if block_hash not in self.cached:
            self.cached[block_hash] = block_id
            self.hash_of[block_id] = block_hash

    def step(self, budget: int = 32, *, copy: bool = False) -> StepPlan:
        """One engine step; with `copy`, all transfers of the plan and before end well at once."""
        self.now_s += 1.0
        for request in list(self.requests.values()):
            if request.state == "waiting":
                self.admit(request)
        progress, upto = [], {}
        for request in list(self.requests.values()):
            if request.state != "running" or budget <= 0:
                continue
            target = min(request.num_tokens, request.num_computed + budget)
            if -(-target // BLOCK_SIZE) > len(request.block_ids):
                if not self.free:
                    self.preempt(request)
                    continue
                request.block_ids += self._allocate(1)
            budget -= target - request.num_computed
            upto[request.request_id] = target
            progress.append(StepProgress(request.request_id, (list(request.block_ids),), target))
        plan = self.offload.plan_step(progress, self.now_s)
        self._check_plan(plan)
        for request_id, target in upto.items():
            self._compute(self.requests[request_id], target)
        for job in [*plan.loads, *plan.stores]:
            self.jobs[job.job_id] = job
            if job.direction is Direction.STORE:
                # What a job reads is settled when the step's compute is done, whenever it is copied.
                for block_id in blocks_of(job):
                    assert self.refs[block_id] > 0, "a block of a job is not held"
        for request_id, target in upto.items():
            request = self.requests[request_id]
            if target == request.num_tokens:
                if request.num_tokens - request.num_prompt_tokens >= request.max_tokens:
                    self.finish(request)
                else:
                    request.append_token()
        if copy:
            while self.jobs:
                self.end_job(next(iter(self.jobs)))
        return plan

    def _check_plan(self, plan: StepPlan) -> None:
        named = [block_id for job in [*plan.loads, *plan.stores] for block_id in blocks_of(job)]
        assert len(named) == len(set(named)), "a plan names a device block twice"

    def end_job(self, job_id: int, *, error: str | None = None, worker: int | None = None) -> None:
        """Let workers report a job; with an error nothing can be relied on in what it wrote."""
        job = self.jobs[job_id]
        pairs = list(zip(blocks_of(job), slots_of(job), strict=True))
        for block_id, slot in pairs:
            assert self.refs[block_id] > 0, "a block was freed under a copy"
            if job.direction is Direction.STORE:
                self.host[slot] = 77 if error else self.values[block_id]
            else:
                self.values[block_id] = 78 if error else self.host[slot]
        workers = range(self.num_workers) if worker is None else [worker]
        results = [TransferResult(job_id, rank, error, SLOT_BYTES * len(pairs), 0.001) for rank in workers]
        del self.jobs[job_id]
        self.deliver(results)

    def deliver(self, results: Sequence[TransferResult]) -> None:
        for outcome in self.offload.on_transfers_finished(results, self.now_s):
            request = self.requests[outcome.request_id]
            assert request.state == "loading"
            if not outcome.ok:
                # Back to waiting without blocks: the next match finds what is left of the hit.
                self._drop_blocks(request)
                request.state = "waiting"
                continue
            end = outcome.first_token + outcome.num_tokens
            for index in range(outcome.first_token // BLOCK_SIZE, end // BLOCK_SIZE):
                block_id, block_hash = request.block_ids[index], request.block_hashes[index]
                if self.values[block_id] != value_of(block_hash):
                    self.wrong_loads.append(f"{request.request_id} block {index}")
                self._cache(block_hash, block_id)
            request.num_computed = end
            request.state = "running"

    def run(self, max_steps: int = 2000) -> None:
        """Step until every request is answered and every transfer has ended."""
        for _ in range(max_steps):
            if not self.requests and not self.jobs and not self.offload.has_open_work():
                return
            self.step(copy=True)
            self.deliver([])
        raise AssertionError(f"not idle after {max_steps} steps: {self.requests} {self.jobs}")

    # what must always hold
    def check(self) -> None:
        snapshot = self.offload.snapshot()
        store, pool, prompt = snapshot.store, snapshot.pool, snapshot.prompt_tokens
        assert store.offered == store.stored + sum(store.skipped.values()) + store.failed + store.in_flight
        assert prompt.total == prompt.device_hit + prompt.host_hit + sum(prompt.tier_hit.values()) + prompt.recomputed
        assert pool.slots == pool.free + pool.ready + pool.storing
        for counts in (store, pool, prompt, snapshot.load, snapshot.requests):
            for name in counts.__slots__:
                value = getattr(counts, name)
                assert not isinstance(value, int) or value >= 0, f"{name} is {value}"
        assert pool.loading <= pool.ready
        assert pool.pinned <= pool.ready
        assert pool.ready == len(self.manager.index)
        assert snapshot.requests.running == len(self.requests)
        assert snapshot.requests.waiting_for_load == sum(r.state == "loading" for r in self.requests.values())
        assert not self.wrong_loads, self.wrong_loads
        self.check_slots()
        # Everything that can be found holds the right value.
        for shard in self.manager.index.shards():
            for key, slot in shard.items():
                assert self.host[slot] == value_of(key), "a published slot holds something else"

    def check_slots(self) -> None:
        """Every slot is in one place: free, under one kind of transfer, or ready, and a candidate unless pinned."""
        manager, offload = self.manager, self.offload
        table = manager.table
        states = table.current_states(0, table.num_slots)
        ready = states == SlotState.READY
        assert int(ready.sum()) == table.num_ready
        assert len(manager.evictable) == int((ready & (table.pins == 0)).sum())
        assert not (ready & (table.pins < 0)).any()
        loads_on = np.zeros_like(table.pins)
        for pin in manager._loading.values():
            loads_on[pin.slots] += 1
        assert (loads_on <= table.pins).all(), "a slot under a load may be given out"
        assert manager._loading.keys() == {id(job.pin) for job in offload._jobs if not job.is_store}
        returned = table._returned[: table._num_returned].tolist()
        untouched = [s for s in range(table._frontier, table.num_slots) if table.states[s] != SlotState.HELD]
        assert len(set(returned) | set(untouched)) == len(returned) + len(untouched) == table.num_free
        stores = [slot for job in offload._jobs if job.is_store for slot in job.slots.tolist()]
        stores += [slot for slots in offload._stores.touched_slots() for slot in slots.tolist()]
        loads = {slot for job in offload._jobs if not job.is_store for slot in job.slots.tolist()}
        assert len(stores) == len(set(stores)), "a slot is under two stores"
        assert not set(stores) & loads, "a slot is stored and loaded at once"
        assert not (set(stores) | loads) & (set(returned) | set(untouched)), "a slot under a transfer is free"
        assert offload._loads._num_pinned == sum(len(state.pin or ()) for state in offload._requests)

    def check_idle(self) -> None:
        snapshot = self.offload.snapshot()
        assert snapshot.open_jobs == 0
        assert (snapshot.store.in_flight, snapshot.load.in_flight) == (0, 0)
        assert (snapshot.pool.storing, snapshot.pool.loading, snapshot.pool.pinned) == (0, 0, 0)
        assert (snapshot.requests.running, snapshot.requests.waiting_for_load) == (0, 0)
        assert self.refs == [0] * len(self.refs)
        assert len(self.free) == len(self.refs)
        table = self.manager.table
        assert int(np.count_nonzero(table.pins[table.current_states(0, table.num_slots) == 2])) == 0
