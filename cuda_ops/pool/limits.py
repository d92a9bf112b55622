"""Memory limits of this process: of the machine, its cgroups, and file systems."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import psutil

from kvferry.core.errors import StartError

_UNLIMITED_BYTES = 1 << 60
"""cgroup v1 represents "no limit" by a number near 2**63."""


MemoryLimit = tuple[str, int]
"""A limit on allocations: its name, which is shown to users, and the bytes that are available."""


class NotEnoughMemory(StartError):
    """An allocation that exceeds a limit, refused before anything was allocated. The message has both numbers."""


def memory_limits(root: Path = Path("/")) -> list[MemoryLimit]:
    """Return the limits on anonymous memory: available memory of the machine, and what is left in the cgroups."""
    limits = [("memory available on this machine", psutil.virtual_memory().available)]
    limits += _cgroup_limits(root)
    return limits


def shared_memory_limits(folder: Path) -> list[MemoryLimit]:
    """Return the limits on shared memory in this folder: those of memory, and the space of its file system."""
    name = f"space left in {folder} (raise it for a container by --shm-size, or by the sizeLimit of a volume in memory)"
    return [(name, _free_bytes(folder)), *memory_limits()]


def file_limits(folder: Path) -> list[MemoryLimit]:
    """Return the limit on a mapped file in this folder: the space on its disk, as its pages can be written back."""
    return [(f"space left on the disk of {folder}", _free_bytes(folder))]


def largest_memory_bytes() -> int:
    """Return the most this process could have if no other memory were in use: the machine's, or its cgroups' limit."""
    allowed = [_read_bytes(maximum) for maximum, _ in _cgroup_files(Path("/"))]
    return min([psutil.virtual_memory().total, *(limit for limit in allowed if limit is not None)])


def largest_file_bytes(folder: Path) -> int:
    """Return the most a file in this folder, which may not exist yet, could have on an empty file system."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    status = os.statvfs(folder)
    return status.f_blocks * status.f_frsize


def locked_memory_bytes() -> int | None:
    """Return the limit of `RLIMIT_MEMLOCK`, or None if unlimited. Not every driver is subject to it."""
    soft_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft_bytes == resource.RLIM_INFINITY else soft_bytes


def check_fits(setting: str, wanted_bytes: int, limits: list[MemoryLimit]) -> None:
    """Raise `NotEnoughMemory`, naming the setting, if the wanted bytes exceed a limit."""
    name, available_bytes = min(limits, key=lambda limit: limit[1])
    if wanted_bytes > available_bytes:
        raise NotEnoughMemory(
            f"{setting} asks for {wanted_bytes:,} bytes ({wanted_bytes / 2**30:.2f} GiB), but {name} is "
            f"{available_bytes:,} bytes ({available_bytes / 2**30:.2f} GiB): lower {setting} "
            "or raise that limit"
        )


def _cgroup_limits(root: Path) -> list[MemoryLimit]:
    """Return what is left in this process's cgroup and in each of its parents, versions 1 and 2.

    Unused page cache, as of the model's files, is charged to the cgroup, and freed for allocations.
    """
    found: list[MemoryLimit] = []
    for maximum, usage in _cgroup_files(root):
        limit_bytes, used_bytes = _read_bytes(maximum), _read_bytes(usage)
        if limit_bytes is not None and used_bytes is not None and limit_bytes < _UNLIMITED_BYTES:
            used_bytes -= _inactive_cache_bytes(usage.with_name("memory.stat"))
            found.append((f"memory left in the cgroup ({maximum})", min(max(limit_bytes - used_bytes, 0), limit_bytes)))
    return found


def _cgroup_files(root: Path) -> list[tuple[Path, Path]]:
    """Return pairs of limit and usage files. A container sees its own cgroup as the root, whatever its path."""
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    files: list[tuple[Path, Path]] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, names = mount, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            top, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        folder = top / path.lstrip("/")
        while True:
            files.append((folder / names[0], folder / names[1]))
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent
    return files


def _read_bytes(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_cache_bytes(statistics: Path) -> int:
    """Return the page cache of a cgroup and its children that was not used lately; 0 if it is unknown."""
    try:
        lines = [line.split() for line in statistics.read_text().splitlines()]
        values = {name: int(value) for name, value in lines}
    except (OSError, ValueError):
        return 0
    # Version 1 has a cgroup's own and, by this name, that of its children, too.
    return values.get("total_inactive_file", values.get("inactive_file", 0))


def _free_bytes(folder: Path) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
