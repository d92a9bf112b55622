"""`kvferry tenants`: usage and limits. Tenants are named by digest, or by a local file with the cache salt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import SOURCES, count, note_more, out, print_answer, print_table, size, words
from kvferry.app.cli.remote import CursorOption, JsonOption, LimitOption, UrlOption, connect, path_to
from kvferry.core.keys import tenant_digest
from kvferry.core.policy import UNLIMITED

app = typer.Typer(no_args_is_help=True, help="What each tenant has in the pool, and its limit.")

SaltFileOption = Annotated[
    typer.FileText | None,
    typer.Option(
        "--cache-salt-file",
        metavar="FILE",
        help="Only the tenant whose cache salt is in this file; - is stdin. Only its digest is sent.",
    ),
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
def list_tenants(
    limit: LimitOption = 20,
    cursor: CursorOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what each tenant has in the pool, its limit, and what served its prompts; the largest first."""
    with connect(url) as client:
        answer = client.get("tenants", limit=limit, cursor=cursor)
    print_answer(answer, as_json, lambda answer: _print_tenants(answer["items"]))
    if not as_json:
        note_more(answer)


@app.command("limit")
def set_limit(
    max_pool_bytes: Annotated[
        str, typer.Argument(metavar="SIZE", help="Such as 8GiB, 0 to store nothing, or unlimited.")
    ],
    tenant: TenantArgument = None,
    cache_salt_file: SaltFileOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Limit what a tenant may have in the pool. It loses its own coldest blocks beyond that. Survives a restart."""
    body = {"max_pool_bytes": _parse_limit(max_pool_bytes)}
    with connect(url) as client:
        answer = client.send("PUT", path_to("tenants", _digest(tenant, cache_salt_file)), body)
    print_answer(answer, as_json, lambda one: _print_tenants([one]))


@app.command("unlimit")
def unset_limit(
    tenant: TenantArgument = None,
    cache_salt_file: SaltFileOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete a tenant's limit, so that KVFERRY_TENANT_MAX_BYTES applies."""
    digest = _digest(tenant, cache_salt_file)
    with connect(url) as client:
        client.send("DELETE", path_to("tenants", digest))
    done = {"tenant": digest, "deleted": True}
    print_answer(done, as_json, lambda done: out.print(f"limit deleted: tenant {done['tenant']}"))


def _digest(tenant: str | None, salt_file: typer.FileText | None) -> str:
    digest = tenant_of(tenant, salt_file)
    if digest is None:
        raise typer.BadParameter("give the tenant's digest, or --cache-salt-file", param_hint="TENANT")
    return digest


def _parse_limit(text: str) -> int | str:
    from kvferry.app.settings.types import parse_size

    if text in ("0", UNLIMITED):
        return 0 if text == "0" else text
    try:
        return parse_size(text)
    except ValueError as error:
        raise typer.BadParameter(f"{text!r}: {error}, 0, or {UNLIMITED}", param_hint="SIZE") from None


def _print_tenants(tenants: Sequence[Mapping[str, Any]]) -> None:
    rows = []
    for one in tenants:
        limit, tokens = one["max_pool_bytes"], one["prompt_tokens"]
        served = [sum(found.values()) if isinstance(found := tokens[name], Mapping) else found for name in SOURCES]
        rows.append(
            (
                words(one["tenant"] or "no tenant"),
                size(one["pool_bytes"]),
                limit["value"] if isinstance(limit["value"], str) else size(limit["value"]),
                limit["source"],
                size(one["stored_bytes"]),
                *map(count, served),
            )
        )
    columns = ("tenant", "in the pool", "limit", "from", "stored", *SOURCES.values())
    print_table(rows, *columns, right=tuple(name for name in columns if name not in ("tenant", "from")))
