"""Replay of a trace through the real scheduler, manager and device block pool: only the bytes are missing.

Requests run one after another: each finds its prefix, loads, computes its prompt in one step and its answer in another,
and all transfers end with the step that starts them. So figures are the same in each run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from kvferry.app.engines.embedded.block_pool import BlockPool
from kvferry.app.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest
from kvferry.core.cost_model import LoadDecision, LoadOrCompute
from kvferry.core.engine_api import StepProgress, StoreMode
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.policy import PolicyResolver, RequestPolicy, TierWait, TierWaitMode
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.scheduler import Hit, Later, OffloadScheduler, SchedulerOptions
from kvferry.core.tiers.base import Tier
from kvferry.core.transfers import StepPlan, TransferResult

SLOT_BYTES = 1
"""Slots have no bytes here, and a layout needs some."""


@dataclass(slots=True)
class ReplayedRequest:
    """A request of a trace. Satisfies `EngineRequest` of core; blocks of answers are the same as no others."""

    request_id: str
    num_prompt_tokens: int
    num_tokens: int
    block_hashes: Sequence[bytes]
    aliases: Sequence[str] = ()
    tenant: str | None = None
    lora: str | None = None
    kv_transfer_params: dict[str, Any] | None = None
    session: str | None = None


@dataclass(frozen=True, slots=True)
class Setup:
    """Sizes in blocks, and how the pool decides."""

    device_blocks: int
    pool_slots: int
    policy: str = "lru"
    mode: StoreMode = StoreMode.EAGER
    watermark_blocks: int = 256
    block_tokens: int = TRACE_BLOCK_TOKENS


@dataclass(slots=True)
class Tokens:
    """Prompt tokens of a replay by what served them."""

    prompt: int = 0
    device: int = 0
    pool: int = 0
    tier: int = 0

    @property
    def hit_percent(self) -> float:
        """Return the share that was not computed."""
        return 100 * (self.device + self.pool + self.tier) / self.prompt


@dataclass(slots=True)
class Replay:
    """A trace through the core, one request after another, which wait for what the `tiers` have."""

    setup: Setup
    tiers: Mapping[str, Tier] = field(default_factory=dict)
    tier_wait: TierWaitMode = TierWaitMode.WAIT_COMPLETE
    tokens: Tokens = field(default_factory=Tokens)
    device: BlockPool = field(init=False)
    offload: OffloadScheduler = field(init=False)

    def __post_init__(self) -> None:
        setup = self.setup
        layout = GroupLayout([GroupSpec(setup.block_tokens, SLOT_BYTES)])
        manager = OffloadManager(setup.pool_slots, layout.slot_bytes, setup.policy)
        self.device = BlockPool(setup.device_blocks)
        self.offload = OffloadScheduler(
            manager,
            PolicyResolver(RequestPolicy(tier_wait=TierWait(self.tier_wait)), {}, manager.lock),
            self.device,
            layout,
            SchedulerOptions(store_mode=setup.mode, watermark_blocks=setup.watermark_blocks),
            cost_model=LoadOrCompute(LoadDecision.ALWAYS),
            tiers=self.tiers,
        )

    def run(self, requests: Iterable[tuple[float, ReplayedRequest]]) -> Tokens:
        """Replay all requests, each at its time in seconds, and return what served their prompts."""
        for now_s, request in requests:
            self._run_request(request, now_s)
        return self.tokens

    def _run_request(self, request: ReplayedRequest, now_s: float) -> None:
        hashes, num_prompt, block_tokens = request.block_hashes, request.num_prompt_tokens, self.setup.block_tokens
        self.offload.on_new_request(request, now_s)
        # The last token is always computed.
        on_device = self.device.find_prefix(hashes[: (num_prompt - 1) // block_tokens])
        num_hit = len(on_device) * block_tokens
        result = self.offload.match(request.request_id, num_hit, now_s)
        while isinstance(result, Later):
            self._step([], now_s)
            result = self.offload.match(request.request_id, num_hit, now_s)
        num_load = result.num_tokens if isinstance(result, Hit) else 0
        table = self._allocate(on_device, num_prompt)
        self.offload.commit(request.request_id, (table,), num_load, now_s)
        num_tier = sum(self.offload.tier_hit(request.request_id, num_load).values())
        if num_load:
            self._step([], now_s)
        num_loaded = (num_hit + num_load) // block_tokens
        self._register(table[:num_loaded], hashes)
        self._step([StepProgress(request.request_id, (table,), num_prompt)], now_s)
        self._register(table[: num_prompt // block_tokens], hashes)
        if request.num_tokens > num_prompt:
            table = [*table, *self._allocate((), request.num_tokens - len(table) * block_tokens)]
            # The last token of an answer is not computed.
            num_computed = request.num_tokens - 1
            self._step([StepProgress(request.request_id, (table,), num_computed)], now_s)
            self._register(table[: num_computed // block_tokens], hashes)
        self.offload.on_request_finished(request.request_id, now_s)
        for _ in range(request.num_tokens - num_prompt):
            # The steps of an answer, in which the order of a long prompt's blocks is settled.
            if not self.offload.has_open_work():
                break
            self._step([], now_s)
        self.device.free(table)
        self.tokens.prompt += num_prompt
        self.tokens.device += num_hit
        self.tokens.pool += num_load - num_tier
        self.tokens.tier += num_tier

    def _allocate(self, shared: Sequence[int], num_tokens: int) -> list[int]:
        num_new = max(-(-num_tokens // self.setup.block_tokens) - len(shared), 0)
        table = self.device.allocate(shared, num_new)
        if table is None:
            raise ValueError(
                f"a request needs {len(shared) + num_new} blocks, and the device has {self.device.num_blocks}"
            )
        return table

    def _step(self, progress: Sequence[StepProgress], now_s: float) -> None:
        """Take one step, and end the transfers that it starts."""
        plan: StepPlan = self.offload.plan_step(progress, now_s)
        jobs = (*plan.loads, *plan.stores_ahead, *plan.stores)
        for outcome in self.offload.on_transfers_finished([TransferResult(job.job_id, 0) for job in jobs], now_s):
            if not outcome.ok:
                raise RuntimeError(f"the load of request {outcome.request_id} failed")

    def _register(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        for block, block_hash in zip(blocks, hashes, strict=False):
            self.device.register(block, block_hash)


def replayed(trace: Sequence[TraceRequest]) -> Iterator[tuple[float, ReplayedRequest]]:
    """Return each request with its time in seconds."""
    answers = count(1)
    for number, request in enumerate(trace):
        prompt = [hash_id.to_bytes(8, "little") for hash_id in full_ids(request)]
        num_tokens = request.input_length + request.output_length
        rest = [
            b"answer" + next(answers).to_bytes(8, "little")
            for _ in range(num_tokens // request.block_size - len(prompt))
        ]
        yield (
            request.timestamp / 1000,
            ReplayedRequest(f"r{number}", request.input_length, num_tokens, prompt + rest, session=request.session_id),
        )


def full_ids(request: TraceRequest) -> tuple[int, ...]:
    """Return the hash ids of a request's full blocks."""
    return request.hash_ids[: request.input_length // request.block_size]


def count_blocks(trace: Sequence[TraceRequest]) -> int:
    """Return the number of different full blocks."""
    return len({hash_id for request in trace for hash_id in full_ids(request)})
