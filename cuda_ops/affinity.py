"""Which processors a thread of ours runs on, where the engine has bound its own threads to some."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Collection

_log = logging.getLogger(__name__)


def allowed_processors() -> frozenset[int]:
    """Those that this program was given, also where an engine has started this process, and bound it to some of them
    since."""
    parent = multiprocessing.parent_process()
    try:
        return frozenset(os.sched_getaffinity(0 if parent is None or parent.pid is None else parent.pid))
    except OSError:
        return frozenset(os.sched_getaffinity(0))


def run_on(cpus: Collection[int] | None) -> None:
    """Have the calling thread run on these processors; None leaves it where it is. What is not allowed is logged."""
    if cpus is None:
        return
    try:
        os.sched_setaffinity(0, cpus)
    except OSError as error:
        name = threading.current_thread().name
        _log.warning("thread %s may not run on processors %s: %s", name, sorted(cpus), error)
