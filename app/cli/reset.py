"""`kvferry reset`: drop stored blocks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import confirm, count, finite, note, out, print_answer, size
from kvferry.app.cli.remote import JsonOption, UrlOption, connect
from kvferry.app.cli.tenants import SaltFileOption, tenant_of

TenantOption = Annotated[
    str | None, typer.Option(help="Only blocks stored for tenants that match this glob.", metavar="GLOB")
]
LoraOption = Annotated[
    str | None, typer.Option(help="Only blocks stored with LoRAs that match this glob.", metavar="GLOB")
]
RequestOption = Annotated[
    str | None, typer.Option(help="Only blocks stored by requests whose ids match this glob.", metavar="GLOB")
]
SessionOption = Annotated[
    str | None, typer.Option(help="Only blocks stored in sessions whose ids match this glob.", metavar="GLOB")
]
ANSWER_S = 30.0
"""Time for the response once the transfers have ended."""


def reset(
    tier: Annotated[list[str] | None, typer.Option(help="Only this tier; may be repeated.", metavar="NAME")] = None,
    tenant: TenantOption = None,
    cache_salt_file: SaltFileOption = None,
    lora: LoraOption = None,
    request: RequestOption = None,
    session: SessionOption = None,
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
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drop stored blocks: all, or those of matching requests. The engine keeps serving."""
    match = match_of(tenant, cache_salt_file, lora, request, session)
    body = {"tiers": tier or None, "match": match or None, "drain_timeout_s": drain_timeout_s, "reason": reason}
    with connect(url) as client:
        if dry_run:
            print_answer(client.send("POST", "reset?dry_run=true", body), as_json, partial(_print_dry_run, body))
            return
        if not yes and all(set(glob) == {"*"} for glob in match.values()):
            place = f" in {', '.join(tier)}" if tier else ""
            affected = _counts(client.send("POST", "reset?dry_run=true", body))
            again = "the engine computes it again when it is needed"
            confirm(f"drops everything{place}: {affected}; {again}", "Drop it?", "reset")
        answer = client.send("POST", "reset", body, timeout_s=drain_timeout_s + ANSWER_S)
    print_answer(answer, as_json, _print_reset)


def match_of(
    tenant: str | None,
    cache_salt_file: typer.FileText | None,
    lora: str | None,
    request: str | None,
    session: str | None,
) -> dict[str, str]:
    """Return the globs of blocks as the API expects them."""
    given = {"tenant": tenant_of(tenant, cache_salt_file), "lora": lora, "request": request, "session": session}
    return {name: glob for name, glob in given.items() if glob is not None}


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
