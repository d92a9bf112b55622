"""`kvferry what-if`: what other pool sizes, eviction policies and store modes would have found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from xml.sax.saxutils import escape  # nosec B406 # nothing is parsed

import typer

from kvferry.app.cli.console import count, duration, note, out, print_answer, print_table, size, words
from kvferry.app.cli.remote import JsonOption, UrlOption, connect

_DEVICE_SHARE, _POOL_SHARE = 20, 10
"""Parts of a trace's different blocks that device and pool hold by default: 1/20 and 1/10."""
_WATERMARK_BLOCKS = 64
_COLORS = {"lru": "#1f77b4", "arc": "#2ca02c", "hazard": "#d62728"}
_WIDTH, _HEIGHT, _MARGIN = 720, 420, 60


def what_if(
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Simulate a trace in Mooncake's format instead; no server."),
    ] = None,
    pool_blocks: Annotated[
        int | None, typer.Option(min=1, help="With --trace: size of the pool in blocks of 512 tokens.")
    ] = None,
    device_blocks: Annotated[
        int | None, typer.Option(min=1, help="With --trace: size of the device in blocks.")
    ] = None,
    token_bytes: Annotated[int, typer.Option(min=1, help="With --trace: bytes of one token in the pool.")] = 131_072,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write a plot.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the hit rate over pool sizes for each eviction policy and store mode."""
    if trace is None and (pool_blocks or device_blocks):
        raise typer.BadParameter("only with --trace; of a service, its own sizes are simulated")
    if trace is not None:
        answer = _simulate(trace, pool_blocks, device_blocks, token_bytes)
    else:
        with connect(url) as client:
            answer = client.get("what-if")
    print_answer(answer, as_json, _print)
    if svg is not None:
        try:
            svg.write_text(plot(answer), encoding="utf-8")
        except OSError as error:
            raise typer.BadParameter(f"{svg}: {error.strerror}", param_hint="--svg") from error
        note(f"plot written: {svg}")


def _simulate(path: Path, pool_blocks: int | None, device_blocks: int | None, token_bytes: int) -> dict[str, Any]:
    from kvferry.app.replay.trace import (
        TRACE_BLOCK_TOKENS,
        BadTrace,
        block_size_notice,
        is_short,
        read_trace,
        request_blocks,
    )
    from kvferry.app.what_if import Present, describe
    from kvferry.core.engine_api import StoreMode
    from kvferry.core.shadow.caches import Configuration, ShadowCaches, ShadowSetup

    try:
        trace = read_trace(path)
    except BadTrace as error:
        raise typer.BadParameter(str(error), param_hint="--trace") from error
    notice = block_size_notice(sum(is_short(one.input_length) for one in trace), len(trace))
    if notice is not None:
        note(notice)
    num_blocks = len({hash_id for one in trace for hash_id in one.hash_ids})
    pool_blocks = pool_blocks or max(num_blocks // _POOL_SHARE, 1)
    device_blocks = device_blocks or max(num_blocks // _DEVICE_SHARE, 1)
    caches = ShadowCaches(ShadowSetup(pool_blocks, device_blocks, TRACE_BLOCK_TOKENS, _WATERMARK_BLOCKS))
    for request in request_blocks(trace):
        caches.record(request)
    present = Present(pool_blocks, TRACE_BLOCK_TOKENS * token_bytes, "lru", StoreMode.EAGER)
    answer = asdict(describe(caches, present))
    if answer["prompt_tokens"] < sum(one.input_length for one in trace):
        note("only the last 24 hours of the trace count")
    # Times of a trace are not of a clock, and it does not say what served its prompts: the estimate of the pool as
    # given stands for it.
    answer["since"] = None
    number = caches.configurations.index(Configuration("lru", StoreMode.EAGER, pool_blocks))
    answer["current"]["hit_rate"] = caches.estimates()[number].hit_rate
    return answer


def _print(answer: Mapping[str, Any]) -> None:
    curves: Sequence[Mapping[str, Any]] = answer["curves"]
    if not curves:
        out.print("no request was recorded: `kvferry config set what_if=true` switches recording on, if it is off")
        return
    now = answer["current"]
    sizes = [point["pool_bytes"] for point in curves[0]["points"]]
    rows = []
    for curve in curves:
        is_now = (curve["store_mode"], curve["eviction_policy"]) == (now["store_mode"], now["eviction_policy"])
        name = f"{curve['store_mode']}, {curve['eviction_policy']}{' *' if is_now else ''}"
        rates = [_percent(point) for point in curve["points"]]
        rows.append((name, *rates, "-" if curve["knee_bytes"] is None else size(curve["knee_bytes"])))
    columns = [f"{size(each)}{' *' if each == now['pool_bytes'] else ''}" for each in sizes]
    print_table(rows, "mode, policy", *columns, "knee", right=(*columns, "knee"))
    out.print()
    counted = f"percent of {count(answer['prompt_tokens'])} prompt tokens"
    if answer["auto"] is None:
        out.print(f"{counted} of the trace; * is the pool as given")
    else:
        out.print(f"{counted} since {words(answer['since'])}; * is now,")
        out.print(f"measured {100 * now['hit_rate']:.1f}%")
    tokens, seconds = answer["next_gib"]["hit_tokens_per_hour"], answer["next_gib"]["prefill_seconds_per_hour"]
    if tokens is not None:
        worth = "" if seconds is None else f", {duration(seconds)} of prefill"
        out.print(f"the next GiB: {tokens:,.0f} more prompt tokens an hour found{worth}")
    if answer["dropped_requests"]:
        note(f"{count(answer['dropped_requests'])} requests were dropped: they came faster than they were simulated")


def _percent(point: Mapping[str, Any]) -> str:
    # One end of a bar may be cut off at 0 or 100%.
    bar = max(point["high"] - point["hit_rate"], point["hit_rate"] - point["low"])
    return f"{100 * point['hit_rate']:.1f} ±{100 * bar:.1f}"


def plot(answer: Mapping[str, Any]) -> str:
    """Return an SVG image of the curves: hit rate over the size of the pool, which is on a logarithmic scale."""
    curves = answer["curves"]
    sizes = [point["pool_bytes"] for point in curves[0]["points"]] if curves else []
    highest = max((point["hit_rate"] for curve in curves for point in curve["points"]), default=0.0) or 1.0

    def place(number: int, rate: float) -> tuple[float, float]:
        step = (_WIDTH - 2 * _MARGIN) / max(len(sizes) - 1, 1)
        return _MARGIN + number * step, _HEIGHT - _MARGIN - rate / highest * (_HEIGHT - 2 * _MARGIN)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for number, each in enumerate(sizes):
        x, y = place(number, 0)
        weight = "bold" if each == answer["current"]["pool_bytes"] else "normal"
        parts.append(
            f'<text x="{x:.0f}" y="{y + 20:.0f}" text-anchor="middle" font-weight="{weight}">{size(each)}</text>'
        )
    for step in range(5):
        x, y = place(0, highest * step / 4)
        parts.append(f'<path d="M{x:.0f} {y:.0f}H{_WIDTH - _MARGIN}" stroke="#ddd"/>')
        parts.append(f'<text x="{x - 8:.0f}" y="{y + 4:.0f}" text-anchor="end">{25 * highest * step:.3g}%</text>')
    for row, curve in enumerate(curves):
        color, is_lazy = _COLORS.get(curve["eviction_policy"], "#777"), curve["store_mode"] == "lazy"
        dash = "" if is_lazy else ' stroke-dasharray="5 4"'
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in _line(curve, place))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        name = escape(f"{curve['store_mode']}, {curve['eviction_policy']}")
        y = _HEIGHT - _MARGIN - 16 * (len(curves) - row)
        parts.append(f'<path d="M{_WIDTH - 190} {y}h24" stroke="{color}" stroke-width="2"{dash}/>')
        parts.append(f'<text x="{_WIDTH - 160}" y="{y + 4}">{name}</text>')
    return "\n".join([*parts, "</svg>\n"])


def _line(curve: Mapping[str, Any], place: Any) -> list[tuple[float, float]]:
    return [place(number, point["hit_rate"]) for number, point in enumerate(curve["points"])]
