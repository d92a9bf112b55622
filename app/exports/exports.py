"""Exports and imports of a service: one at a time, on a thread of its own, and the latest ones that have ended."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvferry.app.call_errors import NotFound
from kvferry.app.event_feed import EventFeed, EventType
from kvferry.app.exports.copying import Copying, ExportedEngine
from kvferry.app.exports.places import read_place
from kvferry.app.exports.task import (
    Canceled,
    Task,
    TaskConflict,
    TaskError,
    TaskFailed,
    TaskKind,
    TaskOptions,
    TaskStatus,
)
from kvferry.app.guard import OffloadGuard
from kvferry.core.scheduler.scheduler import OffloadScheduler

_log = logging.getLogger(__name__)

MAX_ENDED = 20
"""Ended tasks that are kept."""
OPEN_S = 10.0
"""Time for which a call waits until the place is open."""
CLOSE_S = 10.0
_EVENTS = {TaskKind.EXPORT: EventType.EXPORTED, TaskKind.IMPORT: EventType.IMPORTED}


class NoSuchTask(NotFound):
    """There is no task with this id."""


class Exports:
    """Starts, shows and cancels exports and imports. Thread: any."""

    def __init__(
        self,
        engine: ExportedEngine | None,
        scheduler: OffloadScheduler,
        guard: OffloadGuard,
        feed: EventFeed,
        root: Path,
    ) -> None:
        """`engine` is None in a process that does not map the pool. Folders must be below `root`."""
        self._engine = engine
        self._scheduler = scheduler
        self._guard = guard
        self._feed = feed
        self._root = root
        self._lock = threading.Lock()
        self._running: Task | None = None
        self._thread: threading.Thread | None = None
        self._ended: deque[Task] = deque(maxlen=MAX_ENDED)
        self._is_closed = False

    def tasks(self) -> list[Task]:
        """Return the running task and those that ended last, the latest first."""
        with self._lock:
            running = [] if self._running is None else [self._running]
            return [*running, *reversed(self._ended)]

    def find(self, task_id: str) -> Task:
        """Return a task. Raises `NoSuchTask`."""
        for task in self.tasks():
            if task.id == task_id:
                return task
        raise NoSuchTask(f"there is no export or import {task_id!r}; the latest {MAX_ENDED} of this process are known")

    def start(self, kind: TaskKind, place: Mapping[str, Any], options: TaskOptions) -> Task:
        """Begin a task, and wait for a limited time until its place is open.

        Raises `ValueError` for a bad place, and `TaskError`.
        """
        task = Task(kind, read_place(place, self._root), options)
        with self._lock:
            if self._engine is None:
                raise TaskConflict("this process does not map the pool: set KVFERRY_EXPORT_PATH at start")
            if self._running is not None or self._is_closed:
                what = "the process stops" if self._running is None else f"{self._running.kind} {self._running.id} runs"
                raise TaskConflict(f"{what}: one export or import runs at a time")
            copying = Copying(task, self._engine, self._scheduler, self._guard)
            self._running = task
            self._thread = threading.Thread(
                target=self._run, args=(task, copying), name=f"kvferry-{kind.value}", daemon=True
            )
            self._thread.start()
        with suppress(TimeoutError):
            task.opened.result(OPEN_S)
            return task
        with self._lock:
            # What comes of it is in its status from now on.
            task.is_listed = True
        return task

    def cancel(self, task_id: str) -> Task:
        """Have a task end soon. One that has ended stays as it is. Raises `NoSuchTask`."""
        task = self.find(task_id)
        task.cancel()
        return task

    def close(self) -> None:
        """Cancel the task that runs, and wait for a limited time until it has ended."""
        with self._lock:
            self._is_closed = True
            task, thread = self._running, self._thread
        if task is not None:
            task.cancel()
        if thread is not None:
            thread.join(CLOSE_S)
            if thread.is_alive():
                _log.warning("an export or import did not end at shutdown: its place does not answer")

    def _run(self, task: Task, copying: Copying) -> None:
        """Do a task. Thread: its own."""
        status = TaskStatus.DONE
        error: TaskError = TaskFailed("it ended before its place was open")
        try:
            copying.run()
        except Canceled:
            status, error = TaskStatus.CANCELED, TaskConflict("it was canceled before its place was open")
        except TaskError as failure:
            status, error = TaskStatus.FAILED, failure
            task.notes.append(str(failure))
        except Exception as unexpected:  # noqa: BLE001 - the process goes on, and the task says so
            status, error = TaskStatus.FAILED, TaskFailed(f"unexpected {type(unexpected).__name__}; see the log")
            task.notes.append(str(error))
            _log.exception("%s %s failed", task.kind.value, task.id)
        self._end(task, status)
        if not task.opened.done():
            task.opened.set_exception(error)

    def _end(self, task: Task, status: TaskStatus) -> None:
        task.status, task.ended_s = status, time.time()
        with self._lock:
            self._running = None
            task.is_listed |= task.opened.done()
            if task.is_listed:
                self._ended.append(task)
        if task.is_listed:
            self._feed.changed(_EVENTS[task.kind], task.describe(), time.time())
            if status is TaskStatus.FAILED:
                _log.warning("%s failed: %s", task.kind.value, task.notes[-1])
            _log.info("%s ended: %s", task.kind.value, ", ".join(f"{k}={v}" for k, v in task.describe().items()))
