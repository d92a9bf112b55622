"""Request of the embedded engine: a prompt, its growing answer, and how far both are computed.

Satisfies `kvferry.core.engine_api.EngineRequest`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch

from kvferry.app.engines.embedded.block_pool import chain_root, extend_chain
from kvferry.app.engines.embedded.tokenizer import Detokenizer, StopScanner
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
class SamplingParams:
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
class ClientOptions:
    """What a client sets for a request besides sampling. Requests share blocks only within one `cache_salt`."""

    cache_salt: str | None = None
    kv_transfer_params: Mapping[str, Any] | None = None
    priority: int = 0
    session: str | None = None


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """Output of one step for one request. The last one has a `finish_reason`, and for `error` a message.

    `num_cached_tokens` are the prompt tokens that were not computed, because the device or the host pool had them.
    """

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason | None
    num_prompt_tokens: int
    num_cached_tokens: int
    error: str | None = None


class Request:
    """A prompt and its growing answer. Once it is submitted, only the engine thread changes it, except `is_canceled`.

    Creating one takes time proportional to the prompt.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        detokenizer: Detokenizer,
        block_size: int,
        aliases: Sequence[str],
        options: ClientOptions,
    ) -> None:
        self.request_id = request_id
        self.aliases = tuple(aliases)
        self.tenant = tenant_digest(options.cache_salt)
        self.lora: str | None = None
        self.kv_transfer_params = options.kv_transfer_params
        self.priority = options.priority
        self.session = options.session
        self.sampling = sampling
        self.num_prompt_tokens = len(prompt_token_ids)
        self.trace: TracedRequest | None = None
        self.send: Callable[[OutputDelta], None]
        """Sends output to the client; set when the request is submitted."""
        self.is_canceled = False
        """Whether the client is gone. Set by any thread."""

        self.token_ids = list(prompt_token_ids)
        """Prompt and answer so far."""
        self.block_hashes: list[bytes] = []
        """Chained hashes of the full blocks of `token_ids`."""
        self.block_table: list[int] = []
        """Device blocks of the tokens that are computed, loaded or scheduled."""
        self.num_computed_tokens = 0
        self.arrival = 0
        self.finish_reason: FinishReason | None = None
        self.generator: torch.Generator | None = None
        self._block_size = block_size
        self._chain_root = chain_root(options.cache_salt, self.lora)
        self._num_cached_tokens: int | None = None
        self._text = StopScanner(detokenizer, sampling.stop)
        extend_chain(self.block_hashes, self._chain_root, self.token_ids, block_size)

    def rename(self, request_id: str) -> None:
        """Replace the id, before the engine knows it; the previous one stays an alias."""
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

    def record_cached(self, num_tokens: int) -> None:
        """Record how many tokens of a starting request are served from a cache.

        If it was preempted within its prompt, it may have computed the blocks found itself: the lower count is kept.
        After that the count is final.
        """
        if not self.num_output_tokens:
            known = self._num_cached_tokens
            self._num_cached_tokens = num_tokens if known is None else min(known, num_tokens)

    def append(self, token_id: int, is_eos: bool) -> OutputDelta:
        """Append a sampled token; return the output for the client, with a `finish_reason` if the answer ends."""
        self.token_ids.append(token_id)
        extend_chain(self.block_hashes, self._chain_root, self.token_ids, self._block_size)
        if is_eos and not self.sampling.ignore_eos:
            return self._output((token_id,), self._text.flush(), FinishReason.STOP)
        piece, stopped = self._text.push(token_id, self.num_output_tokens > self.sampling.min_tokens)
        if stopped:
            return self._output((token_id,), piece, FinishReason.STOP)
        if self.num_output_tokens >= self.sampling.max_tokens:
            return self._output((token_id,), piece + self._text.flush(), FinishReason.LENGTH)
        return self._output((token_id,), piece, None)

    def end(self, reason: FinishReason, error: str | None = None) -> OutputDelta:
        """Return the last output when something other than a token ends the answer, which is incomplete then."""
        return self._output((), "", reason, error)

    def _output(
        self, token_ids: tuple[int, ...], text: str, reason: FinishReason | None, error: str | None = None
    ) -> OutputDelta:
        self.finish_reason = reason
        return OutputDelta(token_ids, text, reason, self.num_prompt_tokens, self._num_cached_tokens or 0, error)
