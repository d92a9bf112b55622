"""KV events of the embedded engine: what its device and its pool hold, published for routers as vLLM does.

A thread turns queued changes into events. It begins with a report of everything there is, and repeats that when it has
lost changes. A subscriber that missed more batches than are kept gets one as their replacement. Such a report begins
with `AllBlocksCleared`, so that no router believes in a block that is gone.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress
from typing import Any

from kvferry.app.api.context import KVEventCounts
from kvferry.app.engines.embedded.block_pool import BlockPool
from kvferry.app.engines.embedded.kv_changes import Change, ChangeQueue, Evicted, Filled, PoolCleared, Removed, Stored
from kvferry.app.engines.embedded.kv_sockets import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventSockets,
)
from kvferry.app.engines.embedded.request import Request
from kvferry.app.engines.kv_reports import BlockReports, EventTypes, SlotContent, slot_key
from kvferry.app.logs import RateLimitedLogger
from kvferry.app.settings import Settings
from kvferry.app.threads import WatchedThread
from kvferry.core.groups import Group, GroupLayout
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager

_log = logging.getLogger(__name__)

CLOSE_S = 5.0
MIN_REPLACE_INTERVAL_S = 1.0
"""Interval in which one subscriber is sent everything at most; others wait for it, and until it is sent."""
MAX_WAITING = 8
"""Subscribers that wait to be sent everything; more of them get the batches that are kept."""
MAX_SILENCE_S = 5.0
"""After this time an empty batch is sent, so that a subscriber that lost the last one sees the gap."""
_POLL_S = 0.02
_ERROR_BACKOFF_S = 1.0
_CHANGES_PER_TURN = 256
_BATCH_TOKENS = 1 << 14
"""Tokens of a batch, which bound the size of a message."""
_HASH_MASK = (1 << 64) - 1


def external_hash(block_hash: bytes) -> int:
    """Return what stands for a block in events: the last 64 bits of its hash, as vLLM has it by default."""
    return int.from_bytes(block_hash, "big") & _HASH_MASK


_TYPES = EventTypes(BlockStored, BlockRemoved, external_hash, list)


class KVEventPublisher:
    """Publishes changes from `start` to `close`."""

    def __init__(
        self, changes: ChangeQueue, manager: OffloadManager, device: BlockPool, layout: GroupLayout, settings: Settings
    ) -> None:
        """Bind the sockets. Raises `StartError`."""
        self._sockets = KVEventSockets(
            str(settings.kv_events_endpoint),
            settings.kv_events_replay_endpoint,
            settings.kv_events_topic or "",
            settings.kv_events_buffer,
        )
        self.endpoints: Sequence[str] = self._sockets.endpoints
        """Address of the batches, and of the requests for missed ones if there is one."""
        self._changes = changes
        self._manager = manager
        self._device = device
        self._slots = layout.groups[0]
        of_blocks = GroupLayout([self._slots.spec])
        self._blocks = of_blocks.groups[0]
        self._on_device = BlockReports(of_blocks, "GPU", _TYPES, device.num_blocks)
        self._in_pool = BlockReports(layout, "CPU", _TYPES, device.num_blocks)
        self._batch_slots = max(_BATCH_TOKENS // self._slots.slot_tokens, 1)
        self._cleared_number = -1
        self._replaced_s = self._sent_s = float("-inf")
        self._waiting: dict[bytes, int] = {}
        """First number that each subscriber requested which waits to be sent everything."""
        self._must_report = True
        self._num_published = self._num_reports = self._num_full_answers = 0
        self._fault: str | None = None
        self._log = RateLimitedLogger(_log)
        self.thread = WatchedThread("kvferry-kv-events", self._run, "routers have an outdated view of this engine")
        _log.info("KV events are published on %s, replay: %s", self.endpoints[0], *(self.endpoints[1:] or ["none"]))

    def start(self) -> None:
        """Start the thread, which reports everything there is."""
        self.thread.start()

    def close(self) -> None:
        """Publish that all blocks are gone, and close the sockets. May be called before `start`."""
        if self.thread.close(CLOSE_S):
            self._sockets.close()

    def degraded(self) -> list[str]:
        """Return why routers may have an outdated view; empty if they have not."""
        fault = self._fault
        return [] if fault is None else [f"KV events: {fault}; everything is reported again once it works"]

    def counts(self) -> KVEventCounts:
        """Return what was published so far. Thread: any."""
        return KVEventCounts(
            published=self._num_published,
            dropped=self._changes.num_dropped,
            replayed=self._sockets.num_replayed,
            reports=self._num_reports,
            full_answers=self._num_full_answers,
        )

    # --- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # Changes that an earlier thread had taken when it died are lost.
        self._must_report = True
        while not self.thread.closing.is_set():
            try:
                self._take_turn()
                self._fault = None
            except Exception as error:  # noqa: BLE001 - the thread must not die
                if self._fault is None:
                    _log.exception("KV events were not published")
                self._fault = f"they were not published: {type(error).__name__}"
                self._must_report = True
                self.thread.closing.wait(_ERROR_BACKOFF_S)
        self._send([AllBlocksCleared()])

    def _take_turn(self) -> None:
        if self._must_report or self._changes.has_overflowed:
            self._report_all()
        while (changes := self._changes.take(_CHANGES_PER_TURN)) and not self.thread.closing.is_set():
            for change in changes:
                self._apply(change)
            self._publish()
        if time.monotonic() - self._sent_s >= MAX_SILENCE_S:
            self._send([])
        if self._sockets.answers_requests:
            for subscriber, first_number in self._sockets.wait_for_requests(_POLL_S):
                self._answer(subscriber, first_number)
            self._answer_waiting()
            for subscriber, next_number in self._sockets.send_answers():
                self._answer(subscriber, next_number)
        else:
            self.thread.closing.wait(_POLL_S)

    def _answer(self, subscriber: bytes, first_number: int) -> None:
        """Send a subscriber the batches from a number on, or what replaces them if not all of them are kept."""
        is_known = max(first_number, self._cleared_number) >= self._sockets.first_kept
        if is_known or (subscriber not in self._waiting and len(self._waiting) >= MAX_WAITING):
            self._waiting.pop(subscriber, None)
            self._sockets.answer(subscriber, first_number)
        else:
            self._waiting[subscriber] = first_number

    def _answer_waiting(self) -> None:
        """Send everything to the subscriber that has waited longest, if it may be sent now."""
        sockets, now_s = self._sockets, time.monotonic()
        if not self._waiting or sockets.is_replacing or now_s - self._replaced_s < MIN_REPLACE_INTERVAL_S:
            return
        subscriber = next(iter(self._waiting))
        first_number = self._waiting.pop(subscriber)
        self._replaced_s = now_s
        parts = list(self._everything())
        # Their numbers are above the one requested, which shows the subscriber that others are missing.
        per_batch = -(-len(parts) // max(sockets.next_number - first_number - 1, 1))
        batches = [chain.from_iterable(parts[at : at + per_batch]) for at in range(0, len(parts), per_batch)]
        self._num_full_answers += 1
        sockets.answer_with(subscriber, [EventBatch(time.time(), list(events)) for events in batches])

    def _everything(self) -> Iterator[list[Any]]:
        """Yield the events of all that was published so far, without what has left since."""
        yield [AllBlocksCleared()]
        for place in (self._on_device, self._in_pool):
            yield from place.all_events(self._batch_slots)

    def _report_all(self) -> None:
        if self._changes.has_overflowed:
            self._log.log(
                logging.WARNING,
                "overflow",
                "KV events: changes came faster than they were published; everything is reported again",
            )
        self._num_reports += 1
        # Changes from here on are queued. What has them already is published once.
        with self._manager.lock:
            self._changes.restart()
        hashes = self._device.registered_hashes()
        self._on_device.restart(slot_key(block_hash, self._blocks) for block_hash in hashes)
        rows = Inventory(self._manager).all_rows()
        self._in_pool.restart(chain.from_iterable(compress(one.keys, one.live) for one in rows))
        self._cleared_number = self._sockets.next_number
        for events in self._everything():
            if self.thread.closing.is_set():
                return
            self._send(events)
        self._must_report = False

    def _apply(self, change: Change) -> None:
        if isinstance(change, Filled):
            self._fill(change)
        elif isinstance(change, Removed):
            self._on_device.leave([slot_key(block_hash, self._blocks) for block_hash in change.hashes])
        elif isinstance(change, Stored):
            self._in_pool.enter(change.keys)
        elif isinstance(change, Evicted):
            self._in_pool.leave(change.keys)
        elif isinstance(change, PoolCleared):
            # `AllBlocksCleared` would include the device.
            self._in_pool.leave_all()

    def _fill(self, change: Filled) -> None:
        request, first, end = change.request, change.first_block, change.first_block + len(change.are_new)
        blocks, slots = self._blocks, self._slots
        if slots.slot_blocks == 1:
            _record((self._on_device, self._in_pool), request, blocks, range(first, end))
        else:
            size = slots.slot_blocks
            _record((self._on_device,), request, blocks, range(first, end))
            _record((self._in_pool,), request, slots, range(first // size, end // size))
        hashes = request.block_hashes[first:end]
        new = [block_hash for block_hash, is_new in zip(hashes, change.are_new, strict=True) if is_new]
        self._on_device.enter([slot_key(block_hash, blocks) for block_hash in new])

    def _publish(self) -> None:
        """Send the events of all changes so far, in batches."""
        for place in (self._on_device, self._in_pool):
            while place.has_events and not self.thread.closing.is_set():
                events = place.take(self._batch_slots)
                if events:
                    self._send(events)

    def _send(self, events: list[Any]) -> None:
        self._num_published += len(events)
        self._sockets.send(EventBatch(time.time(), events))
        self._sent_s = time.monotonic()


def _record(places: Sequence[BlockReports], request: Request, group: Group, slots: Iterable[int]) -> None:
    """Record the content of full slots of a request for those of these places that lack it."""
    hashes, size, tokens = request.block_hashes, group.slot_blocks, group.slot_tokens
    for number in slots:
        start, end = number * size, (number + 1) * size
        key = slot_key(hashes[end - 1], group)
        lacking = [place for place in places if place.lacks(key)]
        if lacking:
            # As in vLLM's events, the first block of a prompt has its salt; here a digest, as the salt is a secret.
            has_salt = start == 0 and request.tenant is not None
            content = SlotContent(
                group=group.index,
                hash=hashes[end - 1],
                parent=hashes[start - 1] if start else None,
                token_ids=array("i", request.token_ids[number * tokens : (number + 1) * tokens]),
                extra_keys=(request.tenant,) if has_salt else None,
            )
            for place in lacking:
                place.record(key, content)
    for place in places:
        place.end_recording()
