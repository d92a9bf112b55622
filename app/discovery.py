"""Where services of this host can be found: a small file each in the state folder, for clients that know no URL.

Engines are killed without warning, so a file may be left behind: it counts for as long as its process lives.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

_FOLDER = "services"
_CLOCK_S = 2.0
"""How exactly the start of a process is known."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """A discovery file that this process wrote."""

    path: Path

    def withdraw(self) -> None:
        """The service is no longer there."""
        self.path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class FoundService:
    """A live service of this host."""

    name: str
    url: str


def announce_service(state_dir: Path, name: str, url: str) -> Announcement:
    """Say that the engine `name` can be reached at `url`, for as long as this process lives. Raises `OSError`."""
    folder = state_dir / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    process = psutil.Process()
    content = {"name": name, "url": url, "pid": process.pid, "started_s": process.create_time()}
    # Renamed into place, so that nobody reads half of it.
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=".")
    with os.fdopen(handle, "w") as file:
        json.dump(content, file)
    os.replace(temporary, path)
    return Announcement(path)


def find_services(state_dir: Path) -> list[FoundService]:
    """The services of this host that are alive, by name."""
    found: list[FoundService] = []
    for path in sorted((state_dir / _FOLDER).glob("*.json")):
        try:
            content = json.loads(path.read_text())
            name, url = str(content["name"]), str(content["url"])
            if _is_alive(int(content["pid"]), float(content["started_s"])):
                found.append(FoundService(name, url))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def _is_alive(pid: int, started_s: float) -> bool:
    """Whether this very process lives: numbers are used again."""
    try:
        return abs(psutil.Process(pid).create_time() - started_s) < _CLOCK_S
    except psutil.Error:
        return False
