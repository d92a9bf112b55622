"""The passes of a demonstration: all conversations at once, each turn streamed and timed, and the result of a pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from kvferry.app.client import Json, KVFerryClient
from kvferry.app.replay.report import CacheUse, cache_use, first_token_times, named_errors, settled_stats
from kvferry.app.replay.sender import COMPLETIONS, Answer, Model, open_client, send
from kvferry.app.replay.workload import Conversation, Transcript, make_text

QUANTILES = (50, 95)
PROBE_CHARS = 600
WITHOUT_OFFLOADING: Mapping[str, Any] = {"kv_transfer_params": {"store": False, "load": False}}


class BadEngine(Exception):
    """An engine that the demonstration cannot use; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """The engine, and the admin API of its offloading."""

    engine: KVFerryClient
    model: Model
    admin: KVFerryClient
    chars_per_token: float = 1.0

    def body(self, prompt: str, output_tokens: int, params: Mapping[str, Any]) -> Json:
        """Return the body of a request for the next message of the assistant."""
        return {
            "model": self.model.name,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "return_token_ids": True,
            **params,
        }


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One pass. Passes with different labels share no prompt; `params` are added to each request."""

    title: str
    label: str
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TurnResult:
    """The answer to one request of a conversation."""

    conversation: str
    turn: int
    request_id: str
    answer: Answer


@dataclass(frozen=True, slots=True)
class PassResult:
    """Result of a pass, so far or complete. Tokens of requests that failed do not count.

    `cached_tokens` is None if the engine does not report it, `cache` if it has restarted.
    """

    title: str
    requests: int
    failed: int
    errors: dict[str, int]
    prompt_tokens: int
    cached_tokens: int | None
    first_token_s: dict[str, float]
    total_s: float
    cache: CacheUse | None


class Pass:
    """One pass over all conversations. `results` can be read while it runs."""

    def __init__(self, target: Target, plan: PassPlan, conversations: Sequence[Conversation], seed: int) -> None:
        self.plan = plan
        self.results: list[TurnResult] = []
        self._target = target
        self._conversations = conversations
        self._seed = seed
        self._started_s = time.perf_counter()
        self._total_s: float | None = None
        self._before = settled_stats(target.admin)
        self._after: Json | None = None

    async def run(self, run_id: str, on_result: Callable[[TurnResult], None]) -> None:
        """Send everything. `on_result` is called with each result."""
        async with (
            open_client(self._target.engine, len(self._conversations)) as client,
            asyncio.TaskGroup() as group,
        ):
            for conversation in self._conversations:
                group.create_task(self._converse(client, conversation, run_id, on_result))
        self._total_s = time.perf_counter() - self._started_s
        self._after = settled_stats(self._target.admin)

    def result(self) -> PassResult:
        """Return the result so far."""
        answers = [result.answer for result in self.results]
        worked = [answer for answer in answers if answer.error is None]
        cached = [answer.cached_tokens for answer in worked if answer.cached_tokens is not None]
        return PassResult(
            title=self.plan.title,
            requests=len(answers),
            failed=len(answers) - len(worked),
            errors=named_errors(answers),
            prompt_tokens=sum(answer.prompt_tokens or 0 for answer in worked),
            cached_tokens=sum(cached) if len(cached) == len(worked) else None,
            first_token_s=first_token_times(answers, QUANTILES),
            total_s=self._total_s or time.perf_counter() - self._started_s,
            cache=None if self._after is None else cache_use(self._before, self._after),
        )

    async def _converse(
        self,
        client: httpx.AsyncClient,
        conversation: Conversation,
        run_id: str,
        on_result: Callable[[TurnResult], None],
    ) -> None:
        target = self._target
        transcript = Transcript(conversation, self._seed, self.plan.label, target.chars_per_token)
        for number, turn in enumerate(conversation.turns):
            await asyncio.sleep(turn.think_s)
            transcript.add_message(number)
            body = target.body(transcript.prompt, turn.output_tokens, self.plan.params)
            request_id = f"demo-{run_id}-{conversation.name}-{number + 1}"
            answer = await send(client, body, request_id)
            result = TurnResult(conversation.name, number + 1, request_id, answer)
            self.results.append(result)
            on_result(result)
            if answer.error is not None:
                return
            transcript.add_answer(answer.text)


async def probe(engine: KVFerryClient, model: Model, admin: KVFerryClient, run_id: str) -> Target:
    """Send one prompt, and return the engine with the length of its tokens. Raises `BadEngine`."""
    num_chars = min(PROBE_CHARS, (model.context_tokens or 2 * PROBE_CHARS) // 2)
    prompt = make_text(run_id, num_chars, "Question:")
    target = Target(engine, model, admin)
    async with open_client(engine, 1) as client:
        answer = await send(client, target.body(prompt, 2, WITHOUT_OFFLOADING), f"demo-{run_id}-probe")
    if answer.error is not None:
        raise BadEngine(f"{engine.url}{COMPLETIONS}: {answer.error}")
    if not answer.prompt_tokens:
        raise BadEngine(f"{engine.url}{COMPLETIONS}: reports no usage in streams (stream_options.include_usage)")
    return replace(target, chars_per_token=len(prompt) / answer.prompt_tokens)
