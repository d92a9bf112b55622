"""A request's answer on its way from the engine's thread to the event loop that asked for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry.app.engines.embedded.request import OutputDelta


class RequestStream:
    """An async iterator of what each step adds; it ends after the delta that has a `finish_reason`."""

    def __init__(self, request_id: str, cancel: Callable[[], None]) -> None:
        """`cancel` stops the request; it is called when its client is gone."""
        self.request_id = request_id
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._deltas: asyncio.Queue[OutputDelta] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> OutputDelta:
        if self._ended:
            raise StopAsyncIteration
        delta = await self._deltas.get()
        self._ended = delta.finish_reason is not None
        return delta

    def cancel(self) -> None:
        """The client is gone: stop working for it. Harmless once the answer has ended."""
        if not self._ended:
            self._cancel()

    def push(self, delta: OutputDelta) -> None:
        """Called by the engine's thread. An event loop that has closed is a client that is gone."""
        try:
            self._loop.call_soon_threadsafe(self._deltas.put_nowait, delta)
        except RuntimeError:
            self._cancel()
