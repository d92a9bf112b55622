"""Threads of the metadata store: one writes, a few read, and no caller waits longer than its time limit.

All writes of a process, those of the journal and those of callers, are changes in the queue of one thread. It executes
them in the order of their arrival, each in a transaction of its own. A change executes statements and returns a
function that applies it in memory, which the thread calls once the transaction is committed: database and memory agree
without a lock.

A call's future decides how it ends. A caller whose time is over cancels it; whenever the thread continues, nothing is
committed. Just before the commit the thread sets the future running, after which it cannot be canceled: a caller whose
time is over then does not know the outcome. Reads have the same decision before their result is returned.

The threads are daemons, so that a database that hangs does not keep the interpreter from ending, as the threads of
anyio and of the standard library's executors would. One that hangs takes no other call before it continues; other
parts of the service do not use these threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from sqlalchemy import Connection

from kvferry.app.store.errors import DatabaseUnavailable, OutcomeUnknown

T = TypeVar("T")
Change = Callable[[Connection], Callable[[], T]]
"""Executes the statements of a change, and returns a function that applies it in memory and returns its result."""

MAX_READ_THREADS = 4
MAX_QUEUED = 1000
"""Calls that may wait for a thread."""
READ_TIMEOUT_S = 10.0

Work = Callable[[Callable[[], bool]], T]
"""Makes a call's result. Its argument ends the time in which the caller may cancel, and returns False if it has."""


def database_only(statements: Callable[[Connection], T]) -> Change[T]:
    """Return a change that is not applied in memory."""

    def change(connection: Connection) -> Callable[[], T]:
        result = statements(connection)
        return lambda: result

    return change


class CallThreads:
    """A bounded queue of calls, and daemon threads that execute them; the first calls start the threads."""

    def __init__(self, name: str, max_threads: int) -> None:
        self._name = name
        self._max_threads = max_threads
        self._lock = threading.Lock()
        self._queue: SimpleQueue[tuple[Future[Any], Work[Any]] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def submit(self, work: Work[T]) -> Future[T]:
        """Queue a call, and return its future. Raises `DatabaseUnavailable`."""
        future: Future[T] = Future()
        with self._lock:
            if self._is_closed:
                raise DatabaseUnavailable("the database is not open")
            if self._queue.qsize() >= MAX_QUEUED:
                raise DatabaseUnavailable(f"{MAX_QUEUED:,} calls wait for the database already")
            if len(self._threads) < self._max_threads:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise DatabaseUnavailable(f"no thread for calls of the database: {error}") from error
                self._threads.append(thread)
            self._queue.put((future, work))
        return future

    def close(self, timeout_s: float) -> None:
        """Refuse further calls, and wait for those in the queue."""
        with self._lock:
            self._is_closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            future, work = call
            if not future.cancelled():
                _settle(future, work)
            del call, future, work


class StoreThreads:
    """Threads for calls of the admin API that only read, or write by `Database.write`."""

    def __init__(self, max_threads: int = MAX_READ_THREADS, timeout_s: float = READ_TIMEOUT_S) -> None:
        self._threads = CallThreads("kvferry-database", max_threads)
        self._timeout_s = timeout_s

    async def run(self, call: Callable[[], T], timeout_s: float | None = None) -> T:
        """Run a call on a thread, and return its result. Raises `DatabaseUnavailable` also if it took too long."""
        return await result_async(self._threads.submit(lambda _: call()), timeout_s or self._timeout_s)

    def close(self) -> None:
        """End the threads that do not hang."""
        self._threads.close(0.0)


def _settle(future: Future[T], work: Work[T]) -> None:
    try:
        result = work(future.set_running_or_notify_cancel)
    except BaseException as error:  # noqa: BLE001  raised to the caller
        if _is_awaited(future):
            future.set_exception(error)
    else:
        if _is_awaited(future):
            future.set_result(result)


def _is_awaited(future: Future[Any]) -> bool:
    """Return whether the call was not canceled, which it cannot be from now on."""
    return future.running() or (not future.cancelled() and future.set_running_or_notify_cancel())


def result_of(future: Future[T], timeout_s: float | None) -> T:
    """Return a call's result.

    Raises:
        DatabaseUnavailable: the call did not end within `timeout_s`, and nothing is written.
        OutcomeUnknown: it began to commit in time, and did not end within `timeout_s` from then.
    """
    futures.wait([future], timeout_s)
    if not future.done():
        if future.cancel():
            raise _timed_out(timeout_s)
        futures.wait([future], timeout_s)
    if not future.done():
        raise _not_committed(timeout_s)
    return future.result()


async def result_async(future: Future[T], timeout_s: float) -> T:
    """Return a call's result; see `result_of`. A caller that is canceled meanwhile cancels the call."""
    task = asyncio.wrap_future(future)
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            if future.cancel():
                raise _timed_out(timeout_s)
            await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            raise _not_committed(timeout_s)
        return task.result()
    finally:
        future.cancel()
        task.cancel()


def _timed_out(timeout_s: float | None) -> DatabaseUnavailable:
    return DatabaseUnavailable(f"the database was busy for {timeout_s:g} s")


def _not_committed(timeout_s: float | None) -> OutcomeUnknown:
    return OutcomeUnknown(f"the database did not commit within {timeout_s:g} s")
