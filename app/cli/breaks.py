"""`kvferry breaks`: spans near the front of prompts that make them miss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import count, finite, note, out, percentage, words
from kvferry.app.cli.remote import Answer, Service, answers

_SHOWN_CHARS = 200


def _print(answer: Mapping[str, Any]) -> None:
    for one in answer["items"]:
        for line in _describe(one, answer["computed_tokens"]):
            out.print(line, soft_wrap=True)
        out.print()
    if not answer["items"] and not answer["explained_bytes"]:
        note("no token ids are kept: kvferry config set explain_bytes=64MiB keeps those of recent prompts")
    elif not answer["items"]:
        out.print(f"No break in {count(answer['computed_tokens'])} computed prompt tokens.")


def _describe(one: Mapping[str, Any], computed: int) -> Iterator[str]:
    about = "about " if one["estimated"] else ""
    at = "token" if one["exact"] else "the block of token"
    yield (
        f"At {at} {count(one['position'])}: {about}{count(one['tokens'])} tokens computed again "
        f"({percentage(one['tokens'], computed)} of all computed), {about}{count(one['requests'])} requests"
    )
    if one["token_ids"] is not None:
        before = one["token_ids_before"] if one["text_before"] is None else one["text_before"]
        parts = (before, *(one["texts"] or one["token_ids"]))
        for name, part in zip(("after", "earlier", "later"), parts, strict=True):
            shown = part if isinstance(part, str) else " ".join(map(str, part))
            yield f"  {name}: {words(shown)[:_SHOWN_CHARS] or 'nothing'}"
    first, second = one["examples"]
    yield f"  such as {words(first)} and {words(second)}"
    yield f"  {words(one['advice'])}"


@answers(show=_print)
def breaks(
    service: Service,
    window_s: Annotated[
        float, typer.Option(callback=finite, metavar="SECONDS", min=1, max=3600, help="Of the last seconds.")
    ] = 3600.0,
) -> Answer:
    """Show the spans that differ between prompts which are equal before and behind, the most expensive first."""
    return service.get("breaks", window_s=window_s)
