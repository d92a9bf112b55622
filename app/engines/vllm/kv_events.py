"""vLLM's KV events for the host pool, so that routers that listen to an engine know what it can bring back.

Such an event has the tokens of its blocks, which are only known while a request is there: they are noted as its blocks
fill, and for as many blocks as may still be stored. Without listeners none of this happens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU, AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys, maybe_convert_block_hash, to_event_extra_keys

from app.engines.vllm.fingerprint import hash_bytes
from app.engines.vllm.layout import VllmLayout
from app.engines.vllm.requests import VllmRequest
from core.events import EventSink, EvictionBatch, RequestEnd, ResetEvent, StoreBatch
from core.groups import Group, GroupKind, GroupLayout
from core.keys import Key, group_of, hash_of

_NOTES_PER_BLOCK = 4
"""Notes kept, for each block of the device: in lazy mode a block is stored long after its request."""
_LOCAL = "LOCAL"
_KIND_WORDS = {
    GroupKind.FULL: "full_attention",
    GroupKind.SLIDING: "sliding_window",
    GroupKind.RECURRENT: "mamba",
}


@dataclass(frozen=True, slots=True)
class _Note:
    """What a slot's event says of it. `hashes` are those of its blocks."""

    hashes: list[bytes]
    parent: bytes | None
    token_ids: list[int]
    extra_keys: list[tuple[Any, ...] | None]
    lora_id: int | None
    lora_name: str | None
    session_id: str | None


class KVEventSink:
    """Listens to what the cache does, and turns it into vLLM's events. An `EventSink`; any thread may call it."""

    def __init__(self, slots: GroupLayout, num_blocks: int, hash_bytes: int) -> None:
        """vLLM's own hashes, which are what events are about, have `hash_bytes` bytes; some of ours are longer."""
        self._slots = slots
        self._hash_bytes = hash_bytes
        self._notes: OrderedDict[Key, _Note] = OrderedDict()
        self._max_notes = _NOTES_PER_BLOCK * num_blocks * len(slots)
        self._noted: dict[str, list[int]] = {}
        self._hashes: dict[Key, list[bytes]] = {}
        self._events: deque[Any] = deque()
        self._inner: EventSink | None = None

    @classmethod
    def for_config(cls, config: Any, layout: VllmLayout, slots: GroupLayout) -> KVEventSink | None:
        """A sink if vLLM was told to publish events."""
        events = config.kv_events_config
        if events is None or not events.enable_kv_cache_events:
            return None
        return cls(slots, layout.num_blocks, hash_bytes(config))

    def before(self, inner: EventSink) -> EventSink:
        """This sink, which passes everything on to `inner` first."""
        self._inner = inner
        return self

    def take(self) -> list[Any]:
        """The events since the last call."""
        taken: list[Any] = []
        while self._events:
            taken.append(self._events.popleft())
        return taken

    # --- the engine's thread: what fills ------------------------------------------------------------------------

    def note(self, request: VllmRequest, num_computed_tokens: int) -> None:
        """Remember what the request's full slots hold, as far as they are new."""
        done = self._noted.setdefault(request.request_id, [0] * len(self._slots))
        for group in self._slots.groups:
            known = len(request.block_hashes) * self._slots.hash_block_size
            full = min(num_computed_tokens, known) // group.slot_tokens
            for number in range(done[group.index], full):
                self._note_slot(request, group, number)
            done[group.index] = max(done[group.index], full)
        while len(self._notes) > self._max_notes:
            self._notes.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """The request is over; what it filled may still be stored."""
        self._noted.pop(request_id, None)

    def _note_slot(self, request: VllmRequest, group: Group, number: int) -> None:
        start, end = number * group.slot_tokens, (number + 1) * group.slot_tokens
        size, step = group.spec.block_size, self._slots.hash_block_size
        ends = range(start + size, end + 1, size)
        hashes = [bytes(request.block_hashes[token // step - 1]) for token in ends]
        live = request.request
        adapter = live.lora_request
        self._notes[hashes[-1] + bytes([group.index])] = _Note(
            hashes=hashes,
            parent=bytes(request.block_hashes[start // step - 1]) if start else None,
            token_ids=list(live.all_token_ids[start:end]),
            extra_keys=[generate_block_hash_extra_keys(live, token - size, token, 0)[0] for token in ends],
            lora_id=None if adapter is None else adapter.adapter_id,
            lora_name=None if adapter is None else adapter.name,
            session_id=live.session_id,
        )

    # --- the sink: what is stored, and what goes ----------------------------------------------------------------

    def stored(self, batch: StoreBatch) -> None:
        """Blocks can be loaded from now on."""
        if self._inner is not None:
            self._inner.stored(batch)
        for key in batch.keys:
            note = self._notes.pop(key, None)
            if note is not None and len(note.hashes) > 1:
                self._hashes[key] = note.hashes
            self._events.append(self._stored_event(key, note))

    def evicted(self, batch: EvictionBatch) -> None:
        """Blocks have left the pool."""
        if self._inner is not None:
            self._inner.evicted(batch)
        by_group: dict[int, list[bytes]] = {}
        for key in batch.rows.keys:
            by_group.setdefault(group_of(key), []).extend(self._hashes.pop(key, [hash_of(key)]))
        for group, hashes in by_group.items():
            self._events.append(
                BlockRemoved(block_hashes=self._shown(hashes), medium=MEDIUM_CPU, group_idx=group, locality=_LOCAL)
            )

    def was_reset(self, event: ResetEvent) -> None:
        """All blocks have left the pool. vLLM has no such event for one medium: listeners forget the device's too."""
        if self._inner is not None:
            self._inner.was_reset(event)
        self._hashes.clear()
        self._events.append(AllBlocksCleared())

    def regretted(self, keys: Sequence[Key], time_s: float) -> None:
        """Passed on."""
        if self._inner is not None:
            self._inner.regretted(keys, time_s)

    def request_ended(self, end: RequestEnd) -> None:
        """Passed on."""
        if self._inner is not None:
            self._inner.request_ended(end)

    def _stored_event(self, key: Key, note: _Note | None) -> Any:
        group = self._slots.groups[group_of(key)]
        about = {
            "block_size": group.spec.block_size,
            "medium": MEDIUM_CPU,
            "group_idx": group.index,
            "kv_cache_spec_kind": _KIND_WORDS[group.spec.kind],
            "kv_cache_spec_sliding_window": group.spec.window_tokens,
            "locality": _LOCAL,
        }
        if note is None:
            # The request is long gone: the block can be named, but not said what it holds.
            return BlockStored(
                block_hashes=self._shown([hash_of(key)]),
                parent_block_hash=None,
                token_ids=[],
                lora_id=None,
                lora_name=None,
                **about,
            )
        return BlockStored(
            block_hashes=self._shown(note.hashes),
            parent_block_hash=None if note.parent is None else self._shown([note.parent])[0],
            token_ids=note.token_ids,
            lora_id=note.lora_id,
            lora_name=note.lora_name,
            extra_keys=to_event_extra_keys(note.extra_keys),
            session_id=note.session_id,
            **about,
        )

    def _shown(self, hashes: Sequence[bytes]) -> list[Any]:
        return [maybe_convert_block_hash(block_hash[: self._hash_bytes]) for block_hash in hashes]
