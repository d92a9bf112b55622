"""Mapping of hash ids to token ids: each id is replaced by a fixed run of tokens wherever it occurs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache

from kvferry.app.replay.trace import TRACE_BLOCK_TOKENS, TraceRequest

FIRST_TOKEN_ID = 3
LAST_TOKEN_ID = 249
CACHED_RUNS = 65_536


@dataclass(frozen=True, slots=True)
class Mapping:
    """How a trace becomes prompts: `tokens_per_hash` tokens for 512 of the trace, outputs of at most `max_output`.

    `context_tokens` is the engine's limit of prompt and output together; None if the engine does not report it.
    """

    tokens_per_hash: int
    max_output_tokens: int
    seed: int
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class MappedRequest:
    """One request to send."""

    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int
    truncated: bool


def map_request(request: TraceRequest, mapping: Mapping) -> MappedRequest:
    """Return the request to send for one of the trace. A prompt that exceeds the context is truncated."""
    full, rest = divmod(request.input_length, TRACE_BLOCK_TOKENS)
    prompt = [
        token
        for hash_id in request.hash_ids[:full]
        for token in hash_run(hash_id, mapping.seed, mapping.tokens_per_hash)
    ]
    if rest:
        run = hash_run(request.hash_ids[full], mapping.seed, mapping.tokens_per_hash)
        prompt += run[: _scaled(rest, mapping.tokens_per_hash)]
    output_tokens = min(_scaled(request.output_length, mapping.tokens_per_hash), mapping.max_output_tokens)
    length = len(prompt)
    if mapping.context_tokens is not None:
        output_tokens = max(1, min(output_tokens, mapping.context_tokens - 1))
        prompt = prompt[: max(1, mapping.context_tokens - output_tokens)]
    return MappedRequest(request.timestamp / 1000, tuple(prompt), output_tokens, len(prompt) < length)


@lru_cache(CACHED_RUNS)
def hash_run(hash_id: int, seed: int, tokens: int) -> tuple[int, ...]:
    """Return the tokens of a hash id, which depend on the arguments only."""
    digest = hashlib.shake_128(f"{seed}:{hash_id}".encode()).digest(2 * tokens)
    words = memoryview(digest).cast("H")
    span = LAST_TOKEN_ID - FIRST_TOKEN_ID + 1
    return tuple(FIRST_TOKEN_ID + word % span for word in words)


def _scaled(trace_tokens: int, tokens_per_hash: int) -> int:
    return max(1, round(trace_tokens * tokens_per_hash / TRACE_BLOCK_TOKENS))
