"""Discovery of the services on this host: each has a file in the state folder, for clients without a URL.

A killed process leaves its file behind, so a file is valid only while its process lives.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

_log = logging.getLogger(__name__)

_FOLDER = "services"
_CLOCK_S = 2.0
"""Tolerance of the start time of a process."""


@dataclass(frozen=True, slots=True)
class FoundService:
    """A live service on this host. Data-parallel ranks of one engine share `engine`."""

    name: str
    url: str
    engine: str


def announce_service(
    state_dir: Path, name: str, url: str, engine: str | None = None, metrics_url: str | None = None
) -> Callable[[], None]:
    """Write the discovery file of the service `name`, and return a function that removes it.

    A failure is logged; the service runs without the file. A file that another service of this name has written since
    is not removed. `engine` is the name that data-parallel ranks share, `metrics_url` the metrics' own address.
    """
    folder = state_dir / _FOLDER
    path = folder / f"{name}.json"
    process = psutil.Process()
    about = {"name": name, "url": url, "engine": engine or name}
    if metrics_url is not None:
        about["metrics_url"] = metrics_url
    content = json.dumps({**about, "pid": process.pid, "started_s": process.create_time()})
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_private(folder)
        # Renamed into place, so that no reader gets a part of it.
        handle, temporary = tempfile.mkstemp(dir=folder, prefix=".")
        try:
            with os.fdopen(handle, "w") as file:
                file.write(content)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:
        _log.warning(
            "KVFERRY_STATE_DIR=%s: clients will need --url, since the discovery file cannot be written: %s",
            state_dir,
            error,
        )

    def withdraw() -> None:
        with suppress(OSError):
            if path.read_text() == content:
                path.unlink()

    return withdraw


def find_services(state_dir: Path) -> list[FoundService]:
    """Return the live services on this host by name.

    Clients send their token to these URLs, so a folder that other users can write to is ignored.
    """
    found: list[FoundService] = []
    if not _is_private(state_dir / _FOLDER):
        return found
    for path in sorted((state_dir / _FOLDER).glob("*.json")):
        try:
            content = json.loads(path.read_text())
            name, url = str(content["name"]), str(content["url"])
            if _is_alive(int(content["pid"]), float(content["started_s"])):
                found.append(FoundService(name, url, str(content.get("engine", name))))
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return found


def _make_private(folder: Path) -> None:
    """Set a folder's mode to 0700. Raises `OSError` for a folder of another user."""
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise OSError(f"{folder} belongs to another user ({found.st_uid}); remove it, or set another KVFERRY_STATE_DIR")
    if stat.S_IMODE(found.st_mode) != 0o700:
        folder.chmod(0o700)


def _is_private(folder: Path) -> bool:
    """Return whether only this user and root can write to a folder."""
    try:
        found = folder.stat()
    except OSError:
        return False
    return found.st_uid in (0, os.geteuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_alive(pid: int, started_s: float) -> bool:
    """Return whether the process with this id and start time lives; ids are reused."""
    try:
        return abs(psutil.Process(pid).create_time() - started_s) < _CLOCK_S
    except psutil.Error:
        return False
