"""`kvferry pools`: files of kept pools on this machine, listed and removed without a service."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from kvferry.app.cli.console import Failed, confirm, size
from kvferry.app.cli.remote import Answer, answers

if TYPE_CHECKING:
    from kvferry.cuda_ops.persistent.pool_files import PoolFile

app = typer.Typer(help="Files of kept pools on this machine, of this user: list them, and remove those not in use.")


@app.callback(invoke_without_command=True)
@answers(empty="no kept pools")
def pools(context: typer.Context) -> Answer | None:
    """Show the kept pools in /dev/shm and KVFERRY_POOL_PATH: size, time since the last start, and users."""
    if context.invoked_subcommand is not None:
        return None
    now_s = time.time()
    return {"items": [_described(pool, now_s) for pool in _find()]}


@app.command("remove")
@answers()
def remove(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The pool's name, or the path of its file.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", metavar="", help="Do not ask for confirmation.")] = False,
) -> Answer:
    """Remove a pool that no engine uses, with all of its blocks. Only files that kvferry made are removed."""
    from kvferry.cuda_ops.persistent.pool_file import NotAPool
    from kvferry.cuda_ops.persistent.pool_files import PoolInUse, remove_pool

    pools = [pool for pool in _find() if name in (pool.name, str(pool.path))]
    if len(pools) != 1:
        paths = ", ".join(str(pool.path) for pool in pools)
        raise Failed(f"{name}: " + (f"give one of the paths {paths}" if pools else "no such pool; see kvferry pools"))
    (pool,) = pools
    if not yes:
        confirm(f"removes {pool.path}, {size(pool.num_bytes)}", "Remove it?", "remove")
    try:
        remove_pool(pool.path)
    except OSError as error:
        raise Failed(f"{pool.path}: {error.strerror or error}") from error
    except (PoolInUse, NotAPool) as error:
        raise Failed(str(error)) from error
    return {"removed": str(pool.path), "bytes": pool.num_bytes}


def _find() -> list[PoolFile]:
    from kvferry.app.settings import Settings
    from kvferry.cuda_ops.persistent.pool_files import find_pools
    from kvferry.cuda_ops.pool.backing import SHARED_MEMORY

    own_folder = Settings().pool_path
    folders = dict.fromkeys([SHARED_MEMORY, *([] if own_folder is None else [own_folder])])
    return [pool for folder in folders for pool in find_pools(folder)]


def _described(pool: PoolFile, now_s: float) -> dict[str, object]:
    return {
        "name": pool.name,
        "path": str(pool.path),
        "bytes": pool.num_bytes,
        "age_s": max(0.0, now_s - pool.used_s),
        "used_by": pool.holders,
    }
