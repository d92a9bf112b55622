"""Query parameters of cursor-paged lists."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query
from pydantic import BaseModel, ConfigDict

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000
_CURSOR_TEXT = "`next_cursor` of the page before"
# Exactly the texts that are cursors, so that the API's description says which are refused. Floats are the hex digits of
# positive finite numbers.
_TIME_AND_ID = "_x[0-6][0-9a-f]{15}_[0-9]{1,18}$"

Limit = Annotated[int, Query(ge=1, le=MAX_LIMIT, description="maximum number of items")]
PositionCursor = Annotated[str | None, Query(pattern="^[0-9]{1,18}$", description=_CURSOR_TEXT)]
AuditCursor = Annotated[str | None, Query(pattern="^audit" + _TIME_AND_ID, description=_CURSOR_TEXT)]
EvictionCursor = Annotated[str | None, Query(pattern="^evictions" + _TIME_AND_ID, description=_CURSOR_TEXT)]
RuleCursor = Annotated[
    str | None, Query(pattern="^rules_-?[0-9]{1,18}_[A-Za-z0-9._-]{1,64}$", description=_CURSOR_TEXT)
]


class PageQuery(BaseModel):
    """Page of a list with filters. Unknown parameters are refused, since a misspelled filter would filter nothing."""

    model_config = ConfigDict(extra="forbid")
    limit: Limit = DEFAULT_LIMIT
