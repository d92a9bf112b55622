"""Examination of this machine and environment for kvferry: what would prevent a start, and what would make it slow.

Nothing is created or changed. Imports of other packages are tried in processes of their own.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from kvferry.app.common.discovery import find_services
from kvferry.app.common.folders import nearest_folder
from kvferry.app.serve.preflight import start_problems
from kvferry.app.service.server import listen
from kvferry.app.settings import BadSettings, Settings
from kvferry.app.settings.fields import PoolKind
from kvferry.app.settings.types import format_size
from kvferry.core.errors import StartError
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from kvferry.cuda_ops.pool.limits import locked_memory_bytes, shared_memory_limits

PLUGINS = "VLLM_PLUGINS"
"""vLLM's variable with the names of the plug-ins that it loads; without it, all."""
_PLUGIN = "kvferry"
_INTERFACE_TIMEOUT_S = 120.0
_MIN_STATE_BYTES = 1 << 30
_REMOTE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p", "lustre", "ceph", "glusterfs"})
"""Kinds of file systems whose locks SQLite cannot rely on."""
_ADJTIMEX_BYTES = 512
"""More than the structure of `adjtimex` takes."""
_TIME_ERROR = 5
"""State of the clock that `adjtimex` returns while nothing synchronizes it."""


class State(StrEnum):
    """Result of a check."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check; `text` has what to do unless the state is ok."""

    check: str
    state: State
    text: str


def examine() -> Iterator[Finding]:
    """Yield the findings as they are made; the slowest, the import of vLLM, comes last."""
    settings: Settings | None = None
    try:
        settings = Settings()
    except BadSettings as error:
        for problem in error.problems:
            yield Finding("settings", State.ERROR, str(problem))
    if settings is not None:
        problems = start_problems(settings)
        yield from (Finding("settings", State.ERROR, problem) for problem in problems)
        if not problems:
            yield Finding("settings", State.OK, "valid, and a service could start with them")
        checks: tuple[Callable[[Settings], Finding], ...] = (_shared_memory, _locked_memory, _state_folder, _port)
        for check in checks:
            yield check(settings)
    yield _numa()
    yield _driver()
    yield _clock()
    yield from _vllm()


def _judge(check: str, text: str, advice: str | None) -> Finding:
    """Return a finding that is a warning if there is advice."""
    return Finding(check, State.OK, text) if advice is None else Finding(check, State.WARNING, f"{text}: {advice}")


def _shared_memory(settings: Settings) -> Finding:
    """Check the space for pools that processes share: of kind `shm`, and any pool inside vLLM unless it is a file."""
    free_bytes = shared_memory_limits(SHARED_MEMORY)[0][1]
    advice = "vLLM's ranks share the pool there; raise it (--shm-size of a container, or a volume in memory)"
    fits = settings.pool_kind is PoolKind.FILE or settings.pool_bytes <= free_bytes
    text = f"{_gib(free_bytes)} free, and KVFERRY_POOL_BYTES is {format_size(settings.pool_bytes)}"
    return _judge(str(SHARED_MEMORY), text, None if fits else advice)


def _locked_memory(settings: Settings) -> Finding:
    limit_bytes = locked_memory_bytes()
    if limit_bytes is None:
        return Finding("memlock", State.OK, "unlimited")
    advice = "less than the pool, and some drivers lock it; where registering it fails, set `ulimit -l unlimited`"
    return _judge("memlock", format_size(limit_bytes), None if limit_bytes >= settings.pool_bytes else advice)


def _state_folder(settings: Settings) -> Finding:
    folder = nearest_folder(settings.state_dir)
    free_bytes, kind = psutil.disk_usage(str(folder)).free, _file_system(folder)
    advice = None
    if kind in _REMOTE_SYSTEMS:
        advice = "SQLite needs locks that this file system may not have; set KVFERRY_STATE_DIR to a local disk"
    elif free_bytes < _MIN_STATE_BYTES:
        advice = f"history takes up to {_gib(_MIN_STATE_BYTES)}; free some, or set KVFERRY_STATE_DIR"
    return _judge("state folder", f"{settings.state_dir}: {kind}, {_gib(free_bytes)} free", advice)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"


def _file_system(folder: Path) -> str:
    """Return the kind of the file system of a folder."""
    path = folder.resolve()
    mounts = {Path(one.mountpoint): one.fstype for one in psutil.disk_partitions(all=True)}
    return next((mounts[one] for one in (path, *path.parents) if one in mounts), "unknown")


def _port(settings: Settings) -> Finding:
    running = find_services(settings.state_dir)
    if any(urlsplit(service.url).port == settings.port for service in running):
        return Finding("port", State.OK, f"{settings.port} is that of {running[0].name}, which is running")
    try:
        with listen(settings.host, settings.port):
            return Finding("port", State.OK, f"{settings.host}:{settings.port} is free")
    except StartError as error:
        # vLLM goes on without the API; `kvferry serve` refuses to start.
        return Finding("port", State.WARNING, str(error))


def _numa() -> Finding:
    num_nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*")))
    if num_nodes < 2:
        return Finding("NUMA", State.OK, "one node")
    text = f"{num_nodes} nodes: the pool is placed at the GPU's, if the container may do so (cap SYS_NICE)"
    return Finding("NUMA", State.OK, text)


def _driver() -> Finding:
    version = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Finding("GPU driver", State.OK, "none: engines run on the CPU")
    if code := driver.cuInit(0) or driver.cuDriverGetVersion(ctypes.byref(version)):
        advice = "is the GPU visible here (nvidia-smi, --gpus of a container)?"
        return _judge("GPU driver", f"libcuda answers with error {code}", advice)
    return Finding("GPU driver", State.OK, f"CUDA {version.value // 1000}.{version.value % 1000 // 10}")


def _clock() -> Finding:
    """Check whether something synchronizes the clock, as the kernel sees it."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Modes 0, the first field: nothing is changed.
    state = libc.adjtimex(ctypes.create_string_buffer(_ADJTIMEX_BYTES))
    if state == _TIME_ERROR:
        advice = "times of history, and ages of blocks in shared tiers, differ between hosts; run an NTP client"
        return _judge("clock", "not synchronized", advice)
    return Finding("clock", State.OK, "synchronized" if state >= 0 else "state unknown here")


def _vllm() -> Iterator[Finding]:
    names = metadata.packages_distributions().get("vllm", []) if find_spec("vllm") else []
    if not names:
        text = "not installed in this environment; its connector needs kvferry installed beside it"
        yield Finding("vLLM", State.OK, text)
        return
    version, allowed = metadata.version(names[0]), os.environ.get(PLUGINS)
    error = None
    if _PLUGIN not in {point.name for point in metadata.entry_points(group="vllm.general_plugins")}:
        error = f"{version} does not see the plug-in; install kvferry with this Python's pip"
    elif allowed is not None and _PLUGIN not in allowed.split(","):
        error = f"{PLUGINS}={allowed} leaves kvferry out; add it, or unset the variable"
    if error is not None:
        yield Finding("vLLM", State.ERROR, error)
        return
    yield Finding("vLLM", State.OK, f"{version} sees the plug-in")
    command = [sys.executable, "-m", "kvferry.app.engines.vllm.versions"]
    try:
        done = subprocess.run(  # nosec B603 # this interpreter and a module of kvferry
            command, capture_output=True, text=True, timeout=_INTERFACE_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        text = f"importing vLLM takes longer than {_INTERFACE_TIMEOUT_S:.0f} s"
        yield _judge("vLLM's interface", text, "see whether its files are on a slow disk")
        return
    if done.returncode:
        text = " ".join((done.stdout.strip() or done.stderr).split())[-400:]
        yield Finding("vLLM's interface", State.ERROR, f"{text}; install a release that docs/vllm.md names")
    else:
        yield Finding("vLLM's interface", State.OK, "has all parts that the connector uses")
