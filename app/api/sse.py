"""Server-sent events: a bounded number of streams, each until its client disconnects or the server stops."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Annotated

import anyio
from fastapi import Query
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.types import Receive, Scope, Send

from kvferry.app.api.auth import TokenName
from kvferry.app.api.errors import Problem, Responses

SEND_TIMEOUT_S = 30.0
SHUTDOWN_GRACE_S = 1.0
CLOSING_POLL_S = 0.25
"""Longest time between a stream's checks whether it must end."""

MustEnd = Callable[[], bool]
MaxEvents = Annotated[
    int | None, Query(ge=1, le=1_000_000, description="end the stream after so many events; null is unlimited")
]

STREAM_RESPONSES: Responses = {
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
    503: {"description": "The maximum number of streams is open"},
}
"""OpenAPI description of a stream's responses, with the schema of one event."""

_log = logging.getLogger(__name__)


class Stream(EventSourceResponse):
    """Response that disconnects a client which reads nothing for `send_timeout`, as a suspended machine does."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            _log.info(
                "stream: client does not read, disconnected: request %s: %s",
                scope["state"]["request_id"],
                scope["path"],
            )
            if self.background is not None:
                await self.background()


class Streams:
    """Open streams of one kind."""

    heartbeat_s = 15.0
    """Interval of comment lines, which tell client and proxies that the stream is alive."""
    send_timeout_s = SEND_TIMEOUT_S

    def __init__(self, closing: MustEnd, is_valid: Callable[[TokenName], bool], max_streams: int) -> None:
        """`closing` says that the server stops; the streams of a token that is not valid any more end."""
        self._closing = closing
        self._is_valid = is_valid
        self._max_streams = max_streams
        self._num_open = 0

    def open(
        self,
        token: TokenName,
        follow: Callable[[MustEnd], AsyncGenerator[ServerSentEvent, None]],
        max_events: int | None = None,
    ) -> EventSourceResponse:
        """Return the response that sends the events of `follow`, which must end once its argument returns true."""
        if self._num_open >= self._max_streams:
            raise Problem(503, f"{self._max_streams} streams are open already: close one", headers={"Retry-After": "5"})
        shutdown = anyio.Event()

        def must_end() -> bool:
            return self._closing() or shutdown.is_set() or not self._is_valid(token)

        return Stream(
            self._counted(follow(must_end), max_events),
            ping=self.heartbeat_s,
            send_timeout=self.send_timeout_s,
            shutdown_event=shutdown,
            shutdown_grace_period=SHUTDOWN_GRACE_S,
        )

    async def _counted(
        self, events: AsyncGenerator[ServerSentEvent, None], max_events: int | None
    ) -> AsyncIterator[ServerSentEvent]:
        # Counted from the first read: a client that disconnects before it would never be subtracted.
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
