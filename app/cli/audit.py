"""`kvferry audit`: the calls that changed something, or were refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.app.cli.console import count, note, note_more, print_answer, print_table, unreadable, words
from kvferry.app.cli.remote import CursorOption, JsonOption, LimitOption, UrlOption, connect


def audit(
    limit: LimitOption = 20,
    cursor: CursorOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the calls that changed something, or were refused, newest first."""
    with connect(url) as client:
        print_answer(client.get("audit", limit=limit, cursor=cursor), as_json, _print_calls)


def _outcome(item: Mapping[str, Any]) -> str:
    is_dry_run = item["outcome"] == "applied" and item["path"].endswith("?dry_run=true")
    return "dry run" if is_dry_run else words(item["outcome"])


def _print_calls(answer: Mapping[str, Any]) -> None:
    if answer.get("logged_only"):
        note(
            f"{count(answer['logged_only'])} records since {answer['logged_only_since']} are in the log only, as the "
            "database did not accept them: search it for `audit record not in the database`"
        )
    if not answer["items"]:
        note("no calls in the database")
        return
    rows = [
        (unreadable(item), "", "", "", "")
        if "unreadable" in item
        else (
            item["time"].replace("T", " ").partition(".")[0],
            f"{words(item['token'])} {words(item['client'])}",
            f"{words(item['method'])} {words(item['path']).removeprefix('/admin/v1/')}",
            "-" if item["status"] is None else f"{item['status']} {_outcome(item)}",
            "" if item["what"] is None else words(item["what"]),
        )
        for item in answer["items"]
    ]
    print_table(rows, "time", "token and client", "call", "answer", "body")
    note_more(answer)
