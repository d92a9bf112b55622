"""Request of the embedded engine: tokens, blocks, progress and end. Satisfies `EngineRequest` of core."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from kvferry.app.engines.embedded.block_pool import chain_root, extend_chain
from kvferry.app.engines.embedded.tokenizer import TextStream
from kvferry.core.keys import tenant_digest

if TYPE_CHECKING:
    from kvferry.app.telemetry.traces import TracedRequest


class FinishReason(StrEnum):
    """Why an answer ended; after `abort` and `error` it is incomplete."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling and stop parameters. Temperature 0 is greedy; a seed makes sampling repeatable.

    Of the first `min_tokens` tokens none is the end token, and a stop string that they complete does not count.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Output of one step. The last one has a `finish_reason`, and for `error` a message.

    `num_cached_tokens` are the prompt tokens that were not computed, because the device or the host pool had them.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    error: str | None = None


class RequestStream:
    """Async iterator over the output of each step; ends after the delta with a `finish_reason`."""

    def __init__(self, request_id: str, cancel: Callable[[], None]) -> None:
        """Bind to the running event loop. `cancel` stops the request; it is called when the client is gone."""
        self.request_id = request_id
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._deltas: asyncio.Queue[OutputDelta] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputDelta:
        if self._ended:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        self._ended = delta.finish_reason is not None
        return delta

    def cancel(self) -> None:
        """Stop the request because its client is gone. Harmless once the answer has ended."""
        if not self._ended:
            self._cancel()

    def push(self, delta: OutputDelta) -> None:
        """Add output. Thread: engine. Ignored if the event loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._deltas.put_nowait, delta)
        except RuntimeError:
            self._cancel()


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """What a client sets for a request beside its answer. Requests share blocks only within one `cache_salt`."""

    cache_salt: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    priority: int = 0


class Request:
    """A prompt and its growing answer. Created by any thread, then accessed by the engine thread only.

    Creating one takes time proportional to the prompt. After submission `sink` receives the output of each step.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: Sampling,
        text: TextStream,
        block_size: int,
        aliases: Sequence[str] = (),
        options: ClientOptions | None = None,
    ) -> None:
        options = options or ClientOptions()
        self.request_id = request_id
        self.aliases = tuple(aliases)
        self.tenant = tenant_digest(options.cache_salt)
        self.lora: str | None = None
        self.kv_transfer_params = options.kv_transfer_params
        self.priority = options.priority
        self.sampling = sampling
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.block_hashes: list[bytes] = []
        self.block_table: list[int] = []
        self.num_computed_tokens = 0
        self.num_loading_tokens = 0
        self.arrival = 0
        self.trace: TracedRequest | None = None
        self.generator: torch.Generator | None = None
        self._block_size = block_size
        self._chain_root = chain_root(options.cache_salt, self.lora)
        self._cached_tokens: int | None = None
        self._prefilled = False
        self._text = StopScanner(text, sampling.stop)
        self.sink: Callable[[OutputDelta], None] | None = None
        self._extend_hashes()

    def rename(self, request_id: str) -> None:
        """Replace the id, before submission; the previous one stays an alias."""
        self.aliases = (self.request_id, *self.aliases)
        self.request_id = request_id

    @property
    def num_tokens(self) -> int:
        """Return the tokens of prompt and answer so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Return the tokens of the answer so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def may_end(self) -> bool:
        """Return whether the next token may be the end token."""
        return self.sampling.ignore_eos or self.num_output_tokens >= self.sampling.min_tokens

    @property
    def num_cached_tokens(self) -> int:
        """Return the prompt tokens served from a cache; final when the prefill is done."""
        return self._cached_tokens or 0

    def record_cached(self, num_tokens: int) -> None:
        """Record how many tokens of a starting prefill are served from a cache.

        After a preemption, the blocks found may have been computed by this request itself: the lower count is kept.
        """
        if not self._prefilled:
            num_tokens = min(num_tokens, self.num_prompt_tokens)
            self._cached_tokens = num_tokens if self._cached_tokens is None else min(self._cached_tokens, num_tokens)

    def advance(self, num_new_tokens: int) -> None:
        """Record that a step has computed this many more tokens."""
        self.num_computed_tokens += num_new_tokens
        self._prefilled = self._prefilled or self.num_computed_tokens >= self.num_prompt_tokens

    def append(self, token_id: int, is_eos: bool) -> OutputDelta:
        """Append a sampled token; return the output for the client, and whether the answer ends."""
        self.token_ids.append(token_id)
        self._extend_hashes()
        if is_eos and not self.sampling.ignore_eos:
            return self._delta((token_id,), self._text.flush(), FinishReason.STOP)
        piece, stopped = self._text.push(token_id, self.num_output_tokens > self.sampling.min_tokens)
        if stopped:
            return self._delta((token_id,), piece, FinishReason.STOP)
        if self.num_output_tokens >= self.sampling.max_tokens:
            return self._delta((token_id,), piece + self._text.flush(), FinishReason.LENGTH)
        return self._delta((token_id,), piece, None)

    def end(self, reason: FinishReason, error: str | None = None) -> OutputDelta:
        """Return the last output when something other than a token ends the answer; without text if that fails."""
        try:
            text = self._text.flush()
        except Exception:  # noqa: BLE001 - a tokenizer is the checkpoint's own program
            text = ""
        return self._delta((), text, reason, error)

    def send(self, delta: OutputDelta) -> None:
        """Send output to the client."""
        if self.sink is not None:
            self.sink(delta)

    def _delta(
        self, token_ids: tuple[int, ...], text: str, reason: FinishReason | None, error: str | None = None
    ) -> OutputDelta:
        return OutputDelta(
            token_ids, text, reason, self.num_prompt_tokens, self.num_output_tokens, self.num_cached_tokens, error
        )

    def _extend_hashes(self) -> None:
        known = len(self.block_hashes) * self._block_size
        if self.num_tokens - known >= self._block_size:
            extend_chain(self.block_hashes, self._chain_root, self.token_ids[known:], self._block_size, known)


class StopScanner:
    """Text of an answer up to its first stop string. A possible start of a stop string is held back until it is
    decided; the held text is shorter than the longest stop string.

    Each stop string is compared at most once from each place of the text, whatever the others hold back.
    """

    def __init__(self, text: TextStream, stops: Sequence[str]) -> None:
        self._text = text
        self._stops = stops
        self._held = ""
        self._starts = [0] * len(stops)
        """Where in the held text each stop string may start at the earliest."""

    def push(self, token_id: int, may_stop: bool = True) -> tuple[str, bool]:
        """Return the text that may be sent now, and whether a stop string ended the answer, which it `may_stop`."""
        return self._scan(self._text.push(token_id), may_stop)

    def flush(self) -> str:
        """Return the held text, once no token follows."""
        piece, stopped = self._scan(self._text.flush())
        rest, self._held = ("" if stopped else self._held), ""
        return piece + rest

    def _scan(self, piece: str, may_stop: bool = True) -> tuple[str, bool]:
        text = self._held + piece
        stops = list(zip(self._stops, self._starts, strict=True))
        found = [start for stop, first in stops if (start := text.find(stop, first)) >= 0]
        if found and may_stop:
            self._held = ""
            return text[: min(found)], True
        starts = [_possible_start(text, stop, first) for stop, first in stops]
        num_sent = min(starts, default=len(text))
        self._held, self._starts = text[num_sent:], [start - num_sent for start in starts]
        return text[:num_sent], False


def _possible_start(text: str, stop: str, first: int) -> int:
    """Return where the longest end of `text[first:]` with which `stop` begins starts, `len(text)` if there is none."""
    start = text.find(stop[0], max(len(text) - len(stop) + 1, first))
    while start >= 0 and not stop.startswith(text[start:]):
        start = text.find(stop[0], start + 1)
    return len(text) if start < 0 else start
