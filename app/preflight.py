"""Checks of settings against this machine before anything is loaded, for `kvferry serve` and `kvferry config check`.

The checks create nothing. Problems that depend on the model's layout are found only by the start itself.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvferry.app.engines.identity import is_missing_folder
from kvferry.app.folders import check_writable, nearest_folder
from kvferry.app.settings import Settings
from kvferry.app.settings.fields import Engine, PoolKind
from kvferry.app.store import check_database, check_name
from kvferry.app.tiers.opening import check_tiers
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from kvferry.cuda_ops.pool.limits import MemoryLimit, check_fits, file_limits, memory_limits, shared_memory_limits


def start_problems(settings: Settings) -> list[str]:
    """Return why a service with these settings cannot start, each with what to do."""
    problems: list[str] = []
    for check in _CHECKS:
        try:
            check(settings)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _check_engine(settings: Settings) -> None:
    if settings.engine is not Engine.EMBEDDED:
        return
    if is_missing_folder(settings.model):
        raise ValueError(f"KVFERRY_MODEL={settings.model}: there is no such folder; name `tiny`, a folder or a hub id")
    if settings.device.startswith("cuda"):
        # Imported late: torch takes seconds to import, and only CUDA devices need the driver.
        from kvferry.app.engines.embedded.model import resolve_device

        resolve_device(settings.device)


def _check_pool(settings: Settings) -> None:
    folder: Path | None = None
    limits: Callable[[], list[MemoryLimit]] = memory_limits
    if settings.pool_kind is PoolKind.SHM:
        folder, limits = SHARED_MEMORY, lambda: shared_memory_limits(SHARED_MEMORY)
    elif settings.pool_kind is PoolKind.FILE and settings.pool_path is not None:
        folder = settings.pool_path
        check_writable(f"KVFERRY_POOL_PATH={folder}", folder)
        existing = nearest_folder(folder)
        limits = lambda: file_limits(existing)  # noqa: E731
    if folder is not None and folder.is_dir() and any(folder.glob("*.pool")):
        # A kept pool there may be this engine's, which needs no more room.
        return
    check_fits("KVFERRY_POOL_BYTES", settings.pool_bytes, limits())


def _check_name(settings: Settings) -> None:
    if settings.engine_name is not None:
        check_name(settings.resolved_database_url(), settings.engine_name)


_CHECKS: tuple[Callable[[Settings], None], ...] = (
    _check_engine,
    _check_pool,
    lambda settings: check_database(settings.resolved_database_url()),
    _check_name,
    lambda settings: check_tiers(settings.tiers),
)
