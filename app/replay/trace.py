"""Traces, read or generated, and prompts in place of their hashes.

A trace in Mooncake's format has one JSON object per line, with one hash id per block of the input. Equal ids mean an
equal prefix up to and including that block; the last block of an input may be partial. Blocks have 512 tokens, or
`block_size`. Sessions of agents in the format of callanjfox/kv-cache-tester are a JSON file each.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count, islice
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated

from kvferry.app.common.call_errors import error_text

T = TypeVar("T")

TRACE_BLOCK_TOKENS = 512
"""Tokens of a block in traces that do not say it."""
MAX_BLOCK_TOKENS = 1 << 16
SCALED_BLOCK_TOKENS = 16
"""What is sent for a block of 512 tokens, unless the user says otherwise."""
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
SESSION_INTERVAL_MS = 60_000
"""Time between the beginnings of sessions, whose files count from their own beginning."""


class BadTrace(Exception):
    """A trace that cannot be read; the message names the line."""


@validated(frozen=True, config=ConfigDict(strict=True))
class TraceRequest:
    """One recorded request. Times are in milliseconds, lengths are tokens of the recorded model.

    Of a session, `delay` is the time from the end of its request before to this one; None if it is not known.
    """

    timestamp: Annotated[float, Field(ge=0, le=_MAX_TIME_MS, allow_inf_nan=False)]
    input_length: Annotated[int, Field(ge=1)]
    output_length: Annotated[int, Field(ge=0, le=_MAX_OUTPUT_TOKENS)]
    hash_ids: tuple[Annotated[int, Field(ge=0, lt=_MAX_HASH_ID)], ...]
    block_size: Annotated[int, Field(ge=1, le=MAX_BLOCK_TOKENS)] = TRACE_BLOCK_TOKENS
    session_id: Annotated[str, Field(max_length=256)] | None = None
    delay: Annotated[float, Field(ge=0, le=_MAX_TIME_MS, allow_inf_nan=False)] | None = None


@validated(frozen=True, config=ConfigDict(strict=True))
class _SessionEntry:
    """A request of a session, or a sub-agent with requests of its own. Times are in seconds."""

    t: Annotated[float, Field(ge=0, le=_MAX_TIME_MS / 1000, allow_inf_nan=False)]
    input_tokens: Annotated[int, Field(ge=0, alias="in")] = 0
    output_tokens: Annotated[int, Field(ge=0, le=_MAX_OUTPUT_TOKENS, alias="out")] = 0
    hash_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    think_time: Annotated[float, Field(ge=0, le=_MAX_TIME_MS / 1000, allow_inf_nan=False)] | None = None
    requests: tuple[_SessionEntry, ...] = ()


@validated(frozen=True, config=ConfigDict(strict=True))
class _Session:
    """A file of kv-cache-tester. Its hash ids mean nothing outside of it."""

    block_size: Annotated[int, Field(ge=1, le=MAX_BLOCK_TOKENS)]
    requests: tuple[_SessionEntry, ...]


_REQUEST = TypeAdapter(TraceRequest)
_SESSION = TypeAdapter(_Session)


def read_trace(path: Path, limit: int | None = None, block_tokens: int | None = None) -> list[TraceRequest]:
    """Return the first `limit` requests of a trace, or all of them.

    Args:
        path: Lines in Mooncake's format, of which blank ones are skipped; a session's file, or a folder of those.
        limit: Most requests to return.
        block_tokens: Tokens of a block, of lines that do not say it.

    Returns:
        The requests, which have blocks of one size.

    Raises:
        BadTrace: The trace cannot be read.
    """
    try:
        if path.is_dir() or path.suffix == ".json":
            requests = _read_sessions(sorted(path.glob("*.json")) if path.is_dir() else [path])[:limit]
        else:
            requests = list(islice(_read_lines(path, block_tokens), limit))
    except OSError as error:
        raise BadTrace(f"{error.filename or path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadTrace(f"{path}: not UTF-8 text (byte {error.start})") from error
    if not requests:
        raise BadTrace(f"{path}: contains no request")
    return requests


def _read_lines(path: Path, block_tokens: int | None) -> Iterator[TraceRequest]:
    first: TraceRequest | None = None
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{path}, line {number}"
                request = _validated(_REQUEST, line, where)
                if block_tokens is not None and '"block_size"' not in line:
                    request = replace(request, block_size=block_tokens)
                first = first or request
                _check_blocks(request, first, where)
                yield request


def _read_sessions(paths: Sequence[Path]) -> list[TraceRequest]:
    """Return the requests of sessions, which begin one after another, in the order of their times."""
    requests: list[TraceRequest] = []
    numbers = count()
    for at, path in enumerate(paths):
        session = _validated(_SESSION, path.read_bytes(), str(path))
        ids: dict[int, int] = {}
        for name, start_s, entry in _flatten(session.requests, path.stem, at * SESSION_INTERVAL_MS / 1000):
            prompt = [ids.setdefault(hash_id, next(numbers)) for hash_id in entry.hash_ids]
            # The last block has no id if it is not full.
            num_tokens = min(entry.input_tokens, len(prompt) * session.block_size + session.block_size - 1)
            num_blocks = -(-num_tokens // session.block_size)
            prompt += islice(numbers, max(num_blocks - len(prompt), 0))
            delay_ms = None if entry.think_time is None else 1000 * entry.think_time
            requests.append(
                TraceRequest(
                    1000 * (start_s + entry.t),
                    num_tokens,
                    entry.output_tokens,
                    tuple(prompt[:num_blocks]),
                    session.block_size,
                    name,
                    delay_ms,
                )
            )
            _check_blocks(requests[-1], requests[0], str(path))
    return sorted(requests, key=lambda one: one.timestamp)


def _flatten(entries: Sequence[_SessionEntry], name: str, start_s: float) -> Iterator[tuple[str, float, _SessionEntry]]:
    """Yield the requests of a session, with its name and when it began; sub-agents are sessions of their own."""
    for number, entry in enumerate(entries):
        if entry.requests:
            yield from _flatten(entry.requests, f"{name}/{number}", start_s + entry.t)
        elif entry.input_tokens:
            yield name, start_s, entry


def _check_blocks(request: TraceRequest, first: TraceRequest, where: str) -> None:
    """Raise `BadTrace` if a request does not have an id for each block, or blocks of another size than the first."""
    if request.block_size != first.block_size:
        raise BadTrace(
            f"{where}: block_size {request.block_size} after {first.block_size}; a trace has blocks of one size"
        )
    num_blocks = -(-request.input_length // request.block_size)
    if len(request.hash_ids) != num_blocks:
        raise BadTrace(
            f"{where}: input_length {request.input_length} has {num_blocks} blocks of {request.block_size} tokens, and "
            f"hash_ids has {len(request.hash_ids)} ids"
        )


def _validated(format_: TypeAdapter[T], text: str | bytes, where: str) -> T:
    try:
        return format_.validate_json(text)
    except ValidationError as error:
        raise BadTrace(f"{where}: {error_text(error, 'request', _SHOWN_PROBLEMS)}") from error


def block_size_notice(requests: Sequence[TraceRequest]) -> str | None:
    """Return why a trace cannot show the hits of a workload, if most prompts are shorter than its blocks."""
    num_short = sum(one.input_length < one.block_size for one in requests)
    if 2 * num_short <= len(requests):
        return None
    return (
        f"{num_short:,} of {len(requests):,} prompts are shorter than the trace's blocks of {requests[0].block_size} "
        "tokens: what they share does not show in the trace, and they hit nothing"
    )


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
    """How a trace becomes prompts: `tokens_per_hash` tokens for a block, outputs of at most `max_output_tokens`.

    `context_tokens` is the engine's limit of prompt and output together; None if the engine does not report it.
    """

    tokens_per_hash: int
    max_output_tokens: int
    seed: int
    context_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class MappedRequest:
    """One request to send. Times are those of the trace; see `TraceRequest`."""

    at_s: float
    prompt: tuple[int, ...]
    output_tokens: int
    truncated: bool
    session: str | None = None
    delay_s: float | None = None


def map_request(request: TraceRequest, mapping: Mapping) -> MappedRequest:
    """Return the request to send for one of the trace. A prompt that exceeds the context is truncated."""
    full, rest = divmod(request.input_length, request.block_size)
    prompt = [
        token
        for hash_id in request.hash_ids[:full]
        for token in hash_run(hash_id, mapping.seed, mapping.tokens_per_hash)
    ]
    if rest:
        run = hash_run(request.hash_ids[full], mapping.seed, mapping.tokens_per_hash)
        prompt += run[: _scaled(rest, request, mapping)]
    output_tokens = min(_scaled(request.output_length, request, mapping), mapping.max_output_tokens)
    length = len(prompt)
    if mapping.context_tokens is not None:
        output_tokens = max(1, min(output_tokens, mapping.context_tokens - 1))
        prompt = prompt[: max(1, mapping.context_tokens - output_tokens)]
    return MappedRequest(
        request.timestamp / 1000,
        tuple(prompt),
        output_tokens,
        len(prompt) < length,
        request.session_id,
        None if request.delay is None else request.delay / 1000,
    )


@lru_cache(CACHED_RUNS)
def hash_run(hash_id: int, seed: int, tokens: int) -> tuple[int, ...]:
    """Return the tokens of a hash id, which depend on the arguments only."""
    digest = hashlib.shake_128(f"{seed}:{hash_id}".encode()).digest(2 * tokens)
    words = memoryview(digest).cast("H")
    span = LAST_TOKEN_ID - FIRST_TOKEN_ID + 1
    return tuple(FIRST_TOKEN_ID + word % span for word in words)


def _scaled(trace_tokens: int, request: TraceRequest, mapping: Mapping) -> int:
    return max(1, round(trace_tokens * mapping.tokens_per_hash / request.block_size))
