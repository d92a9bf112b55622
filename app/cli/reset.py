"""`kvferry reset`: drop stored blocks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import confirm, count, finite, note, out, size
from kvferry.app.cli.remote import Answer, Result, Service, TierOption, answers
from kvferry.app.cli.tenants import LoraGlob, RequestGlob, SaltFileOption, SessionGlob, TenantGlob, tenant_of

ANSWER_S = 30.0
"""Time for the response once the transfers have ended."""


def _counts(answer: Mapping[str, Any]) -> str:
    """Format the blocks and bytes of an answer, by place."""
    places = {"pool": answer} | answer.get("tiers", {})
    return ", ".join(
        f"{name} {count(one['dropped_blocks'])} blocks ({size(one['dropped_bytes'])})" for name, one in places.items()
    )


def _print_dry_run(body: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
    out.print(f"would drop: {_counts(answer)}; nothing was dropped")
    if body["match"]:
        note("blocks in tiers are not counted by the request that stored them, but dropped by a reset")


def _print_reset(answer: Mapping[str, Any]) -> None:
    pending = answer["pending_jobs"]
    out.print(f"dropped: {_counts(answer)}; epoch {count(answer['epoch'])}")
    if pending:
        note(
            f"{count(pending)} transfers, writes to a kept pool or resets of tiers not done yet: none of their blocks "
            "is served here; other engines of a shared tier use it until its reset has arrived"
        )
    if answer.get("detached_tiers"):
        note(f"reset when they are attached again: {', '.join(answer['detached_tiers'])}")


@answers(show=_print_reset)
def reset(
    service: Service,
    tier: TierOption = None,
    tenant: TenantGlob = None,
    cache_salt_file: SaltFileOption = None,
    lora: LoraGlob = None,
    request: RequestGlob = None,
    session: SessionGlob = None,
    drain_timeout_s: Annotated[
        float,
        typer.Option(
            "--drain-timeout-s",
            callback=finite,
            metavar="SECONDS",
            min=0,
            help="How long to wait for running transfers.",
        ),
    ] = 30.0,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Reason, for the audit table.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", metavar="", help="Show what would be dropped, and drop nothing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", metavar="", help="Drop everything without a question.")] = False,
) -> Answer:
    """Drop stored blocks: all, or those of matching requests. The engine keeps serving."""
    given = {"tenant": tenant_of(tenant, cache_salt_file), "lora": lora, "request": request, "session": session}
    match = {name: glob for name, glob in given.items() if glob is not None}
    body = {"tiers": tier or None, "match": match or None, "drain_timeout_s": drain_timeout_s, "reason": reason}
    if dry_run:
        return Result(service.send("POST", "reset?dry_run=true", body), partial(_print_dry_run, body))
    if not yes and all(set(glob) == {"*"} for glob in match.values()):
        place = f" in {', '.join(tier)}" if tier else ""
        affected = _counts(service.send("POST", "reset?dry_run=true", body))
        again = "the engine computes it again when it is needed"
        confirm(f"drops everything{place}: {affected}; {again}", "Drop it?", "reset")
    return service.send("POST", "reset", body, timeout_s=drain_timeout_s + ANSWER_S)
