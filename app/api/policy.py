"""The runtime defaults of the request policy."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Body

from kvferry.app.api.audit_trail import WRITE_AHEAD
from kvferry.app.api.context import AdminContext
from kvferry.app.api.policy_models import PolicyView, view_fields
from kvferry.app.event_feed import EventType
from kvferry.app.policies.wire import PolicyBody, patch_to_wire


def policy_router(context: AdminContext) -> APIRouter:
    """`/admin/v1/policy`."""
    router = APIRouter(prefix="/policy", tags=["policies"])
    scheduler = context.scheduler

    @router.get("", summary="The policy of a request that nothing else settles", response_model=PolicyView)
    def get_policy() -> dict[str, Any]:
        """Field by field: the value, and what set it: `default`, `env`, `file`, `connector` or `runtime`."""
        return view_fields(scheduler.policies.defaults())

    @router.patch("", summary="Change the runtime defaults", response_model=PolicyView, dependencies=[WRITE_AHEAD])
    def patch_policy(body: Annotated[PolicyBody, Body()]) -> dict[str, Any]:
        """Null gives a field back to the settings. Applies to blocks not yet offered; forgotten at the next start."""
        patch, removed = body.patch(), body.removed()
        scheduler.policies.set_runtime(patch, removed)
        context.wake()
        context.feed.changed(EventType.POLICY, {"set": patch_to_wire(patch), "removed": removed}, time.time())
        return view_fields(scheduler.policies.defaults())

    return router
