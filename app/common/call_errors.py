"""Errors of calls: names that do not exist, conflicts, and fields that are not valid, one entry per field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, Field, ValidationError

BODY_FIELD = "body"


class NotFound(Exception):
    """A name or id in a call that does not exist."""


class Conflict(Exception):
    """A change that is not possible now; the message says why, and what to do.

    `slug` names the kind of problem, `extras` are further fields of the answer, and `errors` those of single fields.
    """

    slug: str
    title = "Not possible now"
    extras: Mapping[str, Any] = {}
    errors: Sequence[FieldError] = ()


class NamedConflict(Conflict):
    """A conflict with other overrides, rules or limits of tenants. The title is made of the slug."""

    def __init__(self, slug: str, message: str) -> None:
        super().__init__(message)
        self.slug, self.title = slug, slug.replace("-", " ").capitalize()


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
        messages.setdefault(path[:200], []).append(str(error["msg"]).removeprefix("Value error, "))
    return [FieldError(field=path, message="; ".join(dict.fromkeys(texts))) for path, texts in messages.items()]


def error_text(error: ValidationError, whole: str, most: int = 10) -> str:
    """Return up to `most` errors of Pydantic on one line; those of no single field are of `whole`."""
    fields = field_errors(error.errors(include_url=False), skip=0, whole=whole)
    texts = [f"{one.field}: {one.message}" for one in fields[:most]]
    return "; ".join(texts + ["and more"] * (len(fields) > most))
