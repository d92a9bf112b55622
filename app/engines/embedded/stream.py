"""Stream of a request's answer from the engine thread to the event loop that submitted it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvferry.app.engines.embedded.request import OutputDelta


class RequestStream:
    """Async iterator over the output of each step; ends after the delta with a `finish_reason`."""

    def __init__(self, request_id: str, cancel: Callable[[], None]) -> None:
        """Bind to the running event loop. `cancel` stops the request; it is called when the client is gone."""
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
        """Stop the request because its client is gone. Harmless once the answer has ended."""
        if not self._ended:
            self._cancel()

    def push(self, delta: OutputDelta) -> None:
        """Add output. Thread: engine. Ignored if the event loop is closed."""
        try:
            self._loop.call_soon_threadsafe(self._deltas.put_nowait, delta)
        except RuntimeError:
            self._cancel()
