"""The tiers below the pool: attached, disabled and detached while the service runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Body, Path, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from kvferry.app.api.calls import admin_router
from kvferry.app.api.context import AdminContext, Context
from kvferry.app.api.errors import Responses, invalid_field
from kvferry.app.api.pagination import DEFAULT_LIMIT, Limit, PositionCursor, cut_page
from kvferry.app.api.routes.reset import Glob
from kvferry.app.api.routes.stats import TierStats, tier_stats
from kvferry.app.common.call_errors import BODY_FIELD
from kvferry.app.operations.policy_json import TierName
from kvferry.app.operations.tier_flushes import FlushProgress
from kvferry.app.settings.tiers import check_without_token, installed_types, read_tiers
from kvferry.app.store import Page
from kvferry.app.tiers.registry import DRAIN_S, NoSuchTier, TierState

MAX_DRAIN_S = 60.0

Name = Annotated[TierName, Path(description="name of the tier", examples=["disk"])]


class FlushBody(BaseModel):
    """Blocks to flush."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": [{"tenant": None}]})
    tenant: Glob | None = Field(
        default=None, description="shell glob on the tenant of the request that stored a block; null is all"
    )


class FlushAnswer(BaseModel):
    """Number of blocks that are being copied."""

    num_blocks: int


class TierView(BaseModel):
    """An attached tier."""

    name: str
    enabled: bool = Field(description="whether new jobs are submitted to it")
    source: str = Field(description="`settings`, or `runtime` for a tier that was attached over HTTP")
    health: list[str] = Field(description="what restricts it, as in `/readyz`; empty for nothing")
    counts: TierStats = Field(description="as in stats")  # type: ignore[valid-type]  # made of core's fields
    limits: dict[str, Any] = Field(
        description="those in its definition, defaults included", examples=[{"max_bytes": 1 << 30, "timeout_s": 10}]
    )
    namespace: str | None = Field(
        description="equal for tiers through which engines exchange blocks; null for a tier that is not shared, or was "
        "not reached yet"
    )
    definition: dict[str, Any] = Field(description="as in KVFERRY_TIERS, with secrets masked")
    flush: FlushProgress | None = Field(description="null if there was none")


_BODY = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"enabled": {"type": "boolean"}},
            "required": ["enabled"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"type": {"enum": sorted(installed_types())}},
            "required": ["type"],
            "not": {"required": ["enabled"]},
        },
    ]
}


def _is_limit(name: str) -> bool:
    return name.endswith(("_bytes", "_s", "_blocks")) or name in ("threads", "requests")


_NOT_FOUND: Responses = {404: {"description": "There is no tier of this name"}}
_CONFLICT: Responses = {409: {"description": "Not possible now; the detail says why"}}


def _views(context: AdminContext, states: Sequence[TierState]) -> list[TierView]:
    tiering = context.scheduler.tiers
    health = tiering.health()
    stats = tiering.stats()
    return [
        TierView(
            name=state.name,
            enabled=state.is_enabled,
            source="settings" if state.is_of_settings else "runtime",
            health=[text for text in health if text.startswith(f"tier {state.name}: ")],
            counts=tier_stats(stats[state.name]),
            limits={name: value for name, value in state.definition.items() if _is_limit(name)},
            namespace=state.namespace,
            definition=dict(state.definition),
            flush=context.tier_flushes.progress(state.name),
        )
        for state in states
        # It may have been detached meanwhile.
        if state.name in stats
    ]


def _view(context: AdminContext, name: str) -> TierView:
    views = _views(context, [context.tier_registry.state(name)])
    if not views:
        raise NoSuchTier(f"tier {name} is being detached")
    return views[0]


router = admin_router(prefix="/tiers", tags=["tiers"])


@router.get("", summary="All tiers, with their definitions")
def get_tiers(context: Context, limit: Limit = DEFAULT_LIMIT, cursor: PositionCursor = None) -> Page[TierView]:
    """The fastest first, with health, counts and limits."""
    states, next_cursor = cut_page(context.tier_registry.states(), limit, cursor)
    return Page(_views(context, states), next_cursor)


@router.get("/{name}", summary="One tier", responses=_NOT_FOUND)
def get_tier(context: Context, name: Name) -> TierView:
    """Its definition as in KVFERRY_TIERS, with secrets masked."""
    return _view(context, name)


@router.put(
    "/{name}",
    summary="Attach, enable or disable a tier",
    responses={201: {"model": TierView, "description": "Attached"}, **_NOT_FOUND, **_CONFLICT},
    openapi_extra={"requestBody": {"content": {"application/json": {"schema": _BODY}}}},
)
def put_tier(
    context: Context,
    name: Name,
    response: Response,
    body: Annotated[
        dict[str, Any],
        Body(examples=[{"enabled": False}, {"type": "fs", "path": "/var/kvferry", "max_bytes": "100GiB"}]),
    ],
) -> TierView:
    """With `enabled` alone: new jobs are submitted to the tier, or none. Jobs under way end; resets reach it.

    With a definition as in KVFERRY_TIERS: the tier is opened and probed as at start, which takes at most its
    `timeout_s`, and is used from then on, as the last of the tiers. A bad definition is a 422.
    Without an admin token, so is one that names a file or folder outside `tiers` in KVFERRY_STATE_DIR, or an
    endpoint without a credentials_file.
    Resets of it that an earlier process left open are repeated first; if they cannot be read, it is a 503.
    While a tier is attached or detached, another attempt is a 409. Changes are lost at the next start, which
    attaches the tiers of the settings.
    """
    if "enabled" in body:
        context.tier_registry.enable(name, is_enabled=_enabled(body))
        return _view(context, name)
    if body.get("name", name) != name:
        raise invalid_field("name", "must be that of the path, or omitted")
    settings = context.settings.current
    try:
        if settings.admin_token is None:
            (entry,) = read_tiers([{**body, "name": name}])
            check_without_token(entry, settings.tier_root)
        context.tier_registry.attach(name, body)
    except ValueError as error:
        # Also `TierRefused`: its texts are those of a refused start.
        raise invalid_field(BODY_FIELD, str(error)) from None
    response.status_code = 201
    return _view(context, name)


@router.delete("/{name}", summary="Detach a tier", status_code=204, responses=_NOT_FOUND | _CONFLICT)
def delete_tier(
    context: Context,
    name: Name,
    drain_timeout_s: Annotated[
        float, Query(ge=0, le=MAX_DRAIN_S, allow_inf_nan=False, description="time for open jobs to end")
    ] = DRAIN_S,
) -> None:
    """Jobs under way end first, those that outlast `drain_timeout_s` are canceled. Then the tier is closed.

    Its blocks stay where they are, and resets do not reach them while it is detached. Resets of all tiers, and
    drops of blocks, are kept and repeated when a tier is attached again under this name, before it is used. Disable
    a tier instead if resets have to reach it at once. A tier of the settings is attached again at the next start.
    """
    context.tier_registry.detach(name, drain_timeout_s)


@router.post(
    "/{name}/flush",
    summary="Copy the pool's blocks to a tier",
    status_code=202,
    responses=_NOT_FOUND | _CONFLICT,
)
def flush_tier(context: Context, name: Name, body: Annotated[FlushBody | None, Body()] = None) -> FlushAnswer:
    """Copies all blocks of the pool that the tier may have, beginnings of prompts first, beside the engine.

    Progress is under `flush` in `GET /admin/v1/tiers`. In lazy mode, blocks that only the device has are not copied.
    Left out are blocks whose request's policy excluded the tier, and those for which `max_bytes` has no room. A
    second flush of a tier meanwhile is a 409, as is one of a tier that is disabled or does not work.
    """
    return FlushAnswer(num_blocks=context.tier_flushes.begin(name, None if body is None else body.tenant))


@router.delete("/{name}/flush", summary="End a flush", status_code=204, responses=_NOT_FOUND)
def end_flush(context: Context, name: Name) -> None:
    """Blocks that were copied stay in the tier. Without a flush nothing changes."""
    context.tier_flushes.cancel(name)


def _enabled(body: dict[str, Any]) -> bool:
    if len(body) > 1 or not isinstance(body["enabled"], bool):
        raise invalid_field("enabled", "must be true or false, without other fields")
    return body["enabled"]
