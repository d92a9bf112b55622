"""Work that may wait for the database runs on threads of its own, bounded in number and time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import anyio

from kvferry.app.api.problems import Problem, unavailable
from kvferry.app.store.claims import Claim, deciding

P = ParamSpec("P")
T = TypeVar("T")

STORE_TIMEOUT_S = 10.0
MAX_STORE_THREADS = 8


class StoreThreads:
    """Runs calls to the metadata store; one that takes too long is abandoned, answered 503, and never committed.

    Its threads are not those of the other endpoints, so that a database that hangs takes nothing with it.
    """

    def __init__(self, max_threads: int = MAX_STORE_THREADS, timeout_s: float = STORE_TIMEOUT_S) -> None:
        self._limiter = anyio.CapacityLimiter(max_threads)
        self._timeout_s = timeout_s

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call on a thread and return its result.

        Raises:
            Problem: 503 if the call did not end in time, and then nothing is written; 504 if it has begun to commit
                and that does not end either.
        """
        claim = Claim()

        def work() -> T:
            with deciding(claim):
                return call(*args, **kwargs)

        task = asyncio.ensure_future(
            anyio.to_thread.run_sync(work, limiter=self._limiter, abandon_on_cancel=True),
        )
        try:
            await asyncio.wait({task}, timeout=self._timeout_s)
            if not task.done():
                if claim.abandon():
                    raise unavailable(f"the metadata store did not answer within {self._timeout_s:g} s")
                await asyncio.wait({task}, timeout=self._timeout_s)
            if not task.done():
                detail = f"the metadata store did not commit within {self._timeout_s:g} s: the outcome is not known"
                raise Problem(504, detail, slug="outcome-unknown")
            return task.result()
        finally:
            claim.abandon()
            task.cancel()
