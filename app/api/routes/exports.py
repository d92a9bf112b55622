"""Exports of the pool's blocks to a folder or an object store, imports from there, and their progress."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

from fastapi import Body, Path
from pydantic import BaseModel, ConfigDict, Field, JsonValue

from kvferry.app.api.audit import AUDIT_BEFORE
from kvferry.app.api.calls import admin_router
from kvferry.app.api.context import AdminContext, Context
from kvferry.app.api.errors import Problem, Responses, invalid_field
from kvferry.app.api.pagination import DEFAULT_LIMIT, Limit, PositionCursor, cut_page
from kvferry.app.api.routes.reset import ResetMatch, to_filter
from kvferry.app.exports.exports import MAX_ENDED
from kvferry.app.exports.places import read_place
from kvferry.app.exports.task import PlaceRefused, Task, TaskFailed, TaskKind, TaskOptions, TaskStatus
from kvferry.app.settings.tiers import check_without_token
from kvferry.app.settings.types import MAX_EXACT
from kvferry.app.times import rfc3339, rfc3339_or_none
from kvferry.core.keys import RequestFilter

_PLACE = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"const": "fs"}, "path": {"type": "string", "minLength": 1, "maxLength": 1000}},
            "required": ["type", "path"],
            "additionalProperties": False,
        },
        {
            "type": "object",
            "properties": {"type": {"const": "object"}, "url": {"type": "string"}},
            "required": ["type", "url"],
        },
    ]
}
_EXAMPLE: JsonValue = {"type": "fs", "path": "before-upgrade"}
_PLACE_TEXT = (
    'a folder below KVFERRY_EXPORT_PATH, `{"type": "fs", "path": "NAME"}`, or a bucket, `{"type": "object", '
    '"url": "s3://BUCKET/PREFIX"}`, with the fields of a tier of type `object` that are about the bucket'
)
PlaceBody = Annotated[dict[str, Any], Field(description=_PLACE_TEXT, json_schema_extra=_PLACE)]
MaxBytes = Annotated[int, Field(ge=1, le=MAX_EXACT)]
TaskId = Annotated[str, Path(alias="id", max_length=64, examples=["5f0c1a2b"])]


class CopyBody(BaseModel):
    """Blocks to copy: those that matching requests stored, in the order of the export."""

    model_config = ConfigDict(extra="forbid", strict=True)
    match: ResetMatch | None = Field(default=None, description="null, or without any glob, matches everything")
    max_bytes: MaxBytes | None = Field(default=None, description="the most bytes to copy; null is no limit")


class ExportBody(CopyBody):
    """Place and blocks of an export."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"to": _EXAMPLE, "max_bytes": 1 << 34}]})
    to: PlaceBody


class ImportBody(CopyBody):
    """Place and blocks of an import."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"from": _EXAMPLE}]})
    from_: PlaceBody = Field(alias="from")
    evict: bool = Field(
        default=False,
        description="evict other blocks for at most half of the pool's slots; by default only free slots are used",
    )


class TaskView(BaseModel):
    """An export or import, and how far it is. Totals are null until they are known, and of an import by `match`."""

    id: str
    kind: TaskKind
    status: TaskStatus
    place: dict[str, Any] = Field(description="as in the call, with secrets masked")
    match: dict[str, str | None] = Field(description="globs; a tenant is its digest")
    max_bytes: int | None
    began: str
    ended: str | None
    total_blocks: int | None
    total_bytes: int | None
    copied_blocks: int
    copied_bytes: int
    present_blocks: int = Field(description="of an import: in the pool already")
    damaged_blocks: int = Field(description="of an import: missing in the export, or with a wrong checksum")
    left_blocks: int = Field(
        description="have left the pool since, are corrupt there, are concerned by a reset since, are beyond the limit "
        "of their tenant, or found no space"
    )
    notes: list[str] = Field(description="what to know of the result; the last says why the task failed")


class TaskList(BaseModel):
    """The task that runs, and those that have ended since the start of the process, the latest first."""

    items: list[TaskView] = Field(description=f"at most {MAX_ENDED} that have ended")
    next_cursor: str | None


def _view(task: Task) -> TaskView:
    options = task.options
    return TaskView(
        id=task.id,
        kind=task.kind,
        status=task.status,
        place=task.place.shown(),
        match=asdict(options.match),
        max_bytes=options.max_bytes,
        began=rfc3339(task.began_s),
        ended=rfc3339_or_none(task.ended_s),
        **asdict(task.progress),
        notes=list(task.notes),
    )


_CONFLICT: Responses = {409: {"description": "Another one runs, or the place does not fit; the detail says why"}}
_NOT_FOUND: Responses = {404: {"description": "No task of this process has this id"}}


def _begin(context: AdminContext, kind: TaskKind, field: str, place: dict[str, Any], options: TaskOptions) -> TaskView:
    settings = context.settings.current
    try:
        if settings.admin_token is None:
            check_without_token(read_place(place, settings.export_root), settings.export_root)
        return _view(context.exports.start(kind, place, options))
    except PlaceRefused as error:
        raise invalid_field(field, f"cannot be used: {error}") from None
    except TaskFailed as error:
        raise Problem(500, str(error)) from None
    except ValueError as error:
        raise invalid_field(field, str(error)) from None


router = admin_router(tags=["exports"])


@router.post(
    "/import",
    summary="Import blocks into the pool",
    status_code=202,
    responses={404: {"description": "There is no export"}, **_CONFLICT},
    dependencies=[AUDIT_BEFORE],
)
def begin_import(context: Context, body: Annotated[ImportBody, Body()]) -> TaskView:
    """Copies the blocks of an export into the pool, where requests find them as soon as they are verified.

    The export must be of an engine with the same fingerprint: otherwise the answer is 409 and names what differs.
    """
    options = TaskOptions(to_filter(body.match) or RequestFilter(), body.max_bytes, body.evict)
    return _begin(context, TaskKind.IMPORT, "from", body.from_, options)


@router.post(
    "/export",
    summary="Export blocks of the pool",
    status_code=202,
    responses=_CONFLICT,
    dependencies=[AUDIT_BEFORE],
)
def begin_export(context: Context, body: Annotated[ExportBody, Body()]) -> TaskView:
    """Copies blocks to a folder or an object store, in a task with its progress under `/tasks`.

    Whole prefixes are copied, those first that were used last. An export that was interrupted is continued by one
    to the same place; a whole one is not overwritten.
    """
    options = TaskOptions(to_filter(body.match) or RequestFilter(), body.max_bytes)
    return _begin(context, TaskKind.EXPORT, "to", body.to, options)


@router.get("/tasks", summary="Exports and imports")
def list_tasks(context: Context, limit: Limit = DEFAULT_LIMIT, cursor: PositionCursor = None) -> TaskList:
    """The one that runs, and the latest that have ended. A restart forgets them."""
    tasks, next_cursor = cut_page(context.exports.tasks(), limit, cursor)
    return TaskList(items=[_view(task) for task in tasks], next_cursor=next_cursor)


@router.get("/tasks/{id}", summary="One export or import", responses=_NOT_FOUND)
def get_task(context: Context, task_id: TaskId) -> TaskView:
    """Its progress, and how it ended."""
    return _view(context.exports.find(task_id))


@router.post(
    "/tasks/{id}/cancel", summary="Cancel an export or import", responses=_NOT_FOUND, dependencies=[AUDIT_BEFORE]
)
def cancel_task(context: Context, task_id: TaskId) -> TaskView:
    """It ends soon after the answer. What was copied so far stays; one that has ended stays as it is."""
    return _view(context.exports.cancel(task_id))
