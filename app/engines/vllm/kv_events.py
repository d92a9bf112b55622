"""vLLM's KV events for the host pool, with which routers track the blocks that an engine can load.

Used only if vLLM publishes events, which it does with those of its own cache.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys

from kvferry.app.api.context import KVEventCounts
from kvferry.app.engines.kv_reports import BlockReports, EventTypes, SlotContent, slot_key
from kvferry.app.engines.vllm.fingerprint import hash_bytes
from kvferry.app.engines.vllm.layout import VllmLayout
from kvferry.app.engines.vllm.requests import VllmRequest
from kvferry.core.groups import Group, GroupLayout
from kvferry.core.keys import Key
from kvferry.core.pool.events import CacheEvent, EvictionBatch, ResetEvent, StoreBatch

MAX_BLOCKS_PER_TAKE = 4096
"""Limit of slots reported per step; a reset or a warm start may report the whole pool."""


class KVEventSink:
    """Converter of changes of the pool to vLLM's events.

    Thread: any for `recovered` and `receive`, which only append to a queue, and `counts`; engine for all others.
    """

    def __init__(self, slots: GroupLayout, num_blocks: int, hash_bytes: int) -> None:
        """Create a sink; events contain the first `hash_bytes` bytes of each hash, which are vLLM's own hash."""

        def external_hash(block_hash: bytes) -> Any:
            return maybe_convert_block_hash(block_hash[:hash_bytes])

        types = EventTypes(BlockStored, BlockRemoved, external_hash, to_event_extra_keys)
        self._slots = slots
        self._reports = BlockReports(slots, MEDIUM_CPU, types, num_blocks)
        self._num_recorded: dict[str, list[int]] = {}
        self._num_taken = 0
        self._device: Any = None
        self._device_index: Any = None

    @classmethod
    def for_config(cls, config: Any, layout: VllmLayout, slots: GroupLayout) -> KVEventSink | None:
        """Return a sink if vLLM publishes events, else None."""
        events = config.kv_events_config
        if events is None or not events.enable_kv_cache_events:
            return None
        return cls(slots, layout.num_blocks, hash_bytes(config))

    def bind(self, device: Any) -> None:
        """Set vLLM's block pool; the event of its resets makes subscribers clear the host pool's blocks as well."""
        self._device = device
        self._device_index = _index_of(device)

    @property
    def has_events(self) -> bool:
        """Whether `take` has events to return."""
        return self._reports.has_events

    def take(self) -> list[Any]:
        """Return the events since the last call, or the events of the first `MAX_BLOCKS_PER_TAKE` slots."""
        index = _index_of(self._device)
        if index is not self._device_index:
            self._device_index = index
            self._reports.repeat_all()
        events = self._reports.take(MAX_BLOCKS_PER_TAKE)
        self._num_taken += len(events)
        return events

    def counts(self) -> KVEventCounts:
        """Return how many events vLLM's publisher has received. Thread: any."""
        return KVEventCounts(published=self._num_taken)

    # --- requests -----------------------------------------------------------------------------------------------

    def record(self, request: VllmRequest, num_computed_tokens: int) -> None:
        """Record the content of the request's full slots that were not recorded before."""
        if request.unhashed is not None:
            return
        done = self._num_recorded.setdefault(request.request_id, [0] * len(self._slots))
        for group in self._slots.groups:
            known = len(request.block_hashes) * self._slots.hash_block_size
            full = min(num_computed_tokens, known) // group.slot_tokens
            for number in range(done[group.index], full):
                self._record_slot(request, group, number)
            done[group.index] = max(done[group.index], full)
        self._reports.end_recording()

    def report(self, request: VllmRequest, num_tokens: int) -> None:
        """Report the slots of the pool that hold the request's first `num_tokens` tokens again."""
        if request.unhashed is not None:
            return
        self.record(request, num_tokens)
        self._reports.repeat(self._keys_of(request, num_tokens))

    def finish_request(self, request_id: str) -> None:
        """Remove a finished request; the content of its blocks stays recorded, since they may still be stored."""
        self._num_recorded.pop(request_id, None)

    def _keys_of(self, request: VllmRequest, num_tokens: int) -> list[Key]:
        hashes = request.block_hashes
        step = self._slots.hash_block_size
        num_known = min(num_tokens, len(hashes) * step)
        return [
            slot_key(hashes[end // step - 1], group)
            for group in self._slots.groups
            for end in range(group.slot_tokens, num_known + 1, group.slot_tokens)
        ]

    def _record_slot(self, request: VllmRequest, group: Group, number: int) -> None:
        start, end, step = number * group.slot_tokens, (number + 1) * group.slot_tokens, self._slots.hash_block_size
        key = slot_key(request.block_hashes[end // step - 1], group)
        if not self._reports.lacks(key):
            return
        live = request.request
        adapter = live.lora_request
        content = SlotContent(
            group=group.index,
            hash=bytes(request.block_hashes[end // step - 1]),
            parent=bytes(request.block_hashes[start // step - 1]) if start else None,
            token_ids=array("i", live.all_token_ids[start:end]),
            extra_keys=generate_block_hash_extra_keys(live, start, end, 0)[0],
            lora_id=None if adapter is None else adapter.adapter_id,
            lora_name=None if adapter is None else adapter.name,
            session_id=live.session_id,
        )
        self._reports.record(key, content)

    # --- changes of the pool --------------------------------------------------------------------------------------

    def recovered(self, keys: Sequence[Key]) -> None:
        """Queue slots recovered from an earlier process. Requires: manager lock held."""
        self._reports.enter(keys)

    def receive(self, event: CacheEvent) -> None:
        """Queue the slots that entered or left."""
        if isinstance(event, StoreBatch):
            self._reports.enter(event.keys)
        elif isinstance(event, EvictionBatch):
            self._reports.leave(event.rows.keys)
        elif isinstance(event, ResetEvent):
            # vLLM's event for a reset has no medium.
            self._reports.leave_all()


def _index_of(device: Any) -> Any:
    """Return the index of vLLM's block pool, which is replaced when the pool is reset."""
    return getattr(device, "cached_block_hash_to_block", None)
