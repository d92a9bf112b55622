"""`kvferry evictions`: which blocks left the pool, when and why."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import (
    count,
    duration,
    moment,
    note,
    note_more,
    print_answer,
    print_table,
    size,
    unreadable,
    words,
)
from kvferry.app.cli.remote import CursorOption, JsonOption, LimitOption, UrlOption, connect

SECONDS_CHARS = len("2026-01-31 12:00:00")
COLUMNS = ("time", "reason", "hash", "position", "age_s", "hits", "request", "tenant", "needed_by", "regretted_at")


def evictions(
    since: Annotated[
        str | None,
        typer.Option(callback=moment, metavar="WHEN", help="From this time on, or within the last 15m, 2h, 1d."),
    ] = None,
    until: Annotated[str | None, typer.Option(callback=moment, metavar="WHEN", help="Before this time.")] = None,
    reason: Annotated[str | None, typer.Option(metavar="NAME", help="Only for this reason, such as capacity.")] = None,
    request: Annotated[str | None, typer.Option(metavar="ID", help="Only blocks that this request stored.")] = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Only blocks of this tenant (its digest).")
    ] = None,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    summary: Annotated[
        bool, typer.Option("--summary", metavar="", help="Show counts, ages and the regret rate instead.")
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which blocks left the pool, when and why."""
    filters = {"reason": reason, "request": request, "tenant": tenant, "cursor": cursor}
    if summary and any(filters.values()):
        raise typer.BadParameter("--summary takes --since and --until only", param_hint="--summary")
    with connect(url) as client:
        if summary:
            answer = client.get("evictions/summary", since=since, until=until)
        else:
            answer = client.get("evictions", limit=limit, since=since, until=until, **filters)
    print_answer(answer, as_json, _print_summary if summary else _print_page)


def _print_summary(answer: Mapping[str, Any]) -> None:
    print_table(_flat(answer), "count", "value", right=("value",), header=False)


def _print_page(answer: Mapping[str, Any]) -> None:
    items = answer["items"]
    if not items:
        note("no evictions")
        return
    shown = [name for name in COLUMNS if name == "time" or any(item.get(name) is not None for item in items)]
    rows = [
        [unreadable(item), *[""] * (len(shown) - 1)]
        if "unreadable" in item
        else [_cell(name, item.get(name)) for name in shown]
        for item in items
    ]
    print_table(rows, *(name.removesuffix("_s") for name in shown), right=("position", "age", "hits"))
    note_more(answer)


def _cell(name: str, value: Any) -> str:
    if name.endswith("_s") and isinstance(value, (int, float)):
        return duration(value)
    if name in ("time", "regretted_at") and isinstance(value, str):
        return value.replace("T", " ")[:SECONDS_CHARS]
    return words(value)


def _flat(answer: Mapping[str, Any], prefix: str = "", depth: int = 0) -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in islice(answer.items(), 100):
        label = f"{prefix}{name}"
        if isinstance(value, Mapping) and depth < 3:
            rows += _flat(value, f"{label} ", depth + 1)
        elif name == "buckets" and isinstance(value, list):
            rows += [_bucket(prefix, item) for item in value]
        elif name.endswith("_s") and isinstance(value, (int, float)):
            rows.append((label.removesuffix("_s"), duration(value)))
        elif name.endswith("bytes") and isinstance(value, (int, float)):
            rows.append((label, size(value)))
        elif (name.endswith(("rate", "fraction"))) and isinstance(value, (int, float)):
            rows.append((label, f"{100 * value:.1f}%"))
        else:
            rows.append((label, count(value)))
    return rows


def _bucket(prefix: str, item: Mapping[str, Any]) -> tuple[str, str]:
    upto_s = item.get("upto_s")
    label = "more" if upto_s is None else f"up to {duration(upto_s)}"
    return f"  {prefix}{label}", count(item.get("count"))
