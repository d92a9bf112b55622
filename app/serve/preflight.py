"""Checks of settings against this machine before anything is loaded, for `kvferry serve` and `kvferry config check`.

The checks create nothing. `kvferry config check` also runs `layout_problems`, which needs PyTorch and the model's
configuration; a start finds these problems while it loads the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path

from kvferry.app.common.folders import check_folder, check_writable, nearest_folder
from kvferry.app.engines.identity import is_missing_folder
from kvferry.app.pool.recovery import check_kept_file
from kvferry.app.pool.sizing import check_holds_slot
from kvferry.app.service.startup import load_traces
from kvferry.app.settings import Settings
from kvferry.app.settings.fields import Engine, PoolKind
from kvferry.app.store import check_database, check_name
from kvferry.app.tiers.opening import check_tiers
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from kvferry.cuda_ops.pool.limits import (
    MemoryLimit,
    check_fits,
    file_limits,
    memory_limits,
    shared_memory_limits,
)

BARE_BLOCK_BYTES = 64 << 10
"""Size of a block without an engine."""
_EMBEDDED = ("torch", "transformers")
"""Packages of the extras of these names."""


def start_problems(settings: Settings) -> list[str]:
    """Return why a service with these settings cannot start, each with what to do."""
    return _problems(_CHECKS, settings)


def layout_problems(settings: Settings) -> list[str]:
    """Return what else prevents a start, by the layout of the model's KV; takes seconds to import PyTorch."""
    return _problems((_check_layout,), settings)


def _problems(checks: Iterable[Callable[[Settings], object]], settings: Settings) -> list[str]:
    problems: list[str] = []
    for check in checks:
        try:
            check(settings)
        except ValueError as error:
            problems.append(str(error))
    return problems


def _check_engine(settings: Settings) -> None:
    if settings.engine is not Engine.EMBEDDED:
        return
    missing = _missing_packages(*_EMBEDDED)
    if missing:
        raise ValueError(
            f"KVFERRY_ENGINE={settings.engine}: {' and '.join(missing)} not installed; "
            "pip install 'kvferry[embedded]', or set KVFERRY_ENGINE=none"
        )
    if is_missing_folder(settings.model):
        raise ValueError(f"KVFERRY_MODEL={settings.model}: there is no such folder; name `tiny`, a folder or a hub id")
    if settings.device.startswith("cuda"):
        # Imported late: torch takes seconds to import, and only CUDA devices need the driver.
        from kvferry.app.engines.embedded.model import resolve_device

        resolve_device(settings.device)


def _missing_packages(*names: str) -> list[str]:
    """Return which of these packages are not installed."""
    return [name for name in names if find_spec(name) is None]


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
    # A kept pool there may be this engine's, whose bytes are not needed again.
    existing_bytes = 0 if folder is None else max(map(_file_bytes, folder.glob("*.pool")), default=0)
    check_fits("KVFERRY_POOL_BYTES", max(settings.pool_bytes - existing_bytes, 0), limits())


def _file_bytes(path: Path) -> int:
    """Return the size of a file; 0 if it is gone. A link is no pool."""
    try:
        return path.lstat().st_size
    except OSError:
        return 0


def _check_layout(settings: Settings) -> None:
    block_bytes = BARE_BLOCK_BYTES
    if settings.engine is Engine.EMBEDDED:
        if is_missing_folder(settings.model) or _missing_packages(*_EMBEDDED):
            return
        from kvferry.app.engines.embedded.attention import check_memory
        from kvferry.app.engines.embedded.model import inspect_config, resolve_device

        shape = inspect_config(settings.model, settings.dtype)
        if shape is None:
            return
        check_memory(shape, settings.device_blocks, settings.block_size, resolve_device(settings.device))
        block_bytes = shape.block_bytes(settings.block_size)
    slot_bytes = block_bytes * settings.blocks_per_slot
    check_holds_slot(settings.pool_bytes, slot_bytes)
    check_tiers(settings.tiers, slot_bytes)


def _check_database(settings: Settings) -> None:
    if "{STATE_DIR}" in settings.database_url.get_secret_value():
        check_folder(f"KVFERRY_STATE_DIR={settings.state_dir}", settings.state_dir)
    check_database(settings.resolved_database_url())


def _check_name(settings: Settings) -> None:
    if settings.engine_name is not None:
        check_name(settings.resolved_database_url(), settings.engine_name)


def _check_kept_pool(settings: Settings) -> None:
    if settings.engine_name is not None:
        check_kept_file(settings, settings.engine_name)


_CHECKS: tuple[Callable[[Settings], object], ...] = (
    _check_engine,
    _check_pool,
    _check_database,
    _check_name,
    _check_kept_pool,
    lambda settings: check_tiers(settings.tiers, None),
    load_traces,
)
