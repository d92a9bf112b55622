"""Memory of finished requests, however long they were and whatever ids they had."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import pytest

from kvferry.core.engine_api import StepProgress, StoreMode
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.keys import Key
from kvferry.core.policy import Level, PolicyResolver, RequestPolicy
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.scheduler import Later, OffloadScheduler, SchedulerOptions
from kvferry.core.tiers.base import TierCounts, TierJob, TierResult
from kvferry.core.transfers import StepPlan, TransferResult

BLOCK = 16
LONG = 8192
MAX_BYTES = 4096


@dataclass
class Request:
    """A request of whole blocks and one token more, whose hashes are its name's."""

    request_id: str
    num_blocks: int
    content: str = ""
    aliases: Sequence[str] = ()
    tenant: str | None = None
    lora: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    block_hashes: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        content = self.content or self.request_id[-20:]
        self.block_hashes = [f"{content}-{i:06}".encode().rjust(32) for i in range(self.num_blocks)]
        self.num_prompt_tokens = self.num_tokens = self.num_blocks * BLOCK + 1


class Device:
    """A device that never runs out of blocks. Those in `names` are free, and hold these keys."""

    def __init__(self) -> None:
        self.names: dict[int, Key] = {}

    def hold(self, block_ids: Sequence[int]) -> None: ...
    def release(self, block_ids: Sequence[int], *, reuse_first: bool = False) -> None: ...

    def free_blocks(self, after: int | None) -> Iterator[int] | None:
        return iter(range(len(self.names))) if after is None else None

    def contents(self, block_ids: Sequence[int]) -> list[Key | None]:
        return [self.names.get(block) for block in block_ids]

    def resident(self, keys: Sequence[Key]) -> list[bool]:
        return [False] * len(keys)

    def take_given_out(self, among: object) -> dict[int, Key | None]:
        return {}


class FullTier:
    """A tier that has every block of the requests whose hashes begin with `tier`."""

    timeout_s = 60.0

    def __init__(self) -> None:
        self._results: list[TierResult] = []

    def on_new_request(self, request: Any) -> Level:
        return Level.BLOCK

    def on_request_finished(self, request_id: str) -> None: ...

    def look_up(self, number: int, keys: Sequence[Key]) -> None:
        self._results.append(TierResult(number, np.array([b"tier" in key for key in keys])))

    def store(self, job: TierJob) -> None:
        self._results.append(TierResult(job.number, np.ones(len(job), dtype=np.bool_)))

    def load(self, job: TierJob) -> None:
        self.store(job)

    def cancel(self, number: int) -> None: ...
    def drop(self, keys: Sequence[Key]) -> None: ...
    def reset(self, number: int, match: Any) -> None: ...

    def poll(self) -> list[TierResult]:
        results, self._results = self._results, []
        return results

    def health(self) -> list[str]:
        return []

    def counts(self) -> TierCounts:
        return TierCounts()

    def close(self, timeout_s: float) -> None: ...


class Engine:
    """Runs one request after the other through the scheduler."""

    def __init__(self, num_slots: int, mode: StoreMode = StoreMode.EAGER, tiers: Any = None, **options: Any) -> None:
        manager = OffloadManager(num_slots, 64)
        self.policies = PolicyResolver(RequestPolicy(), {}, manager.lock)
        self.device = Device()
        self.scheduler = OffloadScheduler(
            manager,
            self.policies,
            self.device,
            GroupLayout([GroupSpec(BLOCK, 64)]),
            SchedulerOptions(store_mode=mode, watermark_blocks=LONG, **options),
            tiers={"disk": FullTier()} if tiers is None else tiers,
        )
        self.now_s = 1000.0

    def run(self, request: Request) -> None:
        scheduler = self.scheduler
        scheduler.on_new_request(request, self.now_s)
        found: Any = Later()
        while isinstance(found, Later):
            self.now_s += 1e-4
            found = scheduler.match(request.request_id, 0, self.now_s)
            self._finish_transfers(StepPlan())
        num_tokens = getattr(found, "num_tokens", 0)
        tables = [list(range(request.num_blocks + 1))]
        self.device.names = {}
        scheduler.commit(request.request_id, tables, num_tokens, self.now_s)
        self._finish_transfers(scheduler.plan_step([], self.now_s))
        # Each step offers a part of what is full.
        for _ in range(request.num_blocks // 500 + 2):
            progress = StepProgress(request.request_id, tables, request.num_tokens)
            self._finish_transfers(scheduler.plan_step([progress], self.now_s))
        self.device.names = {i: block_hash + b"\0" for i, block_hash in enumerate(request.block_hashes)}
        scheduler.on_request_finished(request.request_id, self.now_s)
        self._finish_transfers(scheduler.plan_step([], self.now_s))
        while scheduler.has_open_work():
            self._finish_transfers(scheduler.plan_step([], self.now_s))

    def _finish_transfers(self, plan: StepPlan) -> None:
        self.scheduler.on_transfers_finished(
            [TransferResult(job.job_id) for job in (*plan.loads, *plan.stores)], self.now_s
        )

    def view(self, request_id: str) -> Any:
        return self.scheduler.requests.find(request_id, self.now_s)

    def remembered_bytes(self) -> float:
        """Bytes for each finished request."""
        recent = list(self.scheduler.requests._recent.values())
        return size_of(recent, [self.policies, RequestPolicy]) / len(recent)


def size_of(roots: list[Any], shared: list[Any]) -> int:
    """Bytes of all that is reachable from the roots and not from what is shared."""
    seen = {id(each) for each in shared}

    def walk(found: list[Any]) -> int:
        total = 0
        while found:
            each = found.pop()
            if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType)):
                continue
            seen.add(id(each))
            total += sys.getsizeof(each)
            found += gc.get_referents(each)
        return total

    walk(list(shared))
    seen.difference_update(map(id, roots))
    return walk(list(roots))


@pytest.mark.parametrize("mode", list(StoreMode))
def test_long_finished_request_when_remembered_takes_few_bytes(mode: StoreMode) -> None:
    engine = Engine(2 * LONG + 4000, mode)
    for name in ("tier", "stored", "stored-again", "misses"):
        engine.run(Request(name, LONG, content=name[:6]))
    assert engine.view("tier").prompt_tokens.tier_hit["disk"] >= LONG * BLOCK // 2
    assert engine.view("misses").missed_tokens.causes["new"]
    assert engine.view("stored").store.stored == LONG
    assert engine.remembered_bytes() <= MAX_BYTES


def test_long_ids_when_remembered_take_few_bytes_and_are_found() -> None:
    engine = Engine(64)
    ids = ["x" * 100_000 + str(i) for i in range(5)]
    for name in ids:
        engine.run(Request(name, 3, aliases=tuple(f"{name}-{i}" for i in range(50)), lora="y" * 100_000 + name))
    assert engine.remembered_bytes() <= MAX_BYTES
    views = [engine.view(name) for name in ids]
    assert len({view.sequence for view in views}) == len(ids)
    for name, view in zip(ids, views, strict=True):
        assert engine.view(f"{name}-49").sequence == view.sequence
        assert engine.view(view.request_id).sequence == view.sequence


def test_many_tier_names_of_client_when_remembered_take_few_bytes() -> None:
    engine = Engine(64, request_fields=("tiers",))
    for i in range(3):
        engine.run(Request(f"r{i}", 3, kv_transfer_params={"tiers": [f"tier-{i}-{j}" for j in range(10_000)]}))
    assert engine.remembered_bytes() <= MAX_BYTES
