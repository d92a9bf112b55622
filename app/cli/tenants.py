"""`kvferry tenants`: usage and limits. Tenants are named by digest, or by a local file with the cache salt."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.app.cli.console import SOURCES
from kvferry.app.cli.remote import Answer, CursorOption, LimitOption, Service, answers, path_to
from kvferry.core.keys import tenant_digest

app = typer.Typer(no_args_is_help=True, help="What each tenant has in the pool, and its limit.")

COLUMNS = ("tenant", "pool_bytes", "max_pool_bytes", "stored_bytes", *(f"prompt_tokens.{name}" for name in SOURCES))

SaltFileOption = Annotated[
    typer.FileText | None,
    typer.Option(
        "--cache-salt-file",
        metavar="FILE",
        help="Only the tenant whose cache salt is in this file; - is stdin. Only its digest is sent.",
    ),
]

TenantOption = Annotated[str | None, typer.Option(metavar="TENANT", help="Only this tenant (its digest).")]
TenantGlob = Annotated[str | None, typer.Option(metavar="GLOB", help="Only tenants whose digests match this glob.")]
LoraGlob = Annotated[str | None, typer.Option(metavar="GLOB", help="Only LoRAs that match this glob; '?*' is any.")]
RequestGlob = Annotated[str | None, typer.Option(metavar="GLOB", help="Only requests whose ids match this glob.")]
SessionGlob = Annotated[
    str | None, typer.Option(metavar="GLOB", help="Only sessions whose ids match this glob; '*' is any.")
]
TenantArgument = Annotated[str | None, typer.Argument(metavar="[TENANT]", help="Digest of the tenant.")]


def tenant_of(tenant: str | None, salt_file: typer.FileText | None) -> str | None:
    """Return the tenant's glob, or the digest of the salt in the file."""
    if salt_file is None:
        return tenant
    if tenant is not None:
        raise typer.BadParameter("give --tenant or --cache-salt-file, not both", param_hint="--cache-salt-file")
    salt = salt_file.read().removesuffix("\n").removesuffix("\r")
    if not salt:
        raise typer.BadParameter("file is empty", param_hint="--cache-salt-file")
    return tenant_digest(salt)


@app.command("list")
@answers(*COLUMNS, spare=("stored_bytes",))
def list_tenants(service: Service, limit: LimitOption = 20, cursor: CursorOption = None) -> Answer:
    """Show what each tenant has in the pool, its limit, and what served its prompts; the largest first."""
    return service.get("tenants", limit=limit, cursor=cursor)


@app.command("limit")
@answers()
def set_limit(
    service: Service,
    max_pool_bytes: Annotated[
        str, typer.Argument(metavar="SIZE", help="Such as 8GiB, 0 to store nothing, or unlimited.")
    ],
    tenant: TenantArgument = None,
    cache_salt_file: SaltFileOption = None,
) -> Answer:
    """Limit what a tenant may have in the pool. It loses its own coldest blocks beyond that. Survives a restart."""
    from kvferry.app.settings.types import parse_limit

    try:
        body = {"max_pool_bytes": parse_limit(max_pool_bytes)}
    except ValueError as error:
        raise typer.BadParameter(f"{max_pool_bytes!r}: {error}", param_hint="SIZE") from None
    return service.send("PUT", path_to("tenants", _digest(tenant, cache_salt_file)), body)


@app.command("unlimit")
@answers()
def unset_limit(service: Service, tenant: TenantArgument = None, cache_salt_file: SaltFileOption = None) -> Answer:
    """Delete a tenant's limit, so that KVFERRY_TENANT_MAX_BYTES applies."""
    digest = _digest(tenant, cache_salt_file)
    service.send("DELETE", path_to("tenants", digest))
    return {"tenant": digest, "deleted": True}


def _digest(tenant: str | None, salt_file: typer.FileText | None) -> str:
    digest = tenant_of(tenant, salt_file)
    if digest is None:
        raise typer.BadParameter("give the tenant's digest, or --cache-salt-file", param_hint="TENANT")
    return digest
