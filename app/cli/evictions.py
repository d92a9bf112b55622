"""`kvferry evictions`: which blocks left the pool, when and why."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.app.cli.console import moment
from kvferry.app.cli.remote import CursorOption, JsonOption, LimitOption, UrlOption, connect
from kvferry.app.cli.tables import show_answer

COLUMNS = ("time", "reason", "hash", "position", "age_s", "hits", "request", "tenant", "session")


def evictions(
    since: Annotated[
        str | None,
        typer.Option(callback=moment, metavar="WHEN", help="From this time on, or within the last 15m, 2h, 1d."),
    ] = None,
    until: Annotated[str | None, typer.Option(callback=moment, metavar="WHEN", help="Before this time.")] = None,
    reason: Annotated[str | None, typer.Option(metavar="NAME", help="Only for this reason, such as capacity.")] = None,
    request: Annotated[str | None, typer.Option(metavar="ID", help="Only blocks that this request stored.")] = None,
    tenant: Annotated[
        str | None, typer.Option(metavar="TENANT", help="Only blocks of this tenant (its digest).")
    ] = None,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    summary: Annotated[
        bool, typer.Option("--summary", metavar="", help="Show counts, ages and the regret rate instead.")
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which blocks left the pool, when and why."""
    filters = {"reason": reason, "request": request, "tenant": tenant, "cursor": cursor}
    if summary and any(filters.values()):
        raise typer.BadParameter("--summary takes --since and --until only", param_hint="--summary")
    with connect(url) as client:
        if summary:
            answer = client.get("evictions/summary", since=since, until=until)
        else:
            answer = client.get("evictions", limit=limit, since=since, until=until, **filters)
    spare = ("session", "tenant", "position")
    show_answer(answer, as_json, *() if summary else COLUMNS, spare=spare, empty="no evictions")
