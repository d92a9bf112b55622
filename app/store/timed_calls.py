"""Calls to the metadata store from the event loop, with a time limit, after which none of them commits."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from kvferry.app.store.errors import DatabaseUnavailable, OutcomeUnknown

T = TypeVar("T")

MAX_STORE_THREADS = 8
STORE_TIMEOUT_S = 10.0
IDLE_THREAD_S = 10.0

_Queued = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class _TimedCall:
    """A call with a time limit. `decision` is running once its write is committed, and canceled if it must not be."""

    decision: Future[None]
    also_write: Callable[[Connection], None] | None


_timed_call: ContextVar[_TimedCall | None] = ContextVar("timed_call", default=None)


def decide_commit(connection: Connection) -> None:
    """Let a timed call commit, with what it writes besides.

    Raises `DatabaseUnavailable` if its caller does not wait.
    """
    call = _timed_call.get()
    if call is None or call.decision.running():
        # A call's first commit decides for its further writes.
        return
    if call.also_write is not None:
        call.also_write(connection)
    if call.decision.cancelled() or not call.decision.set_running_or_notify_cancel():
        raise DatabaseUnavailable("the caller stopped waiting before the commit")


class StoreThreads:
    """Threads for calls to the metadata store from the event loop, bounded in number and time.

    A call that takes too long is abandoned and never committed; its thread takes no other call before it ends, and ends
    with the process. Other routes use other threads, so that a database that hangs does not affect them.
    """

    def __init__(self, max_threads: int = MAX_STORE_THREADS, timeout_s: float = STORE_TIMEOUT_S) -> None:
        self._max_threads = max_threads
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._num_threads = 0
        self._num_idle = 0

    async def run(self, call: Callable[[], T], also_write: Callable[[Connection], None] | None = None) -> T:
        """Run a call on a thread, and return its result.

        Args:
            call: reads, or writes.
            also_write: called in the transaction of the first write before it is committed.

        Raises:
            DatabaseUnavailable: the call did not end in time, or no thread could start, and nothing is written.
            OutcomeUnknown: it began to commit in time, and that did not end, or the connection was lost.
        """
        decision: Future[None] = Future()
        result: Future[T] = Future()

        def work() -> None:
            if result.set_running_or_notify_cancel():
                # This context is a copy that ends with the call.
                _timed_call.set(_TimedCall(decision, also_write))
                try:
                    result.set_result(call())
                except BaseException as error:  # noqa: BLE001  raised to the caller
                    result.set_exception(error)

        queued = partial(copy_context().run, work)
        task = asyncio.wrap_future(result)
        try:
            self._submit(queued)
            await asyncio.wait({task}, timeout=self._timeout_s)
            if not task.done():
                if decision.cancel():
                    raise DatabaseUnavailable(f"no result within {self._timeout_s:g} s")
                await asyncio.wait({task}, timeout=self._timeout_s)
            if not task.done():
                raise OutcomeUnknown(f"the metadata store did not commit within {self._timeout_s:g} s")
            return task.result()
        finally:
            decision.cancel()
            task.cancel()
            with self._changed, suppress(ValueError):
                self._queue.remove(queued)

    def _submit(self, queued: _Queued) -> None:
        with self._changed:
            self._queue.append(queued)
            self._changed.notify()
            if self._num_idle < len(self._queue) and self._num_threads < self._max_threads:
                try:
                    # Those of anyio and of the standard library's executor are waited for when the interpreter ends.
                    threading.Thread(target=self._run_calls, name="kvferry-database", daemon=True).start()
                except RuntimeError as error:
                    # A limit on threads: one that runs takes the call later.
                    if not self._num_threads:
                        raise DatabaseUnavailable(f"no thread for calls of the database: {error}") from error
                else:
                    self._num_threads += 1

    def _run_calls(self) -> None:
        while True:
            with self._changed:
                self._num_idle += 1
                self._changed.wait_for(lambda: bool(self._queue), IDLE_THREAD_S)
                self._num_idle -= 1
                if not self._queue:
                    self._num_threads -= 1
                    return
                queued = self._queue.popleft()
            queued()
            del queued
