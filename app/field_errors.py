"""Validation errors of request bodies and queries, one entry per field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field

BODY_FIELD = "body"


class FieldError(BaseModel):
    """The errors of one field; `field` is its path with dots, or `body` for the whole body."""

    field: str = Field(examples=["max_offload_tokens"])
    message: str = Field(examples=['must be a whole number, 0 or more, "unlimited" or null'])


def field_errors(errors: Sequence[Mapping[str, Any]], skip: int = 1, whole: str = BODY_FIELD) -> list[FieldError]:
    """Return Pydantic's errors as one entry per field, in their order.

    The first `skip` parts of a location are left out: FastAPI's first part is `body`, `query` or `path`. Errors of no
    single field are those of `whole`.
    """
    messages: dict[str, list[str]] = {}
    for error in errors:
        path = ".".join(str(part) for part in error["loc"][skip:]) or whole
        messages.setdefault(path[:200], []).append(_message(error))
    return [FieldError(field=path, message="; ".join(dict.fromkeys(texts))) for path, texts in messages.items()]


def _message(error: Mapping[str, Any]) -> str:
    if error["type"] == "extra_forbidden":
        return "unknown field"
    if error["type"] == "missing":
        return "is required"
    return str(error["msg"]).removeprefix("Value error, ")
