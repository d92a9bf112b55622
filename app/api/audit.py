"""The audit table as a list: what operators did, or tried to."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, Field

from kvferry.app.api.context import AdminContext
from kvferry.app.api.offthread import StoreThreads
from kvferry.app.api.paging import DEFAULT_LIMIT, AuditCursor, Limit, Page
from kvferry.app.store import AuditRecord
from kvferry.app.times import rfc3339


class AuditItem(BaseModel):
    """One mutating call."""

    id: int
    time: str
    token: str = Field(description="the token's name: `admin`, `read` or `none`", examples=["admin"])
    client: str = Field(description="the caller's address", examples=["127.0.0.1"])
    request_id: str
    method: str
    path: str
    what: dict[str, Any] | None = Field(description="the body, bounded and with secrets masked; null without one")
    status: int | None = Field(description="null while the call is under way, or where the process ended under it")
    outcome: str | None = Field(description="`applied`, `refused` or `failed`", examples=["applied"])


def _item(record: AuditRecord) -> AuditItem:
    entry = record.entry
    return AuditItem(
        id=record.id,
        time=rfc3339(entry.time_s),
        token=entry.token,
        client=entry.client,
        request_id=entry.request_id,
        method=entry.method,
        path=entry.path,
        what=None if entry.what is None else dict(entry.what),
        status=entry.status,
        outcome=entry.outcome,
    )


def audit_router(context: AdminContext, threads: StoreThreads) -> APIRouter:
    """`/admin/v1/audit`."""
    router = APIRouter(tags=["audit"])

    @router.get(
        "/audit", summary="What operators did, the latest first", responses={503: {"description": "No database"}}
    )
    async def list_audit(limit: Limit = DEFAULT_LIMIT, cursor: AuditCursor = None) -> Page[AuditItem]:
        """Every call that changed something, or was refused."""
        page = await threads.run(context.store.reader.audit, cursor, limit)
        return Page(items=[_item(record) for record in page.items], next_cursor=page.next_cursor)

    return router
