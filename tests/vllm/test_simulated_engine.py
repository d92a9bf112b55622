"""vLLM's scheduler with kvferry's connector over a simulated device: no step reads, and no slot holds, wrong bytes.

`TEST_LONG=1` runs more episodes. The name of a case ends with its seed.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvferry.app.engines.vllm.connector import KVFerryConnector
from kvferry.app.engines.vllm.layout import read_layout
from kvferry.core.engine_api import StoreMode
from kvferry.core.keys import Key, group_of, hash_of, make_keys
from kvferry.core.pool.events import CacheEvent, StoreBatch
from kvferry.core.transfers import Direction
from tests.harness.effort import examples
from tests.vllm import fabricated as fake
from tests.vllm.engines import engine_options, transfer_config
from tests.vllm.simulated import BLOCK, ERASED, SPECS, VOCABULARY, Chunk, Device, Setup, Worker, append_cells
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

MAX_PROMPT = 150
MAX_LIVE = 8
MAX_DRAIN_STEPS = 3000
MAX_TURN_STEPS = 30
NUM_EPISODES = 40
NUM_STEPS = 40
SEED = 2
EAGER, LAZY = StoreMode.EAGER, StoreMode.LAZY
TINY = {"num_blocks": 50, "num_slots": 40, "failing_share": 0.05}
SETUPS = {
    "full-eager": Setup("F", EAGER),
    "full-eager-drafts-two-blocks-a-slot": Setup("F", EAGER, num_drafts=3, blocks_per_slot=2),
    "window-eager-resets": Setup("W", EAGER, num_blocks=22, reset_share=0.1),
    "full-eager-async-drafts": Setup("F", EAGER, is_async=True, num_drafts=3),
    "both-eager-async-tiny": Setup("FW", EAGER, is_async=True, **TINY),
    "full-lazy-failures-resets": Setup("F", LAZY, failing_share=0.05, reset_share=0.1),
    "window-lazy-async-drafts": Setup("W", LAZY, is_async=True, num_drafts=3, num_blocks=22),
    "both-lazy": Setup("FW", LAZY, num_blocks=80),
    "drafter-window-lazy": Setup("EW", LAZY, num_drafts=3, num_blocks=80),
    "both-lazy-async-tiny": Setup("FW", LAZY, is_async=True, **TINY),
}


class SimulatedEngine:
    """vLLM's scheduler and kvferry's connector, whose steps a simulated worker executes. The seed fixes all choices."""

    def __init__(self, model: Path, setup: Setup, seed: int) -> None:
        self.setup, self.choices, self.problems = setup, random.Random(seed), list[str]()
        config, caches = _configure(model, setup)
        hash_of_tokens = get_hash_fn_by_name("sha256")
        init_none_hash(hash_of_tokens)
        self._hasher = get_request_block_hasher(BLOCK, hash_of_tokens)
        grammars = SimpleNamespace(
            accept_tokens=lambda request, tokens: True,
            validate_tokens=lambda request, tokens: tokens,
            should_advance=lambda request: False,
        )
        make = AsyncScheduler if setup.is_async else Scheduler
        self.vllm_scheduler = make(config, caches, grammars, BLOCK, hash_block_size=BLOCK, log_stats=False)
        self.connector: KVFerryConnector = self.vllm_scheduler.connector
        self.scheduler = self.connector._the_scheduler()
        self.core = self.connector._the_core().service.scheduler
        self._device = Device(setup.num_blocks)
        self.worker = Worker(setup, self._device, self.choices, self.problems)
        self._live: dict[str, Request] = {}
        self._ended: deque[list[int]] = deque(maxlen=30)
        self._in_flight: deque[tuple[Any, ModelRunnerOutput, DraftTokenIds]] = deque()
        self._cells: dict[bytes, list[int]] = {}
        """The cells of a slot in group 0, by the hash of its last block."""
        self._num_requests = 0
        self._sink, self.core.manager.sink = self.core.manager.sink, self._check_published

    def run(self, num_steps: int) -> None:
        """Take steps with new and aborted requests, end all requests, and erase the device as sleep does."""
        choices, setup = self.choices, self.setup
        for _ in range(num_steps):
            while len(self._live) < MAX_LIVE and choices.random() < 0.5:
                self._add_request()
            self.step()
            is_free = not self._in_flight and not self.scheduler.device.num_held
            if choices.random() < setup.reset_share and is_free:
                self.vllm_scheduler.reset_prefix_cache(reset_connector=True)
        self.settle()
        assert self.vllm_scheduler.reset_prefix_cache(reset_connector=True)
        self._device.cells[:] = ERASED

    def settle(self) -> None:
        """Take steps until all requests have ended."""
        for _ in range(MAX_DRAIN_STEPS):
            if not (self._live or self._in_flight or self.vllm_scheduler.has_requests()):
                break
            self.step()
        self._check_at_rest()

    def step(self) -> None:
        """Plan a step and execute it, then process the output of the oldest step that was not processed."""
        scheduler = self.vllm_scheduler
        if scheduler.has_requests() or not self._in_flight:
            planned = scheduler.schedule()
            self._in_flight.append((planned, *self._execute(planned)))
            if self.setup.is_async and len(self._in_flight) < 2 and scheduler.has_requests():
                return
        planned, output, drafts = self._in_flight.popleft()
        if self._live and self.choices.random() < self.setup.abort_share:
            scheduler.finish_requests(self.choices.choice(list(self._live)), RequestStatus.FINISHED_ABORTED)
        scheduler.update_from_output(planned, output)
        if drafts.req_ids and not self.setup.is_async:
            scheduler.update_draft_token_ids(drafts)
        for name, request in list(self._live.items()):
            self._learn(request)
            if request.is_finished():
                self._check_offered(request)
                self._ended.append(list(request.all_token_ids))
                del self._live[name]
        status = self.scheduler.offload.status
        assert not self.problems, self.problems
        assert status.num_errors == 0, status.last_error

    def _execute(self, planned: Any) -> tuple[ModelRunnerOutput, DraftTokenIds]:
        begun = {new.req_id for new in planned.scheduled_new_reqs} | set(planned.scheduled_cached_reqs.resumed_req_ids)
        chunks = []
        for name, num_tokens in planned.num_scheduled_tokens.items():
            request = self.vllm_scheduler.requests[name]
            chunks.append(
                Chunk(
                    name,
                    request.num_computed_tokens - num_tokens,
                    num_tokens,
                    len(planned.scheduled_spec_decode_tokens.get(name, ())),
                    self.vllm_scheduler.kv_cache_manager.get_block_ids(name),
                    list(request.all_token_ids) if name in begun else None,
                )
            )
        return self.worker.execute(planned.kv_connector_metadata, chunks)

    def _add_request(self) -> None:
        """Add a request, most of which continue an earlier one or a part of it."""
        choices = self.choices
        if self._ended and choices.random() < 0.75:
            prompt = choices.choice(self._ended)
            kept = len(prompt) if choices.random() < 0.6 else choices.randint(1, len(prompt))
            prompt, num_new = prompt[:kept], choices.choice((1, 1, 2, 3, 8))
        else:
            prompt, num_new = [], choices.randint(1, 60)
        prompt = (prompt + choices.choices(range(VOCABULARY), k=num_new))[:MAX_PROMPT]
        self.add(prompt, choices.randint(1, 14))

    def add(self, prompt: list[int], max_tokens: int) -> None:
        """Add a request."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self._num_requests += 1
        request = Request(f"request-{self._num_requests}", prompt, params, None, block_hasher=self._hasher)
        self._live[request.request_id] = request
        self._learn(request)
        self.vllm_scheduler.add_request(request)

    def continue_session(self, *, ends: bool = False) -> Request:
        """Begin a session, answer its next turn or end it; its answers are stored only as parts of later prompts."""
        asked = {"kv_transfer_params": {"offload_prompt_only": True}}
        params = SamplingParams(max_tokens=9, temperature=0, ignore_eos=True, extra_args=asked)
        tokens = self.choices.choices(range(VOCABULARY), k=10)
        request = Request("session", tokens, params, None, block_hasher=self._hasher, resumable=not ends)
        session = self._live.setdefault(request.request_id, request)
        self.vllm_scheduler.add_request(request)
        self._learn(session)
        for _ in range(MAX_TURN_STEPS):
            self.step()
        return session

    def _learn(self, request: Request) -> None:
        """Record the cells of the slots that may end with the full blocks of a request."""
        if request.block_hashes and request.block_hashes[-1] not in self._cells:
            cells, size = append_cells([], request.all_token_ids), self.setup.blocks_per_slot
            for end, block_hash in enumerate(request.block_hashes, 1):
                self._cells.setdefault(block_hash, cells[max(end - size, 0) * BLOCK : end * BLOCK])

    def _check_published(self, event: CacheEvent) -> None:
        if isinstance(event, StoreBatch):
            for key, slot in zip(event.keys, self.core.manager.lookup_each(event.keys).tolist(), strict=True):
                if self.setup.groups[group_of(key)] == "E":
                    continue
                parts = [self._device.slots[slot, part] for part in range(self.setup.blocks_per_slot)]
                if np.concatenate(parts).tolist() != self._expected(key):
                    letter = self.setup.groups[group_of(key)]
                    self.problems.append(
                        f"a slot of {event.origin.request_id} was published with wrong bytes ({letter})"
                    )
        if self._sink is not None:
            self._sink(event)

    def _check_offered(self, request: Request) -> None:
        """In eager mode all that was computed was offered, also what drafts have completed at the end."""
        setup, found = self.setup, self.core.requests.find(request.request_id, 0.0)
        if setup.groups == "F" and setup.mode is EAGER and request.status is not RequestStatus.FINISHED_ABORTED:
            num_slots = (request.num_tokens - 1) // (setup.blocks_per_slot * BLOCK)
            assert found.store.offered >= num_slots * setup.blocks_per_slot, request.request_id

    def _expected(self, key: Key) -> list[int]:
        return [cell + group_of(key) for cell in self._cells[hash_of(key)]]

    def _check_at_rest(self) -> None:
        """With no request left, nothing is held, pinned or under way."""
        left = self.core.snapshot()
        assert not self._live, f"requests that do not end: {list(self._live)}"
        assert self.vllm_scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == self.setup.num_blocks - 1
        assert self.scheduler.device.num_held == left.pool.pinned == left.pool.storing == 0
        assert left.requests.running == left.requests.waiting_for_load == 0


def _configure(model: Path, setup: Setup) -> tuple[Any, Any]:
    """Return vLLM's configuration and that of its KV cache."""
    groups = fake.groups_of(*(SPECS[letter] for letter in setup.groups), layers=1)
    interval = setup.retention_interval
    caches = fake.cache_config(
        KVCacheLayout.LBNHC, groups, setup.num_blocks, block_size=BLOCK, retention_interval=interval
    )
    slot_bytes = read_layout(caches).group_layout(setup.blocks_per_slot, 1).slot_bytes
    extra: Mapping[str, object] = {
        "pool_bytes": slot_bytes * setup.num_slots,
        "load_decision": "always",
        "store_mode": setup.mode.value,
        "offload_prompt_only": False,
        "blocks_per_slot": setup.blocks_per_slot,
    }
    drafts = {"method": "ngram", "num_speculative_tokens": setup.num_drafts, "prompt_lookup_max": 3}
    options = engine_options(
        model,
        max_num_batched_tokens=48,
        max_num_seqs=6,
        max_model_len=200,
        speculative_config=drafts if setup.num_drafts else None,
    )
    config = EngineArgs(**options, kv_transfer_config=transfer_config(**extra)).create_engine_config()
    if "E" in setup.groups:
        config.speculative_config.method = "eagle"
    if setup.num_modules > 1:
        config.speculative_config.method = "mtp"
        drafter = config.speculative_config.draft_model_config = copy(config.model_config)
        drafter.hf_config = SimpleNamespace(num_nextn_predict_layers=setup.num_modules)
    config.scheduler_config.async_scheduling = setup.is_async
    config.cache_config.num_gpu_blocks = setup.num_blocks
    return config, caches


@pytest.mark.sampled
@pytest.mark.parametrize("setup", [pytest.param(setup, id=f"{name}-seed-{SEED}") for name, setup in SETUPS.items()])
def test_kv_when_stored_and_loaded_is_that_of_its_tokens(setup: Setup, llama: Path) -> None:
    engine = SimulatedEngine(llama, setup, SEED)
    try:
        for _ in range(examples(NUM_EPISODES)):
            engine.run(NUM_STEPS)
    finally:
        engine.connector.shutdown()
    assert all(engine.worker.num_copied.values()), engine.worker.num_copied


@pytest.mark.parametrize("mode", [EAGER, LAZY])
def test_last_block_of_a_known_prefix_with_eagle_is_computed(mode: StoreMode, llama: Path) -> None:
    engine = SimulatedEngine(llama, Setup("E", mode, num_drafts=3, abort_share=0), SEED)
    head, tails = list(range(6 * BLOCK)), [[number] * 9 for number in range(4)]
    try:
        for tail in tails[:3]:
            engine.add(head + tail, 1)
            engine.settle()
        assert engine.worker.num_copied[Direction.LOAD] == 0, "the device had all but the last block"
        assert mode is EAGER or engine.worker.num_copied[Direction.STORE] == 0
        assert engine.vllm_scheduler.reset_prefix_cache()
        engine.add(head + tails[3], 1)
        engine.settle()
    finally:
        engine.connector.shutdown()
    counts = engine.core.snapshot()
    assert counts.prompt_tokens.host_hit == (5 * BLOCK if mode is EAGER else 0)
    assert counts.missed_tokens.causes["gap"] == (0 if mode is EAGER else 6 * BLOCK)
    assert not engine.worker.stale_drafts


@pytest.mark.parametrize("mode", [EAGER, LAZY])
def test_block_that_draft_modules_may_compute_again_is_not_stored(mode: StoreMode, llama: Path) -> None:
    setup = Setup("E", mode, num_drafts=3, num_modules=3, abort_share=0)
    engine = SimulatedEngine(llama, setup, SEED)
    try:
        for num_tokens in (3 * BLOCK, 6 * BLOCK, 8 * BLOCK):
            engine.add(list(range(num_tokens)), 1)
            engine.settle()
            assert engine.vllm_scheduler.reset_prefix_cache()
    finally:
        engine.connector.shutdown()
    assert not engine.worker.stale_drafts
    assert engine.core.snapshot().prompt_tokens.host_hit == (5 * BLOCK if mode is EAGER else 0)


def test_answer_that_becomes_prompt_of_a_session_is_stored(llama: Path) -> None:
    engine = SimulatedEngine(llama, Setup("F", EAGER, abort_share=0.0), SEED)
    try:
        session = engine.continue_session()
        for ends in (False, False, True):
            engine.continue_session(ends=ends)
        keys = make_keys(session.block_hashes[: session.num_prompt_tokens // BLOCK], 0)
        assert session.is_finished()
        assert len(engine.core.manager.lookup(keys)) == len(keys) > 8
    finally:
        engine.connector.shutdown()


@pytest.mark.parametrize(("interval", "num_hit"), [(0, 0), (4 * BLOCK, 8 * BLOCK), (None, 10 * BLOCK)])
def test_windows_at_the_retention_interval_are_stored(interval: int | None, num_hit: int, llama: Path) -> None:
    setup = Setup("FW", EAGER, num_blocks=100, abort_share=0, retention_interval=interval)
    engine = SimulatedEngine(llama, setup, SEED)
    head = list(range(10 * BLOCK))
    try:
        engine.add(head + [1] * 30, 1)
        engine.settle()
        assert engine.vllm_scheduler.reset_prefix_cache()
        engine.add(head + [2] * 30, 1)
        engine.settle()
    finally:
        engine.connector.shutdown()
    assert engine.core.snapshot().prompt_tokens.host_hit == num_hit
