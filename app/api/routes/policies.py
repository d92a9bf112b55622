"""Policies: the runtime defaults, and overrides for single requests.

An override may be set before its request arrives or while it runs, and survives a restart.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Body
from pydantic import Field

from kvferry.app.api.audit import AUDIT_BEFORE
from kvferry.app.api.context import AdminContext
from kvferry.app.api.errors import Problem, too_many
from kvferry.app.api.middleware import RequestId
from kvferry.app.api.routes.requests import OverrideState, find_override, ids_of, override_to_json, unknown_request
from kvferry.app.event_feed import EventType
from kvferry.app.policy_json import OverrideBody, PolicyBody, PolicyView, patch_to_json, policy_to_json
from kvferry.app.policy_store import TooManyError
from kvferry.core.policy import Override
from kvferry.core.scheduler.requests import RequestPhase


class OverrideView(PolicyView):
    """The effective policy of a request id, and the override in it."""

    id: str
    override: OverrideState | None = Field(description="null if the request is known and nothing is overridden")


def policies_router(context: AdminContext) -> APIRouter:
    """Return the routes `/policy` and `/requests/{id}/policy`."""
    router = APIRouter(tags=["policies"])
    scheduler, policies = context.scheduler, context.policies

    @router.get("/policy", summary="The default policy", response_model=PolicyView)
    def get_policy() -> dict[str, Any]:
        """Field by field: the value, and its source: `default`, `env`, `file`, `connector` or `runtime`."""
        return policy_to_json(scheduler.policies.defaults())

    @router.patch(
        "/policy", summary="Change the runtime defaults", response_model=PolicyView, dependencies=[AUDIT_BEFORE]
    )
    def patch_policy(body: Annotated[PolicyBody, Body()]) -> dict[str, Any]:
        """Null restores a field's setting. Applies to blocks not yet offered; lost at the next start."""
        patch, removed = body.patch(), body.removed()
        scheduler.policies.set_runtime(patch, removed)
        context.wake()
        context.feed.changed(EventType.POLICY, {"set": patch_to_json(patch), "removed": removed}, time.time())
        return policy_to_json(scheduler.policies.defaults())

    def view(request_id: str, now_s: float) -> dict[str, Any]:
        request = scheduler.requests.find(request_id, now_s)
        override = find_override(context, request_id, request, now_s)
        if request is None and override is None:
            raise unknown_request(request_id)
        if request is None or (override is not None and request.phase is RequestPhase.FINISHED):
            # The policy if the request came now: a finished request's own policy no longer applies.
            effective = scheduler.policies.expected(ids_of(request_id, request), now_s)
        else:
            effective = request.policy
        return {**policy_to_json(effective), "id": request_id, "override": override_to_json(override)}

    @router.get("/requests/{id:path}/policy", summary="The policy of a request id", response_model=OverrideView)
    def get_override(request_id: RequestId) -> dict[str, Any]:
        """Field by field with its source. 404 if neither a request nor an override of this id is known."""
        return view(request_id, time.time())

    @router.put(
        "/requests/{id:path}/policy",
        summary="Override the policy of one request",
        response_model=OverrideView,
        dependencies=[AUDIT_BEFORE],
    )
    async def put_override(request_id: RequestId, body: Annotated[OverrideBody, Body()]) -> dict[str, Any]:
        """Before the request arrives or while it runs; replaces its earlier override. Expires after `ttl_s`."""
        now_s = time.time()
        override = Override(request_id, body.patch(), now_s + body.ttl_s)
        try:
            await context.store_threads.run(policies.set_override, override, now_s)
        except TooManyError as error:
            raise too_many(error) from None
        context.wake()
        return view(request_id, now_s)

    @router.delete(
        "/requests/{id:path}/policy", summary="Delete an override", status_code=204, dependencies=[AUDIT_BEFORE]
    )
    async def delete_override(request_id: RequestId) -> None:
        """404 if there is none for exactly this id."""
        if not await context.store_threads.run(policies.drop_override, request_id, time.time()):
            raise Problem(404, f"request {request_id[:200]!r} has no override")
        context.wake()

    return router
