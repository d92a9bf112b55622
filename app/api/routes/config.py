"""Settings of this process: values, sources, and changes of mutable ones."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Body

from kvferry.app.api.calls import admin_router
from kvferry.app.api.context import AdminContext, Context
from kvferry.app.operations.policy_json import whole
from kvferry.app.settings import Settings, SettingView
from kvferry.app.settings.fields import MUTABLE_NAMES, OFFERED
from kvferry.app.telemetry.events import EventType


def _view(settings: Settings, context: AdminContext) -> dict[str, SettingView]:
    unapplied, in_use = context.settings.unapplied, {"store_mode": str(context.store_mode())}
    return {
        view.name: replace(view, shortfall=unapplied.get(view.name), in_use=in_use.get(view.name))
        for view in settings.describe()
    }


def _mutable_schemas() -> dict[str, Any]:
    """Return the JSON Schema of each mutable setting's value, from which the dashboard makes its forms."""
    described = Settings.model_json_schema()

    def find(name: str) -> dict[str, Any]:
        schema: dict[str, Any] = described["properties"][name]
        if "$ref" in schema:
            schema = described["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        return schema | {"enum": OFFERED[name]} if name in OFFERED else schema

    return {name: find(name) for name in MUTABLE_NAMES}


_PATCH_EXAMPLES = [{"log_level": "debug", "max_pinned_fraction": 0.1}]


router = admin_router(prefix="/config", tags=["config"])


@router.get("", summary="Every setting with its value and source")
async def get_config(context: Context) -> dict[str, SettingView]:
    """By name, in lower case. Secrets, and passwords in URLs, are masked."""
    return _view(context.settings.current, context)


@router.patch(
    "",
    summary="Change settings while running",
    responses={
        409: {
            "description": "It needs a restart, pinned blocks are in the part that a smaller pool loses, or "
            "the pool cannot have that size now"
        }
    },
    openapi_extra={
        "requestBody": {"content": {"application/json": {"schema": {"properties": _mutable_schemas()}}}},
    },
)
def patch_config(
    context: Context,
    patch: Annotated[dict[str, Any], Body(examples=_PATCH_EXAMPLES, description="plain values by name")],
) -> dict[str, SettingView]:
    """Null restores a setting's value at start. All changes are applied or none; they are lost at the next start.

    A setting that needs a restart is a 409 that names it, an unknown name or a bad value a 422.

    `pool_bytes` is rounded down to whole extents, and the resize goes on after the response: stats show its
    progress (`slots`, `wanted_slots`). A size for which there is no memory, or no space on the disk, is a 409 with
    both numbers. Blocks in a removed part are evicted (`shrink`), slots in use once they are free; pinned blocks
    there are a 409 that names them.
    """
    changed = context.settings.change({name: whole(value) for name, value in patch.items()})
    context.feed.changed(EventType.CONFIG, {"settings": sorted(patch)}, time.time())
    return _view(changed, context)
