"""The audit's records of mutating calls."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import Response
from pydantic import BaseModel, Field

from kvferry.app.api.audit import LoggedOnly
from kvferry.app.api.auth import Caller, TokenKind
from kvferry.app.api.calls import admin_router, from_app
from kvferry.app.api.context import Context
from kvferry.app.api.pagination import DEFAULT_LIMIT, AuditCursor, Limit, json_page_response
from kvferry.app.common.times import rfc3339_or_none
from kvferry.app.store import MetadataStore


class AuditItem(BaseModel):
    """One mutating call."""

    id: int
    time: str
    token: str = Field(
        description="the token's name: `admin`, `read`, `none`, or `service` for the service itself", examples=["admin"]
    )
    client: str = Field(description="the caller's address", examples=["127.0.0.1"])
    request_id: str
    method: str
    path: str
    what: dict[str, Any] | None = Field(
        description="the body, bounded and with secrets masked; of a call that was refused or is "
        "under way the names of its fields; null without one"
    )
    status: int | None = Field(description="null while the call is under way, or if the process ended during it")
    outcome: str | None = Field(description="`applied`, `refused` or `failed`", examples=["applied"])


class AuditPage(BaseModel):
    """One page of the calls, and how many are missing in all pages."""

    items: list[AuditItem]
    next_cursor: str | None = Field(description="null on the last page")
    logged_only: int = Field(
        description="records since the start that the database did not accept: they are in the log, in lines with "
        "`audit record not in the database`"
    )
    logged_only_since: str | None = Field(description="time of the first of these; null if there are none")


class CallerToken(BaseModel):
    """The token of a call."""

    name: str = Field(description="as in the audit", examples=["read:1a2b3c4d"])
    may_change: bool = Field(description="whether it allows calls that change something")


def _read_page(store: MetadataStore, logged_only: LoggedOnly, cursor: str | None, limit: int) -> Response:
    missing = {"logged_only": logged_only.count, "logged_only_since": rfc3339_or_none(logged_only.since_s)}
    return json_page_response(store.reader.audit(cursor, limit), missing)


router = admin_router(tags=["audit"])


@router.get(
    "/audit",
    summary="Mutating calls, newest first",
    response_model=AuditPage,
    responses={503: {"description": "No database"}},
)
async def list_audit(
    context: Context,
    logged_only: Annotated[LoggedOnly, from_app("logged_only")],
    limit: Limit = DEFAULT_LIMIT,
    cursor: AuditCursor = None,
) -> Response:
    """Every call that changed something, or was refused."""
    return await context.store.threads.run(partial(_read_page, context.store, logged_only, cursor, limit))


@router.get("/token", summary="The token of this call")
async def get_token(caller: Caller) -> CallerToken:
    """Its name, and what it allows. Without any token set, every caller on this host may change everything."""
    return CallerToken(name=str(caller), may_change=caller.kind is not TokenKind.READ)
