"""Discovery of the services on this host by clients without a URL.

Each service has a file in its state folder, and one in a folder of this user on this host, where those are found that
have another state folder. A killed process leaves its files behind, so a file is valid only while its process lives.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvferry.app.common.folders import replace_file

_log = logging.getLogger(__name__)

_FOLDER = "services"
_CLOCK_S = 2.0
"""Tolerance of the start time of a process."""


@dataclass(frozen=True, slots=True)
class FoundService:
    """A live service on this host. Data-parallel ranks of one engine share `engine` and `state_dir`."""

    name: str
    url: str
    engine: str
    state_dir: str


def announce_service(
    state_dir: Path, name: str, url: str, engine: str | None = None, metrics_url: str | None = None
) -> Callable[[], None]:
    """Write the discovery files of the service `name`, and return a function that removes them.

    A failure in the state folder is logged; the service runs without the file. A file that another service of this name
    has written since is not removed. `engine` is the name that data-parallel ranks share, `metrics_url` the address of
    the metrics alone.
    """
    process = psutil.Process()
    path = state_dir / _FOLDER / f"{name}.json"
    on_host = next(_host_folders()) / _FOLDER / f"{name}.{process.pid}.json"
    about = {"name": name, "url": url, "engine": engine or name, "state_dir": str(state_dir)}
    if metrics_url is not None:
        about["metrics_url"] = metrics_url
    content = json.dumps({**about, "pid": process.pid, "started_s": process.create_time()})
    with suppress(OSError):
        on_host.parent.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Another user that owns it could exchange the folder in it.
        _make_private(on_host.parent.parent)
        _remove_dead(on_host.parent)
        _write(on_host, content)
    try:
        _write(path, content)
    except OSError as error:
        _log.warning(
            "KVFERRY_STATE_DIR=%s: clients will need --url, since the discovery file cannot be written: %s",
            state_dir,
            error,
        )

    def withdraw() -> None:
        for file in (path, on_host):
            with suppress(OSError):
                if file.read_text() == content:
                    file.unlink()

    return withdraw


def find_on_host() -> list[FoundService]:
    """Return the live services of this user on this host, whatever state folder they have."""
    return [service for folder in _host_folders() if _is_private(folder) for service in find_services(folder)]


def find_services(state_dir: Path) -> list[FoundService]:
    """Return the live services with this state folder by name.

    Clients send their token to these URLs, so a folder that other users can write to is ignored.
    """
    services: list[FoundService] = []
    if not _is_private(state_dir / _FOLDER):
        return services
    for path in sorted((state_dir / _FOLDER).glob("*.json")):
        try:
            content = json.loads(path.read_text())
            name, url = str(content["name"]), str(content["url"])
            if _is_alive(int(content["pid"]), float(content["started_s"])):
                services.append(
                    FoundService(name, url, str(content.get("engine", name)), str(content.get("state_dir", "")))
                )
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            continue
    return services


def _host_folders() -> Iterator[Path]:
    """Yield the folders for services of this user: that of the session, if there is one, and that of all."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield Path(runtime) / "kvferry"
    yield Path(tempfile.gettempdir()) / f"kvferry-{os.geteuid()}"


def _write(path: Path, content: str) -> None:
    """Write a file for this user only. Raises `OSError`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_private(path.parent)
    replace_file(path, content)


def _remove_dead(folder: Path) -> None:
    """Remove the files of processes that have ended; the name of a file ends with the id of its process."""
    for path in folder.glob("*.*.json"):
        with suppress(ValueError):
            if not psutil.pid_exists(int(path.stem.rpartition(".")[2])):
                path.unlink()


def _make_private(folder: Path) -> None:
    """Set a folder's mode to 0700. Raises `OSError` for a folder of another user."""
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise OSError(
            f"{folder} belongs to another user ({status.st_uid}); remove it, or set another KVFERRY_STATE_DIR"
        )
    if stat.S_IMODE(status.st_mode) != 0o700:
        folder.chmod(0o700)


def _is_private(folder: Path) -> bool:
    """Return whether only this user and root can write to a folder."""
    try:
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_alive(pid: int, started_s: float) -> bool:
    """Return whether the process with this id and start time lives; ids are reused."""
    try:
        return abs(psutil.Process(pid).create_time() - started_s) < _CLOCK_S
    except psutil.Error:
        return False
