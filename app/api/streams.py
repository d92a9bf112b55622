"""Server-sent events: so many clients at once, each until it goes, reads too slowly, or the server stops."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Annotated, Any

import anyio
from fastapi import Query
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from kvferry.app.api.context import AdminContext
from kvferry.app.api.problems import Problem

SEND_TIMEOUT_S = 30.0
SHUTDOWN_GRACE_S = 1.0
CLOSING_POLL_S = 0.25
"""A stream looks at least so often whether it has to end."""
HEARTBEAT_S = 15.0
"""A comment line this often tells client and proxies that the stream is alive."""

MustEnd = Callable[[], bool]
MaxEvents = Annotated[
    int | None, Query(ge=1, le=1_000_000, description="end the stream after so many events; null is without end")
]

STREAM_RESPONSES: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {
            "text/event-stream": {
                "schema": {
                    "type": "object",
                    "required": ["data"],
                    "properties": {
                        "event": {"type": "string"},
                        "id": {"type": "string"},
                        "data": {"type": "string", "contentMediaType": "application/json"},
                    },
                }
            }
        }
    },
    503: {"description": "As many streams as there may be are open already"},
}
"""What a route of streams describes: the schema of one event."""

_log = logging.getLogger(__name__)


class Stream(EventSourceResponse):
    """An answer that lets a client go which reads nothing for so long, as that of a machine that sleeps."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            _log.info(
                "request %s: the client of %s does not read, and is let go", scope["state"]["request_id"], scope["path"]
            )
            if self.background is not None:
                await self.background()


class Streams:
    """One kind of stream."""

    def __init__(self, context: AdminContext, max_streams: int) -> None:
        self._context = context
        self._max_streams = max_streams
        self._num_open = 0

    def open(
        self, follow: Callable[[MustEnd], AsyncGenerator[ServerSentEvent, None]], max_events: int | None = None
    ) -> EventSourceResponse:
        """The answer that sends what `follow` yields until it ends, as it must once its argument says so."""
        if self._num_open >= self._max_streams:
            raise Problem(503, f"{self._max_streams} streams are open already: close one", headers={"Retry-After": "5"})
        shutdown = anyio.Event()
        return Stream(
            self._counted(follow(lambda: self._context.closing() or shutdown.is_set()), max_events),
            ping=HEARTBEAT_S,
            send_timeout=SEND_TIMEOUT_S,
            shutdown_event=shutdown,
            shutdown_grace_period=SHUTDOWN_GRACE_S,
        )

    async def _counted(
        self, events: AsyncGenerator[ServerSentEvent, None], max_events: int | None
    ) -> AsyncIterator[ServerSentEvent]:
        # Counted from when it is read: a client may go before that, and nobody would count it out again.
        self._num_open += 1
        try:
            async with aclosing(events):
                num_sent = 0
                async for event in events:
                    yield event
                    num_sent += 1
                    if num_sent == max_events:
                        break
        finally:
            self._num_open -= 1
