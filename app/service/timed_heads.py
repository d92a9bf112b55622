"""HTTP/1.1 connections of uvicorn, with a time limit for the head of a request."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedHeads(H11Protocol):
    """A connection that is closed when its client takes too long to send a head, or the rest of an answered body."""

    head_s = 10.0
    """Time in which a whole head has to arrive; otherwise half-open connections would use up the file descriptors."""
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Expect the first head."""
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        """Stop the timer if a head is complete; start it if no request is under way, as the next head has begun."""
        previous = self.scope
        super().data_received(data)
        if self.scope is not previous:
            self._stop_timer()
        elif self._timer is None and self._awaits_head():
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timer."""
        self._stop_timer()
        super().connection_lost(exc)

    def _awaits_head(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        self._timer = self.loop.call_later(self.head_s, self._close_late)

    def _close_late(self) -> None:
        self._timer = None
        if self._awaits_head():
            self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
