"""CPU affinity of kvferry's threads, independent of the engine's own thread binding."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Collection

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
