"""Traces in Mooncake's format: one JSON object per line, with one hash id per 512-token block of the input.

Equal ids mean an equal prefix up to and including that block; the last block of an input may be partial.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from kvferry.app.field_errors import field_errors
from kvferry.core.pool.events import PROMPT_BLOCK_TOKENS

TRACE_BLOCK_TOKENS = PROMPT_BLOCK_TOKENS


class BadTrace(Exception):
    """A trace that cannot be read; the message names the line."""


@dataclass(frozen=True, config=ConfigDict(strict=True))
class TraceRequest:
    """One recorded request. The time is in milliseconds, lengths are tokens of the recorded model."""

    timestamp: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    input_length: Annotated[int, Field(ge=1)]
    output_length: Annotated[int, Field(ge=0)]
    hash_ids: tuple[int, ...]

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
        problems = "; ".join(f"{one.field}: {one.message}" for one in fields)
        raise BadTrace(f"{path}, line {number}: {problems}") from error
    if not requests:
        raise BadTrace(f"{path}: contains no request")
    return requests
