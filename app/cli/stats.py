"""`kvferry stats`: a snapshot of all counters, once or repeatedly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.app.cli.console import (
    COLORS,
    SOURCES,
    ExitCode,
    Failed,
    count,
    duration,
    out,
    percentage,
    print_json,
    print_json_line,
    size,
    words,
)
from kvferry.app.cli.remote import EngineOption, JsonOption, UrlOption, connect_ranks, connected, read_problems
from kvferry.app.cli.tables import cell, label
from kvferry.app.telemetry.miss_texts import SHORT

if TYPE_CHECKING:
    from kvferry.app.client import KVFerryClient

BAR_WIDTH = 24
_SHARED = ("block_size", "groups", "slot_bytes")
"""Fields that are equal for all data-parallel ranks of an engine."""
_LARGEST = ("uptime_s", "epoch", "lag_s", "window_s", "paused")
"""Fields of which the largest value is shown."""
_KNOWN = ("gain_s", "net_s")
"""Fields that are null if they are null for any rank."""

Json = Mapping[str, Any]


@connected
def stats(
    watch: Annotated[bool, typer.Option("--watch", "-w", metavar="", help="Repeat until Ctrl-C.")] = False,
    interval_s: Annotated[
        float, typer.Option("--interval-s", metavar="SECONDS", min=0.1, max=60, help="Time between snapshots.")
    ] = 1.0,
    engine: EngineOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what served prompt tokens, what the pool holds, and what was stored, loaded and evicted.

    Counters of an engine's data-parallel ranks are added up.
    """
    with connect_ranks(url, engine) as clients:
        if not watch:
            snapshot = add_up([client.get("stats") for client in clients])
            if as_json:
                print_json(snapshot)
            else:
                out.print(render(snapshot, _problems(clients)))
            return
        try:
            with ExitStack() as streams:
                ranks = [
                    streams.enter_context(closing(client.events("stats/stream", interval_s=interval_s)))
                    for client in clients
                ]
                is_live = out.is_terminal and not as_json
                live = streams.enter_context(Live(console=out, auto_refresh=False)) if is_live else None
                for snapshot in map(add_up, zip(*ranks, strict=False)):
                    if as_json:
                        print_json_line(snapshot)
                    elif live is not None:
                        live.update(render(snapshot, _problems(clients)), refresh=True)
                    else:
                        out.print(render(snapshot, _problems(clients)))
        except KeyboardInterrupt:
            return
    raise Failed("stream ended by the server", ExitCode.UNREACHABLE)


def add_up(snapshots: Sequence[Json]) -> Json:
    """Combine the snapshots of an engine's data-parallel ranks: counts are added, shared fields kept."""
    if len(snapshots) == 1:
        return snapshots[0]
    whole = _merged(snapshots)
    advice = filter(None, (each.get("advice") for each in snapshots))
    most = max(advice, key=lambda one: float(one["seconds_per_hour"]), default=None)
    return {**whole, "engine": {**whole.get("engine", {}), "ranks": len(snapshots)}, "advice": most}


def _merged(parts: Sequence[Json]) -> dict[str, Any]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _added(name, [part.get(name) for part in parts]) for name in names}


def _added(name: str, given: Sequence[Any]) -> Any:
    values = [] if name in _KNOWN and None in given else [value for value in given if value is not None]
    first = values[0] if values else None
    if isinstance(first, Mapping):
        return _merged(values)
    if isinstance(first, bool) and name not in _LARGEST:
        return all(values)
    if not isinstance(first, (int, float)) or name in _SHARED:
        return first
    return max(values) if name in _LARGEST else sum(values)


def _problems(clients: Sequence[KVFerryClient]) -> list[str]:
    """Return the problems of all data-parallel ranks, each once."""
    return list(dict.fromkeys(text for client in clients for text in read_problems(client)))


def render(snapshot: Json, problems: Sequence[str] = ()) -> RenderableType:
    """Format a snapshot for people."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=16)
    grid.add_column(justify="right", min_width=10)
    grid.add_column(justify="right", min_width=6)
    grid.add_column(width=BAR_WIDTH)
    _prompt_rows(grid, snapshot.get("prompt_tokens", {}))
    _missed_rows(grid, snapshot.get("missed_tokens", {}))
    _pool_rows(grid, snapshot.get("pool", {}))
    trouble = [Text(text, "bold red") for text in problems]
    return Group(headline(snapshot), *trouble, Text(), grid, Text(), _flows(snapshot))


def headline(snapshot: Json) -> Text:
    """Return what the snapshot is of."""
    # Of any version: without it, the answer is not that of kvferry.
    engine = snapshot["engine"]
    return Text.assemble(
        ("kvferry", "bold"),
        f"  {engine.get('name', '?')}, {engine.get('model', '?')} on {engine.get('device', '?')}",
        f", {engine['ranks']} data-parallel ranks" if "ranks" in engine else "",
        (
            f"  up {duration(snapshot.get('uptime_s', 0))}, all blocks dropped {count(snapshot.get('epoch', 0))} times",
            "dim",
        ),
    )


def _section(grid: Table, name: str, total: str) -> None:
    grid.add_row(Text(name, "bold"), Text(total, "bold"), "", "")


def _bar_row(grid: Table, name: str, part: float, whole: float, color: str) -> None:
    bar: RenderableType = Bar(whole, 0, part, width=BAR_WIDTH, color=color) if whole and part else ""
    grid.add_row(f"  {name}", count(part), Text(percentage(part, whole), "dim"), bar)


def _prompt_rows(grid: Table, tokens: Json) -> None:
    total = tokens.get("total", 0)
    _section(grid, "prompt tokens", count(total))
    _bar_row(grid, SOURCES["device_hit"], tokens.get("device_hit", 0), total, COLORS["device_hit"])
    _bar_row(grid, SOURCES["host_hit"], tokens.get("host_hit", 0), total, COLORS["host_hit"])
    for tier, hit in tokens.get("tier_hit", {}).items():
        _bar_row(grid, f"tier {tier}", hit, total, COLORS["tier_hit"])
    _bar_row(grid, SOURCES["recomputed"], tokens.get("recomputed", 0), total, COLORS["recomputed"])


def _missed_rows(grid: Table, missed: Json) -> None:
    """Add why tokens were computed, the most frequent cause first."""
    causes = {
        texts.get(cause, f"{words(part)}: {words(cause)}"): tokens
        for part, texts in SHORT.items()
        for cause, tokens in missed.get(part, {}).items()
    }
    whole = sum(causes.values())
    for cause, tokens in sorted(causes.items(), key=lambda item: -item[1]):
        if tokens:
            _bar_row(grid, f"  {cause}", tokens, whole, COLORS["recomputed"])


def _pool_rows(grid: Table, pool: Json) -> None:
    slots = pool.get("slots", 0)
    grid.add_row()
    _section(grid, "pool slots", count(slots))
    for name, color in (("ready", COLORS["host_hit"]), ("storing", COLORS["tier_hit"]), ("free", "bright_black")):
        _bar_row(grid, name, pool.get(name, 0), slots, color)
    for name in ("loading", "pinned", "unverified"):
        if pool.get(name):
            note = "of ready, not evicted" if name == "pinned" else "of ready"
            grid.add_row(f"  {name}", count(pool[name]), "", Text(note, "dim"))


def _flows(snapshot: Json) -> Table:
    """Return the rest, a section a line, without counters at 0."""
    pool = snapshot.get("pool", {})
    slot_bytes, used_slots = pool.get("slot_bytes", 0), pool.get("slots", 0) - pool.get("free", 0)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", min_width=16)
    grid.add_column()
    grid.add_row(
        "pool",
        f"{size(used_slots * slot_bytes)} of {size(pool.get('bytes', 0))} in use, {size(slot_bytes)} a slot, "
        f"eviction policy {pool.get('eviction_policy', '?')}, "
        f"store mode {snapshot.get('store_mode', {}).get('mode', '?')}",
    )
    for name in ("store", "load", "evictions", "requests", "journal", "recovery"):
        if snapshot.get(name) is not None:
            grid.add_row(label(name), cell(name, _counted(snapshot[name])))
    if "balance" in snapshot:
        grid.add_row("balance", balance_text(snapshot["balance"]))
    if snapshot.get("advice"):
        grid.add_row("advice", f"{snapshot['advice']['text']} {snapshot['advice']['command']}")
    offloading = snapshot.get("offloading", {})
    is_on, num_errors = offloading.get("is_on", True), offloading.get("num_errors")
    if num_errors or not is_on:
        text = "on" if is_on else f"OFF: {offloading.get('reason')}"
        text += f"; {num_errors} unexpected errors, latest: {offloading.get('last_error')}" if num_errors else ""
        grid.add_row("offloading", text)
    return grid


def _counted(section: Json) -> Json:
    """Return a section with those parts that are not 0 or empty, also of the objects in it."""
    parts = {name: _counted(part) if isinstance(part, Mapping) else part for name, part in section.items()}
    return {name: part for name, part in parts.items() if part}


def balance_text(balance: Json) -> RenderableType:
    """Return what offloading has cost and saved in the last minutes, and whether storing is paused."""
    gain_s, net_s, rate = balance["gain_s"], balance["net_s"], balance["prefill_tokens_per_s"]
    saved = f"{count(balance['saved_tokens'])} tokens"
    if gain_s is None:
        saved += ", of which the time is not measured yet"
    elif rate is not None:
        saved = f"{gain_s:,.2f} s ({saved}, computed at {rate:,.0f}/s)"
    text = Text.assemble(
        f"last {duration(balance['window_s'])}: saved {saved}, cost {balance['cost_s']:,.2f} s "
        f"(hooks {balance['hook_s']:,.2f} s, waits for loads and tiers {balance['load_wait_s']:,.2f} s)",
        "" if net_s is None else (f"; net {net_s:+,.2f} s", "red" if net_s < 0 else "green"),
    )
    if balance["since"] is not None:
        state = "paused" if balance["paused"] else "tried again"
        reason = f"storing is {state} since {words(balance['since'])}: {words(balance['reason'])}"
        return Group(text, Text(reason, "yellow"))
    return text
