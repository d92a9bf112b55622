"""vLLM's KV events for the host pool, so that routers that subscribe to an engine know which blocks it can load.

A `BlockStored` event carries the tokens of its blocks, which are only known while a request has them: they are noted as
its blocks fill, and kept while the pool holds the block. Nothing of this happens unless vLLM publishes events.
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
from kvferry.core.pool.events import EventSink, EvictionBatch, RequestEnd, ResetEvent, StoreBatch

MAX_BLOCKS_PER_TAKE = 4096
"""Slots reported with one step of the engine: a reset or a warm start may concern the whole pool."""
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
    """Content of a slot, for its event. `hashes` are those of its blocks."""

    group: int
    hashes: list[bytes]
    parent: bytes | None
    token_ids: array[int]
    extra_keys: list[tuple[Any, ...] | None]
    lora_id: int | None
    lora_name: str | None
    session_id: str | None

    @property
    def after(self) -> tuple[object, ...]:
        """Equal to `end` of the note that this one continues."""
        return self.group, self.session_id, self.parent

    @property
    def end(self) -> tuple[object, ...]:
        """See `after`."""
        return self.group, self.session_id, self.hashes[-1]


_Reported = tuple[Key, _Note | None]
"""A slot that entered or left the pool. The note is None where no request has shown the tokens yet."""


class KVEventSink:
    """An `EventSink` that turns changes of the pool into vLLM's events.

    The methods of `EventSink` are called on any thread and only queue. All others: engine thread.
    """

    def __init__(self, slots: GroupLayout, num_blocks: int, hash_bytes: int) -> None:
        """vLLM's own hashes, which are what events are about, have `hash_bytes` bytes; some of ours are longer."""
        self._slots = slots
        self._hash_bytes = hash_bytes
        self._notes: OrderedDict[Key, _Note] = OrderedDict()
        self._max_notes = _NOTES_PER_BLOCK * num_blocks * len(slots)
        self._noted: dict[str, list[int]] = {}
        # Slots that subscribers know of, as of the changes taken so far.
        self._reported: dict[Key, _Note | None] = {}
        # Changes in their order: whether slots entered, and which. Iterators, so that a large one is reported in parts.
        self._changes: deque[tuple[bool, Iterator[_Reported]]] = deque()
        self._device: Any = None
        self._device_index: Any = None
        self._repeating: Iterator[_Reported] | None = None
        self._inner: EventSink | None = None

    @classmethod
    def for_config(cls, config: Any, layout: VllmLayout, slots: GroupLayout) -> KVEventSink | None:
        """Return a sink if vLLM publishes events."""
        events = config.kv_events_config
        if events is None or not events.enable_kv_cache_events:
            return None
        return cls(slots, layout.num_blocks, hash_bytes(config))

    def before(self, inner: EventSink) -> EventSink:
        """This sink, which passes everything on to `inner` first."""
        self._inner = inner
        return self

    def bind(self, device: Any) -> None:
        """Watch vLLM's block pool for resets, whose event makes subscribers forget the host pool as well."""
        self._device = device
        self._device_index = _index_of(device)

    @property
    def is_behind(self) -> bool:
        """Whether `take` has more events to return."""
        return bool(self._changes)

    def take(self) -> list[Any]:
        """Return the events since the last call, or the first of them if they concern very many slots."""
        self._repeat_after_clear()
        events: list[Any] = []
        entered: dict[Key, _Note | None] = {}
        left: list[_Reported] = []
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

    def note(self, request: VllmRequest, num_computed_tokens: int) -> None:
        """Remember the content of the request's full slots, as far as they are new."""
        done = self._noted.setdefault(request.request_id, [0] * len(self._slots))
        for group in self._slots.groups:
            known = len(request.block_hashes) * self._slots.hash_block_size
            full = min(num_computed_tokens, known) // group.slot_tokens
            for number in range(done[group.index], full):
                self._note_slot(request, group, number)
            done[group.index] = max(done[group.index], full)
        while len(self._notes) > self._max_notes:
            self._notes.popitem(last=False)

    def report(self, request: VllmRequest, num_tokens: int) -> None:
        """Report once more the slots of the pool that hold the request's first tokens."""
        self.note(request, num_tokens)
        self._changes.append((True, self._again(self._keys_of(request, num_tokens))))

    def forget(self, request_id: str) -> None:
        """The request is over; its blocks may still be stored."""
        self._noted.pop(request_id, None)

    def _keys_of(self, request: VllmRequest, num_tokens: int) -> list[Key]:
        hashes = request.block_hashes
        step = self._slots.hash_block_size
        num_known = min(num_tokens, len(hashes) * step)
        return [
            _key(hashes[end // step - 1], group)
            for group in self._slots.groups
            for end in range(group.slot_tokens, num_known + 1, group.slot_tokens)
        ]

    def _note_slot(self, request: VllmRequest, group: Group, number: int) -> None:
        start, end = number * group.slot_tokens, (number + 1) * group.slot_tokens
        size, step = group.spec.block_size, self._slots.hash_block_size
        key = _key(request.block_hashes[end // step - 1], group)
        is_reported = key in self._reported
        if is_reported and self._reported[key] is not None:
            return
        ends = range(start + size, end + 1, size)
        live = request.request
        adapter = live.lora_request
        note = _Note(
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
            # An earlier process stored this slot, so that it was reported without its tokens.
            self._reported[key] = note
            self._changes.append((True, self._again([key])))
        else:
            self._notes[key] = note

    # --- changes of the pool --------------------------------------------------------------------------------------

    def recovered(self, keys: Sequence[Key]) -> None:
        """Report slots of an earlier process. Requires: manager lock held."""
        self._changes.append((True, self._enter(keys)))

    def stored(self, batch: StoreBatch) -> None:
        """Queue slots that entered."""
        if self._inner is not None:
            self._inner.stored(batch)
        self._changes.append((True, self._enter(batch.keys)))

    def evicted(self, batch: EvictionBatch) -> None:
        """Queue slots that left."""
        if self._inner is not None:
            self._inner.evicted(batch)
        self._changes.append((False, self._leave(batch.rows.keys)))

    def was_reset(self, event: ResetEvent) -> None:
        """Queue that all slots left. Named one by one: vLLM's event for it does not say of which medium."""
        if self._inner is not None:
            self._inner.was_reset(event)
        self._changes.append((False, self._leave_all()))

    def regretted(self, keys: Sequence[Key], time_s: float) -> None:
        """Passed on."""
        if self._inner is not None:
            self._inner.regretted(keys, time_s)

    def request_ended(self, end: RequestEnd) -> None:
        """Passed on."""
        if self._inner is not None:
            self._inner.request_ended(end)

    # Generators, which run when the change is taken: on the engine thread, after all changes before.

    def _enter(self, keys: Sequence[Key]) -> Iterator[_Reported]:
        for key in keys:
            note = self._reported[key] = self._notes.pop(key, None)
            yield key, note

    def _again(self, keys: Iterable[Key]) -> Iterator[_Reported]:
        for key in keys:
            if key in self._reported:
                yield key, self._reported[key]

    def _leave(self, keys: Sequence[Key]) -> Iterator[_Reported]:
        for key in keys:
            if key in self._reported:
                yield key, self._reported.pop(key)

    def _leave_all(self) -> Iterator[_Reported]:
        gone, self._reported = self._reported, {}
        while gone:
            yield gone.popitem()

    def _repeat_after_clear(self) -> None:
        """Report the whole pool once more if vLLM has reset its own cache since the last call."""
        index = _index_of(self._device)
        if index is self._device_index:
            return
        self._device_index = index
        if self._repeating is not None and self._changes and self._changes[0][1] is self._repeating:
            self._changes.popleft()
        # First, while `_reported` is as subscribers knew it.
        self._repeating = self._again(list(self._reported))
        self._changes.appendleft((True, self._repeating))

    # --- events ---------------------------------------------------------------------------------------------------

    def _stored_events(self, slots: dict[Key, _Note | None]) -> list[Any]:
        runs = _runs([note for note in slots.values() if note is not None])
        unknown = [self._unknown_event(key) for key, note in slots.items() if note is None]
        return unknown + [self._stored_event(run) for run in runs]

    def _stored_event(self, run: Sequence[_Note]) -> Any:
        first = run[0]
        return BlockStored(
            block_hashes=self._shown(chain.from_iterable(note.hashes for note in run)),
            parent_block_hash=None if first.parent is None else self._shown([first.parent])[0],
            token_ids=list(chain.from_iterable(note.token_ids for note in run)),
            lora_id=first.lora_id,
            lora_name=first.lora_name,
            extra_keys=to_event_extra_keys(chain.from_iterable(note.extra_keys for note in run)),
            session_id=first.session_id,
            **self._about(first.group),
        )

    def _unknown_event(self, key: Key) -> Any:
        """The event of a block whose tokens are not known: one a block, since a list of hashes means a chain."""
        return BlockStored(
            block_hashes=self._shown([hash_of(key)]),
            parent_block_hash=None,
            token_ids=[],
            lora_id=None,
            lora_name=None,
            **self._about(group_of(key)),
        )

    def _about(self, index: int) -> dict[str, Any]:
        group = self._slots.groups[index]
        return {
            "block_size": group.spec.block_size,
            "medium": MEDIUM_CPU,
            "group_idx": index,
            "kv_cache_spec_kind": _KIND_WORDS[group.spec.kind],
            "kv_cache_spec_sliding_window": group.spec.window_tokens,
            "locality": _LOCAL,
        }

    def _removed_events(self, slots: Iterable[_Reported]) -> list[Any]:
        by_group: dict[int, list[bytes]] = {}
        for key, note in slots:
            by_group.setdefault(group_of(key), []).extend([hash_of(key)] if note is None else note.hashes)
        return [
            BlockRemoved(block_hashes=self._shown(hashes), medium=MEDIUM_CPU, group_idx=group, locality=_LOCAL)
            for group, hashes in by_group.items()
        ]

    def _shown(self, hashes: Iterable[bytes]) -> list[Any]:
        return [maybe_convert_block_hash(block_hash[: self._hash_bytes]) for block_hash in hashes]


def _key(block_hash: bytes, group: Group) -> Key:
    return bytes(block_hash) + bytes([group.index])


def _index_of(device: Any) -> Any:
    """The index of vLLM's block pool, which vLLM replaces when it resets the pool."""
    return getattr(device, "cached_block_hash_to_block", None)


def _runs(notes: Sequence[_Note]) -> list[list[_Note]]:
    """Chain notes of consecutive slots of one prefix, in whichever order they come."""
    following: dict[tuple[object, ...], list[_Note]] = {}
    for note in notes:
        following.setdefault(note.after, []).append(note)
    ends = {note.end for note in notes}
    starts = deque(note for note in notes if note.after not in ends)
    runs: list[list[_Note]] = []
    while starts:
        run = [starts.popleft()]
        while (found := following.get(run[-1].end)) is not None:
            run.append(found[0])
            starts += found[1:]
        runs.append(run)
    return runs
