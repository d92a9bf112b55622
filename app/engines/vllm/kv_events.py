"""vLLM's KV events for the host pool, with which routers track the blocks that an engine can load.

A `BlockStored` event contains the tokens of its blocks, which are known only while a request has the blocks. They are
recorded when blocks are filled, and kept while the pool holds the blocks. Used only if vLLM publishes events.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys

from kvferry.app.engines.vllm.fingerprint import hash_bytes
from kvferry.app.engines.vllm.layout import VllmLayout
from kvferry.app.engines.vllm.requests import VllmRequest
from kvferry.core.groups import Group, GroupKind, GroupLayout
from kvferry.core.keys import Key, group_of, hash_of
from kvferry.core.pool.events import CacheEvent, EvictionBatch, ResetEvent, StoreBatch

MAX_BLOCKS_PER_TAKE = 4096
"""Limit of slots reported per step; a reset or a warm start may report the whole pool."""
_CONTENTS_PER_BLOCK = 4
"""Recorded contents per device block; in lazy mode a block may be stored long after its request has finished."""
_LOCAL = "LOCAL"
_KIND_NAMES = {
    GroupKind.FULL: "full_attention",
    GroupKind.SLIDING: "sliding_window",
    GroupKind.RECURRENT: "mamba",
}


@dataclass(frozen=True, slots=True)
class _Content:
    """Content of a slot for its event; `hashes` are the hashes of its blocks."""

    group: int
    hashes: list[bytes]
    parent: bytes | None
    token_ids: array[int]
    extra_keys: list[tuple[Any, ...] | None]
    lora_id: int | None
    lora_name: str | None
    session_id: str | None

    @property
    def previous_end(self) -> tuple[object, ...]:
        """`end` of the preceding slot of the prefix."""
        return self.group, self.session_id, self.parent

    @property
    def end(self) -> tuple[object, ...]:
        """Identifies the end of this slot; see `previous_end`."""
        return self.group, self.session_id, self.hashes[-1]


_Change = tuple[Key, _Content | None]
"""A slot that entered or left the pool; the content is None if no request had its tokens yet."""


class KVEventSink:
    """Converter of changes of the pool to vLLM's events.

    Thread: any for `recovered` and `receive`, which only append to a queue; engine for all others.
    """

    def __init__(self, slots: GroupLayout, num_blocks: int, hash_bytes: int) -> None:
        """Create a sink; events contain the first `hash_bytes` bytes of each hash, which are vLLM's own hash."""
        self._slots = slots
        self._hash_bytes = hash_bytes
        self._contents: OrderedDict[Key, _Content] = OrderedDict()
        self._max_contents = _CONTENTS_PER_BLOCK * num_blocks * len(slots)
        self._num_recorded: dict[str, list[int]] = {}
        # Slots that subscribers know of after the changes returned so far.
        self._reported: dict[Key, _Content | None] = {}
        # Changes in their order: whether slots entered, and an iterator of the slots, which reports them in parts.
        self._changes: deque[tuple[bool, Iterator[_Change]]] = deque()
        self._device: Any = None
        self._device_index: Any = None
        self._repeated: Iterator[_Change] | None = None

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
        return bool(self._changes)

    def take(self) -> list[Any]:
        """Return the events since the last call, or the events of the first `MAX_BLOCKS_PER_TAKE` slots."""
        self._repeat_after_clear()
        events: list[Any] = []
        entered: dict[Key, _Content | None] = {}
        left: list[_Change] = []
        num_left = MAX_BLOCKS_PER_TAKE
        while self._changes and num_left:
            is_entry, slots = self._changes[0]
            taken = list(islice(slots, num_left))
            if len(taken) < num_left:
                self._changes.popleft()
            num_left -= len(taken)
            if is_entry and taken:
                events += self._removed_events(left)
                left = []
                entered.update(taken)
            elif taken:
                events += self._stored_events(entered)
                entered = {}
                left += taken
        return events + self._stored_events(entered) + self._removed_events(left)

    # --- requests -----------------------------------------------------------------------------------------------

    def record(self, request: VllmRequest, num_computed_tokens: int) -> None:
        """Record the content of the request's full slots that were not recorded before."""
        done = self._num_recorded.setdefault(request.request_id, [0] * len(self._slots))
        for group in self._slots.groups:
            known = len(request.block_hashes) * self._slots.hash_block_size
            full = min(num_computed_tokens, known) // group.slot_tokens
            for number in range(done[group.index], full):
                self._record_slot(request, group, number)
            done[group.index] = max(done[group.index], full)
        while len(self._contents) > self._max_contents:
            self._contents.popitem(last=False)

    def report(self, request: VllmRequest, num_tokens: int) -> None:
        """Report the slots of the pool that hold the request's first `num_tokens` tokens again."""
        self.record(request, num_tokens)
        self._changes.append((True, self._repeat(self._keys_of(request, num_tokens))))

    def finish_request(self, request_id: str) -> None:
        """Remove a finished request; the content of its blocks stays recorded, since they may still be stored."""
        self._num_recorded.pop(request_id, None)

    def _keys_of(self, request: VllmRequest, num_tokens: int) -> list[Key]:
        hashes = request.block_hashes
        step = self._slots.hash_block_size
        num_known = min(num_tokens, len(hashes) * step)
        return [
            _key(hashes[end // step - 1], group)
            for group in self._slots.groups
            for end in range(group.slot_tokens, num_known + 1, group.slot_tokens)
        ]

    def _record_slot(self, request: VllmRequest, group: Group, number: int) -> None:
        start, end = number * group.slot_tokens, (number + 1) * group.slot_tokens
        size, step = group.spec.block_size, self._slots.hash_block_size
        key = _key(request.block_hashes[end // step - 1], group)
        is_reported = key in self._reported
        if is_reported and self._reported[key] is not None:
            return
        ends = range(start + size, end + 1, size)
        live = request.request
        adapter = live.lora_request
        content = _Content(
            group=group.index,
            hashes=[bytes(request.block_hashes[token // step - 1]) for token in ends],
            parent=bytes(request.block_hashes[start // step - 1]) if start else None,
            token_ids=array("i", live.all_token_ids[start:end]),
            extra_keys=[generate_block_hash_extra_keys(live, token - size, token, 0)[0] for token in ends],
            lora_id=None if adapter is None else adapter.adapter_id,
            lora_name=None if adapter is None else adapter.name,
            session_id=live.session_id,
        )
        if is_reported:
            # Stored by an earlier process, so it was reported without its tokens.
            self._reported[key] = content
            self._changes.append((True, self._repeat([key])))
        else:
            self._contents[key] = content

    # --- changes of the pool --------------------------------------------------------------------------------------

    def recovered(self, keys: Sequence[Key]) -> None:
        """Queue slots recovered from an earlier process. Requires: manager lock held."""
        self._changes.append((True, self._enter(keys)))

    def receive(self, event: CacheEvent) -> None:
        """Queue the slots that entered or left."""
        if isinstance(event, StoreBatch):
            self._changes.append((True, self._enter(event.keys)))
        elif isinstance(event, EvictionBatch):
            self._changes.append((False, self._leave(event.rows.keys)))
        elif isinstance(event, ResetEvent):
            # vLLM's event for a reset has no medium.
            self._changes.append((False, self._leave_all()))

    # Generators of changes. They run in `take`, on the engine thread, after the changes queued before them.

    def _enter(self, keys: Sequence[Key]) -> Iterator[_Change]:
        for key in keys:
            content = self._reported[key] = self._contents.pop(key, None)
            yield key, content

    def _repeat(self, keys: Iterable[Key]) -> Iterator[_Change]:
        for key in keys:
            if key in self._reported:
                yield key, self._reported[key]

    def _leave(self, keys: Sequence[Key]) -> Iterator[_Change]:
        for key in keys:
            if key in self._reported:
                yield key, self._reported.pop(key)

    def _leave_all(self) -> Iterator[_Change]:
        removed, self._reported = self._reported, {}
        while removed:
            yield removed.popitem()

    def _repeat_after_clear(self) -> None:
        """Report the whole pool again if vLLM has reset its own cache since the last call."""
        index = _index_of(self._device)
        if index is self._device_index:
            return
        self._device_index = index
        if self._repeated is not None and self._changes and self._changes[0][1] is self._repeated:
            self._changes.popleft()
        # Before all other changes, since `_reported` is what subscribers knew before the reset.
        self._repeated = self._repeat(list(self._reported))
        self._changes.appendleft((True, self._repeated))

    # --- events ---------------------------------------------------------------------------------------------------

    def _stored_events(self, slots: dict[Key, _Content | None]) -> list[Any]:
        runs = _runs([content for content in slots.values() if content is not None])
        unknown = [self._unknown_event(key) for key, content in slots.items() if content is None]
        return unknown + [self._stored_event(run) for run in runs]

    def _stored_event(self, run: Sequence[_Content]) -> Any:
        first = run[0]
        return BlockStored(
            block_hashes=self._event_hashes(chain.from_iterable(content.hashes for content in run)),
            parent_block_hash=None if first.parent is None else self._event_hashes([first.parent])[0],
            token_ids=list(chain.from_iterable(content.token_ids for content in run)),
            lora_id=first.lora_id,
            lora_name=first.lora_name,
            extra_keys=to_event_extra_keys(chain.from_iterable(content.extra_keys for content in run)),
            session_id=first.session_id,
            **self._group_fields(first.group),
        )

    def _unknown_event(self, key: Key) -> Any:
        """Return the event of one block whose tokens are unknown; in an event, a list of hashes means a chain."""
        return BlockStored(
            block_hashes=self._event_hashes([hash_of(key)]),
            parent_block_hash=None,
            token_ids=[],
            lora_id=None,
            lora_name=None,
            **self._group_fields(group_of(key)),
        )

    def _group_fields(self, index: int) -> dict[str, Any]:
        group = self._slots.groups[index]
        return {
            "block_size": group.spec.block_size,
            "medium": MEDIUM_CPU,
            "group_idx": index,
            "kv_cache_spec_kind": _KIND_NAMES[group.spec.kind],
            "kv_cache_spec_sliding_window": group.spec.window_tokens,
            "locality": _LOCAL,
        }

    def _removed_events(self, slots: Iterable[_Change]) -> list[Any]:
        by_group: dict[int, list[bytes]] = {}
        for key, content in slots:
            by_group.setdefault(group_of(key), []).extend([hash_of(key)] if content is None else content.hashes)
        return [
            BlockRemoved(block_hashes=self._event_hashes(hashes), medium=MEDIUM_CPU, group_idx=group, locality=_LOCAL)
            for group, hashes in by_group.items()
        ]

    def _event_hashes(self, hashes: Iterable[bytes]) -> list[Any]:
        return [maybe_convert_block_hash(block_hash[: self._hash_bytes]) for block_hash in hashes]


def _key(block_hash: bytes, group: Group) -> Key:
    return bytes(block_hash) + bytes([group.index])


def _index_of(device: Any) -> Any:
    """Return the index of vLLM's block pool, which is replaced when the pool is reset."""
    return getattr(device, "cached_block_hash_to_block", None)


def _runs(contents: Sequence[_Content]) -> list[list[_Content]]:
    """Group consecutive slots of the same prefix; `contents` may have any order."""
    following: dict[tuple[object, ...], list[_Content]] = {}
    for content in contents:
        following.setdefault(content.previous_end, []).append(content)
    ends = {content.end for content in contents}
    starts = deque(content for content in contents if content.previous_end not in ends)
    runs: list[list[_Content]] = []
    while starts:
        run = [starts.popleft()]
        while (found := following.get(run[-1].end)) is not None:
            run.append(found[0])
            starts += found[1:]
        runs.append(run)
    return runs
