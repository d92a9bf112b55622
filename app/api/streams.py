"""Server-sent events: so many clients at once, each until it goes, reads too slowly, or the server stops."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import anyio
from sse_starlette import EventSourceResponse, ServerSentEvent

from app.api.context import AdminContext
from app.api.problems import Problem

SEND_TIMEOUT_S = 30.0
SHUTDOWN_GRACE_S = 1.0
CLOSING_POLL_S = 0.25
"""A stream looks at least so often whether it has to end."""
HEARTBEAT_S = 15.0
"""A comment line this often tells client and proxies that the stream is alive."""

MustEnd = Callable[[], bool]


class Streams:
    """One kind of stream."""

    def __init__(self, context: AdminContext, max_streams: int) -> None:
        self._context = context
        self._max_streams = max_streams
        self._num_open = 0

    def open(self, follow: Callable[[MustEnd], AsyncGenerator[ServerSentEvent, None]]) -> EventSourceResponse:
        """The answer that sends what `follow` yields until it ends, as it must once its argument says so."""
        if self._num_open >= self._max_streams:
            raise Problem(503, f"{self._max_streams} streams are open already: close one", headers={"Retry-After": "5"})
        shutdown = anyio.Event()
        return EventSourceResponse(
            self._counted(follow(lambda: self._context.closing() or shutdown.is_set())),
            ping=HEARTBEAT_S,
            send_timeout=SEND_TIMEOUT_S,
            shutdown_event=shutdown,
            shutdown_grace_period=SHUTDOWN_GRACE_S,
        )

    async def _counted(self, events: AsyncGenerator[ServerSentEvent, None]) -> AsyncIterator[ServerSentEvent]:
        # Counted from when it is read: a client may go before that, and nobody would count it out again.
        self._num_open += 1
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            self._num_open -= 1
