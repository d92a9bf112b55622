"""The smallest engine that offloads its KV cache: it stores blocks, loses them, and loads them again.

Run it where kvferry is installed: `python own_engine.py`. It needs neither PyTorch nor a model: the KV of a block is a
function of the tokens up to its end, as it is in a model, so that every byte can be checked. docs/attaching.md explains
the calls.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import Counter, deque
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

try:
    import numpy as np

    from kvferry.core.engine_api import StepProgress
    from kvferry.core.groups import GroupLayout, GroupSpec
    from kvferry.core.keys import Key
    from kvferry.core.policy import PolicyResolver, RequestPolicy
    from kvferry.core.pool.manager import OffloadManager
    from kvferry.core.scheduler.scheduler import Hit, Later, OffloadScheduler
    from kvferry.core.transfers import LoadOutcome, TransferJob
    from kvferry.cuda_ops.copy.cpu_copy import CpuCopyEngine
    from kvferry.cuda_ops.copy.layout import DeviceLayout
    from kvferry.cuda_ops.pool.host_pool import HostPool
except ImportError as error:
    sys.exit(f"{error}: kvferry is not installed for {sys.executable}; run `pip install .`, or use .venv/bin/python")

BLOCK_TOKENS = 16
BLOCK_BYTES = 4096
DEVICE_BLOCKS = 8
POOL_SLOTS = 20
IDLE_S = 0.01


def hash_blocks(tokens: Sequence[int]) -> list[bytes]:
    """Return a hash for each full block, which includes the previous one: it identifies all tokens up to its end."""
    hashes = [b""]
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = np.array(tokens[start : start + BLOCK_TOKENS], dtype=np.int64).tobytes()
        hashes.append(hashlib.sha256(hashes[-1] + block).digest())
    return hashes[1:]


def compute_kv(block_hash: bytes) -> np.ndarray:
    """Return the KV of a block, uint8 `[BLOCK_BYTES]`."""
    return np.frombuffer(hashlib.shake_256(block_hash).digest(BLOCK_BYTES), dtype=np.uint8)


@dataclass
class Request:
    """A `kvferry.core.engine_api.EngineRequest`."""

    request_id: str
    tokens: Sequence[int]
    aliases: Sequence[str] = ()
    tenant: str | None = None
    lora: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    block_hashes: Sequence[bytes] = field(init=False)

    def __post_init__(self) -> None:
        self.block_hashes = hash_blocks(self.tokens)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


class Device:
    """Memory of the device, and a `kvferry.core.engine_api.DeviceView` of its blocks, which are not cached."""

    def __init__(self) -> None:
        self.memory = np.zeros((DEVICE_BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self._free = deque(range(DEVICE_BLOCKS))
        self._uses: Counter[int] = Counter()
        self._allocated: list[int] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        blocks = [self._free.popleft() for _ in range(count)]
        self._allocated += blocks
        self.hold(blocks)
        return blocks

    def hold(self, block_ids: Sequence[int]) -> None:
        """Keep blocks: those of a request, and those that a transfer uses, even if the request has ended."""
        self._uses.update(block_ids)

    def release(self, block_ids: Sequence[int], *, reuse_first: bool = False) -> None:
        for block in block_ids:
            self._uses[block] -= 1
            if not self._uses[block]:
                self.memory[block] = 0
                self._free.append(block)

    def take_allocated(self, among: Container[int]) -> dict[int, Key | None]:
        allocated, self._allocated = self._allocated, []
        return {block: None for block in allocated if block in among}

    def free_blocks(self) -> Iterator[int]:
        return iter(list(self._free))

    def contents(self, block_ids: Sequence[int]) -> list[Key | None]:
        return [None] * len(block_ids)

    def resident(self, keys: Sequence[Key]) -> list[bool]:
        return [False] * len(keys)


class Engine:
    """Computes one request at a time."""

    def __init__(self) -> None:
        self.device = Device()
        layout = GroupLayout([GroupSpec(BLOCK_TOKENS, BLOCK_BYTES)])
        self.manager = OffloadManager(POOL_SLOTS, layout.slot_bytes)
        policies = PolicyResolver(RequestPolicy(), {}, self.manager.lock)
        self.offload = OffloadScheduler(self.manager, policies, self.device, layout)
        pool = HostPool(POOL_SLOTS, layout.slot_bytes)
        # An engine that sleeps while it is idle is woken by the last argument.
        self.copies = CpuCopyEngine(DeviceLayout.of_arrays([self.device.memory]), pool, lambda: None)

    def run(self, request: Request) -> int:
        """Compute a request, and return how many of its tokens were loaded instead.

        Raises:
            RuntimeError: a block has other bytes than computing it gives.
        """
        self.offload.on_new_request(request, time.time())
        num_loaded, table = self._load(request)
        progress = StepProgress(request.request_id, [table], len(request.tokens))
        self._step([progress], request, num_loaded)
        for block, block_hash in zip(table, request.block_hashes, strict=True):
            if not np.array_equal(self.device.memory[block], compute_kv(block_hash)):
                raise RuntimeError(f"{request.request_id}: block {block} has wrong bytes")
        self.offload.on_request_finished(request.request_id, time.time())
        self.device.release(table)
        return num_loaded

    def finish_transfers(self) -> None:
        """Run steps until no transfer is under way, as an engine does that has nothing to compute."""
        while self.offload.has_open_work():
            self._step()

    def _load(self, request: Request) -> tuple[int, list[int]]:
        """Allocate a request's blocks, and load what the pool has; return the tokens loaded, and the block table."""
        while True:
            # Another engine would run other requests instead of idle steps.
            while isinstance(found := self.offload.match(request.request_id, 0, time.time()), Later):
                self._step()
            while self.device.num_free < len(request.block_hashes):
                self._step()
            table = self.device.allocate(len(request.block_hashes))
            num_tokens = found.num_tokens if isinstance(found, Hit) else 0
            self.offload.commit(request.request_id, [table], num_tokens, time.time())
            if not num_tokens:
                return 0, table
            while not (outcomes := self._step()):
                pass
            if outcomes[0].ok:
                return num_tokens, table
            # What failed is not found a second time.
            self.device.release(table)

    def _step(
        self, progress: Sequence[StepProgress] = (), computed: Request | None = None, num_loaded: int = 0
    ) -> list[LoadOutcome]:
        """Run one step, which computes a request's blocks or none; return the loads that have ended before it."""
        outcomes = self.offload.on_transfers_finished(self.copies.poll(), time.time())
        plan = self.offload.plan_step(progress, time.time())
        for job in plan.stores_ahead:
            self.copies.submit_ahead(job)
        self._submit(plan.loads)
        if computed is not None:
            (table,) = progress[0].block_ids
            for i in range(num_loaded // BLOCK_TOKENS, len(table)):
                self.device.memory[table[i]] = compute_kv(computed.block_hashes[i])
        self._submit(plan.stores)
        if computed is None:
            self.copies.wait([job.job_id for job in plan.jobs], IDLE_S)
        return outcomes

    def _submit(self, jobs: Sequence[TransferJob]) -> None:
        for job in jobs:
            self.copies.submit(job)


def main() -> None:
    """Run requests on a device that holds one of them at a time, and a pool that holds two and a half."""
    engine = Engine()
    prompts = {name: [ord(name)] * BLOCK_TOKENS * DEVICE_BLOCKS for name in "ABCD"}
    for number, name in enumerate("ABACDAD"):
        loaded = engine.run(Request(f"{number}-{name}", prompts[name]))
        engine.finish_transfers()
        evicted = engine.manager.evictions.total
        print(f"{name}: {loaded:3} of {len(prompts[name])} tokens loaded, {evicted:2} blocks evicted so far")
    engine.copies.close()


if __name__ == "__main__":
    main()
