"""Checks of folders that a setting names, which create nothing."""

from __future__ import annotations

import os
from pathlib import Path


def nearest_folder(path: Path) -> Path:
    """Return the path itself, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def check_writable(what: str, path: Path) -> None:
    """Raise `ValueError`, starting with `what`, unless files can be created in `path` or `path` can be created."""
    found = nearest_folder(path)
    if not found.is_dir():
        raise ValueError(f"{what}: {found} is not a folder; name another")
    if not os.access(found, os.W_OK | os.X_OK):
        raise ValueError(f"{what}: {found} cannot be written; make it writable, or name another folder")
