"""Overrides: the policy of one request, set before it arrives or while it runs, and kept across restarts."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Body
from pydantic import Field

from kvferry.app.api.audit_trail import WRITE_AHEAD
from kvferry.app.api.context import AdminContext
from kvferry.app.api.offthread import StoreThreads
from kvferry.app.api.policy_models import OverrideBody, PolicyView, view_fields
from kvferry.app.api.problems import Problem, too_many
from kvferry.app.api.raw_ids import RequestId
from kvferry.app.api.requests import OverrideState, find_override, ids_of, show_override, unknown_request
from kvferry.app.policies.kept import TooManyError
from kvferry.core.policy import Override
from kvferry.core.scheduler.requests import RequestPhase


class OverrideView(PolicyView):
    """The policy that holds for a request id, and the override in it, if there is one."""

    id: str
    override: OverrideState | None = Field(description="null where the request is known and nothing is overridden")


def overrides_router(context: AdminContext, threads: StoreThreads) -> APIRouter:
    """`/admin/v1/requests/{id}/policy`."""
    router = APIRouter(prefix="/requests", tags=["policies"])
    scheduler, policies = context.scheduler, context.policies

    def show(request_id: str, now_s: float) -> dict[str, Any]:
        view = scheduler.requests.find(request_id, now_s)
        override = find_override(context, request_id, view, now_s)
        if view is None and override is None:
            raise unknown_request(request_id)
        if view is None or (override is not None and view.phase is RequestPhase.FINISHED):
            # What would hold if it came now: a finished request's own policy is history.
            effective = scheduler.policies.expected(ids_of(request_id, view), now_s)
        else:
            effective = view.policy
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
        try:
            await threads.run(policies.set_override, override, now_s)
        except TooManyError as error:
            raise too_many(error) from None
        context.wake()
        return show(request_id, now_s)

    @router.delete("/{id:path}/policy", summary="Take an override away", status_code=204, dependencies=[WRITE_AHEAD])
    async def delete_override(request_id: RequestId) -> None:
        """404 if there is none for this very id."""
        if not await threads.run(policies.drop_override, request_id, time.time()):
            raise Problem(404, f"request {request_id[:200]!r} has no override")
        context.wake()

    return router
