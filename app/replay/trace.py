"""Traces in Mooncake's format, read or generated, and prompts in place of their hashes.

A trace has one JSON object per line, with one hash id per 512-token block of the input. Equal ids mean an equal prefix
up to and including that block; the last block of an input may be partial.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from kvferry.app.common.call_errors import field_errors
from kvferry.core.pool.events import PROMPT_BLOCK_TOKENS

TRACE_BLOCK_TOKENS = PROMPT_BLOCK_TOKENS
FIRST_TOKEN_ID = 3
LAST_TOKEN_ID = 249
CACHED_RUNS = 65_536
CONVERSATIONS = 60
TURNS = 5
SYSTEM_PROMPTS = 4
"""Number of beginnings that conversations share."""
SYSTEM_PROMPT_IDS = 4
TURN_IDS = (4, 12)
"""Bounds of the hash ids that a turn adds: together several times what the embedded engine's device holds."""
OUTPUT_TOKENS = (50, 500)
ARRIVALS_MS = 300_000
THINK_MS = (5_000, 60_000)
_MAX_TIME_MS = 1e14
"""Later times are those of no clock in milliseconds, and beyond what dates can express."""
_MAX_HASH_ID = 1 << 63
"""Blocks of answers, which traces do not name, have the ids from here on."""
_MAX_OUTPUT_TOKENS = 1 << 24
_SHOWN_PROBLEMS = 2


class BadTrace(Exception):
    """A trace that cannot be read; the message names the line."""


@validated(frozen=True, config=ConfigDict(strict=True))
class TraceRequest:
    """One recorded request. The time is in milliseconds, lengths are tokens of the recorded model."""

    timestamp: Annotated[float, Field(ge=0, le=_MAX_TIME_MS, allow_inf_nan=False)]
    input_length: Annotated[int, Field(ge=1)]
    output_length: Annotated[int, Field(ge=0, le=_MAX_OUTPUT_TOKENS)]
    hash_ids: tuple[Annotated[int, Field(ge=0, lt=_MAX_HASH_ID)], ...]

    def __post_init__(self) -> None:
        blocks = -(-self.input_length // TRACE_BLOCK_TOKENS)
        if len(self.hash_ids) != blocks:
            raise ValueError(
                f"input_length {self.input_length} has {blocks} blocks of {TRACE_BLOCK_TOKENS} tokens, "
                f"and hash_ids has {len(self.hash_ids)} ids"
            )


_REQUEST = TypeAdapter(TraceRequest)


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Return the first `limit` requests of a trace, or all of them. Blank lines are skipped."""
    requests: list[TraceRequest] = []
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                if len(requests) == limit:
                    break
                if line.strip():
                    requests.append(_REQUEST.validate_json(line))
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadTrace(f"{path}: not UTF-8 text (byte {error.start})") from error
    except ValidationError as error:
        fields = field_errors(error.errors(include_url=False), skip=0, whole="request")
        problems = "; ".join(f"{one.field}: {one.message}" for one in fields[:_SHOWN_PROBLEMS])
        problems += "; and more" * (len(fields) > _SHOWN_PROBLEMS)
        raise BadTrace(f"{path}, line {number}: {problems}") from error
    if not requests:
        raise BadTrace(f"{path}: contains no request")
    return requests


def block_size_notice(num_short: int, num_prompts: int) -> str | None:
    """Return why a trace cannot show the hits of a workload, if most prompts are shorter than its blocks."""
    if 2 * num_short <= num_prompts:
        return None
    return (
        f"{num_short:,} of {num_prompts:,} prompts are shorter than the trace's blocks of {TRACE_BLOCK_TOKENS} tokens: "
        "what they share does not show in the trace, and they hit nothing"
    )


def is_short(input_length: int) -> bool:
    """Return whether a prompt has no full block, so that no other one can share it."""
    return input_length < TRACE_BLOCK_TOKENS


def sample_trace(seed: int) -> list[TraceRequest]:
    """Return the requests of conversations that share beginnings, and go on after others have run."""
    rng = random.Random(seed)
    new_ids = count(SYSTEM_PROMPTS * SYSTEM_PROMPT_IDS)
    requests = []
    for _ in range(CONVERSATIONS):
        first_id = rng.randrange(SYSTEM_PROMPTS) * SYSTEM_PROMPT_IDS
        hash_ids = [*range(first_id, first_id + SYSTEM_PROMPT_IDS)]
        time_ms = rng.uniform(0, ARRIVALS_MS)
        for _ in range(TURNS):
            hash_ids += islice(new_ids, rng.randint(*TURN_IDS))
            input_length = len(hash_ids) * TRACE_BLOCK_TOKENS
            requests.append(TraceRequest(time_ms, input_length, rng.randint(*OUTPUT_TOKENS), tuple(hash_ids)))
            time_ms += rng.uniform(*THINK_MS)
    return sorted(requests, key=lambda request: request.timestamp)


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
