"""Work that may wait for the database runs on threads of its own, bounded in number and time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import ParamSpec, TypeVar

import anyio

from app.api.problems import unavailable

P = ParamSpec("P")
T = TypeVar("T")

STORE_TIMEOUT_S = 10.0
MAX_STORE_THREADS = 8


class StoreThreads:
    """Runs calls to the metadata store; a call that takes too long is left behind and answered 503.

    Its threads are not those of the other endpoints, so that a database that hangs takes nothing with it.
    """

    def __init__(self, max_threads: int = MAX_STORE_THREADS, timeout_s: float = STORE_TIMEOUT_S) -> None:
        self._limiter = anyio.CapacityLimiter(max_threads)
        self._timeout_s = timeout_s

    async def run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The call's result, or a 503 problem when it did not come in time."""
        try:
            with anyio.fail_after(self._timeout_s):
                return await anyio.to_thread.run_sync(
                    partial(call, *args, **kwargs), limiter=self._limiter, abandon_on_cancel=True
                )
        except TimeoutError:
            raise unavailable(f"the metadata store did not answer within {self._timeout_s:g} s") from None
