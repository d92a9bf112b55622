"""`kvferry blocks`, `pin` and `unpin`: the blocks in the pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import out
from kvferry.app.cli.remote import Answer, CursorOption, LimitOption, Result, Service, TtlOption, answers, path_to

COLUMNS = ("hash", "slot", "state", "size", "position", "hits", "request")

BlockHash = Annotated[str, typer.Argument(metavar="HASH", help="The whole hash, as `kvferry blocks --hashes` prints.")]


@answers(*COLUMNS, empty="the pool is empty")
def blocks(
    service: Service,
    block_hash: Annotated[str | None, typer.Argument(metavar="[HASH]", help="Only this block, in full.")] = None,
    hashes: Annotated[bool, typer.Option("--hashes", metavar="", help="Print whole hashes only, one a line.")] = False,
    limit: LimitOption = 50,
    cursor: CursorOption = None,
) -> Answer:
    """Show the blocks in the pool, by slot."""
    if block_hash is not None:
        return service.get(path_to("blocks", block_hash))
    return Result(service.get("blocks", limit=limit, cursor=cursor), _print_hashes if hashes else None)


def _print_hashes(answer: Mapping[str, Any]) -> None:
    for item in answer["items"]:
        out.print(item["hash"], soft_wrap=True)


@answers()
def pin(service: Service, block_hash: BlockHash, ttl_s: TtlOption = None) -> Answer:
    """Keep one block from eviction for a time."""
    return service.send("PUT", path_to("blocks", block_hash, "pin"), {} if ttl_s is None else {"ttl_s": ttl_s})


@answers()
def unpin(service: Service, block_hash: BlockHash) -> Answer:
    """Remove the pin of one block."""
    service.send("DELETE", path_to("blocks", block_hash, "pin"))
    return {"hash": block_hash, "pinned_until": None}
