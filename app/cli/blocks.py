"""`kvferry blocks`, `pin` and `unpin`: the blocks in the pool."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.app.cli.console import out, print_answer
from kvferry.app.cli.remote import CursorOption, JsonOption, LimitOption, TtlOption, UrlOption, connect, path_to
from kvferry.app.cli.tables import show_answer

COLUMNS = ("hash", "slot", "state", "size", "position", "hits", "request")

BlockHash = Annotated[str, typer.Argument(metavar="HASH", help="The whole hash, as `kvferry blocks --hashes` prints.")]


def blocks(
    block_hash: Annotated[str | None, typer.Argument(metavar="[HASH]", help="Only this block, in full.")] = None,
    hashes: Annotated[bool, typer.Option("--hashes", metavar="", help="Print whole hashes only, one a line.")] = False,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the blocks in the pool, by slot."""
    with connect(url) as client:
        if block_hash is not None:
            show_answer(client.get(path_to("blocks", block_hash)), as_json)
            return
        answer = client.get("blocks", limit=limit, cursor=cursor)
    if hashes and not as_json:
        for item in answer["items"]:
            out.print(item["hash"], soft_wrap=True)
    else:
        show_answer(answer, as_json, *COLUMNS, empty="the pool is empty")


def pin(
    block_hash: BlockHash,
    ttl_s: TtlOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep one block from eviction for a time."""
    with connect(url) as client:
        answer = client.send("PUT", path_to("blocks", block_hash, "pin"), {} if ttl_s is None else {"ttl_s": ttl_s})
    print_answer(answer, as_json, lambda pinned: out.print(f"pinned until {pinned['pinned_until']}"))


def unpin(block_hash: BlockHash, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Remove the pin of one block."""
    with connect(url) as client:
        client.send("DELETE", path_to("blocks", block_hash, "pin"))
    print_answer({"hash": block_hash, "pinned_until": None}, as_json, lambda _: out.print("pin removed"))
