"""Traces in Mooncake's format: one JSON object per line, with one hash id per 512-token block of the input.

Equal ids mean an equal prefix up to and including that block; the last block of an input may be partial.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

TRACE_BLOCK_TOKENS = 512
MAX_LINE_CHARS = 16 << 20


class BadTrace(Exception):
    """A trace that cannot be read; the message names the line."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One recorded request. Lengths are tokens of the recorded model."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """Return the first `limit` requests of a trace, or all of them. Blank lines are skipped."""
    try:
        with path.open(encoding="utf-8") as lines:
            requests = list(islice(_requests(lines), limit))
    except OSError as error:
        raise BadTrace(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise BadTrace(f"{path}: not UTF-8 text (byte {error.start})") from error
    except _BadLineError as error:
        raise BadTrace(f"{path}, line {error.number}: {error}") from error
    if not requests:
        raise BadTrace(f"{path}: contains no request")
    return requests


class _BadLineError(Exception):
    def __init__(self, number: int, message: str) -> None:
        self.number = number
        super().__init__(message)


def _requests(lines: Any) -> Iterator[TraceRequest]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield _request(line)
            except ValueError as error:
                raise _BadLineError(number, str(error)) from error


def _request(line: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise ValueError("not a JSON object")
    input_tokens = _whole(fields, "input_length", least=1)
    output_tokens = _whole(fields, "output_length", least=0)
    hash_ids = fields.get("hash_ids")
    if not isinstance(hash_ids, list) or not all(type(item) is int for item in hash_ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    blocks = -(-input_tokens // TRACE_BLOCK_TOKENS)
    if len(hash_ids) != blocks:
        raise ValueError(
            f"input_length {input_tokens} has {blocks} blocks of {TRACE_BLOCK_TOKENS} tokens, "
            f"and hash_ids has {len(hash_ids)} ids"
        )
    return TraceRequest(_timestamp(fields), input_tokens, output_tokens, tuple(hash_ids))


def _whole(fields: dict[str, Any], name: str, least: int) -> int:
    value = fields.get(name)
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be a whole number of {least} or more")
    return value


def _timestamp(fields: dict[str, Any]) -> float:
    value = fields.get("timestamp")
    if type(value) not in (int, float) or not 0 <= value < float("inf"):  # type: ignore[operator]
        raise ValueError("timestamp must be a number of milliseconds, 0 or more")
    return float(value)  # type: ignore[arg-type]
