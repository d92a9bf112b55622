"""`kvferry top`: a live view of the last minute."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Annotated

import typer
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.app.cli.console import COLORS, SOURCES, count, duration, out, shares, size
from kvferry.app.cli.remote import Service, connected, read_problems
from kvferry.app.cli.stats import balance_text, headline
from kvferry.app.cli.tables import Json, items_table

WINDOW_S = 60
NUM_REQUESTS = 10
BAR_WIDTH = 30
COLUMNS = (
    "id",
    "state",
    "num_prompt_tokens",
    "num_output_tokens",
    *(f"prompt_tokens.{name}" for name in SOURCES),
)
_LEVELS = " ▁▂▃▄▅▆▇█"


@connected
def top(
    service: Service,
    interval_s: Annotated[
        float, typer.Option("--interval-s", metavar="SECONDS", min=0.2, max=60, help="Time between updates.")
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", metavar="", help="Print one view and exit.")] = False,
) -> None:
    """Show live where prompt tokens come from, what moves, how full the pool is, and the requests under way.

    Rates are of the last minute. Ends with Ctrl-C; without a terminal, one view is printed.
    """
    if once or not out.is_terminal:
        out.print(_view(service))
        return
    with suppress(KeyboardInterrupt), Live(_view(service), console=out, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval_s)
            live.update(_view(service), refresh=True)


def _view(service: Service) -> RenderableType:
    stats = service.get("stats")
    history = service.get("stats/history", window_s=WINDOW_S)
    running = service.get("requests", limit=NUM_REQUESTS, state="running")["items"]
    running = [*service.get("requests", limit=NUM_REQUESTS, state="loading")["items"], *running][:NUM_REQUESTS]
    return render(stats, history, running, read_problems(service))


def render(stats: Json, history: Json, running: Sequence[Json], problems: Sequence[str]) -> RenderableType:
    """Format one view."""
    rows, names = history["rows"], history["columns"]
    columns = {name: [row[index] for row in rows] for index, name in enumerate(names)}
    requests, pool = stats["requests"], stats["pool"]
    span_s: float = max(1.0, sum(columns["span_s"]))

    def rate(name: str) -> float:
        return float(sum(columns[name])) / span_s

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold")
    grid.add_column()
    grid.add_row(
        "requests",
        f"{count(requests['running'])} running, {count(requests['waiting_for_load'])} of them waiting for a load; "
        f"{rate('finished'):.1f} finished/s",
    )
    sources = {text: sum(columns[name]) for name, text in SOURCES.items()}
    total = sum(sources.values())
    grid.add_row("prompt tokens", f"{total / span_s:,.0f}/s: {shares(sources)}" if total else "none")
    grid.add_row("hit rate", Text(sparkline(_hit_rates(columns)), COLORS["device_hit"]))
    for name, verb, failed in (("store", "stored", "store_failed"), ("load", "loaded", "load_failed")):
        failures = f", {count(sum(columns[failed]))} failed" if sum(columns[failed]) else ""
        grid.add_row(name, f"{size(rate(f'{verb}_bytes'))}/s, {rate(verb):,.0f} blocks/s{failures}")
    regretted = sum(columns["regretted"])
    grid.add_row("evictions", f"{rate('evicted'):,.0f}/s; {count(int(regretted))} evicted blocks were requested again")
    grid.add_row("balance", balance_text(stats["balance"]))
    used = pool["slots"] - pool["free"]
    grid.add_row("pool", f"{count(used)} of {count(pool['slots'])} slots in use, {count(pool['pinned'])} pinned")
    grid.add_row("", Bar(max(1, pool["slots"]), 0, used, width=BAR_WIDTH, color=COLORS["host_hit"]))
    parts: list[RenderableType] = [
        headline(stats),
        Text(f"rates of the last {duration(span_s)}", "dim"),
        Text(),
        grid,
        *(Text(text, "bold red") for text in problems),
    ]
    if running:
        parts += [Text(), items_table(running, *COLUMNS)]
    return Group(*parts)


def _hit_rates(columns: Mapping[str, Sequence[float]]) -> list[float | None]:
    """Return the share of prompt tokens not computed in each interval, None for intervals without any."""
    sources = zip(*(columns[name] for name in SOURCES), strict=True)
    return [1 - computed / total if (total := sum(hits) + computed) else None for *hits, computed in sources]


def sparkline(values: Sequence[float | None]) -> str:
    """Draw values from 0 to 1 as one character each; None is a blank."""
    top_level = len(_LEVELS) - 1
    return "".join(" " if value is None else _LEVELS[max(1, round(value * top_level))] for value in values)
