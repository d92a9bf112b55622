"""`kvferry pool`: offline inspection of a kept pool's file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track

from kvferry.app.cli.console import ExitCode, Failed, err
from kvferry.app.cli.remote import Answer, Result, answers

_BATCH_SLOTS = 256

app = typer.Typer(no_args_is_help=True, help="The file of a kept pool.")


@app.command("inspect")
@answers()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="The pool's file, named in the log of its service.")],
) -> Answer:
    """Show a pool's header, fingerprint and slots, and verify all checksums. Changes nothing.

    Exits with 1 if the file is not a pool or is damaged: truncated, or with a wrong checksum. While a service uses the
    pool, slots that it is writing may count as bad.
    """
    from kvferry.cuda_ops.persistent.format import FORMAT_VERSION
    from kvferry.cuda_ops.persistent.inspection import inspect_pool
    from kvferry.cuda_ops.persistent.pool_file import NotAPool
    from kvferry.cuda_ops.persistent.recovery import DropReason

    try:
        pool = inspect_pool(path)
    except IsADirectoryError:
        name = min((file.name for file in path.glob("*.pool")), default=None)
        advice = f": name a pool in it, such as {name}" if name else ", with no pool in it"
        raise Failed(f"{path} is a folder{advice}") from None
    except OSError as error:
        raise Failed(f"{path}: {error.strerror or error}") from error
    except NotAPool as error:
        raise Failed(f"{path} is not a pool: {error}") from error
    slots = pool.recovered.slots
    starts = range(0, len(slots), _BATCH_SLOTS)
    bad: list[int] = []
    for start in track(starts, "verifying", console=err, transient=True, disable=not err.is_terminal):
        bad += pool.verify(slots[start : start + _BATCH_SLOTS]).tolist()
    shape, header = pool.header.shape, pool.header
    summary = {
        "path": str(path),
        "fingerprint": header.fingerprint,
        "format_version": FORMAT_VERSION,
        "used_by": pool.holders,
        "slots": shape.num_slots,
        "slot_bytes": shape.slot_bytes,
        "extent_slots": shape.extent_slots,
        "max_slots": shape.max_slots,
        "ranks": shape.num_ranks,
        "min_epoch": header.min_epoch,
        "other_boot": pool.other_boot,
        "valid": len(slots),
        "verified": len(slots) - len(bad),
        "bad": len(bad),
        "dropped": {reason.value: number for reason, number in pool.recovered.dropped.items()},
        "bad_slots": bad,
    }
    damages = (DropReason.DAMAGED, DropReason.RANKS_DIFFER, DropReason.TRUNCATED)
    is_damaged = bad or any(reason in pool.recovered.dropped for reason in damages)
    return Result(summary, code=ExitCode.REFUSED if is_damaged else ExitCode.OK)
