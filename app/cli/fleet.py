"""`kvferry fleet`: the engines that share the metadata store, and which of them exchange blocks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import count, duration, note, note_more, percentage, print_answer, print_table, size, words
from kvferry.app.cli.remote import CursorOption, JsonOption, LimitOption, UrlOption, connect


def fleet(
    tenants: Annotated[
        bool, typer.Option("--tenants", metavar="", help="Show the tenants with the most bytes in all pools instead.")
    ] = False,
    limit: LimitOption = 100,
    cursor: CursorOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the engines that share the metadata store: state, hit rate of the last minutes, pool, and shared tiers."""
    if tenants and cursor is not None:
        raise typer.BadParameter("has no effect with --tenants", param_hint="--cursor")
    with connect(url) as client:
        if tenants:
            print_answer(client.get("fleet/tenants", limit=limit), as_json, _print_tenants)
        else:
            print_answer(client.get("fleet", limit=limit, cursor=cursor), as_json, _print_engines)


def _print_engines(answer: Mapping[str, Any]) -> None:
    engines = answer["items"]
    rows = [
        (words(one["name"]), f"unreadable: {words(one['unreadable'])}", *[""] * 8) if "unreadable" in one else _row(one)
        for one in engines
    ]
    columns = ("engine", "state", "seen", "host", "address", "model", "version", "hit rate", "pool", "shared tiers")
    print_table(rows, *columns, right=("hit rate",))
    note_more(answer)
    if len(engines) == 1 and not answer["next_cursor"]:
        note("engines appear here that have the same KVFERRY_DATABASE_URL, each with its own KVFERRY_ENGINE_NAME")


def _row(engine: Mapping[str, Any]) -> tuple[str, ...]:
    pool, recent = engine["pool"], engine["recent"]
    seen_s = (datetime.now().astimezone() - datetime.fromisoformat(engine["seen_at"])).total_seconds()
    use = "-"
    if pool["slots"] and pool["bytes"] is not None:
        use = f"{size(pool['bytes'])}, {percentage(pool['used_slots'] or 0, pool['slots'])} used"
    return (
        words(engine["name"]) + (" *" if engine["answering"] else ""),
        words(engine["state"]),
        f"{duration(max(0.0, seen_s))} ago",
        words(engine["host"]),
        words(engine["url"]),
        words(engine["model"]),
        words(engine["version"]),
        "-" if recent is None or recent["hit_rate"] is None else percentage(recent["hit_rate"], 1),
        use,
        ", ".join(f"{words(tier['name'])} {tier['namespace']} ({tier['engines']})" for tier in _shared(engine)) or "-",
    )


def _shared(engine: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [tier for tier in engine["tiers"] if tier["namespace"] is not None]


def _print_tenants(answer: Mapping[str, Any]) -> None:
    if not answer["items"]:
        note("no blocks")
        return
    rows = [
        (
            "no tenant" if one["tenant"] is None else words(one["tenant"]),
            size(one["pool_bytes"]),
            count(one["engines"]),
        )
        for one in answer["items"]
    ]
    print_table(rows, "tenant", "in pools", "engines", right=("in pools", "engines"))
