"""CPU affinity of kvferry's threads, independent of the engine's own thread binding."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Collection
from pathlib import Path

_log = logging.getLogger(__name__)


def allowed_processors() -> frozenset[int]:
    """Return the processors assigned to the program.

    In a process started by an engine these are the parent's, because the engine may have bound this process to fewer.
    """
    parent = multiprocessing.parent_process()
    try:
        return frozenset(os.sched_getaffinity(0 if parent is None or parent.pid is None else parent.pid))
    except OSError:
        return frozenset(os.sched_getaffinity(0))


def run_on(cpus: Collection[int] | None) -> None:
    """Bind the calling thread to these processors; None changes nothing. A refusal is logged."""
    if cpus is None:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        name = threading.current_thread().name
        _log.warning("thread affinity refused: thread %s, processors %s: %s", name, sorted(cpus), error)


def cpus_of_node(node: int, root: Path = Path("/")) -> frozenset[int]:
    """Return the processors of a NUMA node; empty if the kernel does not report it."""
    try:
        text = (root / f"sys/devices/system/node/node{node}/cpulist").read_text().strip()
    except OSError:
        return frozenset()
    cpus: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def node_of_pci_device(address: str, root: Path = Path("/")) -> int | None:
    """Return the NUMA node of a PCI device, such as `0000:3b:00.0`; None if there is one node or it is unknown."""
    try:
        node = int((root / f"sys/bus/pci/devices/{address.lower()}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None
