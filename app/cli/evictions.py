"""`kvferry evictions`: which blocks left the pool, when and why."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.app.cli.console import moment
from kvferry.app.cli.remote import Answer, CursorOption, LimitOption, Service, SinceOption, answers
from kvferry.app.cli.tenants import TenantOption

COLUMNS = ("time", "reason", "hash", "position", "age_s", "hits", "request", "tenant", "session")


@answers(*COLUMNS, spare=("session", "tenant", "position"), empty="no evictions")
def evictions(
    service: Service,
    since: SinceOption = None,
    until: Annotated[str | None, typer.Option(callback=moment, metavar="WHEN", help="Before this time.")] = None,
    reason: Annotated[str | None, typer.Option(metavar="NAME", help="Only for this reason, such as capacity.")] = None,
    request: Annotated[str | None, typer.Option(metavar="ID", help="Only blocks that this request stored.")] = None,
    tenant: TenantOption = None,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    summary: Annotated[
        bool, typer.Option("--summary", metavar="", help="Show counts, ages and the regret rate instead.")
    ] = False,
) -> Answer:
    """Show which blocks left the pool, when and why."""
    filters = {"reason": reason, "request": request, "tenant": tenant, "cursor": cursor}
    if summary and any(filters.values()):
        raise typer.BadParameter("--summary takes --since and --until only", param_hint="--summary")
    if summary:
        return service.get("evictions/summary", since=since, until=until)
    return service.get("evictions", limit=limit, since=since, until=until, **filters)
