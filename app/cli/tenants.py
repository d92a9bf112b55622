"""Tenants on the command line: named by digest, or by a local file with the cache salt."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.core.keys import tenant_digest

SaltFileOption = Annotated[
    typer.FileText | None,
    typer.Option(
        "--cache-salt-file",
        metavar="FILE",
        help="Only the tenant whose cache salt is in this file; - is stdin. Only its digest is sent.",
    ),
]


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
