"""Hold times of the manager lock by call site: median, 99% and maximum of outermost holds, in milliseconds.

CPU time of the thread that holds it, so that other processes on the machine do not count.

Run: OMP_NUM_THREADS=1 python -m bench.lock [--slots 1000000 12000] [--requests 40]

Requests of 8,192 blocks go through a full pool, so that every block stored evicts another; each prompt comes twice,
and the second time it is loaded. Steps compute 8,192 tokens. Then operators list, look, reset and switch the policy.
In lazy mode some of them are on the device only then, whose own cache finds nothing here, and are stored on demand.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest.mock import patch

from bench.report import environment
from kvferry.core.engine_api import StepProgress, StoreMode
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.keys import Key, RequestFilter, make_keys
from kvferry.core.policy import PolicyResolver, RequestPolicy
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.scheduler import Hit, Later, OffloadScheduler, SchedulerOptions
from kvferry.core.transfers import StepPlan, TransferResult

BLOCK_TOKENS = 16
BLOCKS = 8192
STEP_BLOCKS = 512
DECODE_STEPS = 4


class TimedLock:
    """A re-entrant lock that records the time of each outermost hold by the acquiring function."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0
        self._began_s = 0.0
        self._site = ""
        self.holds_ms: dict[str, list[float]] = defaultdict(list)

    def __enter__(self) -> bool:
        self._lock.acquire()
        self._depth += 1
        if self._depth == 1:
            self._site = sys._getframe(1).f_code.co_qualname
            self._began_s = time.thread_time()
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._depth == 1:
            self.holds_ms[self._site].append((time.thread_time() - self._began_s) * 1e3)
        self._depth -= 1
        self._lock.release()


class Device:
    """Device blocks of the latest request only, free once it has finished, and taken in order by the next one."""

    def __init__(self) -> None:
        self.contents_of: list[Key | None] = [None] * (BLOCKS + 1)
        self.first_free = 0
        self._allocated: dict[int, Key | None] = {}

    def allocate(self, blocks: range) -> None:
        """Give the first free blocks to the next request."""
        self.first_free = blocks.stop
        for block in blocks:
            self._allocated[block] = self.contents_of[block]
            self.contents_of[block] = None

    def hold(self, block_ids: Sequence[int]) -> None:
        """Do nothing: no block is reused here."""

    def release(self, block_ids: Sequence[int], *, reuse_first: bool = False) -> None:
        """Undo `hold`."""

    def free_blocks(self) -> Iterator[int]:
        """Return the blocks of the latest request that the next one has not taken."""
        return iter(range(self.first_free, BLOCKS))

    def take_allocated(self, among: Container[int]) -> dict[int, Key | None]:
        """See `DeviceView`."""
        taken, self._allocated = self._allocated, {}
        return {block: key for block, key in taken.items() if block in among}

    def contents(self, block_ids: Sequence[int]) -> list[Key | None]:
        """See `DeviceView`."""
        return [self.contents_of[block] for block in block_ids]

    def resident(self, keys: Sequence[Key]) -> list[bool]:
        """See `DeviceView`."""
        return [False] * len(keys)


class Request:
    """A prompt of `BLOCKS` blocks and one token."""

    aliases: Sequence[str] = ()
    tenant: str | None = None
    lora: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None

    def __init__(self, request_id: str, number: int) -> None:
        self.request_id = request_id
        self.block_hashes = [(number << 64 | i * 0x9E3779B97F4A7C15 % 2**64).to_bytes(32, "big") for i in range(BLOCKS)]
        self.num_prompt_tokens = BLOCKS * BLOCK_TOKENS + 1
        self.num_tokens = self.num_prompt_tokens


class Bench:
    """A scheduler on a pool, without an engine or bytes."""

    def __init__(self, num_slots: int, mode: StoreMode) -> None:
        with patch("kvferry.core.pool.manager.threading", SimpleNamespace(RLock=TimedLock)):
            self.manager = OffloadManager(num_slots, 4096)
        self.lock: Any = self.manager.lock
        policies = PolicyResolver(RequestPolicy(), {}, self.manager.lock)
        self.device = Device()
        layout = GroupLayout([GroupSpec(BLOCK_TOKENS, 4096)])
        self.scheduler = OffloadScheduler(
            self.manager,
            policies,
            self.device,
            layout,
            SchedulerOptions(store_mode=mode, watermark_blocks=STEP_BLOCKS),
        )
        self._number = 0
        self._now_s = 1000.0

    def fill(self) -> None:
        """Run requests until the pool evicts."""
        while not self.manager.evictions.total:
            self.run()
        self.lock.holds_ms.clear()

    def run(self, *, again: bool = False) -> None:
        """Run one request, with a new prompt or the last one's."""
        self._number += not again
        name = f"r{self._number}{'-again' if again else ''}"
        request, scheduler = Request(name, self._number), self.scheduler
        tables = [list(range(BLOCKS + 1))]
        scheduler.on_new_request(request, self._now())
        found = scheduler.match(name, 0, self._now())
        while isinstance(found, Later):
            self._report(scheduler.plan_step([], self._now()))
            found = scheduler.match(name, 0, self._now())
        num_tokens = found.num_tokens if isinstance(found, Hit) else 0
        num_loaded = num_tokens // BLOCK_TOKENS
        self.device.allocate(range(num_loaded))
        scheduler.commit(name, tables, num_tokens, self._now())
        self._report(scheduler.plan_step([], self._now()))
        for end in range(num_tokens, request.num_tokens, STEP_BLOCKS * BLOCK_TOKENS):
            first = end // BLOCK_TOKENS
            self.device.allocate(range(first, min(first + STEP_BLOCKS, BLOCKS + 1)))
            self._step(name, tables, min(end + STEP_BLOCKS * BLOCK_TOKENS, request.num_tokens))
        for _ in range(DECODE_STEPS):
            self._step(name, tables, request.num_tokens)
        scheduler.on_request_finished(name, self._now())
        self.device.contents_of = [*make_keys(request.block_hashes, 0), None]
        self.device.first_free = 0
        for _ in range(BLOCKS // STEP_BLOCKS + 1):
            self._report(scheduler.plan_step([], self._now()))

    def operate(self) -> None:
        """Do what operators and the history do concurrently with the engine."""
        scheduler, inventory = self.scheduler, Inventory(self.manager)
        for _ in range(5):
            scheduler.requests.page(None, 1000, self._now_s)
            scheduler.requests.find("unknown", self._now_s)
            scheduler.snapshot()
            inventory.list_blocks(0, 1000)
        inventory.slot_states()
        for _ in inventory.all_rows():
            pass
        while inventory.dirty_rows(1000) is not None:
            pass
        for name in ("arc", "lru"):
            self.manager.switch_policy(name)
        scheduler.resets.reset(self._now_s, RequestFilter(request="r1*"))
        scheduler.resets.reset(self._now_s)
        scheduler.abandon_all(self._now_s, 0)

    def _step(self, name: str, tables: list[list[int]], num_tokens: int) -> None:
        self._report(self.scheduler.plan_step([StepProgress(name, tables, num_tokens)], self._now()))

    def _report(self, plan: StepPlan) -> None:
        results = [TransferResult(job.job_id, num_bytes=1, seconds=1e-3) for job in plan.jobs]
        self.scheduler.on_transfers_finished(results, self._now())

    def _now(self) -> float:
        self._now_s += 0.01
        return self._now_s


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slots", type=int, nargs="+", default=[1_000_000, 12_000])
    parser.add_argument("--requests", type=int, default=40)
    options = parser.parse_args()
    print(environment("numpy", "numba"), end="\n\n")
    print("| slots | mode | call site | holds | median ms | 99% | longest |")
    print("| ---: | --- | --- | ---: | ---: | ---: | ---: |")
    for num_slots in options.slots:
        for mode in StoreMode:
            bench = Bench(num_slots, mode)
            bench.fill()
            gc.collect()
            for _ in range(options.requests):
                bench.run()
                bench.run(again=True)
            bench.operate()
            for site, holds in sorted(bench.lock.holds_ms.items()):
                high = statistics.quantiles(holds, n=100)[-1] if len(holds) > 1 else holds[0]
                figures = f"{statistics.median(holds):.3f} | {min(high, max(holds)):.3f} | {max(holds):.3f}"
                print(f"| {num_slots:,} | {mode} | {site} | {len(holds):,} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
