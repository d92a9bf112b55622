"""The same call again: a poller sends the same bytes on the same connection, and they need not be understood anew.

A call that is polled costs the interpreter about three times what its answer does: reading it, its task, finding the
route, the layers it goes through. An engine in this process waits for all of that. Whatever those layers decide, they
decide by the call's bytes and by what stays as it is while the connection lives. So for the same bytes they decide the
same, and only the answer's body is of the moment, its date, and its id where the caller sent none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

BODY_NOW = "body_now"
"""In the state of a call that may be repeated: a `Callable[[], bytes]` that makes its answer's body."""
HEAD_NOW = "head_now"
"""In the state of a call that was answered: a `Callable[[], bytes]` that makes its answer's header lines, each ended,
without those that the server adds and without the body's length."""
MAX_CALL_BYTES = 8192


@dataclass(frozen=True, slots=True)
class _Repeatable:
    """A call, and what makes its answer's head and body."""

    call: bytes = field(repr=False)
    head: Callable[[], bytes]
    body: Callable[[], bytes]


class RepeatedCalls(HttpToolsProtocol):
    """A connection that answers a call at once when it is the call before it, byte for byte, and may be repeated."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._begun = 0
        self._ended = 0
        self._asked: bytes | None = None
        self._repeatable: _Repeatable | None = None
        self._repeated_s = 0.0

    def data_received(self, data: bytes) -> None:
        """Answer what is repeated; read the rest as ever, and keep in mind what came as one call and alone."""
        if self._repeatable is not None and data == self._repeatable.call and self._answer_again(self._repeatable):
            return
        self._repeatable = None
        before, half_read = self._begun, self._begun != self._ended
        # Forgotten as soon as more comes: an answer that is out then may be to another call, or come amid one.
        self._asked = None
        super().data_received(data)
        if not half_read and self._begun == self._ended == before + 1 and len(data) <= MAX_CALL_BYTES:
            self._asked = data

    def _answer_again(self, repeatable: _Repeatable) -> bool:
        if self.flow.write_paused:
            return False
        try:
            head, body = repeatable.head(), repeatable.body()
        except Exception:  # noqa: BLE001  the ordinary way meets it too, and knows how to tell
            return False
        lines = [STATUS_LINE[200]]
        for name, value in self.server_state.default_headers:
            lines += (name, b": ", value, b"\r\n")
        lines += (head, b"content-length: %d\r\n\r\n" % len(body), body)
        self.transport.write(b"".join(lines))
        self.server_state.total_requests += 1
        self._repeated_s = self.loop.time()
        return True

    def on_message_begin(self) -> None:
        self._begun += 1
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._ended += 1
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """An answer is out: if its call came alone and may be repeated, it can be answered again from now on."""
        super().on_response_complete()
        asked, self._asked = self._asked, None
        if asked is not None:
            state = self.cycle.scope["state"]
            if BODY_NOW in state and HEAD_NOW in state:
                self._repeatable = _Repeatable(asked, state[HEAD_NOW], state[BODY_NOW])

    def timeout_keep_alive_handler(self) -> None:
        """Close a connection that was idle for long enough; a repeated call leaves the timer as it is."""
        left_s = self._repeated_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0 and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(left_s, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()
