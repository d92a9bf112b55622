"""`kvferry sessions`: what served the requests of sessions, where their blocks are, and leases of these."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from kvferry.app.cli.console import SOURCES, count, finite, out, print_answer
from kvferry.app.cli.remote import CursorOption, JsonOption, LimitOption, UrlOption, connect, path_to
from kvferry.app.cli.tables import show_answer
from kvferry.app.cli.tenants import SaltFileOption, tenant_of

app = typer.Typer(
    no_args_is_help=True, help="Sessions that clients name: what served them, and leases of their blocks."
)

COLUMNS = ("id", "tenant", "requests", "last_seen", *(f"prompt_tokens.{name}" for name in SOURCES), "retained_until")

Session = Annotated[str, typer.Argument(metavar="ID", help="The session's id, as its client sent it.")]
TenantOption = Annotated[
    str | None,
    typer.Option(metavar="TENANT", help="Digest of its tenant, '' for none; needed if several tenants have this id."),
]


@app.command("list")
def list_sessions(
    limit: LimitOption = 20, cursor: CursorOption = None, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Show the latest sessions, and what served the prompts of their requests."""
    with connect(url) as client:
        answer = client.get("sessions", limit=limit, cursor=cursor)
    show_answer(answer, as_json, *COLUMNS, spare=("requests",), empty="no sessions")


@app.command("show")
def show(
    session: Session,
    tenant: TenantOption = None,
    cache_salt_file: SaltFileOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show one session, and how many tokens of its latest request the device, the pool and each tier hold."""
    with connect(url) as client:
        show_answer(client.get(_path(session, tenant_of(tenant, cache_salt_file))), as_json)


@app.command("retain")
def retain(
    session: Session,
    retain_s: Annotated[float, typer.Argument(callback=finite, min=0, metavar="SECONDS", help="0 ends its leases.")],
    tenant: TenantOption = None,
    cache_salt_file: SaltFileOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep its blocks from eviction for a time, or until its next request. Replaces its leases."""
    path = _path(session, tenant_of(tenant, cache_salt_file))
    with connect(url) as client:
        show_answer(client.send("PUT", path, {"retain_s": retain_s}), as_json)


@app.command("release")
def release(
    session: Session,
    tenant: TenantOption = None,
    cache_salt_file: SaltFileOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """End its leases. Its blocks that no other session has are evicted next."""
    with connect(url) as client:
        client.send("DELETE", _path(session, tenant_of(tenant, cache_salt_file)))
    print_answer({"id": session, "released": True}, as_json, lambda _: out.print("released"))


@app.command("prefetch")
def prefetch(
    session: Session,
    tier: Annotated[
        list[str] | None, typer.Option(help="Only from this tier; may be repeated.", metavar="NAME")
    ] = None,
    tenant: TenantOption = None,
    cache_salt_file: SaltFileOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load the blocks of its latest request from the tiers into the pool."""
    path = _path(session, tenant_of(tenant, cache_salt_file), "prefetch")
    with connect(url) as client:
        answer = client.send("POST", path, {"tiers": tier} if tier else {})
    print_answer(answer, as_json, lambda begun: out.print(f"being loaded: {count(begun['num_blocks'])} blocks"))


def _path(session: str, tenant: str | None, part: str = "") -> str:
    query = "" if tenant is None else f"?tenant={quote(tenant, safe='')}"
    return path_to("sessions", session, part) + query
