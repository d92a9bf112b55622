"""Tier type `fs`: its settings, and how a tier is opened."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field

from kvferry.app.common.folders import check_writable, nearest_folder
from kvferry.app.settings.tiers import TierSettings
from kvferry.app.settings.types import Flag, FolderPath
from kvferry.app.tiers.block_store import TierContext, TierRefused
from kvferry.app.tiers.fs.folder import (
    DEFAULT_PAGE_BYTES,
    Folder,
    FolderInUse,
    ForeignFolder,
    check_is_own,
    check_not_in_use,
    size_on_disk,
)
from kvferry.app.tiers.fs.store import FileStore, PrivateFileStore, SharedFileStore

_ENGINE = "{engine}"


class FileTierSettings(TierSettings):
    """An entry of TIERS of type `fs`."""

    path: FolderPath = Field(
        description="folder of its files, which no other process uses unless shared is true; `{engine}` in it is the "
        "engine's name"
    )
    shared: Flag = Field(default=False, description="whether engines with this setting use the folder together")


class FileTier:
    """Blocks as files in a folder, which outlive the process and are found by the next one with this model."""

    Settings = FileTierSettings

    @staticmethod
    def open(settings: FileTierSettings, context: TierContext) -> FileStore:
        """Open the folder. Raises `TierRefused`."""
        path = Path(str(settings.path).replace(_ENGINE, context.engine))
        try:
            folder = Folder(path, is_shared=settings.shared)
            try:
                _check_holds_block(settings, folder.size_on_disk(context.slot_bytes))
                return (SharedFileStore if settings.shared else PrivateFileStore)(folder, settings.max_bytes, context)
            except (OSError, TierRefused):
                folder.close()
                raise
        except FolderInUse as error:
            raise _in_use(settings, path) from error
        except OSError as error:
            raise _unusable(settings, path, error) from error

    @staticmethod
    def check(settings: FileTierSettings, slot_bytes: int | None) -> None:
        """Raise `TierRefused` for a folder that could not be used, or is too small for a slot; create nothing."""
        path = settings.path
        try:
            check_writable(f"KVFERRY_TIERS: tier {settings.name}: path={path}", path)
            if path.is_dir():
                check_not_in_use(path, is_shared=settings.shared)
                check_is_own(path, is_shared=settings.shared)
            if slot_bytes is not None:
                page_bytes = os.statvfs(nearest_folder(path)).f_frsize or DEFAULT_PAGE_BYTES
                _check_holds_block(settings, size_on_disk(slot_bytes, page_bytes))
        except FolderInUse as error:
            raise _in_use(settings, path) from error
        except OSError as error:
            raise _unusable(settings, path, error) from error
        except TierRefused:
            raise
        except ValueError as error:
            raise TierRefused(str(error)) from error

    @staticmethod
    def notices(settings: FileTierSettings) -> list[str]:
        """Return what an operator should know of settings with which the tier opens; create nothing."""
        space = os.statvfs(nearest_folder(settings.path))
        # The blocks of an existing folder count too, and are many to read.
        num_pages = space.f_blocks if settings.path.exists() else space.f_bavail
        disk_bytes = num_pages * space.f_frsize
        if settings.max_bytes <= disk_bytes:
            return []
        return [
            f"KVFERRY_TIERS: tier {settings.name}: max_bytes={settings.max_bytes} is more than the disk of "
            f"{settings.path} can hold, {disk_bytes:,} bytes; lower max_bytes"
        ]


def _unusable(settings: FileTierSettings, path: Path, error: OSError) -> TierRefused:
    advice = "" if isinstance(error, ForeignFolder) else "; name a folder that kvferry may write to"
    return TierRefused(
        f"KVFERRY_TIERS: tier {settings.name}: path={path} cannot be used: {error.strerror or error}{advice}"
    )


def _in_use(settings: FileTierSettings, path: Path) -> TierRefused:
    if settings.shared:
        return TierRefused(
            f"KVFERRY_TIERS: tier {settings.name}: path={path} is used by another process alone: stop that one, or set "
            "shared to true for both"
        )
    own = settings.path if path != settings.path else settings.path / _ENGINE
    return TierRefused(
        f"KVFERRY_TIERS: tier {settings.name}: path={path} is used by another process: stop that one, or give each "
        f"engine a folder of its own, as path={own} does for engines of different KVFERRY_ENGINE_NAME or data-parallel "
        "rank, or set shared to true for all of them"
    )


def _check_holds_block(settings: FileTierSettings, smallest_bytes: int) -> None:
    if settings.max_bytes < smallest_bytes:
        raise TierRefused(
            f"KVFERRY_TIERS: tier {settings.name}: max_bytes={settings.max_bytes} holds no block: a file of one takes "
            f"up to {smallest_bytes:,} bytes; make it larger"
        )
