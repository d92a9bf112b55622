"""Folders that settings name: checks that create nothing, and small files that are written to them in one step."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryFile, mkstemp


def nearest_folder(path: Path) -> Path:
    """Return the path itself, or its nearest parent that exists."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def can_hold_files(folder: Path) -> bool:
    """Return whether files can be created in a folder, by creating one that has no name and is gone at once.

    Permissions alone do not tell: root has them for `/proc`, and in file systems that are mounted read-only.
    """
    try:
        with TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def check_folder(what: str, path: Path) -> Path:
    """Return `nearest_folder(path)`. Raise `ValueError`, starting with `what`, if that is a file or cannot be found."""
    try:
        folder = nearest_folder(path)
    except OSError as error:
        raise ValueError(f"{what}: {error.strerror}; name another folder") from error
    if not folder.is_dir():
        raise ValueError(f"{what}: {folder} is not a folder; name another")
    return folder


def check_writable(what: str, path: Path) -> None:
    """Raise `ValueError`, starting with `what`, unless files can be created in `path` or `path` can be created."""
    folder = check_folder(what, path)
    if not can_hold_files(folder):
        raise ValueError(f"{what}: {folder} cannot be written; make it writable, or name another folder")


def replace_file(path: Path, content: str) -> None:
    """Write a file for this user only, under another name first, so that no reader gets a part of it.

    Raises `OSError`.
    """
    handle, temporary = mkstemp(dir=path.parent, prefix=".")
    try:
        with os.fdopen(handle, "w") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
