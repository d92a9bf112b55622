"""Limits of what a client reads from a server that may send without end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator

import httpx

MAX_ANSWER_BYTES = 64 << 20
MAX_EVENT_BYTES = 8 << 20
"""Of a server-sent event; vLLM's first chunk has the ids of all prompt tokens, also those of a million."""
_EVENT_STREAM = "text/event-stream"
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")
_LONGEST_END = max(map(len, _EVENT_ENDS))


class BadAnswer(Exception):
    """An answer that is too long, takes too long, or is compressed, so that its length is unknown."""


def limit_answer(response: httpx.Response, max_s: float = 300.0) -> None:
    """Limit the body of a response before it is read: an event of a stream, or the whole of another one.

    A hook of httpx. Reading raises `BadAnswer` at the limit, as after `max_s` unless it is a stream: a server may send
    a byte before each time limit ends.
    """
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise BadAnswer(f"answer is compressed ({encoding[:20]}), which was not requested")
    is_stream = _EVENT_STREAM in response.headers.get("Content-Type", "")
    response.stream = _LimitedStream(response.stream, max_s, is_stream=is_stream)


async def limit_async_answer(response: httpx.Response) -> None:
    """See `limit_answer`; the hook of a client for asyncio."""
    limit_answer(response)


class _LimitedStream(httpx.SyncByteStream, httpx.AsyncByteStream):
    """The body of a response, which ends with `BadAnswer` at its limit."""

    def __init__(self, body: httpx.SyncByteStream | httpx.AsyncByteStream, max_s: float, *, is_stream: bool) -> None:
        self._body = body
        self._max_s = max_s
        self._is_stream = is_stream
        self._began_s = time.monotonic()
        self._num_bytes = 0
        self._tail = b""

    def __iter__(self) -> Iterator[bytes]:
        if isinstance(self._body, httpx.SyncByteStream):
            for chunk in self._body:
                self._count(chunk)
                yield chunk

    async def __aiter__(self) -> AsyncIterator[bytes]:
        if isinstance(self._body, httpx.AsyncByteStream):
            async for chunk in self._body:
                self._count(chunk)
                yield chunk

    def close(self) -> None:
        if isinstance(self._body, httpx.SyncByteStream):
            self._body.close()

    async def aclose(self) -> None:
        if isinstance(self._body, httpx.AsyncByteStream):
            await self._body.aclose()

    def _count(self, chunk: bytes) -> None:
        """Count what the reader has to keep: all, or what follows the last event that is complete."""
        self._num_bytes += len(chunk)
        if self._is_stream:
            # An end may be in two chunks.
            latest = self._tail + chunk
            end = max(latest.rfind(one) for one in _EVENT_ENDS)
            if end >= 0:
                self._num_bytes = len(latest) - end
            self._tail = latest[-(_LONGEST_END - 1) :]
        elif time.monotonic() - self._began_s > self._max_s:
            raise BadAnswer(f"answer has not ended within {self._max_s:g} s")
        limit = MAX_EVENT_BYTES if self._is_stream else MAX_ANSWER_BYTES
        if self._num_bytes > limit:
            what = "event of the stream" if self._is_stream else "answer"
            raise BadAnswer(f"{what} is longer than {limit >> 20} MiB")
