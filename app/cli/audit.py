"""`kvferry audit`: the calls that changed something, or were refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.app.cli.console import count, note
from kvferry.app.cli.remote import Answer, CursorOption, LimitOption, Service, answers
from kvferry.app.cli.tables import show_answer

COLUMNS = ("time", "token", "client", "method", "path", "status", "outcome", "what")


def _print(answer: Mapping[str, Any]) -> None:
    from kvferry.app.client import ADMIN

    if answer.get("logged_only"):
        note(
            f"{count(answer['logged_only'])} records since {answer['logged_only_since']} are in the log only, as the "
            "database did not accept them: search it for `audit record not in the database`"
        )
    for item in answer["items"]:
        item["path"] = item["path"].removeprefix(ADMIN)
    show_answer(answer, *COLUMNS, spare=("status",), empty="no calls in the database")


@answers(show=_print)
def audit(service: Service, limit: LimitOption = 20, cursor: CursorOption = None) -> Answer:
    """Show the calls that changed something, or were refused, newest first."""
    return service.get("audit", limit=limit, cursor=cursor)
