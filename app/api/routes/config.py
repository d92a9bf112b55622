"""Settings of this process: values, sources, and changes of mutable ones."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from fastapi import Body

from kvferry.app.api.calls import admin_router
from kvferry.app.api.context import AdminContext, Context
from kvferry.app.api.errors import invalid_fields
from kvferry.app.common.call_errors import FieldError
from kvferry.app.operations.policy_json import whole
from kvferry.app.settings import Settings, SettingView
from kvferry.app.settings.fields import MUTABLE_NAMES, OFFERED
from kvferry.app.settings.settings import CAPS
from kvferry.app.telemetry.events import EventType
from kvferry.core.policy import UNLIMITED

SIZE_PATTERN = r"[1-9][0-9]{0,5}(\.[0-9]{1,3})? ?[KMGT]i?B"


def _view(settings: Settings, context: AdminContext) -> dict[str, SettingView]:
    unapplied, in_use = context.settings.unapplied, {"store_mode": str(context.store_mode())}
    return {
        view.name: replace(view, shortfall=unapplied.get(view.name), in_use=in_use.get(view.name))
        for view in settings.describe()
    }


def _patch_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of each mutable setting's value, without null."""
    described = Settings.model_json_schema()
    schemas: dict[str, dict[str, Any]] = {}
    for name in MUTABLE_NAMES:
        schema = described["properties"][name]
        if "$ref" in schema:
            schema = described["$defs"][schema["$ref"].rsplit("/", 1)[1]]
        # Null restores the value at start, whatever it was.
        schema = schema | next((one for one in schema.get("anyOf", ()) if one.get("type") != "null"), {})
        facts = {key: schema[key] for key in ("type", "enum", "minimum", "maximum") if key in schema}
        if name in OFFERED:
            facts["enum"] = list(OFFERED[name])
        schemas[name] = facts
    return schemas


def _size_pattern(name: str) -> str:
    return f"{SIZE_PATTERN}|{UNLIMITED}" if name in CAPS else SIZE_PATTERN


_PATCH_SCHEMAS = _patch_schemas()


def _patch_schema() -> dict[str, Any]:
    """Return the JSON Schema of the settings by name. Those that need a restart have any value and are 409."""
    properties: dict[str, Any] = {name: {} for name in Settings.model_fields}
    for name, facts in _PATCH_SCHEMAS.items():
        sizes = [{"type": "string", "pattern": f"^({_size_pattern(name)})$"}] if name.endswith("_bytes") else []
        properties[name] = {"anyOf": [facts, *sizes, {"type": "null"}]}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _check_spelling(patch: Mapping[str, Any]) -> None:
    """Refuse strings that only environment variables may hold: numbers, and words in another case."""
    errors = []
    for name, value in patch.items():
        facts = _PATCH_SCHEMAS.get(name)
        if facts is None or not isinstance(value, str):
            continue
        if name.endswith("_bytes"):
            if re.fullmatch(_size_pattern(name), value) is None:
                errors.append(FieldError(field=name, message="must be a number of bytes, or a size such as 8GiB"))
        elif "enum" in facts:
            if value not in facts["enum"] and value.strip().lower() in facts["enum"]:
                errors.append(FieldError(field=name, message=f"must be one of {', '.join(facts['enum'])}"))
        elif facts["type"] in ("integer", "number"):
            errors.append(FieldError(field=name, message="must be a number, not a string"))
    if errors:
        raise invalid_fields(errors)


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
    openapi_extra={"requestBody": {"content": {"application/json": {"schema": _patch_schema()}}}},
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
    _check_spelling(patch)
    changed = context.settings.change({name: whole(value) for name, value in patch.items()})
    context.feed.changed(EventType.CONFIG, {"settings": sorted(patch)}, time.time())
    return _view(changed, context)
