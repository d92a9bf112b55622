"""Steps that vLLM's CPU backend never takes: recurrent states, asynchronous scheduling, drafts, several ranks, pipeline
stages and the second model runner. What vLLM hands over is fabricated; the connector, core and vLLM's pool are real.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.app.common.discovery import find_services
from kvferry.app.engines.identity import DigestCache
from kvferry.app.engines.vllm.connector import KVFerryConnector
from kvferry.app.engines.vllm.device import VllmDevice
from kvferry.app.engines.vllm.extents import EngineExtents
from kvferry.app.engines.vllm.layout import NULL_BLOCK, read_layout
from kvferry.app.engines.vllm.metadata import ResizeCommand, ResizeResult, StepMetadata, WorkerReports
from kvferry.app.engines.vllm.requests import Adapters
from kvferry.app.engines.vllm.scheduler import ConnectorScheduler, StepSignals
from kvferry.app.guard import MAX_ERRORS, ErrorLog, OffloadGuard
from kvferry.app.service.server import listen
from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.engine_api import StoreMode
from kvferry.core.errors import StartError
from kvferry.core.keys import group_of, hash_of
from kvferry.core.policy import PolicyResolver, RequestPolicy
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.lookup import PrefixLookup
from kvferry.core.scheduler.scheduler import OffloadScheduler, SchedulerOptions
from kvferry.core.transfers import TransferJob, TransferResult
from kvferry.cuda_ops.pool.extents import PoolPlan
from kvferry.cuda_ops.pool.limits import NotEnoughMemory
from tests.harness.server_process import free_port
from tests.harness.waiting import DEADLINE_S, wait_until
from tests.vllm import fabricated as fake
from tests.vllm.engines import engine_options, transfer_config
from tests.vllm.fabricated import BLOCK, NUM_BLOCKS, allocate, block_bytes, cache_config, fill, groups_of
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock, KVCacheBlockCopy
from vllm.v1.core.sched.output import KVConnectorBlockState
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu.kv_connector import ActiveKVConnector
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin


@dataclass
class LiveRequest:
    """As much of vLLM's request as a connector reads."""

    request_id: str
    num_prompt_tokens: int
    block_hashes: list[bytes]
    num_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    kv_transfer_params: None = None
    cache_salt: None = None
    lora_request: None = None
    priority: int = 0
    skip_reading_prefix_cache: bool = False
    session_id: None = None

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens


def hashes(count: int, name: str = "a") -> list[bytes]:
    return [f"{name}{number}".encode().ljust(32, b".") for number in range(count)]


@dataclass
class World:
    """A `ConnectorScheduler` with vLLM's block pool, and steps made by the test."""

    groups: list[KVCacheGroupSpec]
    num_workers: int = 1
    tier_ready: threading.Event | None = None
    writes_early: bool = False
    requests: dict[str, LiveRequest] = field(default_factory=dict)
    tables: dict[str, tuple[list[int], ...]] = field(default_factory=dict)
    num_look_ups: int = 0

    def __post_init__(self) -> None:
        self.layout = read_layout(cache_config(KVCacheLayout.LBNHC, self.groups))
        slots = self.layout.group_layout(1, self.num_workers)
        adapters = Adapters("this start", 100, DigestCache(None))
        device = VllmDevice(adapters, hash_bytes=32, writes_early=self.writes_early)
        self.pool = BlockPool(NUM_BLOCKS * 4, True, BLOCK)
        device.bind(self.pool)
        manager = OffloadManager(64, slots.slot_bytes)
        self.core = OffloadScheduler(
            manager,
            PolicyResolver(RequestPolicy(offload_prompt_only=False), {}, manager.lock),
            device,
            slots,
            SchedulerOptions(num_workers=self.num_workers),
            cost_model=LoadOrCompute("always"),
        )
        ticks = itertools.count(1)
        # A second for each hook: a nested one reads no clock.
        hooks = itertools.count()
        self.guard = OffloadGuard(self.core, self.num_workers, ErrorLog(), timer=lambda: float(next(hooks)))
        self.scheduler = ConnectorScheduler(
            self.guard,
            device,
            self.layout,
            signals=StepSignals(self.tier_ready, clock=lambda: float(next(ticks))),
        )

    def take(self, count: int) -> list[int]:
        """Device blocks, as requests take them."""
        return [block.block_id for block in self.pool.get_new_blocks(count)]

    def take_cached(self, count: int, name: str = "a") -> list[KVCacheBlock]:
        """Device blocks of a request that vLLM's prefix cache has."""
        blocks = self.pool.get_new_blocks(count)
        request = LiveRequest(name, count * BLOCK, hashes(count, name))
        self.pool.cache_full_blocks(request, blocks, 0, count, BLOCK, 0)
        return blocks

    def add(self, request: LiveRequest, *tables: list[int]) -> None:
        self.requests[request.request_id] = request
        self.tables[request.request_id] = tables
        self.scheduler.on_new_request(request)

    def step(
        self,
        computed: dict[str, tuple[int, int]],
        offers: dict[str, list[tuple[int, int, int]]] | None = None,
        drafts: dict[str, list[int]] | None = None,
        unchanged: Sequence[str] = (),
        zeroed: Sequence[int] = (),
        copied: Sequence[KVCacheBlockCopy] = (),
    ) -> StepMetadata:
        """A step that takes each request from so many computed tokens over so many new ones. Those that are `unchanged`
        were given no block. The model runner first zeroes and copies some blocks."""
        plan = self.scheduler.plan(
            SimpleNamespace(
                preempted_req_ids=(),
                finished_req_ids=(),
                total_num_scheduled_tokens=sum(new for _, new in computed.values()),
                num_scheduled_tokens={name: new for name, (_, new) in computed.items()},
                scheduled_spec_decode_tokens=drafts or {},
                new_block_ids_to_zero=list(zeroed) or None,
                kv_cache_block_copies=list(copied) or None,
                scheduled_new_reqs=[],
                scheduled_cached_reqs=SimpleNamespace(
                    req_ids=list(computed),
                    num_computed_tokens=[before for before, _ in computed.values()],
                    new_block_ids=[None if name in unchanged else ((),) for name in computed],
                ),
                kv_connector_block_state=KVConnectorBlockState(
                    {*computed, *(offers or {})}, self.look_up, offers or {}
                ),
            )
        )
        for name, (before, new) in computed.items():
            self.requests[name].num_computed_tokens = before + new
        return plan

    def look_up(self, request_id: str) -> tuple[list[int], ...]:
        """Return a request's tables, which vLLM builds at each call."""
        self.num_look_ups += 1
        return self.tables[request_id]

    def report(self, results: Sequence[TransferResult]) -> None:
        self.scheduler.process_output(KVConnectorOutput(kv_connector_worker_meta=WorkerReports(list(results))))

    def end(self, *jobs: TransferJob) -> None:
        self.report([TransferResult(job.job_id, rank) for job in jobs for rank in range(self.num_workers)])

    def stored(self) -> set[tuple[int, bytes]]:
        """Groups and hashes of what can be loaded."""
        table = self.core.manager.table
        keys = [table.keys[slot] for slot in range(table.num_slots)]
        return {(group_of(key), hash_of(key)) for key in keys if key is not None}


def blocks_of(jobs: Sequence[TransferJob]) -> list[tuple[int, int]]:
    """Groups and device blocks that jobs name."""
    return sorted((run.group, block) for job in jobs for run in job.runs for block in run.block_ids.tolist())


# --- block tables ---------------------------------------------------------------------------------------------------


def test_append_only_tables_are_read_when_they_have_grown() -> None:
    """vLLM builds the list of all blocks of a request at each call, which is expensive at each token."""
    world = World(groups_of(fake.FULL))
    request = LiveRequest("one", BLOCK, hashes(1))
    blocks = world.take(2)
    world.add(request, blocks[:1])
    world.end(*world.step({"one": (0, BLOCK)}).stores)
    world.tables["one"] = (blocks,)
    world.step({"one": (BLOCK, 1)})
    assert world.num_look_ups == 2
    for computed in range(BLOCK + 1, 2 * BLOCK - 1):
        world.step({"one": (computed, 1)}, unchanged=["one"])
    assert world.num_look_ups == 2
    request.block_hashes += hashes(2)[1:]
    assert blocks_of(world.step({"one": (2 * BLOCK - 1, 1)}, unchanged=["one"]).stores) == [(0, blocks[1])]
    assert world.num_look_ups == 2
    # What it had before it was preempted says nothing of what it has now.
    request.num_preemptions += 1
    world.scheduler.match(request, 0)
    world.step({"one": (0, 1)}, unchanged=["one"])
    assert world.num_look_ups == 3


def test_block_that_left_its_window_is_not_stored() -> None:
    """It was freed without a new block for the request, and may belong to another request."""
    world = World(groups_of(fake.WINDOW, fake.FULL))
    request = LiveRequest("one", 3 * BLOCK, hashes(3))
    full, window = world.take(3), world.take(3)
    world.add(request, window, full)
    world.step({"one": (0, BLOCK - 1)})
    world.tables["one"] = ([NULL_BLOCK, *window[1:]], full)
    orders = world.step({"one": (BLOCK - 1, 2 * BLOCK + 1)}, unchanged=["one"])
    assert (0, window[0]) not in blocks_of(orders.stores)
    assert (1, full[0]) in blocks_of(orders.stores)


# --- stores ahead of a step ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writes_early", [False, True])
def test_blocks_written_before_the_hook_are_not_stored_ahead(writes_early: bool) -> None:
    """The second model runner zeroes and copies blocks before it calls `handle_preemptions`, the first after that."""
    world = World(groups_of(fake.FULL), writes_early=writes_early)
    world.core.set_store_mode(StoreMode.LAZY)
    request = LiveRequest("one", 4 * BLOCK + 1, hashes(4))
    taken = world.pool.get_new_blocks(4)
    blocks = [block.block_id for block in taken]
    world.pool.cache_full_blocks(request, taken, 0, 4, BLOCK, 0)
    world.add(request, blocks)
    assert not world.step({"one": (0, 4 * BLOCK)}).stores_ahead
    world.scheduler.finish("one")
    world.pool.free_blocks(taken)
    world.take(world.pool.get_num_free_blocks())
    orders = world.step({}, zeroed=blocks[:1], copied=[KVCacheBlockCopy(blocks[3], blocks[1])])
    assert blocks_of(orders.stores_ahead) == [(0, block) for block in blocks[2 if writes_early else 0 :]]
    world.end(*orders.stores_ahead)
    assert {name for _, name in world.stored()} == set(hashes(4)[2 if writes_early else 0 :])
    assert world.core.snapshot().store.skipped["left_device"] == (2 if writes_early else 0)
    # What they hold is overwritten by now, whatever becomes of them.
    world.pool.free_blocks(taken)
    world.take(4)
    assert not world.step({}).stores_ahead


def test_blocks_stored_from_the_free_queue_return_to_their_places() -> None:
    world = World(groups_of(fake.FULL))
    device, queue = world.core._device, world.pool.free_block_queue
    before = [block.block_id for block in queue.get_all_free_blocks()]
    # A finished request frees its last blocks first, and their slots are stored in ascending order.
    parts = [before[4:1:-1], before[7:4:-1]]
    for part in parts:
        device.hold(part)
    for part in parts:
        device.release(part, reuse_first=True)
    assert [block.block_id for block in queue.get_all_free_blocks()] == before
    assert world.pool.get_num_free_blocks() == len(before)


def test_blocks_stored_while_those_behind_are_taken_are_allocated_next() -> None:
    world = World(groups_of(fake.FULL))
    device = world.core._device
    held = list(device.free_blocks())[2:8]
    device.hold(held)
    world.take(20)
    device.release(held, reuse_first=True)
    assert world.take(len(held)) == held


@pytest.mark.parametrize("hits", [False, True])
def test_blocks_stored_while_those_behind_move_back_are_allocated_next(hits: bool) -> None:
    world = World(groups_of(fake.FULL))
    device, pool = world.core._device, world.pool
    cached = world.take_cached(12)
    world.take(pool.get_num_free_blocks())
    pool.free_blocks(cached)
    held = list(device.free_blocks())[:4]
    device.hold(held)
    if hits:
        behind = cached[4:8]
        pool.touch(behind)
    else:
        behind = world.take_cached(4, "b")
    pool.free_blocks(behind)
    device.release(held, reuse_first=True)
    assert world.take(len(held)) == held


def test_blocks_stored_from_the_queues_end_go_before_those_freed_since() -> None:
    """What was freed since is not stored yet, and would be lost."""
    world = World(groups_of(fake.FULL))
    device, pool = world.core._device, world.pool
    stored, freed = world.take_cached(4, "a"), world.take_cached(4, "b")
    world.take(pool.get_num_free_blocks())
    pool.free_blocks(stored)
    held = list(device.free_blocks())
    device.hold(held)
    pool.free_blocks(freed)
    device.release(held, reuse_first=True)
    assert world.take(len(held)) == held


@pytest.mark.parametrize("was_free", [False, True])
def test_blocks_used_by_a_request_while_stored_are_allocated_last(was_free: bool) -> None:
    """A slot is stored before its first block is reused; requests may use the others, which their prefixes share."""
    world = World(groups_of(fake.FULL))
    device, pool = world.core._device, world.pool
    cached = world.take_cached(4)
    held = [block.block_id for block in cached]
    if was_free:
        pool.free_blocks(cached)
    device.hold(held)
    if was_free:
        pool.touch(cached)
    pool.free_blocks(cached)
    device.release(held, reuse_first=True)
    assert list(device.free_blocks())[-4:] == held[::-1]


class FreeQueueMachine(RuleBasedStateMachine):
    """vLLM's pool, used by requests and by transfers, against a list and the blocks that must be behind others."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(14, True, BLOCK)
        self.device = VllmDevice(Adapters("this start", 100, DigestCache(None)), hash_bytes=32)
        self.device.bind(self.pool)
        self.free = self.queue()
        self.used: list[list[Any]] = []
        self.held: list[list[int]] = []
        self.behind: dict[int, set[int]] = {}
        self.names = itertools.count()

    def queue(self) -> list[int]:
        return [block.block_id for block in self.pool.free_block_queue.get_all_free_blocks()]

    def move(self, blocks: list[Any]) -> None:
        """Blocks left the queue for requests."""
        moved = {block.block_id for block in blocks}
        self.free = [block for block in self.free if block not in moved]
        for block in moved:
            self.behind.pop(block, None)
        for behind in self.behind.values():
            behind -= moved
        self.used.append(blocks)

    @rule(count=st.integers(1, 6), is_full=st.booleans())
    def allocate(self, count: int, is_full: bool) -> None:
        count = min(count, len(self.free))
        if not count:
            return
        expected = self.free[:count]
        blocks = self.pool.get_new_blocks(count)
        assert [block.block_id for block in blocks] == expected
        if is_full:
            request = LiveRequest("one", count * BLOCK, hashes(count, f"{next(self.names)}-"))
            self.pool.cache_full_blocks(request, blocks, 0, count, BLOCK, 0)
        self.move(blocks)

    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        cached = [block for block in self.pool.blocks if block.block_hash is not None]
        if cached:
            blocks = data.draw(st.lists(st.sampled_from(cached), min_size=1, max_size=4, unique_by=id))
            self.pool.touch(blocks)
            self.move(blocks)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        blocks = self.used.pop(data.draw(st.integers(0, len(self.used) - 1)))
        self.pool.free_blocks(reversed(blocks))
        freed = [block for block in reversed(blocks) if not block.ref_cnt]
        first = [block.block_id for block in freed if block.block_hash is None]
        last = [block.block_id for block in freed if block.block_hash is not None]
        self.free = [*first, *self.free, *last]
        for behind in self.behind.values():
            behind.update(last)

    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        chosen = st.lists(st.integers(1, 13), min_size=1, max_size=5, unique=True)
        blocks = data.draw(chosen)
        for block in blocks:
            for behind in self.behind.values():
                behind.discard(block)
            if block in self.free:
                place = self.free.index(block)
                self.behind[block] = set(self.free[place + 1 :])
                del self.free[place]
        self.device.hold(blocks)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), reuse_first=st.booleans())
    def release(self, data: st.DataObject, reuse_first: bool) -> None:
        blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.device.release(blocks, reuse_first=reuse_first)
        queue = self.queue()
        returned = [block for block in blocks if block in queue and block not in self.free]
        assert [block for block in queue if block not in returned] == self.free
        still_held = set(itertools.chain.from_iterable(self.held))
        places = {block: self.behind.pop(block) for block in blocks if block in self.behind and block not in still_held}
        for block in returned if reuse_first else ():
            assert all(queue.index(block) < queue.index(other) for other in places.get(block, ()))
        last = {block for block in returned if not (reuse_first and block in places)}
        last = {block for block in last if self.pool.blocks[block].block_hash is not None}
        assert last == set(queue[len(queue) - len(last) :])
        for behind in self.behind.values():
            behind.update(last)
        self.free = queue

    @precondition(lambda self: len(self.free) == 13)
    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache()

    @invariant()
    def queue_is_intact(self) -> None:
        queue = self.pool.free_block_queue
        found, block = [], queue.fake_free_list_tail.prev_free_block
        while block is not queue.fake_free_list_head:
            found.append(block.block_id)
            block = block.prev_free_block
        assert found[::-1] == self.queue() == self.free
        assert len(found) == queue.num_free_blocks
        assert sorted(found) == [block.block_id for block in self.pool.blocks[1:] if not block.ref_cnt]
        held = set(itertools.chain.from_iterable(self.held))
        assert self.device.num_held == len(held)
        assert set(self.device._successors) <= held


TestFreeQueue = FreeQueueMachine.TestCase
TestFreeQueue.settings = settings(max_examples=100, stateful_step_count=40, deadline=None, derandomize=True)


# --- recurrent states -----------------------------------------------------------------------------------------------


def test_recurrent_states_are_stored_from_offered_blocks_only() -> None:
    world = World(groups_of(fake.MAMBA, fake.FULL))
    request = LiveRequest("one", 4 * BLOCK, hashes(4))
    full, states = world.take(4), world.take(4)
    # A state's block is in the table only until the next boundary, and is then reused.
    world.add(request, [NULL_BLOCK, NULL_BLOCK, NULL_BLOCK, states[3]], full)
    first = world.step({"one": (0, 2 * BLOCK)}, {"one": [(0, states[0], BLOCK), (0, states[1], 2 * BLOCK)]})
    assert blocks_of(first.stores) == sorted([(0, states[0]), (0, states[1]), (1, full[0]), (1, full[1])])
    world.end(*first.stores)
    second = world.step({"one": (2 * BLOCK, 2 * BLOCK)}, {"one": [(0, states[3], 4 * BLOCK)]})
    # There was no offer for the third boundary: its state is nowhere, whatever the table says.
    assert blocks_of(second.stores) == sorted([(0, states[3]), (1, full[2]), (1, full[3])])
    world.end(*second.stores)
    assert {name for group, name in world.stored() if group == 0} == {request.block_hashes[n] for n in (0, 1, 3)}
    assert {name for group, name in world.stored() if group == 1} == set(request.block_hashes)


def test_recurrent_state_is_loaded_for_the_boundary_only() -> None:
    world = World(groups_of(fake.MAMBA, fake.FULL))
    first = LiveRequest("one", 3 * BLOCK + 5, hashes(3))
    full, states = world.take(4), world.take(2)
    world.add(first, [NULL_BLOCK, NULL_BLOCK, states[1], NULL_BLOCK], full)
    orders = world.step({"one": (0, 3 * BLOCK)}, {"one": [(0, states[0], 2 * BLOCK), (0, states[1], 3 * BLOCK)]})
    world.end(*orders.stores)
    world.scheduler.finish("one")
    again = LiveRequest("two", 3 * BLOCK + 5, hashes(3))
    world.add(again)
    assert world.scheduler.match(again, 0) == (3 * BLOCK, True)
    target, state = world.take(4), world.take(1)[0]
    tables = ([NULL_BLOCK, NULL_BLOCK, state], target)
    world.scheduler.commit(again, SimpleNamespace(get_block_ids=lambda: tables), 3 * BLOCK)
    orders = world.step({})
    assert blocks_of(orders.loads) == sorted([(0, state), *((1, block) for block in target[:3])])


def test_boundary_states_when_not_applicable_are_ignored() -> None:
    world = World(groups_of(fake.MAMBA, fake.FULL))
    request = LiveRequest("one", 4 * BLOCK, hashes(4))
    full, states = world.take(4), world.take(2)
    world.add(request, [NULL_BLOCK] * 4, full)
    offers = {"one": [(0, states[0], 3 * BLOCK), (0, states[0], BLOCK + 7)], "gone": [(0, states[1], BLOCK)]}
    assert blocks_of(world.step({"one": (0, 2 * BLOCK)}, offers).stores) == [(1, full[0]), (1, full[1])]


# --- steps that are planned before the last one has answered --------------------------------------------------------


def world_with_a_stored_prefix() -> tuple[World, LiveRequest]:
    """Two blocks in the pool, and a new request that begins with them."""
    world = World(groups_of(fake.FULL))
    world.add(LiveRequest("one", 2 * BLOCK, hashes(2)), world.take(2))
    world.end(*world.step({"one": (0, 2 * BLOCK)}).stores)
    world.scheduler.finish("one")
    again = LiveRequest("two", 2 * BLOCK + 1, hashes(2))
    world.add(again)
    return world, again


def test_load_when_committed_some_steps_later_begins_then() -> None:
    """Since 0.33 vLLM may wait for steps in flight before it says where a load goes."""
    world, again = world_with_a_stored_prefix()
    assert world.scheduler.match(again, 0) == (2 * BLOCK, True)
    for _ in range(3):
        assert world.step({}).loads == []
        assert world.core.snapshot().pool.pinned == 2
    tables = (world.take(3),)
    world.scheduler.commit(again, SimpleNamespace(get_block_ids=lambda: tables), 2 * BLOCK)
    assert world.scheduler.has_open_work()
    (load,) = world.step({}).loads
    assert blocks_of([load]) == [(0, block) for block in tables[0][:2]]
    world.end(load)
    assert world.core.snapshot().pool.pinned == 0


@pytest.mark.parametrize("has_failed", [False, True])
def test_each_load_ends_once_when_a_step_output_was_not_processed(
    has_failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM waits for ever for a load that never ends, and stops at one that ends twice."""
    world, first = world_with_a_stored_prefix()
    second = LiveRequest("three", 2 * BLOCK + 1, hashes(2))
    world.add(second)
    assert [world.scheduler.match(one, 0) for one in (first, second)] == [(2 * BLOCK, True)] * 2
    world.scheduler.commit(first, SimpleNamespace(get_block_ids=lambda: (world.take(3),)), 2 * BLOCK)
    (load,) = world.step({}).loads
    ended = TransferResult(load.job_id, 0, "broken" if has_failed else None)
    output = KVConnectorOutput(
        finished_recving={"two"},
        failed_recving={"two"} if has_failed else set(),
        kv_connector_worker_meta=WorkerReports([ended]),
    )
    world.scheduler.process_output_failed(output, RuntimeError("says the test"))
    monkeypatch.setattr(world.core, "commit", lambda *args: 1 / 0)
    world.scheduler.commit(second, SimpleNamespace(get_block_ids=lambda: (world.take(3),)), 2 * BLOCK)
    step = world.step({})
    # vLLM has learned the end of a failed load from the output, and not that of another.
    assert (output.finished_recving, step.failed_loads) == (
        ({"two"}, ["three"]) if has_failed else (set(), ["two", "three"])
    )
    assert world.step({}).failed_loads == []
    assert not world.scheduler.has_open_work()


@pytest.mark.parametrize("is_loading", [False, True])
def test_load_of_an_aborted_request_ends_once_whatever_fails(is_loading: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps the device blocks of an aborted request until its load ends."""
    world, request = world_with_a_stored_prefix()
    world.scheduler.match(request, 0)
    world.scheduler.commit(request, SimpleNamespace(get_block_ids=lambda: (world.take(3),)), 2 * BLOCK)
    if not is_loading:
        monkeypatch.setattr(world.core, "plan_step", lambda *args: 1 / 0)
    loads = world.step({}).loads
    assert len(loads) == is_loading
    output = KVConnectorOutput(
        finished_recving={"two"} if is_loading else None,
        kv_connector_worker_meta=WorkerReports([TransferResult(load.job_id, 0) for load in loads]),
    )
    world.scheduler.process_output_failed(output, RuntimeError("says the test"))
    assert not output.finished_recving
    world.scheduler.finish("two")
    assert world.scheduler.has_open_work()
    assert [world.step({}).failed_loads for _ in range(2)] == [["two"], []]


def test_error_before_a_plan_leaves_earlier_jobs_to_the_workers() -> None:
    """A block that a worker still copies may not be given to another request."""
    world = World(groups_of(fake.FULL))
    blocks = world.take(2)
    world.add(LiveRequest("one", 2 * BLOCK, hashes(2)), blocks)
    (store,) = world.step({"one": (0, 2 * BLOCK)}).stores
    world.scheduler.planned = None  # as the connector does once it has returned the plan
    step = world.scheduler.plan_failed(RuntimeError("says the test"))
    assert not [*step.loads, *step.stores, *step.stores_ahead]
    held = [block for block in world.pool.blocks if block.block_id in blocks]
    assert [block.ref_cnt for block in held] == [2, 2]
    world.end(store)
    assert [block.ref_cnt for block in held] == [1, 1]


@pytest.mark.parametrize("num_taken", [None, 0])
def test_match_when_no_load_follows_pins_nothing(num_taken: int | None) -> None:
    """The request ends before vLLM has committed the load, or vLLM takes less of it than it was offered."""
    world, again = world_with_a_stored_prefix()
    assert world.scheduler.match(again, 0) == (2 * BLOCK, True)
    world.step({})
    if num_taken is None:
        world.scheduler.finish("two")
    else:
        world.scheduler.commit(again, SimpleNamespace(get_block_ids=lambda: (world.take(3),)), num_taken)
    assert world.core.snapshot().pool.pinned == 0
    assert world.step({}).loads == []


def test_match_of_a_request_that_skips_the_cache_pins_nothing() -> None:
    """vLLM ignores the answer where it needs the prompt's own activations, as for the log probabilities of a prompt."""
    world, again = world_with_a_stored_prefix()
    prompt = LiveRequest("three", 2 * BLOCK + 1, hashes(2), skip_reading_prefix_cache=True)
    blocks = world.take(3)
    world.add(prompt, blocks)
    assert world.scheduler.match(prompt, 0) == (0, False)
    assert world.core.snapshot().pool.pinned == 0
    world.scheduler.commit(prompt, SimpleNamespace(get_block_ids=lambda: (blocks,)), 0)
    world.step({"three": (0, 2 * BLOCK + 1)})
    world.step({})
    world.scheduler.finish("three")
    shown = world.core.requests.find("three", 0.0)
    assert shown is not None
    assert shown.missed_tokens.causes["load_disabled"] == 2 * BLOCK
    assert world.scheduler.match(again, 0) == (2 * BLOCK, True)


def test_error_of_a_match_concerns_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world, again = world_with_a_stored_prefix()
    third = LiveRequest("three", 2 * BLOCK + 1, hashes(2))
    world.add(third)
    assert world.scheduler.match(again, 0) == (2 * BLOCK, True)
    with monkeypatch.context() as patch:
        patch.setattr(PrefixLookup, "find", lambda *args: {}["no such key"])
        assert world.scheduler.match(again, 0) == (0, False)
    assert world.core.snapshot().pool.pinned == 0
    assert world.scheduler.match(again, 0) == (0, False)
    world.tables["two"] = (world.take(3),)
    world.scheduler.commit(again, SimpleNamespace(get_block_ids=lambda: world.tables["two"]), 0)
    step = world.step({"two": (0, 2 * BLOCK + 1)})
    assert (step.loads, step.stores) == ([], [])
    assert world.scheduler.match(third, 0) == (2 * BLOCK, True)
    world.step({})
    for name in ("two", "three"):
        world.scheduler.finish(name)
    shown = world.core.requests.find("two", 0.0)
    assert shown is not None
    assert shown.error == "match: KeyError"
    assert shown.missed_tokens.causes["error"] == 2 * BLOCK
    assert world.guard.status.is_on
    assert world.guard.status.num_errors == world.core.snapshot().requests.excluded == 1
    assert world.core.snapshot().pool.pinned == world.core.snapshot().requests.running == 0


@pytest.mark.parametrize("broken", ["cache_salt", "lora_request", "num_preemptions", "block_hashes"])
def test_request_of_vllm_that_cannot_be_read_is_computed(broken: str) -> None:
    """Its hooks answer misses, however often, and requests beside it load."""
    world, again = world_with_a_stored_prefix()

    class Unreadable(LiveRequest):
        def __getattribute__(self, name: str) -> Any:
            if name == broken:
                raise RuntimeError(f"no {name}, says the test")
            return super().__getattribute__(name)

    table = world.take(3)
    for number in range(2 * MAX_ERRORS):
        bad = Unreadable(f"bad {number}", 2 * BLOCK + 1, hashes(2))
        world.add(bad, table)
        assert world.scheduler.match(bad, 0) == (0, False)
        world.scheduler.commit(bad, SimpleNamespace(get_block_ids=lambda: (table,)), 0)
        assert world.step({bad.request_id: (0, 2 * BLOCK + 1)}).stores == []
        world.scheduler.finish(bad.request_id)
        shown = world.core.requests.find(bad.request_id, 0.0)
        assert shown is not None
        assert "RuntimeError" in str(shown.error)
    assert world.guard.status.is_on
    assert world.core.snapshot().requests.running == 1
    assert world.scheduler.match(again, 0) == (2 * BLOCK, True)


def test_draft_tokens_do_not_fill_blocks() -> None:
    world = World(groups_of(fake.FULL))
    request = LiveRequest("one", BLOCK - 2, [])
    blocks = world.take(2)
    world.add(request, blocks)
    world.step({"one": (0, BLOCK - 2)})
    request.block_hashes += hashes(1)
    assert world.step({"one": (BLOCK - 2, 4)}, drafts={"one": [7, 7, 7]}).stores == []
    assert blocks_of(world.step({"one": (BLOCK - 1, 4)}, drafts={"one": [7, 7, 7]}).stores) == [(0, blocks[0])]


def test_stores_after_another_connectors_failed_load_are_dropped() -> None:
    """Such a connector loads within a step, which then runs on whatever bytes there were."""
    world = World(groups_of(fake.FULL))
    request, bystander = LiveRequest("one", 3 * BLOCK, hashes(3)), LiveRequest("two", BLOCK, hashes(1, "b"))
    blocks, other = world.take(3), world.take(1)
    world.add(request, blocks)
    world.add(bystander, other)
    (store,) = world.step({"one": (0, 2 * BLOCK), "two": (0, BLOCK)}).stores
    world.scheduler.process_output(KVConnectorOutput(invalid_block_ids={blocks[0]}))
    world.end(store)
    assert world.core.snapshot().pool.ready == 0
    # What vLLM computes from then on is as good as ever.
    world.end(*world.step({"one": (0, 3 * BLOCK)}).stores)
    assert world.core.snapshot().pool.ready > 0


def test_store_of_an_aborted_request_when_its_blocks_are_invalid_is_dropped() -> None:
    """It was aborted while the step ran whose output names the blocks, and its last block had just got its hash."""
    world = World(groups_of(fake.FULL))
    request = LiveRequest("one", 2 * BLOCK, hashes(1))
    blocks = world.take(2)
    world.add(request, blocks)
    (store,) = world.step({"one": (0, 2 * BLOCK)}).stores
    request.block_hashes += hashes(2)[1:]
    world.scheduler.finish("one")
    world.scheduler.process_output(KVConnectorOutput(invalid_block_ids={blocks[0]}))
    world.end(store)
    assert world.step({}).stores == []
    assert world.core.snapshot().pool.ready == 0
    assert world.core.snapshot().pool.free == 64


def test_abort_after_device_reset_stores_nothing() -> None:
    """vLLM preempts all requests to reset its cache between two steps, as before it takes other weights. What they held
    until then is gone, and the same blocks may belong to other requests."""
    world = World(groups_of(fake.FULL))
    request = LiveRequest("one", 2 * BLOCK, hashes(1))
    blocks = world.take(2)
    world.add(request, blocks)
    world.end(*world.step({"one": (0, 2 * BLOCK)}).stores)
    request.block_hashes += hashes(2)[1:]
    world.pool.free_blocks([world.pool.blocks[block] for block in blocks])
    request.num_preemptions += 1
    world.scheduler.reset()
    world.scheduler.finish("one")
    assert world.step({}).stores == []
    assert not world.scheduler.has_open_work()


# --- several ranks --------------------------------------------------------------------------------------------------


def outputs_of(*ranks: tuple[list[TransferResult], set[str], set[str]]) -> list[ModelRunnerOutput]:
    """What each rank's worker returns from a step: results, requests received, and those that failed."""
    return [
        ModelRunnerOutput(
            req_ids=[],
            req_id_to_index={},
            kv_connector_output=KVConnectorOutput(
                finished_recving=received or None,
                failed_recving=failed,
                kv_connector_worker_meta=WorkerReports(results) if results else None,
            ),
        )
        for results, received, failed in ranks
    ]


@pytest.mark.parametrize("error", [None, "injected"])
def test_load_ends_with_the_last_rank_and_fails_with_any(error: str | None) -> None:
    world = World(groups_of(fake.FULL), num_workers=2)
    world.add(LiveRequest("one", 2 * BLOCK, hashes(2)), world.take(2))
    world.end(*world.step({"one": (0, 2 * BLOCK)}).stores)
    world.scheduler.finish("one")
    again = LiveRequest("two", 2 * BLOCK + 1, hashes(2))
    world.add(again)
    assert world.scheduler.match(again, 0) == (2 * BLOCK, True)
    tables = (world.take(3),)
    world.scheduler.commit(again, SimpleNamespace(get_block_ids=lambda: tables), 2 * BLOCK)
    (load,) = world.step({}).loads
    vllms = KVOutputAggregator(2)
    early = vllms.aggregate(outputs_of(([TransferResult(load.job_id, 0)], {"two"}, set()), ([], set(), set())))
    world.scheduler.process_output(early.kv_connector_output)
    assert not early.kv_connector_output.finished_recving
    assert world.core.snapshot().requests.waiting_for_load == 1
    failed = {"two"} if error else set()
    late = vllms.aggregate(outputs_of(([], set(), set()), ([TransferResult(load.job_id, 1, error)], {"two"}, failed)))
    world.scheduler.process_output(late.kv_connector_output)
    assert late.kv_connector_output.finished_recving == {"two"}
    assert late.kv_connector_output.failed_recving == failed
    after = world.core.snapshot()
    assert (after.requests.waiting_for_load, after.pool.pinned) == (0, 0)
    assert after.pool.ready == (0 if error else 2)
    assert after.load.failed == (2 if error else 0)


def test_hook_time_counts_each_hook_once_and_the_slowest_rank() -> None:
    world = World(groups_of(fake.FULL), num_workers=2)
    one = LiveRequest("one", 2 * BLOCK, hashes(2))
    world.add(one, world.take(2))
    world.scheduler.match(one, 0)
    world.step({"one": (0, 2 * BLOCK)})
    assert world.core.snapshot().balance.hook_s == 3
    reports = WorkerReports(hook_s=10.0).aggregate(WorkerReports(hook_s=20.0))
    world.scheduler.process_output(KVConnectorOutput(kv_connector_worker_meta=reports))
    assert world.core.snapshot().balance.hook_s == 3 + 1 + 20


@dataclass
class Resizing:
    """The memory of three ranks while another thread changes its size, and what that came to."""

    stopping: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.extents = EngineExtents(PoolPlan(16, 4, 64), 100, 3, None, step=lambda: None, stopping=self.stopping)
        self.thread = ThreadPoolExecutor(1)

    def orders(self) -> list[ResizeCommand]:
        """The next orders, which travel once."""
        taken: list[ResizeCommand] = []
        wait_until(lambda: bool(taken.extend(self.extents.take_commands()) or taken), "there are orders", DEADLINE_S)
        assert self.extents.is_waiting
        assert self.extents.take_commands() == []
        return taken

    def report(self, number: int, *ranks: int, error: str | None = None) -> None:
        self.extents.add_results([ResizeResult(number, rank, error) for rank in ranks])


@pytest.fixture
def resizing() -> Iterator[Resizing]:
    made = Resizing()
    yield made
    made.stopping.set()
    made.thread.shutdown()


def test_first_rank_allocates_first_and_frees_last(resizing: Resizing) -> None:
    grown = resizing.thread.submit(resizing.extents.add_slots, 8)
    assert resizing.orders() == [ResizeCommand(1, 24, (0,))]
    resizing.report(1, 0)
    assert resizing.orders() == [ResizeCommand(2, 24, (1, 2))]
    # One that is late, one that comes twice, and one that was not asked.
    resizing.report(1, 1)
    resizing.report(2, 2, 2, 0)
    assert resizing.extents.is_waiting
    resizing.report(2, 1)
    grown.result(DEADLINE_S)
    assert (resizing.extents.num_slots, resizing.extents.num_bytes) == (24, 2400)
    shrunk = resizing.thread.submit(resizing.extents.remove_extents, 5)
    assert resizing.orders() == [ResizeCommand(3, 4, (1, 2))]
    resizing.report(3, 1)
    resizing.report(3, 2, error="rank 2: it is used")
    with pytest.raises(RuntimeError, match="rank 2: it is used"):
        shrunk.result(DEADLINE_S)
    # Nothing was given back, and it is tried again.
    assert resizing.extents.num_slots == 24
    shrunk = resizing.thread.submit(resizing.extents.remove_extents, 5)
    resizing.report(resizing.orders()[0].number, 1, 2)
    assert resizing.orders() == [ResizeCommand(5, 4, (0,), free=True)]
    resizing.report(5, 0)
    shrunk.result(DEADLINE_S)
    assert resizing.extents.num_slots == 4
    assert not resizing.extents.is_waiting


@pytest.mark.parametrize("rank", range(3))
def test_grow_when_one_rank_fails_is_rolled_back(resizing: Resizing, rank: int) -> None:
    grown = resizing.thread.submit(resizing.extents.add_slots, 8)
    if rank == 0:
        resizing.report(resizing.orders()[0].number, 0, error="rank 0: no room")
    else:
        resizing.report(resizing.orders()[0].number, 0)
        resizing.orders()
        resizing.report(2, rank, error=f"rank {rank}: no room")
        resizing.report(2, 3 - rank)
        assert resizing.orders() == [ResizeCommand(3, 16, (1, 2))]
        resizing.report(3, 1, 2)
        assert resizing.orders() == [ResizeCommand(4, 16, (0,), free=True)]
        resizing.report(4, 0)
    with pytest.raises(NotEnoughMemory, match=f"^rank {rank}: no room$"):
        grown.result(DEADLINE_S)
    assert resizing.extents.num_slots == 16
    assert not resizing.extents.is_waiting


def test_resize_when_engine_stops_raises(resizing: Resizing) -> None:
    grown = resizing.thread.submit(resizing.extents.add_slots, 8)
    resizing.orders()
    resizing.stopping.set()
    with pytest.raises(RuntimeError, match="is stopping"):
        grown.result(DEADLINE_S)


class Waits(threading.Event):
    """Counts the calls of `wait`."""

    num_waits = 0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.num_waits += 1
        return super().wait(timeout)


def test_empty_step_waits_for_tiers_only_if_nothing_else_is_open() -> None:
    tier_ready = Waits()
    world = World(groups_of(fake.FULL), tier_ready=tier_ready)
    world.step({})
    assert tier_ready.num_waits == 0
    blocks = world.take(2)
    world.add(LiveRequest("one", 2 * BLOCK, hashes(2)), blocks)
    world.step({})
    assert tier_ready.num_waits == 1
    # Its blocks are being stored, and the workers wait for that.
    assert world.step({"one": (0, 2 * BLOCK)}).stores
    world.step({})
    assert tier_ready.num_waits == 1
    tier_ready.set()
    world.scheduler.finish("one")
    world.step({})
    assert tier_ready.num_waits == 1


# --- a whole connector, for devices that are not here ---------------------------------------------------------------


@pytest.fixture(scope="module")
def base_config(llama: Path) -> VllmConfig:
    transfer = transfer_config(pool_bytes="8MiB", load_decision="always")
    return EngineArgs(**engine_options(llama), kv_transfer_config=transfer).create_engine_config()


@pytest.fixture
def connector(base_config: VllmConfig) -> Iterator[Callable[..., KVFerryConnector]]:
    made: list[KVFerryConnector] = []

    def make(role: KVConnectorRole, groups: list[KVCacheGroupSpec], **parallel: int) -> KVFerryConnector:
        config = replace(base_config) if not parallel else _spread(base_config, **parallel)
        made.append(KVFerryConnector(config, role, cache_config(KVCacheLayout.LBNHC, groups)))
        return made[-1]

    yield make
    for one in made:
        one.shutdown()


def _spread(config: VllmConfig, **parallel: int) -> Any:
    """The configuration with other numbers of ranks, which vLLM would not let this machine ask for."""
    names = {name: getattr(config, name) for name in vars(config)}
    ranks = SimpleNamespace(**{**vars(config.parallel_config), **parallel})
    return SimpleNamespace(**{**names, "parallel_config": ranks})


class RanksAsThreads:
    """vLLM's world group, for ranks that are threads of this process."""

    def __init__(self, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.local = threading.local()
        self.world_size, self.cpu_group = world_size, None
        self._barrier = threading.Barrier(world_size, timeout=DEADLINE_S)
        self._values: dict[int, object] = {}
        monkeypatch.setattr("vllm.distributed.parallel_state.get_world_group", lambda: self)
        monkeypatch.setattr("torch.distributed.all_gather_object", self._gather)

    def _gather(self, values: list[object], value: object, group: None) -> None:
        self._values[self.local.rank] = value
        self._barrier.wait()
        values[:] = [self._values[rank] for rank in range(self.world_size)]
        self._barrier.wait()


def test_pipeline_stages_with_different_shares_are_refused(
    connector: Callable[..., KVFerryConnector], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    world = RanksAsThreads(2, monkeypatch)

    def start(rank: int, layers: int) -> None:
        world.local.rank = rank
        groups = groups_of(fake.FULL, layers=layers)
        stage = {"world_size": 2, "pipeline_parallel_size": 2, "rank": rank}
        worker = connector(KVConnectorRole.WORKER, groups, **stage)
        worker.register_kv_caches(allocate(cache_config(KVCacheLayout.LBNHC, groups)))

    with ThreadPoolExecutor(2) as pool:
        failures = [each.exception() for each in [pool.submit(start, rank, 4 - rank) for rank in range(2)]]
    for failure in failures:
        assert isinstance(failure, StartError)
        assert "a pipeline_parallel_size that divides the layers" in str(failure)
    assert "kvferry does not start: the ranks have" in capfd.readouterr().err


def test_data_parallel_engines_have_their_own_pools_and_ports(
    base_config: VllmConfig, connector: Callable[..., KVFerryConnector]
) -> None:
    extra = base_config.kv_transfer_config.kv_connector_extra_config
    extra["port"] = port = free_port(2)
    try:
        for rank in range(2):
            ranks = {"data_parallel_size": 2, "data_parallel_index": rank}
            one = connector(KVConnectorRole.SCHEDULER, groups_of(fake.FULL), **ranks)
            one.set_xfer_handshake_metadata_pp_aware({})
    finally:
        extra["port"] = 0
    found = find_services(Path(os.environ["KVFERRY_STATE_DIR"]))
    assert [service.url for service in found] == [f"http://127.0.0.1:{port + rank}" for rank in range(2)]
    assert [service.name[-4:] for service in found] == ["-dp0", "-dp1"]
    assert {service.engine for service in found} == {found[0].name.removesuffix("-dp0")}


def test_admin_port_when_taken_is_replaced_by_a_free_one(
    base_config: VllmConfig, connector: Callable[..., KVFerryConnector], capfd: pytest.CaptureFixture[str]
) -> None:
    extra = base_config.kv_transfer_config.kv_connector_extra_config
    with listen("127.0.0.1", 0) as taken:
        extra["port"] = taken.getsockname()[1]
        try:
            made = connector(KVConnectorRole.SCHEDULER, groups_of(fake.FULL))
            made.set_xfer_handshake_metadata_pp_aware({})
        finally:
            port, extra["port"] = extra["port"], 0
        (found,) = find_services(Path(os.environ["KVFERRY_STATE_DIR"]))
        assert found.url != f"http://127.0.0.1:{port}"
        assert httpx.get(f"{found.url}/healthz", timeout=DEADLINE_S).status_code == 200
    assert f"admin port {port} is taken: listening on {found.url}" in capfd.readouterr().err


def test_admin_address_of_another_host_is_refused(
    base_config: VllmConfig, connector: Callable[..., KVFerryConnector]
) -> None:
    extra = base_config.kv_transfer_config.kv_connector_extra_config
    extra |= {"host": "192.0.2.1", "admin_token": "a-token-that-is-long-enough"}
    try:
        with pytest.raises(StartError, match=r"^host=192\.0\.2\.1 port=0 cannot be listened on"):
            connector(KVConnectorRole.SCHEDULER, groups_of(fake.FULL))
    finally:
        del extra["host"], extra["admin_token"]


@pytest.mark.parametrize("saves_last", [False, True])
def test_second_model_runner_loads_and_stores(
    saves_last: bool,
    connector: Callable[..., KVFerryConnector],
    base_config: VllmConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own driver of connectors in that runner, which needs a GPU to run a model, but none for this. Since 0.33
    stores start after the results were taken, where a model drafts."""
    if saves_last and not hasattr(ActiveKVConnector, "finalize_step"):
        pytest.skip("this vLLM starts stores before it takes the results")
    groups = groups_of(fake.FULL)
    worker = connector(KVConnectorRole.WORKER, groups)
    caches = allocate(cache_config(KVCacheLayout.LBNHC, groups))
    fill(caches, seed=1)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker)
    runner = ActiveKVConnector(base_config, caches)
    world = World(groups)
    blocks = world.take(2)
    world.add(LiveRequest("one", 2 * BLOCK, hashes(2)), blocks)
    name = groups[0].layer_names[1]
    before = [block_bytes(caches[name], block) for block in blocks]

    def run(orders: StepMetadata) -> KVConnectorOutput:
        scheduled = SimpleNamespace(
            kv_connector_metadata=orders, has_sync_kv_loads=False, finished_req_ids=set(), num_scheduled_tokens={}
        )
        if saves_last:
            runner.pre_forward(scheduled)
            runner.finish_forward()
            output = runner.post_forward(set(), defer_finalize=True)
            runner.finalize_step()
        else:
            output = runner.no_forward(scheduled).kv_connector_output or KVConnectorOutput()
        world.scheduler.process_output(output)
        return output

    run(world.step({"one": (0, 2 * BLOCK)}))
    wait_until(lambda: (run(world.step({})), not world.scheduler.has_open_work())[1], "it is stored", DEADLINE_S)
    world.scheduler.finish("one")
    again = LiveRequest("two", 2 * BLOCK + 1, hashes(2))
    world.add(again)
    assert world.scheduler.match(again, 0) == (2 * BLOCK, True)
    target = world.take(3)
    world.scheduler.commit(again, SimpleNamespace(get_block_ids=lambda: (target,)), 2 * BLOCK)
    received: set[str] = set()

    def step() -> bool:
        output = run(world.step({}))
        received.update(output.finished_recving or ())
        assert not output.failed_recving
        return "two" in received

    wait_until(step, "it is loaded", DEADLINE_S)
    assert [block_bytes(caches[name], block) for block in target[:2]] == before


def test_stores_that_a_stage_never_saves_start_in_the_next_step(
    connector: Callable[..., KVFerryConnector], base_config: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a draft model the first model runner calls `wait_for_save` on the last pipeline stage only, where it samples
    tokens. It does so on all of them in steps that compute nothing."""
    groups = groups_of(fake.FULL)
    worker = connector(KVConnectorRole.WORKER, groups)
    caches = allocate(cache_config(KVCacheLayout.LBNHC, groups))
    fill(caches, seed=1)
    worker.register_kv_caches(caches)
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", worker)
    world = World(groups)
    name = groups[0].layer_names[1]

    def run(orders: StepMetadata, writes: Sequence[int] = ()) -> KVConnectorOutput:
        scheduled = SimpleNamespace(kv_connector_metadata=orders, has_sync_kv_loads=False, finished_req_ids=set())
        worker.handle_preemptions(orders)
        with set_forward_context(None, base_config):
            defers = not orders.is_idle
            with KVConnectorModelRunnerMixin._get_kv_connector_output(scheduled, defer_finalize=defers) as output:
                for block in writes:
                    caches[name][block] = block
        world.scheduler.process_output(output)
        return output

    blocks, other = world.take(2), world.take(1)
    world.add(LiveRequest("one", 2 * BLOCK, hashes(2)), blocks)
    world.add(LiveRequest("two", BLOCK, hashes(1, "b")), other)
    run(world.step({"one": (0, 2 * BLOCK)}), writes=blocks)
    before = [block_bytes(caches[name], block) for block in blocks]
    run(world.step({"two": (0, BLOCK)}), writes=other)
    for request, taken in (("one", blocks), ("two", other)):
        world.scheduler.finish(request)
        world.pool.free_blocks([world.pool.blocks[block] for block in taken])
    wait_until(lambda: (run(world.step({})), not world.scheduler.has_open_work())[1], "all is stored", DEADLINE_S)
    assert {name for _, name in world.stored()} == {*hashes(2), *hashes(1, "b")}
    after = world.core.snapshot()
    assert (after.pool.ready, after.store.stored, after.store.failed) == (3, 3, 0)
    assert [world.pool.blocks[block].ref_cnt for block in (*blocks, *other)] == [0, 0, 0]
    again = LiveRequest("three", 2 * BLOCK + 1, hashes(2))
    world.add(again)
    assert world.scheduler.match(again, 0) == (2 * BLOCK, True)
    target = world.take(3)
    world.scheduler.commit(again, SimpleNamespace(get_block_ids=lambda: (target,)), 2 * BLOCK)
    wait_until(lambda: "three" in (run(world.step({})).finished_recving or ()), "it is loaded", DEADLINE_S)
    assert [block_bytes(caches[name], block) for block in target[:2]] == before
