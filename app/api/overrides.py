"""Overrides: the policy of one request, set before it arrives or while it runs, and kept across restarts."""

from __future__ import annotations

import asyncio
import logging
import time
import weakref
from typing import Annotated, Any

from fastapi import APIRouter, Body
from pydantic import Field, ValidationError

from app.api.audit_trail import WRITE_AHEAD
from app.api.context import AdminContext
from app.api.offthread import StoreThreads
from app.api.policy_models import OverrideBody, PolicyBody, PolicyView, overlay, patch_to_wire, view_fields
from app.api.problems import Problem, field_errors
from app.api.raw_ids import RequestId
from app.api.requests import OverrideState, find_override, show_override, unknown_request
from app.store import Store
from core.policy import Override
from core.requests import RequestPhase
from core.scheduler import OffloadScheduler

_log = logging.getLogger(__name__)


class _Locks:
    """One lock an id, for as long as somebody uses it: database and memory change in the same order."""

    def __init__(self) -> None:
        self._locks: weakref.WeakValueDictionary[str, asyncio.Lock] = weakref.WeakValueDictionary()

    def of(self, request_id: str) -> asyncio.Lock:
        return self._locks.setdefault(request_id, asyncio.Lock())


class OverrideView(PolicyView):
    """The policy that holds for a request id, and the override in it, if there is one."""

    id: str
    override: OverrideState | None = Field(description="null where the request is known and nothing is overridden")


def load_overrides(store: Store, scheduler: OffloadScheduler, now_s: float) -> int:
    """At start, before the engine: give the scheduler the overrides that outlived the last process, and say how many.

    Raises `StoreUnavailable`. What does not validate any more is skipped and logged.
    """
    loaded = 0
    for record in store.reader.load_overrides(now_s):
        try:
            patch = PolicyBody.model_validate(record.policy).patch()
        except ValidationError as exc:
            fields = ", ".join(error.field for error in field_errors(exc.errors(include_input=False), skip=0))
            _log.warning("the override kept for request %r is left out, not valid: %s", record.request, fields)
            continue
        scheduler.set_override(Override(record.request, patch, record.expires_s))
        loaded += 1
    return loaded


def overrides_router(context: AdminContext, threads: StoreThreads) -> APIRouter:
    """`/admin/v1/requests/{id}/policy`."""
    router = APIRouter(prefix="/requests", tags=["policies"])
    scheduler = context.scheduler
    locks = _Locks()

    def show(request_id: str, now_s: float) -> dict[str, Any]:
        view = scheduler.find_request(request_id, now_s)
        override = find_override(context, request_id, view, now_s)
        if view is None and override is None:
            raise unknown_request(request_id)
        if override is not None and (view is None or view.phase is RequestPhase.FINISHED):
            # What would hold if it came now: a finished request's own policy is history.
            effective = overlay(scheduler.policy_defaults(), override.patch)
        else:
            effective = view.policy if view is not None else scheduler.policy_defaults()
        return {**view_fields(effective), "id": request_id, "override": show_override(override)}

    @router.get("/{id:path}/policy", summary="The policy that holds for a request id", response_model=OverrideView)
    def get_override(request_id: RequestId) -> dict[str, Any]:
        """Field by field with its source. 404 if neither a request nor an override of this id is known."""
        return show(request_id, time.time())

    @router.put(
        "/{id:path}/policy",
        summary="Override the policy of one request",
        response_model=OverrideView,
        dependencies=[WRITE_AHEAD],
    )
    async def put_override(request_id: RequestId, body: Annotated[OverrideBody, Body()]) -> dict[str, Any]:
        """Before it arrives or while it runs; replaces what was set for this id. Ends by itself after `ttl_s`."""
        now_s = time.time()
        override = Override(request_id, body.patch(), now_s + body.ttl_s)
        async with locks.of(request_id):
            # Kept first: an override that would be forgotten at the next start is not an override.
            await threads.run(
                context.store.intents.save_override,
                request_id,
                patch_to_wire(override.patch),
                now_s,
                override.expires_s,
            )
            scheduler.set_override(override)
        context.wake()
        return show(request_id, now_s)

    @router.delete("/{id:path}/policy", summary="Take an override away", status_code=204, dependencies=[WRITE_AHEAD])
    async def delete_override(request_id: RequestId) -> None:
        """404 if there is none for this very id."""
        async with locks.of(request_id):
            was_kept = await threads.run(context.store.intents.delete_override, request_id)
            was_set = scheduler.drop_override(request_id)
        if not (was_kept or was_set):
            raise Problem(404, f"request {request_id[:200]!r} has no override")
        context.wake()

    return router
