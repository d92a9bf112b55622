"""Asking an engine, and what the answer should be."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from kvferry.app.engines.embedded.engine import EmbeddedEngine, OutputStream
from kvferry.app.engines.embedded.model import load_model
from kvferry.app.engines.embedded.request import FinishReason, OutputDelta, SamplingParams
from kvferry.core.engine_api import BlockTables, EngineRequest, StepProgress
from kvferry.core.scheduler.scheduler import Hit, Later, Miss
from kvferry.core.transfers import LoadOutcome, StepPlan, TransferJob, TransferResult
from tests.harness.waiting import DEADLINE_S

T = TypeVar("T")


class NoOffload:
    """An `Offload` that stores and finds nothing."""

    def on_new_request(self, request: EngineRequest, now_s: float) -> None:
        pass

    def match(self, request_id: str, num_computed_tokens: int, now_s: float) -> Hit | Miss | Later:
        return Miss()

    def commit(self, request_id: str, block_ids: BlockTables, num_loaded_tokens: int, now_s: float) -> None:
        pass

    def plan_step(self, progress: Sequence[StepProgress], now_s: float) -> StepPlan:
        return StepPlan()

    def on_step_failed(self, request_ids: Sequence[str], now_s: float) -> None:
        pass

    def on_transfers_finished(self, results: Sequence[TransferResult], now_s: float) -> list[LoadOutcome]:
        return []

    def on_preempted(self, request_id: str, now_s: float) -> None:
        pass

    def on_request_finished(self, request_id: str, now_s: float, *, is_aborted: bool = False) -> None:
        pass

    def has_open_work(self) -> bool:
        return False


class NoCopies:
    """A `CopyEngine` to which no job is submitted."""

    def submit(self, job: TransferJob) -> None:
        raise NotImplementedError

    def submit_ahead(self, job: TransferJob) -> None:
        raise NotImplementedError

    def poll(self) -> list[TransferResult]:
        return []


class Recorder(NoOffload):
    """Records the requests of an engine. They wait while `may_start` is cleared."""

    def __init__(self) -> None:
        self.announced: list[EngineRequest] = []
        self.finished: list[str] = []
        self.may_start = threading.Event()
        self.may_start.set()

    def on_new_request(self, request: EngineRequest, now_s: float) -> None:
        self.announced.append(request)

    def match(self, request_id: str, num_computed_tokens: int, now_s: float) -> Hit | Miss | Later:
        return Miss() if self.may_start.is_set() else Later()

    def on_request_finished(self, request_id: str, now_s: float, *, is_aborted: bool = False) -> None:
        self.finished.append(request_id)


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    last: OutputDelta | None = None

    @property
    def reason(self) -> FinishReason | None:
        assert self.last is not None
        return self.last.finish_reason

    @property
    def cached(self) -> int:
        assert self.last is not None
        return self.last.num_cached_tokens


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)


async def collect(stream: OutputStream) -> Answer:
    """The answer of one request."""
    answer = Answer()
    async for _, delta in stream:
        answer.token_ids += delta.token_ids
        answer.text += delta.text
        answer.last = delta
    return answer


async def ask(engine: EmbeddedEngine, prompt: Sequence[int], sampling: SamplingParams, **more: Any) -> Answer:
    return await collect(engine.submit(prompt, sampling, **more))


def ask_all(engine: EmbeddedEngine, prompts: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Answer]:
    """All at once."""

    async def everything() -> list[Answer]:
        return await asyncio.gather(*[ask(engine, prompt, sampling) for prompt in prompts])

    return run(everything())


def run(work: Coroutine[Any, Any, T]) -> T:
    async def bounded() -> T:
        return await asyncio.wait_for(work, DEADLINE_S)

    return asyncio.run(bounded())


async def until(condition: Callable[[], bool], what: str) -> None:
    """Poll with a bound."""
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, f"still not: {what}"
        await asyncio.sleep(0.005)


def random_prompts(seed: int, count: int, longest: int, low: int = 3, high: int = 250) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(low, high) for _ in range(rng.randrange(1, longest + 1))] for _ in range(count)]


def reference_model(name: str) -> PreTrainedModel:
    """The same weights in float64, with the attention that transformers itself has."""
    module = load_model(name, "cpu", "float64").module
    module.set_attn_implementation("sdpa")
    return module


@torch.inference_mode()
def reference_answer(module: PreTrainedModel, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy, by a full forward pass over everything for each token: no cache of any kind."""
    ids = list(prompt)
    for _ in range(max_tokens):
        logits = module(input_ids=torch.tensor([ids]), use_cache=False).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt) :]
