"""`kvferry replay`: send a recorded trace to a running engine, and show what served the prompt tokens."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from kvferry.app.cli.console import (
    ExitCode,
    Failed,
    complain,
    count,
    err,
    finite,
    note,
    out,
    print_json,
    run_async,
    shares,
)
from kvferry.app.cli.remote import BlockTokensOption, JsonOption, UrlOption, connect, connect_engine, connected
from kvferry.app.cli.tables import show_answer

if TYPE_CHECKING:
    from kvferry.app.client import KVFerryClient
    from kvferry.app.replay.report import Report
    from kvferry.app.replay.runner import Outcome, Pace
    from kvferry.app.replay.trace import MappedRequest


@connected
def replay(
    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="[TRACE]",
            help="A trace in Mooncake's format, one JSON object per line, or sessions of kv-cache-tester.",
            show_default="generated conversations",
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Number of requests to send.", show_default="all")
    ] = None,
    concurrency: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Number of concurrent requests.")] = 8,
    block_tokens: BlockTokensOption = None,
    tokens_per_hash: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            max=65_536,
            help="Tokens sent for each block of the trace.",
            show_default="16 for one of 512, else all",
        ),
    ] = None,
    max_output: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum output tokens of a request.")] = 16,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of tokens and generated requests.")] = 0,
    respect_timestamps: Annotated[
        bool,
        typer.Option("--respect-timestamps", metavar="", help="Send at the trace's times, not as fast as possible."),
    ] = False,
    sessions: Annotated[
        bool,
        typer.Option("--sessions", metavar="", help="Send each session in order, with its think times."),
    ] = False,
    speed: Annotated[
        float,
        typer.Option(
            callback=finite, metavar="FACTOR", min=0.001, help="Speed-up factor of --respect-timestamps and --sessions."
        ),
    ] = 1.0,
    engine_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="URL of /v1/completions, if it differs from the admin API's. Receives KVFERRY_ENGINE_API_KEY, if set.",
            show_default="--url",
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> int:
    """Send a trace to a running engine, and show what served the prompt tokens.

    Without a recorded trace, generated conversations that share beginnings are sent.

    A hash id of the trace is always replaced by the same tokens, so that shared prefixes of the trace are preserved.
    """
    from kvferry.app.replay.report import make_report, settled_stats
    from kvferry.app.replay.runner import Pace
    from kvferry.app.replay.sender import served_model
    from kvferry.app.replay.trace import (
        SCALED_BLOCK_TOKENS,
        TRACE_BLOCK_TOKENS,
        BadTrace,
        Mapping,
        block_size_notice,
        map_request,
        read_trace,
        sample_trace,
    )

    try:
        recorded = sample_trace(seed)[:requests] if trace is None else read_trace(trace, requests, block_tokens)
    except BadTrace as error:
        raise Failed(str(error), ExitCode.USAGE) from error
    if notice := block_size_notice(recorded):
        note(notice)
    if requests is not None and len(recorded) < requests:
        note(f"the trace has {count(len(recorded))} requests, fewer than --requests {count(requests)}")
    if sessions and all(one.session_id is None for one in recorded):
        note("the trace names no sessions: each request is sent alone")
    size = recorded[0].block_size
    if tokens_per_hash is None:
        tokens_per_hash = SCALED_BLOCK_TOKENS if size == TRACE_BLOCK_TOKENS else size
    with connect(url) as admin, connect_engine(engine_url, admin, is_found=url is None) as engine:
        model = served_model(engine)
        mapping = Mapping(tokens_per_hash, max_output, seed, model.context_tokens)
        mapped = [map_request(request, mapping) for request in recorded]
        before = admin.get("stats")
        started_s = time.perf_counter()
        pace = Pace(concurrency, speed, respect_timestamps, sessions)
        outcomes = _run(mapped, engine, model.name, pace, quiet=as_json)
        total_s = time.perf_counter() - started_s
        after = settled_stats(admin)
    report = make_report(outcomes, total_s, before, after)
    if as_json:
        print_json(asdict(report))
    else:
        _print_report(report, f"{tokens_per_hash} for {size} of the trace")
    for message, times in report.errors.items():
        complain(f"{count(times)} x {message}")
    is_partial = len(outcomes) < len(mapped)
    if is_partial:
        complain(f"interrupted: {count(len(outcomes))} of {count(len(mapped))} requests have ended")
    return ExitCode.REFUSED if report.failed or is_partial else ExitCode.OK


def _run(mapped: list[MappedRequest], engine: KVFerryClient, model: str, pace: Pace, *, quiet: bool) -> list[Outcome]:
    """Return the outcomes, after Ctrl-C those of the requests that have ended."""
    from kvferry.app.replay.runner import run_replay

    columns = (
        TextColumn("replaying"),
        BarColumn(),
        # One text: a redraw between the changes of two fields would show numbers that do not add up.
        TextColumn("{task.fields[counts]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    ended: list[Outcome] = []
    failed = 0

    def counts() -> str:
        answered = len(ended) - failed
        return f"{count(answered)} answered, {count(failed)} failed, {count(len(mapped) - len(ended))} to go"

    with Progress(*columns, console=err, transient=True, disable=quiet) as progress:
        task = progress.add_task("replay", total=len(mapped), counts=counts())

        def on_done(outcome: Outcome) -> None:
            nonlocal failed
            ended.append(outcome)
            failed += outcome.answer.error is not None
            progress.update(task, advance=1, counts=counts())

        with suppress(KeyboardInterrupt):
            run_async(lambda: run_replay(mapped, engine, model, pace, on_done))
    return ended


def _print_report(report: Report, scale: str) -> None:
    show_answer(asdict(report) | {"scale": scale})
    if report.cache is None:
        note("server restarted during the replay: its counters are not comparable")
        return
    cache = report.cache
    served = {"device": cache.device_tokens, "pool": cache.host_tokens}
    served |= {f"tier {name}": tokens for name, tokens in cache.tier_tokens.items()}
    out.print(f"prompt tokens: {shares(served | {'computed': cache.recomputed_tokens})}")
