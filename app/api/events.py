"""What the cache did, as server-sent events, for those who watch it while it happens."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query
from sse_starlette import EventSourceResponse, ServerSentEvent

from kvferry.app.api.context import AdminContext
from kvferry.app.api.streams import STREAM_RESPONSES, MaxEvents, MustEnd, Streams
from kvferry.app.event_feed import Change, Event, EventFeed, EventType, Regret
from kvferry.app.times import rfc3339
from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.events import EvictionBatch, RequestEnd, ResetEvent, StoreBatch

MAX_WATCHERS = 16
POLL_S = 0.1
"""Events wait so long for their readers, who look for them: nobody who makes them wakes anybody."""
BATCH_EVENTS = 64
OPEN = "open"
GAP = "gap"
_EVENT_ID = re.compile(r"([0-9a-f]{8})-([0-9]{1,18})", re.ASCII)

_DESCRIPTION = """\
Each event's data is a JSON object with `type`, `time` and what happened:

- `stored`, `evicted`, `regretted`: blocks that can be loaded from now on, that have left the pool, that were asked for
  again after they had; their number as `blocks`, their `hashes`, and whom or why
- `reset`: all blocks are gone, as many as `blocks`; a reset by match is told as evictions
- `finished`: a request is over; `prompt_tokens` says what served its prompt
- `policy`, `override`, `rule`, `config`: what operators changed
- `open`: the first of a stream; what happens from then on is told
- `gap`: `missed` events, of any type, were lost since this client read too slowly; null where nobody knows how many

Nothing waits for a slow client. With `Last-Event-ID` a client that comes back within a minute misses nothing.
"""


def render(event: Event) -> str:
    """An event's data."""
    item = event.item
    head = {"type": event.type.value, "time": rfc3339(item.time_s)}
    return json.dumps({**head, **_describe(item)}, separators=(",", ":"))


def _describe(item: object) -> Mapping[str, Any]:
    if isinstance(item, StoreBatch):
        return {**_whom(item.origin), "blocks": len(item.keys), "hashes": [key.hex() for key in item.keys]}
    if isinstance(item, EvictionBatch):
        keys = item.rows.keys
        why = {"reason": item.reason.value, "policy": item.policy, "needed_by": item.needed_by}
        return {**why, "blocks": len(keys), "hashes": [key.hex() for key in keys]}
    if isinstance(item, Regret):
        return {"blocks": len(item.keys), "hashes": [key.hex() for key in item.keys]}
    if isinstance(item, ResetEvent):
        return {"blocks": item.dropped}
    if isinstance(item, RequestEnd):
        counts = {"num_prompt_tokens": item.num_prompt_tokens, "num_output_tokens": item.num_output_tokens}
        return {**_whom(item.origin), **counts, "prompt_tokens": asdict(item.prompt_tokens)}
    if isinstance(item, Change):
        return item.what
    raise TypeError(f"no event is made of {type(item).__name__}")


def _whom(origin: RequestIdentity) -> dict[str, Any]:
    return {"request": origin.request_id, "tenant": origin.tenant, "lora": origin.lora}


def _resume(feed: EventFeed, sent_id: str, last_number: int) -> int | None:
    """The number of the last event that a client has seen; None if it is none of ours."""
    match = _EVENT_ID.fullmatch(sent_id)
    if match is None or match[1] != feed.name or int(match[2]) > last_number:
        return None
    return int(match[2])


def events_router(context: AdminContext) -> APIRouter:
    """`/admin/v1/events`."""
    router = APIRouter(tags=["events"])
    streams = Streams(context, MAX_WATCHERS)
    feed = context.feed

    async def follow(
        must_end: MustEnd, wanted: frozenset[str], sent_id: str | None
    ) -> AsyncGenerator[ServerSentEvent, None]:
        def tell(type_: str, data: str) -> ServerSentEvent:
            return ServerSentEvent(data, event=type_, id=f"{feed.name}-{seen}")

        def tell_self(type_: str, **what: Any) -> ServerSentEvent:
            return tell(type_, json.dumps({"type": type_, "time": rfc3339(time.time()), **what}))

        with feed.watching() as last_number:
            resumed = None if sent_id is None else _resume(feed, sent_id, last_number)
            seen = last_number if resumed is None else resumed
            yield tell_self(OPEN)
            if sent_id is not None and resumed is None:
                yield tell_self(GAP, missed=None)
            while not must_end():
                lost, events = feed.read(seen, BATCH_EVENTS)
                if lost:
                    seen += lost
                    yield tell_self(GAP, missed=lost)
                for event in events:
                    seen = event.number
                    if event.type in wanted:
                        yield tell(event.type, render(event))
                await asyncio.sleep(0 if len(events) == BATCH_EVENTS else POLL_S)

    @router.get(
        "/events",
        summary="What the cache does, as server-sent events",
        description=_DESCRIPTION,
        response_class=EventSourceResponse,
        responses=STREAM_RESPONSES,
    )
    async def stream_events(
        type_: Annotated[
            list[EventType] | None, Query(alias="type", description="only these; may be given several times")
        ] = None,
        last_event_id: Annotated[
            str | None, Header(max_length=64, description="the `id` of the last event seen, to go on from there")
        ] = None,
        max_events: MaxEvents = None,
    ) -> EventSourceResponse:
        wanted = frozenset(EventType if type_ is None else type_)
        return streams.open(lambda must_end: follow(must_end, wanted, last_event_id), max_events)

    return router
