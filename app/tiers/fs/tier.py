"""Tier type `fs`: its settings, and how a tier is opened."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field

from kvferry.app.folders import check_writable
from kvferry.app.settings.parsers import folder
from kvferry.app.settings.tiers import ThreadedSettings
from kvferry.app.tiers.fs.folder import NAMESPACE_BYTES, Folder, FolderInUse
from kvferry.app.tiers.fs.store import FileStore
from kvferry.app.tiers.threaded import ThreadedTier
from kvferry.core.tiers.base import TierContext, TierRefused

_log = logging.getLogger(__name__)

_ENGINE = "{engine}"


class FileTierSettings(ThreadedSettings):
    """An entry of TIERS of type `fs`."""

    path: Annotated[Path, BeforeValidator(folder)] = Field(
        description="folder of its files, which no other process uses; `{engine}` in it is the engine's name"
    )


class FileTier(ThreadedTier):
    """Blocks as files in a folder, which outlive the process and are found by the next one with this model."""

    Settings = FileTierSettings

    def __init__(self, settings: FileTierSettings, context: TierContext) -> None:
        """Open and probe the folder. Raises `TierRefused`."""
        super().__init__(_open(settings, context), settings, context)

    @staticmethod
    def check(settings: FileTierSettings) -> None:
        """Raise `TierRefused` for a folder that could not be used; create nothing."""
        try:
            check_writable(f"KVFERRY_TIERS: tier {settings.name}: path={settings.path}", settings.path)
        except ValueError as error:
            raise TierRefused(str(error)) from error


def _open(settings: FileTierSettings, context: TierContext) -> FileStore:
    def refused(advice: str) -> TierRefused:
        return TierRefused(f"KVFERRY_TIERS: tier {context.name}: path={path} {advice}")

    path = Path(str(settings.path).replace(_ENGINE, context.engine))
    try:
        opened = Folder(path)
    except FolderInUse as error:
        own = settings.path if path != settings.path else settings.path / _ENGINE
        raise refused(
            "is used by another process: stop that one, or give each engine a folder of its own, as "
            f"path={own} does for engines of different KVFERRY_ENGINE_NAME or data-parallel rank"
        ) from error
    except OSError as error:
        raise refused(f"cannot be used: {error.strerror or error}; name a folder that kvferry may write to") from error
    try:
        smallest = opened.size_on_disk(context.slot_bytes)
        if settings.max_bytes < smallest:
            raise TierRefused(
                f"KVFERRY_TIERS: tier {context.name}: max_bytes={settings.max_bytes} holds no block: a file of one "
                "takes up to "
                f"{smallest:,} bytes; make it larger"
            )
        store = FileStore(
            context.name, opened, namespace_of(context.fingerprint), settings.max_bytes, context.slot_bytes
        )
    except OSError as error:
        opened.close()
        raise refused(f"cannot be written: {error.strerror or error}; make it writable, or name another") from error
    except TierRefused:
        opened.close()
        raise
    space = os.statvfs(path)
    _log.info(
        "tier %s: at most %s bytes in %s, where %s bytes are free; blocks of up to %s bytes",
        context.name,
        f"{settings.max_bytes:,}",
        path,
        f"{space.f_bavail * space.f_frsize:,}",
        f"{context.slot_bytes:,}",
    )
    return store


def namespace_of(fingerprint: Mapping[str, object]) -> bytes:
    """Return the namespace of a fingerprint, which separates its blocks from those of others."""
    text = json.dumps(fingerprint, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).digest()[:NAMESPACE_BYTES]
