"""`kvferry demo`: one workload twice, without and with offloading, and what that changed."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import RenderableType

from kvferry.app.cli.console import (
    ExitCode,
    Failed,
    complain,
    count,
    duration,
    end_on_signals,
    note,
    out,
    print_json,
    run_async,
    words,
)
from kvferry.app.cli.remote import JsonOption, Service, connect, connected, find, read_ready
from kvferry.app.cli.tables import new_table

if TYPE_CHECKING:
    from kvferry.app.replay.passes import Pass, PassResult, Target, TurnResult
    from kvferry.app.replay.workload import Conversation

SAME = 1.05
"""Numbers whose ratio is smaller are about the same."""
OWN_DEVICE_SHARE = 4
"""The device of an engine of its own holds a quarter of the workload's tokens, and at least its longest prompt."""
OWN_BLOCK_SIZE = 16
OWN_POOL_BYTES_PER_TOKEN = 4096
"""Twice the bytes that `tiny` has for a token."""
OWN_MIN_POOL_BYTES = 64 << 20


@connected
def demo(
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="URL of an engine with OpenAI's API. Receives KVFERRY_ENGINE_API_KEY, if set.",
            show_default="`kvferry serve` with this state folder, if it runs; else an engine for the time of the demo",
        ),
    ] = None,
    admin_url: Annotated[
        str | None,
        typer.Option(metavar="URL", help="URL of kvferry's admin API, if it differs from --url, as with vLLM."),
    ] = None,
    conversations: Annotated[int, typer.Option(metavar="N", min=1, max=256, help="Number of conversations.")] = 12,
    turns: Annotated[int, typer.Option(metavar="N", min=1, max=100, help="Requests of each conversation.")] = 5,
    scale: Annotated[
        float, typer.Option(metavar="FACTOR", min=0.01, max=1000, help="Factor on the lengths of all prompts.")
    ] = 1.0,
    think_s: Annotated[
        float, typer.Option("--think-s", metavar="SECONDS", min=0, max=600, help="Mean time between two messages.")
    ] = 2.0,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the workload.")] = 0,
    as_json: JsonOption = False,
) -> int:
    """Run one workload twice, without and with offloading, and compare times to the first token.

    Several conversations and agents share system prompts, think between their
    messages, and together need more KV cache than a small device has. Without a
    service of this host and state folder, an engine is started for the time of
    the demo, with the built-in model, and nothing of it is left behind.
    """
    from kvferry.app.replay.passes import BadEngine
    from kvferry.app.replay.workload import plan_workload
    from kvferry.core.errors import StartError

    workload = plan_workload(seed, conversations, turns, scale, think_s)
    # So that an engine of its own is stopped.
    end_on_signals()
    try:
        with _target(url, admin_url, workload) as (target, is_own):
            return _compare(target, workload, seed, as_json, is_own)
    except (BadEngine, StartError) as error:
        raise Failed(str(error)) from error
    except KeyboardInterrupt:
        raise Failed("interrupted") from None


@contextmanager
def _target(url: str | None, admin_url: str | None, workload: Sequence[Conversation]) -> Iterator[tuple[Target, bool]]:
    """Yield the engine at `url`, that of a service on this host, or one started for it; and whether it is the last."""
    from kvferry.app.client import KVFerryClient
    from kvferry.app.replay.own_engine import own_engine
    from kvferry.app.replay.passes import probe
    from kvferry.app.replay.sender import served_model
    from kvferry.app.settings.connection import Connection, find_engine

    if admin_url is not None and url is None:
        raise typer.BadParameter("name the engine with --url, too", param_hint="--admin-url")
    with ExitStack() as opened:
        # Also names the option whose URL is invalid.
        connection = find_engine(url, Connection("", None), "--url")
        is_own = False
        if url is not None:
            # No token is sent to an engine alone.
            stranger = opened.enter_context(KVFerryClient(connection.url, None))
            if admin_url is None and "degraded" not in read_ready(stranger):
                raise typer.BadParameter(f"{url} has no admin API of kvferry; name it", param_hint="--admin-url")
            admin = opened.enter_context(connect(admin_url or url))
        elif (local := _local_service(opened)) is not None:
            admin = local
        else:
            is_own = True
            note("starting an engine for the demo: the built-in model `tiny`, which is untrained, on CPU")
            admin = opened.enter_context(KVFerryClient(opened.enter_context(own_engine(_settings(workload))), None))
        connection = find_engine(url, Connection(admin.url, admin.token), "--url", is_found=not is_own)
        engine = opened.enter_context(KVFerryClient(connection.url, connection.token))
        model = served_model(engine)
        yield run_async(lambda: probe(engine, model, admin, secrets.token_hex(4))), is_own


def _local_service(opened: ExitStack) -> Service | None:
    """Return the service on this host if its engine is the embedded one; others may have users."""
    from kvferry.app.client import Unreachable

    if find(None).unannounced_in is not None:
        return None
    client = opened.enter_context(connect(None))
    try:
        engine = client.get("stats")["engine"]
    except Unreachable:
        return None
    if engine["name"] == "embedded":
        return client
    note(
        f"the engine of {client.url} ({words(engine['name'])}) is left alone; to use it, name it with --url, and "
        f"--admin-url {client.url}"
    )
    return None


def _settings(workload: Sequence[Conversation]) -> Mapping[str, object]:
    num_tokens = sum(conversation.num_tokens for conversation in workload)
    longest = max(conversation.max_tokens for conversation in workload)
    device_tokens = max(num_tokens / OWN_DEVICE_SHARE, longest)
    return {
        "MODEL": "tiny",
        "DEVICE": "cpu",
        "BLOCK_SIZE": OWN_BLOCK_SIZE,
        "DEVICE_BLOCKS": math.ceil(device_tokens / OWN_BLOCK_SIZE),
        "POOL_BYTES": max(OWN_MIN_POOL_BYTES, num_tokens * OWN_POOL_BYTES_PER_TOKEN),
    }


def _compare(target: Target, workload: Sequence[Conversation], seed: int, as_json: bool, is_own: bool) -> int:
    from kvferry.app.replay.passes import WITHOUT_OFFLOADING, BadEngine, Pass, PassPlan

    longest, context = max(conversation.max_tokens for conversation in workload), target.model.context_tokens
    if context is not None and longest > context:
        raise BadEngine(
            f"the longest conversation may have {count(longest)} tokens, and the engine accepts {count(context)}; "
            "set --turns or --scale lower"
        )
    run_id = secrets.token_hex(3)
    plans = [
        PassPlan("without offloading", f"{run_id}-without", WITHOUT_OFFLOADING),
        PassPlan("with offloading", f"{run_id}-with", {}),
    ]
    _introduce(target, workload)
    passes: list[Pass] = []
    for plan in plans:
        passes.append(Pass(target, plan, workload, seed))
        _run(passes[-1], workload, f"{run_id}-{plan.title.split()[0]}", quiet=as_json)
    results = [one.result() for one in passes]
    if as_json:
        print_json(_as_json(target, seed, workload, results))
    else:
        out.print(comparison(results, with_changes=not _loaded_nothing(results[-1])))
        for line in _conclusions(target, passes, is_own):
            out.print(line, soft_wrap=True)
    for result in results:
        for message, times in result.errors.items():
            complain(f"{result.title}: {count(times)} x {message}")
    return ExitCode.REFUSED if any(result.failed for result in results) else ExitCode.OK


def _introduce(target: Target, workload: Sequence[Conversation]) -> None:
    agents = sum(conversation.is_agent for conversation in workload)
    tokens = sum(conversation.num_tokens for conversation in workload)
    note(
        f"{target.engine.url}, model {words(target.model.name)}: {count(len(workload))} conversations, "
        f"{count(agents)} of them of agents with tools, {count(len(workload[0].turns))} requests each, in the end "
        f"about {count(tokens)} tokens"
    )
    note(f"watch it live: {target.admin.url}/ui/ (the requests of the first pass forbid storing and loading)")


def _run(current: Pass, workload: Sequence[Conversation], run_id: str, *, quiet: bool) -> None:
    """Run a pass, with a line now and then."""
    total = sum(len(one.turns) for one in workload)
    marks = set() if quiet else {total * quarter // 4 for quarter in range(1, 5)}

    def show(result: TurnResult) -> None:
        if len(current.results) in marks:
            so_far = current.result()
            median_s = so_far.first_token_s.get("p50")
            first = "" if median_s is None else f", median time to first token {duration(median_s)}"
            failed = f", {count(so_far.failed)} of them failed" if so_far.failed else ""
            note(f"{so_far.title}: {count(so_far.requests)} of {count(total)} requests{failed}{first}")

    run_async(lambda: current.run(run_id, show))


def comparison(results: Sequence[PassResult], *, with_changes: bool = False) -> RenderableType:
    """Return the comparison; `with_changes` adds those from the first to the second result."""
    titles = [result.title for result in results]
    table = new_table("", *titles, "", right=[False, *[True] * len(titles), False])

    def row(name: str, values: Sequence[float | None], shown: Callable[[float], str], change: str = "") -> None:
        table.add_row(
            name, *("-" if value is None else shown(value) for value in values), change if with_changes else ""
        )

    for name, quantile in (("time to first token, median", "p50"), ("time to first token, p95", "p95")):
        times = [result.first_token_s.get(quantile) for result in results]
        row(name, times, duration, _change(times, _faster))
    row("requests", [result.requests for result in results], count)
    if any(result.failed for result in results):
        row("  failed", [result.failed for result in results], count)
    # All from the server's counters, so that the rows add up: clients count no tokens of requests that failed.
    caches = [result.cache for result in results]
    row("prompt tokens", [None if one is None else one.prompt_tokens for one in caches], count)
    computed = [_computed(result) for result in results]
    row("  computed", computed, count, _change(computed, _fewer))
    row("  from the device", [None if one is None else one.device_tokens for one in caches], count)
    row("  from the pool and tiers", [None if one is None else _loaded(one) for one in caches], count)
    row("total time", [result.total_s for result in results], duration)
    return table


def _loaded(cache: Any) -> int:
    return int(cache.host_tokens + sum(cache.tier_tokens.values()))


def _loaded_nothing(result: PassResult) -> bool:
    """Return whether the cache is known to have loaded nothing, so that times differ by chance only."""
    return result.cache is not None and not _loaded(result.cache)


def _computed(result: PassResult) -> int | None:
    return None if result.cache is None else result.cache.recomputed_tokens


def _faster(ratio: float) -> str:
    return f"{1 / ratio:.1f}x faster" if ratio < 1 else f"{ratio:.1f}x slower"


def _fewer(ratio: float) -> str:
    return f"{abs(1 - ratio):.1%} {'fewer' if ratio < 1 else 'more'}"


def _change(values: Sequence[float | None], describe: Callable[[float], str]) -> str:
    """Format how the second value compares with the first; empty if one is unknown."""
    first, last = values
    if not first or last is None:
        return ""
    ratio = last / first
    return "about the same" if 1 / SAME < ratio < SAME else describe(ratio)


def _conclusions(target: Target, passes: Sequence[Pass], is_own: bool) -> Iterator[str]:
    """Yield what the numbers do not say by themselves, and where to look next."""
    first, last = (one.result() for one in passes)
    known = _known_requests(target.admin, passes[-1])
    medians = [result.first_token_s.get("p50") for result in (first, last)]
    if medians[0] and medians[1] and medians[1] > medians[0] * SAME:
        yield "Offloading was slower in this run."
    if last.cache is not None and not last.cache.stored_blocks:
        yield "The pass with offloading stored nothing: its policy forbids it (kvferry policy show), or a rule does."
    forbidding = [item["policy"]["load"] for item in known if not item["policy"]["load"]["value"]]
    if forbidding:
        sources = ", ".join(sorted({words(field["source"]) for field in forbidding}))
        yield f"{count(len(forbidding))} requests with offloading were forbidden to load: load=false, from {sources}."
    if _loaded_nothing(last):
        yield "Nothing was loaded: offloading saved nothing here, and what differs between the passes is chance."
    if first.cache is not None:
        if first.cache.device_tokens > first.cache.prompt_tokens / 2:
            yield (
                "The device's cache held most of it by itself, so that little was left to load: a longer workload "
                "(--conversations, --turns, --scale) needs more than it holds."
            )
        if first.cache.stored_blocks or _loaded(first.cache):
            yield (
                "The pass without offloading did store or load: requests of others, or the policy forbids requests to "
                "set store and load (KVFERRY_REQUEST_FIELDS, rules, overrides)."
            )
    if is_own:
        yield (
            "Next: keep an engine running with `kvferry serve`; `kvferry demo` then runs there, and "
            "http://127.0.0.1:8787/ui/ shows what happens and why."
        )
    else:
        # The one with the most loaded tokens.
        example = max(known, key=lambda item: item["prompt_tokens"]["host_hit"])["id"] if known else "ID"
        yield f"Next: {target.admin.url}/ui/ shows it; kvferry why {example} explains a request."


def _known_requests(admin: Service, done: Pass) -> list[Any]:
    """Return the requests of a pass that the service still knows."""
    ids = {result.request_id for result in done.results}
    return [item for item in admin.get("requests", limit=1000)["items"] if item["id"] in ids]


def _as_json(
    target: Target, seed: int, workload: Sequence[Conversation], results: Sequence[PassResult]
) -> dict[str, Any]:
    return {
        "url": target.engine.url,
        "model": target.model.name,
        "compared": "offloading",
        "seed": seed,
        "conversations": len(workload),
        "passes": [asdict(result) | {"computed_tokens": _computed(result)} for result in results],
    }
