"""`kvferry tiers`: the tiers below the pool, and changes of them while the service runs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import ExitCode, err, note, size
from kvferry.app.cli.remote import Answer, Result, Service, answers, path_to
from kvferry.app.cli.reset import ANSWER_S
from kvferry.app.cli.tables import show_answer
from kvferry.app.cli.tenants import TenantGlob

app = typer.Typer(no_args_is_help=True, help="The tiers below the pool: list, attach, disable, detach and flush them.")

COLUMNS = (
    "name",
    "definition.type",
    "enabled",
    "source",
    "used",
    "counts.loaded",
    "hit_rate",
    "counts.look_up_s",
    "counts.gave_up",
    "health",
)
POLL_S = 0.2

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the tier.")]
Definition = Annotated[
    str,
    typer.Argument(
        metavar="JSON", help='As in KVFERRY_TIERS, such as {"type": "fs", "path": "/var/kvferry", "max_bytes": "9GiB"}.'
    ),
]


def _with_use(tier: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add what a tier uses of its limit, and the share of look-ups that it answered."""
    counts = tier["counts"]
    limit = f" of {size(counts['max_bytes'])}" if counts["max_bytes"] else ""
    hit_rate = counts["found"] / counts["looked_up"] if counts["looked_up"] else None
    return {**tier, "used": size(counts["bytes"]) + limit, "hit_rate": hit_rate, "health": tier["health"] or "works"}


def _print_tiers(answer: Mapping[str, Any]) -> None:
    none = "no tier is attached: kvferry tiers attach, or KVFERRY_TIERS for every start"
    show_answer({"items": [_with_use(tier) for tier in answer["items"]]}, *COLUMNS, empty=none)


def _print_tier(tier: Mapping[str, Any]) -> None:
    _print_tiers({"items": [tier]})


@app.command("list")
@answers(show=_print_tiers)
def list_tiers(service: Service) -> Answer:
    """Show all tiers, the fastest first."""
    return service.get("tiers")


@app.command("attach")
@answers(show=_print_tier)
def attach(service: Service, name: Name, definition: Definition) -> Answer:
    """Attach a tier until the next start."""
    try:
        body = json.loads(definition)
    except ValueError as error:
        raise typer.BadParameter(f"is not JSON: {error}", param_hint="JSON") from None
    if not isinstance(body, dict) or "enabled" in body:
        raise typer.BadParameter("must be a JSON object with the fields of a tier", param_hint="JSON")
    tier = service.send("PUT", path_to("tiers", name), body)
    note(f"holds until the next start, or until: kvferry tiers detach {name}")
    return tier


@app.command("disable")
@answers(show=_print_tier)
def disable(service: Service, name: Name) -> Answer:
    """Submit no new jobs to a tier; jobs under way end, and resets reach it."""
    return service.send("PUT", path_to("tiers", name), {"enabled": False})


@app.command("enable")
@answers(show=_print_tier)
def enable(service: Service, name: Name) -> Answer:
    """Submit jobs to a tier again."""
    return service.send("PUT", path_to("tiers", name), {"enabled": True})


@app.command("detach")
@answers()
def detach(
    service: Service,
    name: Name,
    drain_timeout_s: Annotated[
        float | None, typer.Option("--drain-timeout-s", min=0, max=60, help="Time for its jobs to end.")
    ] = None,
) -> Answer:
    """Let a tier's jobs end, and close it. Resets reach its blocks only when it is attached again."""
    query = "" if drain_timeout_s is None else f"?drain_timeout_s={drain_timeout_s:g}"
    service.send("DELETE", path_to("tiers", name) + query, timeout_s=(drain_timeout_s or 0.0) + ANSWER_S)
    return {"name": name, "detached": True}


@app.command("flush")
@answers()
def flush(service: Service, name: Name, tenant: TenantGlob = None) -> Answer:
    """Copy the pool's blocks to a tier, beginnings of prompts first, and wait. Ctrl-C ends it."""
    path = f"{path_to('tiers', name)}/flush"
    try:
        service.send("POST", path, {"tenant": tenant})
        flushed = _follow_flush(service, name)
    except KeyboardInterrupt:
        service.send("DELETE", path)
        flushed = service.get(path_to("tiers", name))["flush"]
    return Result({"name": name, **flushed}, code=ExitCode.OK if flushed["state"] == "done" else ExitCode.REFUSED)


def _follow_flush(service: Service, name: str) -> Mapping[str, Any]:
    """Return a flush once it has ended."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("blocks"))
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        shown = bar.add_task(f"flush {name}", total=None)
        while True:
            flushed: Mapping[str, Any] = service.get(path_to("tiers", name))["flush"]
            num_done = flushed["stored_blocks"] + flushed["left_blocks"]
            bar.update(shown, total=flushed["num_blocks"], completed=num_done)
            if flushed["state"] != "running":
                return flushed
            time.sleep(POLL_S)
