"""`kvferry tiers`: the tiers below the pool, and changes of them while the service runs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvferry.app.cli.console import ExitCode, count, err, note, out, print_answer, size
from kvferry.app.cli.remote import JsonOption, UrlOption, connect, path_to
from kvferry.app.cli.reset import ANSWER_S, TenantOption
from kvferry.app.cli.tables import show_answer, show_items

if TYPE_CHECKING:
    from kvferry.app.client import KVFerryClient

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


@app.command("list")
def list_tiers(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show all tiers, the fastest first."""
    with connect(url) as client:
        answer = client.get("tiers")
    if not as_json:
        answer = {**answer, "items": [_with_use(item) for item in answer["items"]]}
    none = "no tier is attached: kvferry tiers attach, or KVFERRY_TIERS for every start"
    show_answer(answer, as_json, *COLUMNS, empty=none)


def _with_use(tier: Mapping[str, Any]) -> Mapping[str, Any]:
    """Add what a tier uses of its limit, and the share of look-ups that it answered."""
    counts = tier["counts"]
    limit = f" of {size(counts['max_bytes'])}" if counts["max_bytes"] else ""
    hit_rate = counts["found"] / counts["looked_up"] if counts["looked_up"] else None
    return {**tier, "used": size(counts["bytes"]) + limit, "hit_rate": hit_rate, "health": tier["health"] or "works"}


@app.command("attach")
def attach(name: Name, definition: Definition, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Attach a tier until the next start."""
    try:
        body = json.loads(definition)
    except ValueError as error:
        raise typer.BadParameter(f"is not JSON: {error}", param_hint="JSON") from None
    if not isinstance(body, dict) or "enabled" in body:
        raise typer.BadParameter("must be a JSON object with the fields of a tier", param_hint="JSON")
    _put(name, body, url, as_json)
    if not as_json:
        note(f"holds until the next start, or until: kvferry tiers detach {name}")


@app.command("disable")
def disable(name: Name, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Submit no new jobs to a tier; jobs under way end, and resets reach it."""
    _put(name, {"enabled": False}, url, as_json)


@app.command("enable")
def enable(name: Name, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Submit jobs to a tier again."""
    _put(name, {"enabled": True}, url, as_json)


@app.command("detach")
def detach(
    name: Name,
    drain_timeout_s: Annotated[
        float | None, typer.Option("--drain-timeout-s", min=0, max=60, help="Time for its jobs to end.")
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a tier's jobs end, and close it. Resets reach its blocks only when it is attached again."""
    query = "" if drain_timeout_s is None else f"?drain_timeout_s={drain_timeout_s:g}"
    with connect(url) as client:
        client.send("DELETE", path_to("tiers", name) + query, timeout_s=(drain_timeout_s or 0.0) + ANSWER_S)
    print_answer({"name": name, "detached": True}, as_json, lambda done: out.print(f"tier detached: {done['name']}"))


@app.command("flush")
def flush(name: Name, tenant: TenantOption = None, url: UrlOption = None, as_json: JsonOption = False) -> int:
    """Copy the pool's blocks to a tier, beginnings of prompts first, and wait. Ctrl-C ends it."""
    path = f"{path_to('tiers', name)}/flush"
    with connect(url) as client:
        try:
            client.send("POST", path, {"tenant": tenant})
            flushed = _follow_flush(client, name)
        except KeyboardInterrupt:
            client.send("DELETE", path)
            flushed = client.get(path_to("tiers", name))["flush"]
    print_answer({"name": name, **flushed}, as_json, _print_flush)
    return ExitCode.OK if flushed["state"] == "done" else ExitCode.REFUSED


def _follow_flush(client: KVFerryClient, name: str) -> Mapping[str, Any]:
    """Return a flush once it has ended."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TextColumn("blocks"))
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        shown = bar.add_task(f"flush {name}", total=None)
        while True:
            flushed: Mapping[str, Any] = client.get(path_to("tiers", name))["flush"]
            num_done = flushed["stored_blocks"] + flushed["left_blocks"]
            bar.update(shown, total=flushed["num_blocks"], completed=num_done)
            if flushed["state"] != "running":
                return flushed
            time.sleep(POLL_S)


def _print_flush(flushed: Mapping[str, Any]) -> None:
    copied = f"{count(flushed['stored_blocks'])} of {count(flushed['num_blocks'])} blocks"
    out.print(f"flush of tier {flushed['name']} {flushed['state']}: {copied}")
    if flushed["left_blocks"]:
        out.print(f"{count(flushed['left_blocks'])} blocks left out")
    if flushed["reason"]:
        note(flushed["reason"])


def _put(name: str, body: Mapping[str, Any], url: str | None, as_json: bool) -> None:
    with connect(url) as client:
        answer = client.send("PUT", path_to("tiers", name), body)
    print_answer(answer, as_json, lambda tier: show_items([_with_use(tier)], *COLUMNS))
