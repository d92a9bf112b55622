"""`kvferry audit`: the calls that changed something, or were refused."""

from __future__ import annotations

from kvferry.app.cli.console import count, note
from kvferry.app.cli.remote import CursorOption, JsonOption, LimitOption, UrlOption, connect
from kvferry.app.cli.tables import show_answer


def audit(
    limit: LimitOption = 20,
    cursor: CursorOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the calls that changed something, or were refused, newest first."""
    from kvferry.app.client import ADMIN

    with connect(url) as client:
        answer = client.get("audit", limit=limit, cursor=cursor)
    if answer.get("logged_only") and not as_json:
        note(
            f"{count(answer['logged_only'])} records since {answer['logged_only_since']} are in the log only, as the "
            "database did not accept them: search it for `audit record not in the database`"
        )
    columns = ("time", "token", "client", "method", "path", "status", "outcome", "what")
    if not as_json:
        for item in answer["items"]:
            if "unreadable" not in item:
                item["path"] = item["path"].removeprefix(ADMIN)
    show_answer(answer, as_json, *columns, spare=("status",), empty="no calls in the database")
