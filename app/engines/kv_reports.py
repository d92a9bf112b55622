"""Events about the blocks in one place, with which routers track what an engine can use: entries, removals, contents.

A block of an event is a slot, which is found and loaded as a whole, by the hash of its last block. A `BlockStored`
event contains the tokens of its slots, which are known only while a request has them. They are recorded when blocks are
filled, kept while the place holds the slots, and up to a limit before and after that.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, NamedTuple

from kvferry.core.groups import Group, GroupKind, GroupLayout
from kvferry.core.keys import Key, group_of, hash_of, make_keys

CONTENTS_PER_BLOCK = 4
"""Contents per device block that are kept of blocks outside the place.

In lazy mode a block may be stored long after its request has finished, and one that left may be stored again.
"""
_LOCAL = "LOCAL"
_KIND_NAMES = {
    GroupKind.FULL: "full_attention",
    GroupKind.SLIDING: "sliding_window",
    GroupKind.RECURRENT: "mamba",
}


@dataclass(frozen=True, slots=True)
class SlotContent:
    """Content of a slot for its event, with the hash of its last block and of the block before its first."""

    group: int
    hash: bytes
    parent: bytes | None
    token_ids: array[int]
    extra_keys: tuple[Any, ...] | None
    lora_id: int | None = None
    lora_name: str | None = None
    session_id: str | None = None

    @property
    def previous_end(self) -> tuple[object, ...]:
        """`end` of the preceding slot of the prefix."""
        return self.group, self.session_id, self.parent

    @property
    def end(self) -> tuple[object, ...]:
        """Identifies the end of this slot; see `previous_end`."""
        return self.group, self.session_id, self.hash


class EventTypes(NamedTuple):
    """How events are made: the constructors of both, and what block hashes and extra keys are in them."""

    stored: Callable[..., Any]
    removed: Callable[..., Any]
    external_hash: Callable[[bytes], int | bytes]
    extra_keys: Callable[[Iterable[tuple[Any, ...] | None]], Any]


_Change = tuple[Key, SlotContent | None]
"""A slot that entered or left; the content is None if no request had its tokens yet."""
Changes = Iterator[_Change]


class BlockReports:
    """Changes of one place, in their order, and the events of them.

    Thread: any for `enter`, `leave` and `leave_all`, which only append to a queue; one for all others.
    """

    def __init__(self, slots: GroupLayout, medium: str, types: EventTypes, num_device_blocks: int) -> None:
        """Create reports of slots of this layout."""
        self._slots = slots
        self._medium = medium
        self._types = types
        self._contents: OrderedDict[Key, SlotContent] = OrderedDict()
        self._max_contents = CONTENTS_PER_BLOCK * num_device_blocks * len(slots)
        self._completed: list[Key] = []
        # Slots that subscribers know of after the changes returned so far.
        self._reported: dict[Key, SlotContent | None] = {}
        # Changes in their order: whether slots entered, and an iterator of the slots, which reports them in parts.
        self._changes: deque[tuple[bool, Changes]] = deque()
        self._repeated: Changes | None = None

    @property
    def has_events(self) -> bool:
        """Whether `take` has events to return."""
        return bool(self._changes)

    # --- contents ---------------------------------------------------------------------------------------------------

    def lacks(self, key: Key) -> bool:
        """Return whether a slot is not reported, or was reported without its tokens."""
        return self._reported.get(key) is None

    def record(self, key: Key, content: SlotContent) -> None:
        """Record the content of a slot; `end_recording` is to be called after some."""
        if key in self._reported:
            self._reported[key] = content
            self._completed.append(key)
        else:
            self._keep(key, content)

    def end_recording(self) -> None:
        """Report slots again that were reported without their tokens, and forget the oldest contents beyond the limit.

        Contents of slots that are in the place do not count.
        """
        if self._completed:
            # Removed first: subscribers may count reports, and keep a block until as many removals came.
            self._changes.append((False, self._withdraw(self._completed)))
            self.repeat(self._completed)
            self._completed = []
        self._forget_oldest()

    def _keep(self, key: Key, content: SlotContent | None) -> None:
        if content is not None:
            self._contents[key] = content
            self._contents.move_to_end(key)

    def _forget_oldest(self) -> None:
        while len(self._contents) > self._max_contents:
            self._contents.popitem(last=False)

    # --- changes ----------------------------------------------------------------------------------------------------

    def enter(self, keys: Sequence[Key]) -> None:
        """Queue slots that entered."""
        self._changes.append((True, self._enter(keys)))

    def leave(self, keys: Sequence[Key]) -> None:
        """Queue slots that left."""
        self._changes.append((False, self._leave(keys)))

    def leave_all(self) -> None:
        """Queue the removal of all slots."""
        self._changes.append((False, self._leave_all()))

    def repeat(self, keys: Sequence[Key]) -> None:
        """Report those of these slots again that are in the place."""
        self._changes.append((True, self._repeat(keys)))

    def repeat_all(self) -> None:
        """Report all slots again, as subscribers have forgotten them; before all changes that were queued."""
        if self._repeated is not None and self._changes and self._changes[0][1] is self._repeated:
            self._changes.popleft()
        # `_reported` is what subscribers knew before they forgot it.
        self._repeated = self._repeat(list(self._reported))
        self._changes.appendleft((True, self._repeated))

    # Generators of changes. They run in `take`, after the changes queued before them.

    def _enter(self, keys: Sequence[Key]) -> Changes:
        for key in keys:
            if key not in self._reported:
                content = self._reported[key] = self._contents.pop(key, None)
                yield key, content

    def _repeat(self, keys: Iterable[Key]) -> Changes:
        for key in keys:
            if key in self._reported:
                yield key, self._reported[key]

    def _withdraw(self, keys: Iterable[Key]) -> Changes:
        for key in keys:
            if key in self._reported:
                yield key, None

    def _leave(self, keys: Sequence[Key]) -> Changes:
        for key in keys:
            if key in self._reported:
                content = self._reported.pop(key)
                # It may come back from the device, where requests that find it do not record it again.
                self._keep(key, content)
                self._forget_oldest()
                yield key, content

    def _leave_all(self) -> Changes:
        removed, self._reported = self._reported, {}
        while removed:
            key, content = removed.popitem()
            if content is not None and len(self._contents) < self._max_contents:
                # As an older one, as others are of blocks that were not stored yet.
                self._contents[key] = content
                self._contents.move_to_end(key, last=False)
            yield key, content

    # --- events -----------------------------------------------------------------------------------------------------

    def take(self, max_slots: int) -> list[Any]:
        """Return the events since the last call, or those of the first `max_slots` slots."""
        events: list[Any] = []
        entered: dict[Key, SlotContent | None] = {}
        left: list[_Change] = []
        num_left = max_slots
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

    def _stored_events(self, slots: dict[Key, SlotContent | None]) -> list[Any]:
        runs = _runs([content for content in slots.values() if content is not None])
        unknown = [key for key, content in slots.items() if content is None]
        return self._unknown_events(unknown) + [self._stored_event(run) for run in runs]

    def _stored_event(self, run: Sequence[SlotContent]) -> Any:
        first = run[0]
        return self._types.stored(
            block_hashes=self._event_hashes(content.hash for content in run),
            parent_block_hash=None if first.parent is None else self._event_hashes([first.parent])[0],
            token_ids=list(chain.from_iterable(content.token_ids for content in run)),
            lora_id=first.lora_id,
            lora_name=first.lora_name,
            extra_keys=self._types.extra_keys(content.extra_keys for content in run),
            session_id=first.session_id,
            **self._group_fields(first.group),
        )

    def _unknown_events(self, keys: Iterable[Key]) -> list[Any]:
        """Return the events of slots with unknown tokens and predecessors, one for each group."""
        return [
            self._types.stored(
                block_hashes=self._event_hashes(hashes),
                parent_block_hash=None,
                token_ids=[],
                lora_id=None,
                lora_name=None,
                **self._group_fields(group),
            )
            for group, hashes in _by_group(keys).items()
        ]

    def _group_fields(self, index: int) -> dict[str, Any]:
        group = self._slots.groups[index]
        return {
            "block_size": group.slot_tokens,
            "medium": self._medium,
            "group_idx": index,
            "kv_cache_spec_kind": _KIND_NAMES[group.spec.kind],
            "kv_cache_spec_sliding_window": group.spec.window_tokens,
            "locality": _LOCAL,
        }

    def _removed_events(self, slots: Iterable[_Change]) -> list[Any]:
        return [
            self._types.removed(
                block_hashes=self._event_hashes(hashes), medium=self._medium, group_idx=group, locality=_LOCAL
            )
            for group, hashes in _by_group(key for key, _ in slots).items()
        ]

    def _event_hashes(self, hashes: Iterable[bytes]) -> list[Any]:
        return [self._types.external_hash(block_hash) for block_hash in hashes]


def slot_key(block_hash: bytes, group: Group) -> Key:
    """Return the key of the slot that ends with a block."""
    return make_keys((bytes(block_hash),), group.index)[0]


def _by_group(keys: Iterable[Key]) -> dict[int, list[bytes]]:
    """Return the hashes of keys by their group."""
    hashes: dict[int, list[bytes]] = {}
    for key in keys:
        hashes.setdefault(group_of(key), []).append(hash_of(key))
    return hashes


def _runs(contents: Sequence[SlotContent]) -> list[list[SlotContent]]:
    """Group consecutive slots of the same prefix; `contents` may have any order."""
    following: dict[tuple[object, ...], list[SlotContent]] = {}
    for content in contents:
        following.setdefault(content.previous_end, []).append(content)
    ends = {content.end for content in contents}
    starts = deque(content for content in contents if content.previous_end not in ends)
    runs: list[list[SlotContent]] = []
    while starts:
        run = [starts.popleft()]
        while (next_contents := following.get(run[-1].end)) is not None:
            run.append(next_contents[0])
            starts += next_contents[1:]
        runs.append(run)
    return runs
