"""`kvferry what-if`: hit rates at other cache sizes, and of a trace with each eviction policy and store mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import count, duration, err, note, out, size, words
from kvferry.app.cli.remote import Answer, BlockTokensOption, Result, UrlOption, answers, connect
from kvferry.app.cli.tables import show_items

_DEVICE_SHARE, _POOL_SHARE = 20, 10
"""Parts of a trace's different blocks that device and pool hold by default: 1/20 and 1/10."""
_MULTIPLES = (0.5, 1.0, 2.0)
"""Pools that a trace is replayed with, as multiples of the given one."""
_WATERMARK_BLOCKS = 64
_POINTS_PER_ROW = 4
"""Points of the curve for a row of the table, whose sizes are powers of two times the first."""


def _print(answer: Mapping[str, Any]) -> None:
    for text in answer["notes"] if not answer["points"] else []:
        out.print(text)
    if not answer["points"]:
        out.print("No request has ended since counting began.")
        return
    now = answer["current"]
    show_items(answer["points"][::_POINTS_PER_ROW], "bytes", "hit_rate")
    out.print()
    larger, both = max(now["pool_bytes"], now["device_bytes"]), now["pool_bytes"] + now["device_bytes"]
    sizes = {
        f"now: {now['eviction_policy']}, {now['store_mode']}": (now["pool_bytes"], now["hit_rate"]),
        "eager here: the larger of pool and device": (larger, answer["eager"]),
        "lazy here: pool and device together": (both, answer["lazy"]),
        "everything kept": (None, answer["ceiling"]),
    }
    show_items([{"": name, "bytes": each, "hit_rate": rate} for name, (each, rate) in sizes.items()])
    out.print()
    out.print(f"of {count(answer['prompt_tokens'])} prompt tokens since {words(answer['since'])}, with lru")
    tokens, seconds = answer["next_gib"]["hit_tokens_per_hour"], answer["next_gib"]["prefill_seconds_per_hour"]
    if tokens is not None:
        worth = "" if seconds is None else f", {duration(seconds)} of prefill"
        out.print(f"the next GiB: {tokens:,.0f} more prompt tokens an hour found{worth}")
    for text in answer["notes"]:
        note(text)


@answers(show=_print)
def what_if(
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE", help="Replay a trace with each policy and mode; no server."),
    ] = None,
    block_tokens: BlockTokensOption = None,
    pool_blocks: Annotated[
        int | None, typer.Option(min=1, help="With --trace: size of the pool in the trace's blocks.")
    ] = None,
    device_blocks: Annotated[
        int | None, typer.Option(min=1, help="With --trace: size of the device in blocks.")
    ] = None,
    token_bytes: Annotated[int, typer.Option(min=1, help="With --trace: bytes of one token in the pool.")] = 131_072,
    url: UrlOption = None,
) -> Answer:
    """Show what caches of other sizes would have served, or what each policy and mode serves of a trace."""
    if trace is None and (pool_blocks or device_blocks):
        raise typer.BadParameter("only with --trace; of a service, its own sizes are shown")
    if trace is None:
        with connect(url) as service:
            return service.get("what-if")
    return Result(_replay(trace, block_tokens, pool_blocks, device_blocks, token_bytes), _print_replay)


# --- traces -----------------------------------------------------------------------------------------------------


def _replay(
    path: Path, block_tokens: int | None, pool_blocks: int | None, device_blocks: int | None, token_bytes: int
) -> dict[str, Any]:
    """Return what each policy and mode serves of a trace, in the real core."""
    from rich.progress import track

    from kvferry.app.replay.core_replay import Replay, Setup, count_blocks, replayed
    from kvferry.app.replay.trace import BadTrace, block_size_notice, read_trace
    from kvferry.core.engine_api import StoreMode
    from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES

    try:
        trace = read_trace(path, block_tokens=block_tokens)
    except BadTrace as error:
        raise typer.BadParameter(str(error), param_hint="--trace") from error
    if notice := block_size_notice(trace):
        note(notice)
    num_blocks, size_tokens = count_blocks(trace), trace[0].block_size
    pool_blocks = pool_blocks or max(num_blocks // _POOL_SHARE, 1)
    largest = max(-(-(one.input_length + one.output_length) // size_tokens) for one in trace)
    if device_blocks is not None and device_blocks < largest:
        raise typer.BadParameter(f"{device_blocks}: the largest request needs {largest}", param_hint="--device-blocks")
    device_blocks = device_blocks or max(num_blocks // _DEVICE_SHARE, largest)
    block_bytes = size_tokens * token_bytes
    sizes = [max(round(pool_blocks * multiple), 1) for multiple in _MULTIPLES]
    setup = Setup(device_blocks, pool_blocks, watermark_blocks=_WATERMARK_BLOCKS, block_tokens=size_tokens)
    kinds = list(product(StoreMode, EVICTION_POLICIES))
    curves: list[dict[str, Any]] = [
        {"eviction_policy": policy, "store_mode": mode.value, "points": []} for mode, policy in kinds
    ]
    # One replay may take minutes.
    todo = list(product(zip(curves, kinds, strict=True), sizes))
    for (curve, (mode, policy)), slots in track(
        todo, "replay", console=err, transient=True, disable=not err.is_terminal
    ):
        used = Replay(replace(setup, pool_slots=slots, policy=policy, mode=mode)).run(replayed(trace))
        curve["points"].append({"bytes": slots * block_bytes, "hit_rate": used.hit_percent / 100})
    return {
        "prompt_tokens": sum(one.input_length for one in trace),
        "pool_bytes": pool_blocks * block_bytes,
        "device_bytes": device_blocks * block_bytes,
        "curves": curves,
    }


def _print_replay(answer: Mapping[str, Any]) -> None:
    show_items(
        [
            {"mode_and_policy": f"{curve['store_mode']}, {curve['eviction_policy']}"}
            | {size(point["bytes"]): round(100 * point["hit_rate"], 1) for point in curve["points"]}
            for curve in answer["curves"]
        ]
    )
    out.print()
    out.print(
        f"percent of {count(answer['prompt_tokens'])} prompt tokens, by size of the pool, with a device of "
        f"{size(answer['device_bytes'])}"
    )
