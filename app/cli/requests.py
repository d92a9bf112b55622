"""`kvferry requests` and `kvferry why`: what served the prompts of requests, and why the rest was computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from kvferry.app.cli.console import SOURCES, count, duration, out, percentage, words
from kvferry.app.cli.remote import Answer, CursorOption, LimitOption, Service, SinceOption, answers, path_to
from kvferry.app.cli.tables import Json, show_answer
from kvferry.app.cli.tenants import SessionGlob, TenantOption
from kvferry.app.telemetry.miss_texts import CAUSES, EVICTED, NOT_STORED, SHORT

COLUMNS = (
    "id",
    "state",
    "num_prompt_tokens",
    *(f"prompt_tokens.{name}" for name in SOURCES),
    "first_token_s",
    "arrived_at",
    "mostly_because",
)
SPARE_COLUMNS = ("num_prompt_tokens", "state", "first_token_s")
"""Left out, in this order, where the table does not fit: the first is the sum of those that stay."""

_POLICY_OF_SKIP = {"prompt_only": "offload_prompt_only", "token_cap": "max_offload_tokens", "disabled": "store"}
"""The policy field that makes a block not stored for this reason."""


def _print(answer: Json) -> None:
    items = [{**item, "mostly_because": _main_cause(item)} for item in answer["items"]]
    show_answer({**answer, "items": items}, *COLUMNS, spare=SPARE_COLUMNS, empty="no requests")


def _main_cause(request: Json) -> str | None:
    causes = _by_cause(request["missed_tokens"])
    return causes[0][2] if causes else None


@answers(show=_print)
def requests(
    service: Service,
    state: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only in this state: waiting, loading, running or finished.")
    ] = None,
    tenant: TenantOption = None,
    session: SessionGlob = None,
    missed: Annotated[
        bool, typer.Option("--missed", metavar="", help="Only those that missed more than the tail.")
    ] = False,
    since: SinceOption = None,
    limit: LimitOption = 20,
    cursor: CursorOption = None,
) -> Answer:
    """Show live and recent requests, newest first: what served their prompts, and why most of the rest was computed."""
    filters = {"state": state, "tenant": tenant, "session": session, "missed": missed or None, "since": since}
    return service.get("requests", limit=limit, cursor=cursor, **filters)


def _print_explanation(request: Json) -> None:
    for line in explain(request):
        out.print(line, soft_wrap=True)


@answers(show=_print_explanation)
def why(
    service: Service,
    request_id: Annotated[str, typer.Argument(metavar="ID", help="The X-Request-ID that the client sent.")],
) -> Answer:
    """Explain what served a request's prompt, why the rest was computed, and what was stored of it."""
    return service.get(path_to("requests", request_id))


def explain(request: Json) -> Iterator[str]:
    """Yield the explanation of a request's counts, line by line."""
    tokens = request["prompt_tokens"]
    name, state = words(request["id"]), words(request["state"])
    if request["error"] is not None:
        yield f"An unexpected error ({words(request['error'])}) kept it from offloading; the log has the traceback."
    if not tokens["total"]:
        total = request["num_prompt_tokens"]
        size = "" if total is None else f", {count(total)} prompt tokens"
        yield f"{name} is {state}{size}: its prompt is not computed yet, so nothing is counted."
        yield from _override(request)
        return
    yield f"{name} is {state}: {count(tokens['total'])} prompt tokens, of which"
    sources = {"were on the device": tokens["device_hit"], "came from the pool": tokens["host_hit"]}
    sources |= {f"came from the tier {words(tier)}": hit for tier, hit in tokens["tier_hit"].items()}
    sources["were computed"] = tokens["recomputed"]
    for text, number in sources.items():
        if number:
            yield f"  {count(number)} ({percentage(number, tokens['total'])}) {text}"
    yield from _times(request)
    if not request["policy"]["load"]["value"]:
        yield f"Its policy forbids loads, whatever the pool and tiers hold: load={_shown(request, 'load')}"
    if request["prefix"] is not None:
        yield words(request["prefix"]["text"])
    if request["num_prompt_tokens"] < (shortest := request["shortest_hit_tokens"]):
        yield f"No prompt of fewer than {count(shortest)} tokens can hit."
    missed = list(_by_cause(request["missed_tokens"]))
    if missed:
        yield "Computed because they were"
        for number, text, _ in missed:
            yield f"  {count(number)}: {text}"
    if request["evicted_between"] is not None:
        since, until = request["evicted_between"]
        yield f"To see those evictions: kvferry evictions --since {since} --until {until}"
    yield from _stored(request)
    yield from _lease(request)
    yield from _override(request)


def _lease(request: Json) -> Iterator[str]:
    """Yield what its lease kept of a request that has ended, if its policy wanted one."""
    lease = request.get("lease")
    if lease is not None:
        until = "" if lease["until"] is None else f" until {lease['until']}"
        pending = f", {count(lease['pending'])} of them once they are stored" if lease["pending"] else ""
        reason = "" if lease["reason"] is None else f": {words(lease['reason'])}"
        yield f"Its lease was {lease['outcome']}, for {count(lease['blocks'])} blocks{until}{pending}{reason}"


def _times(request: Json) -> Iterator[str]:
    """Yield how long the request waited, if its first token is known."""
    if request["first_token_s"] is not None:
        wait_s, load_s = request["wait_s"] or 0.0, request["load_s"]
        tier_s = request.get("tier_wait_s")
        tiers = "" if tier_s is None else f" ({duration(tier_s)} of it for tiers)"
        load = f", for loads {duration(load_s)}" if load_s else ""
        waited = f"waited {duration(wait_s)} to be scheduled{tiers}{load}"
        yield f"First token after {duration(request['first_token_s'])}: {waited}"


def _by_cause(missed: Json) -> list[tuple[int, str, str]]:
    """Return number of tokens, explanation and the same in a few words, largest first."""
    causes = [
        (number, texts.get(cause, words(cause)), SHORT[part].get(cause, words(cause)))
        for part, texts in (("causes", CAUSES), ("evicted", EVICTED), ("not_stored", NOT_STORED))
        for cause, number in missed[part].items()
        if number
    ]
    return sorted(causes, key=lambda one: -one[0])


def _stored(request: Json) -> Iterator[str]:
    store = request["store"]
    if not store["offered"]:
        yield "No block of it was considered for storing."
        return
    yield f"Of {count(store['offered'])} blocks considered for storing, {count(store['stored'])} were stored"
    if store["in_flight"]:
        yield f"  {count(store['in_flight'])} are being stored"
    if store["failed"]:
        yield f"  {count(store['failed'])} failed; the log has the reason"
    for reason, number in store["skipped"].items():
        if number:
            field = _POLICY_OF_SKIP.get(reason)
            source = "" if field is None else f" ({field}={_shown(request, field)})"
            yield f"  {count(number)} not: {reason.replace('_', ' ')}{source}"


def _override(request: Json) -> Iterator[str]:
    override = request["override"]
    if override is not None:
        yield f"An override of {', '.join(map(words, override['fields']))} holds until {words(override['expires_at'])}"


def _shown(request: Json, field: str) -> str:
    """Return a policy field's value and source."""
    view = request["policy"][field]
    return f"{words(view['value'])}, from {words(view['source'])}"
