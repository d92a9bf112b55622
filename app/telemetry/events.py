"""Feed of live events: a bounded ring from which watchers read.

Publishing never waits for a watcher. A slow watcher learns how many events it missed. Watchers render the events.
"""

from __future__ import annotations

import secrets
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import Any

from kvferry.core.keys import Key
from kvferry.core.pool.events import (
    CacheEvent,
    EventSink,
    EvictionBatch,
    RegretBatch,
    RequestBlocks,
    RequestEnd,
    ResetEvent,
    StoreBatch,
)

MAX_EVENTS = 4096
MAX_KEYS = 65_536
"""Maximum number of keys in all events of the ring, since events differ in size."""


class EventType(StrEnum):
    """Types of events. The last seven come from operators, `STORING` from the service itself.

    `PROMPT` is published while it is watched.
    """

    STORED = "stored"
    EVICTED = "evicted"
    REGRETTED = "regretted"
    RESET = "reset"
    FINISHED = "finished"
    STORING = "storing"
    PROMPT = "prompt"
    POLICY = "policy"
    OVERRIDE = "override"
    RULE = "rule"
    CONFIG = "config"
    RESIZED = "resized"
    FLUSHED = "flushed"


_TYPES: Mapping[type, EventType] = {
    StoreBatch: EventType.STORED,
    EvictionBatch: EventType.EVICTED,
    RegretBatch: EventType.REGRETTED,
    ResetEvent: EventType.RESET,
    RequestEnd: EventType.FINISHED,
}


@dataclass(frozen=True, slots=True)
class PromptBlocks:
    """The prompt of a request that has ended, as in a trace: lengths in tokens, and a key for each full block.

    Equal keys mean equal prompts up to the end of that block, which has `block_size` tokens: those of a slot.
    """

    input_length: int
    output_length: int
    block_size: int
    keys: Sequence[Key]


Item = StoreBatch | EvictionBatch | RegretBatch | ResetEvent | RequestEnd | PromptBlocks | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Event:
    """One event. Numbers grow by one, also for events without a watcher.

    `item` is what core reported, or the JSON values of a change by an operator.
    """

    number: int
    type: EventType
    time_s: float
    item: Item

    @property
    def keys(self) -> Sequence[Key]:
        """The keys of the blocks concerned, without those of a reset."""
        if isinstance(self.item, EvictionBatch):
            return self.item.rows.keys
        return self.item.keys if isinstance(self.item, (StoreBatch, RegretBatch, PromptBlocks)) else ()


class EventFeed:
    """Event sink that passes everything on, and keeps the latest events. Thread: any."""

    def __init__(self, inner: EventSink, slot_tokens: int) -> None:
        """Pass events on to `inner` first. `slot_tokens` are those of a key in `RequestBlocks`."""
        self._inner = inner
        self._slot_tokens = slot_tokens
        self._num_prompt_watchers = 0
        self._lock = threading.Lock()
        self._ring: deque[Event] = deque()
        self._num_keys = 0
        self.last_number = 0
        """Number of the last event."""
        self.name = secrets.token_hex(4)
        """Distinguishes this process's event numbers from those of another."""

    def publish(self, event: CacheEvent) -> None:
        """Pass an event on, and publish it. Requires: manager lock held."""
        self._inner(event)
        if not isinstance(event, RequestBlocks):
            self._push(_TYPES[type(event)], event.time_s, event)
        elif self._num_prompt_watchers:
            # All of its keys would be too many for the ring.
            self._push(EventType.PROMPT, event.time_s, self._prompt_of(event))

    @contextmanager
    def watching_prompts(self) -> Iterator[None]:
        """Publish prompts within the context. Thread: that of the event loop."""
        self._num_prompt_watchers += 1
        try:
            yield
        finally:
            self._num_prompt_watchers -= 1

    def changed(self, type_: EventType, what: Mapping[str, Any], now_s: float) -> None:
        """Publish a change that did not come from core; `what` are JSON values without secrets."""
        self._push(type_, now_s, what)

    def read(self, after: int, limit: int) -> tuple[int, list[Event]]:
        """Return how many events after number `after` are lost, and up to `limit` of the next ones."""
        with self._lock:
            oldest = self.last_number - len(self._ring) + 1
            lost = max(0, oldest - after - 1)
            start = max(0, after + 1 - oldest)
            return lost, list(islice(self._ring, start, start + limit))

    def _prompt_of(self, event: RequestBlocks) -> PromptBlocks:
        keys = event.keys[: event.num_prompt_tokens // self._slot_tokens]
        return PromptBlocks(event.num_prompt_tokens, event.num_output_tokens, self._slot_tokens, keys)

    def _push(self, type_: EventType, time_s: float, item: Item) -> None:
        with self._lock:
            self.last_number += 1
            event = Event(self.last_number, type_, time_s, item)
            self._ring.append(event)
            self._num_keys += len(event.keys)
            while len(self._ring) > MAX_EVENTS or self._num_keys > MAX_KEYS:
                self._num_keys -= len(self._ring.popleft().keys)
