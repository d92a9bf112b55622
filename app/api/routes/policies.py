"""The runtime defaults of the request policy, in memory only; rules and overrides are in `rules.py`, `requests.py`."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import Body

from kvferry.app.api.calls import admin_router
from kvferry.app.api.context import Context
from kvferry.app.api.leases import check_retain_s
from kvferry.app.operations.policy_json import PolicyBody, PolicyView, patch_to_json, policy_to_json
from kvferry.app.telemetry.events import EventType

router = admin_router(prefix="/policy", tags=["policies"])


@router.get("", summary="The default policy", response_model=PolicyView)
def get_policy(context: Context) -> dict[str, Any]:
    """Field by field: the value, and its source: `default`, `env`, `file`, `connector` or `runtime`."""
    return policy_to_json(context.scheduler.policies.defaults())


@router.patch("", summary="Change the runtime defaults", response_model=PolicyView)
def patch_policy(context: Context, body: Annotated[PolicyBody, Body()]) -> dict[str, Any]:
    """Null restores a field's setting. Applies to blocks not yet offered; lost at the next start."""
    check_retain_s(context, body.retain_s)
    patch, removed = body.patch(), body.removed()
    policies = context.scheduler.policies
    policies.set_runtime(patch, removed)
    context.wake()
    context.feed.changed(EventType.POLICY, {"set": patch_to_json(patch), "removed": removed}, time.time())
    return policy_to_json(policies.defaults())
