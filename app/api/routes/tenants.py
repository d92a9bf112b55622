"""Tenants: what each has in the pool, its limit, and what its requests stored and loaded."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from heapq import nsmallest
from typing import Annotated, Literal

from fastapi import Body, Path, Query, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvferry.app.api.audit import Audited
from kvferry.app.api.calls import admin_router
from kvferry.app.api.context import AdminContext, Context
from kvferry.app.api.errors import Problem, Responses
from kvferry.app.api.pagination import DEFAULT_LIMIT, Limit, page_response
from kvferry.app.operations.policy_json import Sourced, whole
from kvferry.app.operations.tenant_store import MAX_BYTES, MAX_LIMITS
from kvferry.app.store import Page
from kvferry.core.keys import TENANT_PATTERN
from kvferry.core.policy import UNLIMITED
from kvferry.core.scheduler.prefills import TenantCounts
from kvferry.core.stats import PromptTokens

_NO_TENANT = "-"
"""Stands for requests without a tenant in cursors."""
_CURSOR_PATTERN = f"^tenants_[0-9]{{1,18}}_({TENANT_PATTERN[1:-1]}|{_NO_TENANT})$"

Digest = Annotated[
    str,
    Path(pattern=TENANT_PATTERN, description="first 16 hex digits of the SHA-256 of its cache salt"),
]
TenantCursor = Annotated[str | None, Query(pattern=_CURSOR_PATTERN, description="`next_cursor` of the page before")]
NumBytes = Annotated[int, Field(ge=0, le=MAX_BYTES), BeforeValidator(whole)]


class TenantLimitBody(BaseModel):
    """The limit of one tenant, in place of the default of all."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"examples": [{"max_pool_bytes": 1 << 30}]}
    )
    max_pool_bytes: NumBytes | Literal["unlimited"] = Field(
        description="bytes of the pool that its blocks may take, in whole slots; 0 stores nothing"
    )


class TenantView(BaseModel):
    """One tenant. Counts are since the start, or since it was last active among the latest tenants."""

    tenant: str | None = Field(description="digest of the tenant's name; null is all requests without a tenant")
    pool_bytes: int = Field(description="bytes of the pool that its blocks take, those being stored included")
    max_pool_bytes: Sourced[int | Literal["unlimited"]] = Field(
        description="source `tenant` if it was set for this tenant, else `default`: `KVFERRY_TENANT_MAX_BYTES`"
    )
    stored_blocks: int
    stored_bytes: int = Field(description="all that its requests have stored, whatever became of it")
    prompt_tokens: PromptTokens = Field(description="as in stats, for its requests")


_REFUSALS: Responses = {409: {"description": f"{MAX_LIMITS:,} tenants have limits already"}}


def _views(context: AdminContext, used: Sequence[tuple[str | None, int]]) -> list[TenantView]:
    """Return tenants, given the bytes that they have in the pool."""
    scheduler, limits = context.scheduler, context.tenants.limits
    with scheduler.manager.lock:
        counts = scheduler.tenants.copies(tenant for tenant, _ in used)
    own = limits.own_limits()

    def view(tenant: str | None, num_bytes: int, counted: TenantCounts) -> TenantView:
        limit = None if tenant is None else own.get(tenant, limits.default_bytes)
        return TenantView(
            tenant=tenant,
            pool_bytes=num_bytes,
            max_pool_bytes=Sourced(
                value="unlimited" if limit is None else limit, source="tenant" if tenant in own else "default"
            ),
            stored_blocks=counted.stored_blocks,
            stored_bytes=counted.stored_bytes,
            prompt_tokens=counted.prompt_tokens,
        )

    return [view(*place, counted) for place, counted in zip(used, counts, strict=True)]


def _view(context: AdminContext, tenant: str) -> TenantView:
    (view,) = _views(context, [(tenant, context.tenants.limits.usage_of(tenant))])
    return view


router = admin_router(prefix="/tenants", tags=["tenants"])


@router.get("", summary="The tenants, those with the most bytes in the pool first", response_model=Page[TenantView])
def list_tenants(context: Context, limit: Limit = DEFAULT_LIMIT, cursor: TenantCursor = None) -> Response:
    """Those that have blocks in the pool, a limit of their own, or requests among those of the latest tenants."""
    scheduler, limits = context.scheduler, context.tenants.limits
    usage = limits.usage()
    with scheduler.manager.lock:
        active = scheduler.tenants.tenants()
    for tenant in (*active, *limits.own_limits()):
        usage.setdefault(tenant, 0)
    places = [(-num_bytes, tenant or _NO_TENANT) for tenant, num_bytes in usage.items()]
    if cursor is not None:
        _, num_bytes, name = cursor.split("_")
        places = [place for place in places if place > (-int(num_bytes), name)]
    ordered = nsmallest(limit + 1, places)
    shown = [(None if name == _NO_TENANT else name, -negative) for negative, name in ordered[:limit]]
    last = ordered[limit - 1] if len(ordered) > limit else None
    return page_response(_views(context, shown), None if last is None else f"tenants_{-last[0]}_{last[1]}")


@router.get("/{tenant}", summary="One tenant")
def get_tenant(context: Context, tenant: Digest) -> TenantView:
    """Zeros if nothing is known of it."""
    return _view(context, tenant)


@router.put("/{tenant}", summary="Limit a tenant", responses=_REFUSALS)
async def put_tenant(
    context: Context, audit: Audited, tenant: Digest, body: Annotated[TenantLimitBody, Body()]
) -> TenantView:
    """Survives a restart. What the tenant has beyond the limit is evicted in the background, its coldest first."""
    max_bytes = None if body.max_pool_bytes == UNLIMITED else int(body.max_pool_bytes)
    await audit.apply(partial(context.tenants.set_limit, tenant, max_bytes))
    context.wake()
    return _view(context, tenant)


@router.delete("/{tenant}", summary="Delete a tenant's limit", status_code=204)
async def delete_tenant(context: Context, audit: Audited, tenant: Digest) -> None:
    """The default applies from then on. 404 without a limit of its own."""
    if not await audit.apply(partial(context.tenants.unset_limit, tenant)):
        raise Problem(404, f"tenant {tenant} has no limit of its own")
    context.wake()
