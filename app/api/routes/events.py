"""Live events as server-sent events."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

from fastapi import Header, Query
from sse_starlette import EventSourceResponse, ServerSentEvent

from kvferry.app.api.auth import Caller
from kvferry.app.api.calls import admin_router, from_app
from kvferry.app.api.context import AdminContext, Context
from kvferry.app.api.sse import STREAM_RESPONSES, MaxEvents, MustEnd, Streams
from kvferry.app.common.times import rfc3339
from kvferry.app.telemetry.events import Event, EventFeed, EventType, Item, PromptBlocks
from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.events import EvictionBatch, RegretBatch, RequestEnd, ResetEvent, StoreBatch

MAX_WATCHERS = 16
POLL_S = 0.1
"""Interval at which streams poll the feed; publishing wakes no stream."""
BATCH_EVENTS = 64
OPEN = "open"
GAP = "gap"
_BY_DEFAULT = frozenset(EventType) - {EventType.PROMPT}
_EVENT_ID = re.compile(r"([0-9a-f]{8})-([0-9]{1,18})", re.ASCII)

_DESCRIPTION = """\
Each event's data is a JSON object with `type`, `time` and what happened:

- `stored`, `evicted`, `regretted`: blocks that can be loaded from now on, that left the pool, that were requested again
  after they had left; their number as `blocks`, their `hashes`, and the request or the reason
- `reset`: all blocks were dropped, as many as `blocks`; a reset by match appears as evictions
- `finished`: a request ended; `prompt_tokens` is what served its prompt
- `storing`: `KVFERRY_AUTO_PAUSE` has paused storing, tries it again, or has turned it on: `storing` is `paused`,
  `probing` or `on`, with the `reason`
- `prompt`, only if it is asked for: a request ended, as in a trace: `input_length`, `output_length`, and `hashes` of
  the full blocks of its prompt, of `block_size` tokens: those of a slot
- `policy`, `override`, `rule`, `config`: changes by operators
- `open`: the first event of a stream
- `gap`: `missed` events, of any type, were lost since this client read too slowly; null if their number is not known

Nothing waits for a slow client. With `Last-Event-ID` a client that reconnects soon misses nothing.
"""


def render(event: Event) -> str:
    """Return an event's data."""
    head = {"type": event.type.value, "time": rfc3339(event.time_s)}
    blocks = {"blocks": len(event.keys), "hashes": [key.hex() for key in event.keys]} if event.keys else {}
    return json.dumps({**head, **_describe(event.item), **blocks}, separators=(",", ":"))


def _describe(item: Item) -> Mapping[str, Any]:
    """Return the fields of an item, without its keys."""
    if isinstance(item, StoreBatch):
        return _origin(item.origin)
    if isinstance(item, EvictionBatch):
        return {"reason": item.reason.value, "policy": item.policy, "needed_by": item.needed_by}
    if isinstance(item, ResetEvent):
        return {"blocks": item.dropped}
    if isinstance(item, RequestEnd):
        counts = {"num_prompt_tokens": item.num_prompt_tokens, "num_output_tokens": item.num_output_tokens}
        return {**_origin(item.origin), **counts, "prompt_tokens": asdict(item.prompt_tokens)}
    if isinstance(item, PromptBlocks):
        return {
            "input_length": item.input_length,
            "output_length": item.output_length,
            "block_size": item.block_size,
        }
    return {} if isinstance(item, RegretBatch) else item


def _origin(origin: RequestIdentity) -> dict[str, Any]:
    return {
        "request": origin.request_id,
        "tenant": origin.tenant,
        "lora": origin.lora,
        "session": origin.session,
    }


def _resume(feed: EventFeed, sent_id: str, last_number: int) -> int | None:
    """Return the number of the last event that a client received; None if its id is not of this feed."""
    match = _EVENT_ID.fullmatch(sent_id)
    if match is None or match[1] != feed.name or int(match[2]) > last_number:
        return None
    return int(match[2])


def _event(feed: EventFeed, number: int, type_: str, data: str) -> ServerSentEvent:
    return ServerSentEvent(data, event=type_, id=f"{feed.name}-{number}")


def _stream_event(feed: EventFeed, number: int, type_: str, **what: Any) -> ServerSentEvent:
    """Return an event about the stream itself, which a client resumes after the event of this number."""
    return _event(feed, number, type_, json.dumps({"type": type_, "time": rfc3339(time.time()), **what}))


async def _follow_events(
    context: AdminContext, wanted: frozenset[str], sent_id: str | None, must_end: MustEnd
) -> AsyncGenerator[ServerSentEvent, None]:
    feed = context.feed
    last_number = feed.last_number
    resumed = None if sent_id is None else _resume(feed, sent_id, last_number)
    seen = last_number if resumed is None else resumed
    yield _stream_event(feed, seen, OPEN)
    if sent_id is not None and resumed is None:
        yield _stream_event(feed, seen, GAP, missed=None)
    while not must_end():
        lost, events = feed.read(seen, BATCH_EVENTS)
        if lost:
            seen += lost
            yield _stream_event(feed, seen, GAP, missed=lost)
        for event in events:
            seen = event.number
            if event.type in wanted:
                yield _event(feed, seen, event.type, render(event))
        await asyncio.sleep(0 if len(events) == BATCH_EVENTS else POLL_S)


async def _follow_prompts(
    context: AdminContext, wanted: frozenset[str], sent_id: str | None, must_end: MustEnd
) -> AsyncGenerator[ServerSentEvent, None]:
    with context.feed.watching_prompts():
        async with aclosing(_follow_events(context, wanted, sent_id, must_end)) as events:
            async for event in events:
                yield event


router = admin_router(tags=["events"])


@router.get(
    "/events",
    summary="Live events, as server-sent events",
    description=_DESCRIPTION,
    response_class=EventSourceResponse,
    responses=STREAM_RESPONSES,
)
async def stream_events(
    context: Context,
    streams: Annotated[Streams, from_app("event_streams")],
    token: Caller,
    type_: Annotated[
        list[EventType] | None,
        Query(
            alias="type",
            description="only these types; may be given several times. Without it all but those that have to be "
            "asked for",
        ),
    ] = None,
    last_event_id: Annotated[
        str | None, Header(max_length=64, description="the `id` of the last event received, to resume after it")
    ] = None,
    max_events: MaxEvents = None,
) -> EventSourceResponse:
    wanted = frozenset(_BY_DEFAULT if type_ is None else type_)
    follow = _follow_prompts if EventType.PROMPT in wanted else _follow_events
    return streams.open(token, partial(follow, context, wanted, last_event_id), max_events)
