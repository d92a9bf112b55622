"""`kvferry blocks`, `pin` and `unpin`: the blocks in the pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import count, note, note_more, out, print_answer, print_table, size, words
from kvferry.app.cli.remote import CursorOption, JsonOption, LimitOption, TtlOption, UrlOption, connect, path_to

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
            print_answer(client.get(path_to("blocks", block_hash)), as_json, _print_block)
        else:
            answer = client.get("blocks", limit=limit, cursor=cursor)
            print_answer(answer, as_json, _print_hashes if hashes else _print_blocks)


def _print_block(block: Mapping[str, Any]) -> None:
    print_table([(name.replace("_", " "), words(value)) for name, value in block.items()], "", "")


def _print_hashes(answer: Mapping[str, Any]) -> None:
    for item in answer["items"]:
        out.print(item["hash"], soft_wrap=True)


def _print_blocks(answer: Mapping[str, Any]) -> None:
    if not answer["items"]:
        note("the pool is empty")
        return
    rows = [
        (
            words(item["hash"]),
            count(item["slot"]),
            words(item["state"]),
            size(item["size"]),
            count(item["position"]),
            count(item["hits"]),
            words(item["request"]),
        )
        for item in answer["items"]
    ]
    numbers = ("slot", "size", "pos", "hits")
    print_table(rows, "hash", "slot", "state", "size", "pos", "hits", "stored by", right=numbers)
    note_more(answer)


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
