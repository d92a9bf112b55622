"""`kvferry sessions`: what served the requests of sessions, where their blocks are, and leases of these."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import typer

from kvferry.app.cli.console import SOURCES, finite
from kvferry.app.cli.remote import Answer, CursorOption, LimitOption, Service, TierOption, answers, path_to
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
@answers(*COLUMNS, spare=("requests",), empty="no sessions")
def list_sessions(service: Service, limit: LimitOption = 20, cursor: CursorOption = None) -> Answer:
    """Show the latest sessions, and what served the prompts of their requests."""
    return service.get("sessions", limit=limit, cursor=cursor)


@app.command("show")
@answers()
def show(
    service: Service, session: Session, tenant: TenantOption = None, cache_salt_file: SaltFileOption = None
) -> Answer:
    """Show one session, and how many tokens of its latest request the device, the pool and each tier hold."""
    return service.get(_path(session, tenant_of(tenant, cache_salt_file)))


@app.command("retain")
@answers()
def retain(
    service: Service,
    session: Session,
    retain_s: Annotated[float, typer.Argument(callback=finite, min=0, metavar="SECONDS", help="0 ends its leases.")],
    tenant: TenantOption = None,
    cache_salt_file: SaltFileOption = None,
) -> Answer:
    """Keep its blocks from eviction for a time, or until its next request. Replaces its leases."""
    return service.send("PUT", _path(session, tenant_of(tenant, cache_salt_file)), {"retain_s": retain_s})


@app.command("release")
@answers()
def release(
    service: Service, session: Session, tenant: TenantOption = None, cache_salt_file: SaltFileOption = None
) -> Answer:
    """End its leases. Its blocks that no other session has are evicted next."""
    service.send("DELETE", _path(session, tenant_of(tenant, cache_salt_file)))
    return {"id": session, "released": True}


@app.command("prefetch")
@answers()
def prefetch(
    service: Service,
    session: Session,
    tier: TierOption = None,
    tenant: TenantOption = None,
    cache_salt_file: SaltFileOption = None,
) -> Answer:
    """Load the blocks of its latest request from the tiers into the pool."""
    path = _path(session, tenant_of(tenant, cache_salt_file), "prefetch")
    return service.send("POST", path, {"tiers": tier} if tier else {})


def _path(session: str, tenant: str | None, part: str = "") -> str:
    query = "" if tenant is None else f"?tenant={quote(tenant, safe='')}"
    return path_to("sessions", session, part) + query
