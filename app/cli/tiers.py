"""`kvferry tiers`: the tiers below the pool, and changes of them while the service runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import note, out, print_answer, print_table, words
from kvferry.app.cli.remote import JsonOption, UrlOption, connect, path_to
from kvferry.app.cli.reset import ANSWER_S

app = typer.Typer(no_args_is_help=True, help="The tiers below the pool: list, attach, disable and detach them.")

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
        print_answer(client.get("tiers"), as_json, lambda answer: _print_tiers(answer["items"]))


@app.command("attach")
def attach(name: Name, definition: Definition, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Attach a tier until the next start."""
    try:
        body = json.loads(definition)
    except ValueError as error:
        raise typer.BadParameter(f"is not JSON: {error}", param_hint="JSON") from None
    if not isinstance(body, dict) or "enabled" in body:
        raise typer.BadParameter("must be a JSON object with the fields of a tier", param_hint="JSON")
    with connect(url) as client:
        answer = client.send("PUT", path_to("tiers", name), body)
        print_answer(answer, as_json, lambda tier: _print_tiers([tier]))
    if not as_json:
        note(f"holds until the next start, or until: kvferry tiers detach {name}")


@app.command("disable")
def disable(name: Name, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Submit no new jobs to a tier; jobs under way end, and resets reach it."""
    _enable(name, False, url, as_json)


@app.command("enable")
def enable(name: Name, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Submit jobs to a tier again."""
    _enable(name, True, url, as_json)


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


def _enable(name: str, is_enabled: bool, url: str | None, as_json: bool) -> None:
    with connect(url) as client:
        answer = client.send("PUT", path_to("tiers", name), {"enabled": is_enabled})
        print_answer(answer, as_json, lambda tier: _print_tiers([tier]))


def _print_tiers(tiers: Sequence[Mapping[str, Any]]) -> None:
    if not tiers:
        note("no tier is attached: kvferry tiers attach, or KVFERRY_TIERS for every start")
        return
    rows = [
        (
            one["name"],
            one["definition"].get("type", ""),
            "yes" if one["enabled"] else "no",
            words(one["source"]),
            "; ".join(words(text).removeprefix(f"tier {one['name']}: ") for text in one["health"]),
        )
        for one in tiers
    ]
    print_table(rows, "tier", "type", "enabled", "source", "problem")
