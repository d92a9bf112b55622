"""`kvferry reset`: drop stored blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import count, note, out, print_answer, size
from kvferry.app.cli.remote import JsonOption, UrlOption, connect
from kvferry.app.cli.tenants import SaltFileOption, tenant_of

ANSWER_S = 30.0
"""Time for the response once the transfers have ended."""


def reset(
    tier: Annotated[list[str] | None, typer.Option(help="Only this tier; may be repeated.", metavar="NAME")] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Only blocks stored for tenants that match this glob.", metavar="GLOB")
    ] = None,
    cache_salt_file: SaltFileOption = None,
    lora: Annotated[
        str | None, typer.Option(help="Only blocks stored with LoRAs that match this glob.", metavar="GLOB")
    ] = None,
    request: Annotated[
        str | None, typer.Option(help="Only blocks stored by requests whose ids match this glob.", metavar="GLOB")
    ] = None,
    drain_timeout_s: Annotated[
        float,
        typer.Option("--drain-timeout-s", metavar="SECONDS", min=0, help="How long to wait for running transfers."),
    ] = 30.0,
    reason: Annotated[str | None, typer.Option(metavar="TEXT", help="Reason, for the audit table.")] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Drop stored blocks: all, or those of matching requests. The engine keeps serving."""
    given = {"tenant": tenant_of(tenant, cache_salt_file), "lora": lora, "request": request}
    match = {name: glob for name, glob in given.items() if glob is not None}
    body = {"tiers": tier or None, "match": match or None, "drain_timeout_s": drain_timeout_s, "reason": reason}
    with connect(url) as client:
        answer = client.send("POST", "reset", body, timeout_s=drain_timeout_s + ANSWER_S)
    print_answer(answer, as_json, _print_reset)


def _print_reset(answer: Mapping[str, Any]) -> None:
    dropped, pending = answer.get("dropped_blocks", 0), answer.get("pending_jobs", 0)
    out.print(f"dropped {count(dropped)} blocks ({size(answer.get('dropped_bytes', 0))}); epoch {answer.get('epoch')}")
    if pending:
        note(f"{count(pending)} transfers still running; their blocks are dropped when they end")
