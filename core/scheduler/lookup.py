"""Prefix lookup: the keys of a request's slots, and the longest prefix that every group of the model can load."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from enum import Enum
from heapq import merge

import numpy as np
from numpy.typing import NDArray

from kvferry.core.engine_api import DeviceView, EngineRequest
from kvferry.core.groups import Group, GroupKind, GroupLayout
from kvferry.core.keys import Key, make_keys
from kvferry.core.policy import RequestPolicy
from kvferry.core.pool.index import Ghosts, hash_keys
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.transfers import NO_SLOTS, BlockRun, Slots

_RESIDENT_BATCH = 64
"""Slots that the device is asked for at once."""


class RequestKeys:
    """The keys of one request's slots in each group, made from the engine's block hashes as they appear."""

    __slots__ = ("_groups", "by_group", "known_end", "recorded_end", "request")

    def __init__(self, request: EngineRequest, groups: Sequence[Group]) -> None:
        self.request = request
        self.by_group: list[list[Key]] = [[] for _ in groups]
        self._groups = groups
        self.recorded_end: int | None = None
        """End of the slots that `PrefixLookup.record_computed` has recorded."""
        self.known_end = 0
        """Tokens of the longest prefix that was found so far, with the blocks that `PrefixLookup.find` skips."""

    def extend(self, group: Group, num_slots: int) -> int:
        """Make the keys of the first `num_slots` slots, as far as they are hashed; return how many there are."""
        keys = self.by_group[group.index]
        if len(keys) < num_slots:
            # The chained hash of a slot's last block covers all blocks before it.
            step = group.hashes_per_slot
            hashes = self.request.block_hashes[(len(keys) + 1) * step - 1 : num_slots * step : step]
            keys += make_keys(hashes, group.index)
        return min(len(keys), num_slots)

    def extend_loadable(self) -> None:
        """Make the keys of all slots that a hit may contain. Thread: engine; the manager lock is not needed."""
        for group in self._groups:
            self.extend(group, (self.request.num_tokens - 1) // group.slot_tokens)

    def loadable_tokens(self, policy: RequestPolicy) -> int:
        """Return the number of leading tokens that may be loaded: all but the last, up to the policy's cap."""
        last = self.request.num_tokens - 1
        return last if policy.max_load_tokens is None else min(last, policy.max_load_tokens)

    def of(self, group: Group, first: int, end: int) -> list[Key]:
        """Return the keys of slots `first` to `end`, as far as they are hashed."""
        keys = self.by_group[group.index]
        return keys[first : end if end <= len(keys) else self.extend(group, end)]

    def of_inner_blocks(self, group: Group, first_block: int, end_block: int) -> list[Key]:
        """Return the keys of inner blocks, those that do not end a slot, among these blocks."""
        if group.slot_blocks == 1:
            return []
        step = group.hashes_per_slot // group.slot_blocks
        hashes = self.request.block_hashes
        numbers = range(first_block, min(end_block, len(hashes) // step))
        inner = (hashes[(i + 1) * step - 1] for i in numbers if (i + 1) % group.slot_blocks)
        return make_keys(inner, group.index)


@dataclass(frozen=True, slots=True)
class GroupHit:
    """Blocks `first_block` to `end_block` of a request in one group, in `slots` from slot number `first_slot` on."""

    group: Group
    first_block: int
    end_block: int
    first_slot: int
    slots: Slots


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """A loadable prefix: tokens `first_token` to `end_token` of a request, and the slots that hold their blocks.

    `slots` are those of all groups; `num_blocks` blocks of `num_bytes` bytes have to be copied.
    """

    first_token: int
    end_token: int
    num_tokens: int
    groups: tuple[GroupHit, ...] = ()
    slots: Slots = field(default_factory=lambda: NO_SLOTS)
    num_blocks: int = 0
    num_bytes: int = 0

    def shorten(self, num_tokens: int) -> PrefixHit | None:
        """Return the hit's first `num_tokens` tokens; None if they need slots that the hit lacks, as windows may."""
        if num_tokens == self.num_tokens:
            return self
        end_token = self.first_token + num_tokens
        hits = [_group_hit(hit.group, hit.slots, hit.first_slot, self.first_token, end_token) for hit in self.groups]
        groups = [hit for hit in hits if hit is not None]
        return _hit(self.first_token, end_token, groups) if len(groups) == len(hits) else None

    def runs(self, tables: Sequence[Sequence[int]], null_block: int) -> tuple[BlockRun, ...] | None:
        """Return the copies into the device blocks of `tables`, without null blocks; None if a table is too short."""
        runs: list[BlockRun] = []
        for hit in self.groups:
            block_ids = np.array(tables[hit.group.index][hit.first_block : hit.end_block], dtype=np.int64)
            if len(block_ids) < hit.end_block - hit.first_block:
                return None
            blocks = np.arange(hit.first_block, hit.end_block)
            slots = hit.slots[blocks // hit.group.slot_blocks - hit.first_slot]
            run = BlockRun(hit.group.index, block_ids, slots, blocks % hit.group.slot_blocks)
            real = block_ids != null_block
            if not real.all():
                run = BlockRun(run.group, block_ids[real], slots[real], run.numbers[real])
            runs.append(run)
        return tuple(runs)


class _Seen(Enum):
    SCHEDULED = "scheduled"
    COMPUTED = "computed"


class PrefixLookup:
    """Looks up prefixes of requests in the pool. Requires: manager lock held."""

    def __init__(self, manager: OffloadManager, layout: GroupLayout, device: DeviceView) -> None:
        self._manager = manager
        self._layout = layout
        self._device = device
        self._windowed = [group for group in layout.groups if group.spec.kind is not GroupKind.FULL]
        # Without full attention, neither pool nor device has the blocks between two boundaries.
        self.seen = None if layout.full_groups else self._new_ghosts()
        """Slots of requests that were scheduled or computed; None where they are not recorded."""

    @property
    def elsewhere(self) -> int:
        """Placeholder slot of a block that is not in the pool yet."""
        return self._manager.table.max_slots

    def find(
        self, keys: RequestKeys, first_token: int, limit_token: int, also: Container[Key] | None = None
    ) -> PrefixHit:
        """Find the longest hit after `first_token` that ends at or before `limit_token`; it may have no tokens.

        With `also`, these keys count as found, at the slot `elsewhere`. Blocks that `GroupLayout.skipped_tokens` leaves
        out are found only.
        """
        alignment = self._layout.alignment_tokens
        end_token = first_token if first_token % alignment else limit_token // alignment * alignment
        found: dict[int, Slots] = {}
        for group in self._layout.full_groups:
            if end_token > first_token:
                first = first_token // group.slot_tokens
                slots = self._find_leading(keys.of(group, first, -(-end_token // group.slot_tokens)), also)
                found[group.index] = slots
                end_token = min(end_token, (first + len(slots)) * group.slot_tokens // alignment * alignment)
        if self._layout.skipped_tokens and end_token > first_token:
            if not self._layout.full_groups:
                end_token = self._find_agreed_end(keys, first_token, end_token, also, found)
            keys.known_end = max(keys.known_end, end_token)
            end_token = min(end_token, keys.known_end - self._layout.skipped_tokens)
        if self._windowed and end_token > first_token:
            end_token = self._find_agreed_end(keys, first_token, end_token, also, found)
        if end_token <= first_token:
            return PrefixHit(first_token, first_token, 0)
        hits = [
            _group_hit(group, found[group.index], first_token // group.slot_tokens, first_token, end_token)
            for group in self._layout.groups
        ]
        return _hit(first_token, end_token, [hit for hit in hits if hit is not None])

    def find_fitting(
        self, keys: RequestKeys, hit: PrefixHit, limit_token: int, also: Container[Key], max_slots: int
    ) -> PrefixHit:
        """Find the longest hit with at most `max_slots` blocks from `also` and as many slots more than `hit`.

        `hit` is the longest one without `also`.
        """
        limit = limit_token
        while True:
            longer = self.find(keys, hit.first_token, limit, also)
            num_elsewhere = int(np.count_nonzero(longer.slots == self.elsewhere))
            num_wanted = max(num_elsewhere, len(longer.slots) - len(hit.slots))
            if num_wanted <= max_slots or longer.end_token <= hit.end_token:
                return longer
            gain = longer.end_token - hit.end_token
            limit = hit.end_token + gain * max(max_slots, 0) // num_wanted

    def list_elsewhere(self, keys: RequestKeys, hit: PrefixHit) -> list[tuple[Group, int, Key]]:
        """Return group, slot number and key of each block of a hit that is not in the pool yet, group by group."""
        blocks: list[tuple[Group, int, Key]] = []
        for one in hit.groups:
            of_group = keys.of(one.group, one.first_slot, one.first_slot + len(one.slots))
            indices = np.flatnonzero(one.slots == self.elsewhere).tolist()
            blocks += [(one.group, one.first_slot + i, of_group[i]) for i in indices]
        return blocks

    def count_resident(self, keys: RequestKeys, limit_token: int) -> int:
        """Return how many of a request's first tokens, up to `limit_token`, the device seems to hold in whole slots.

        An estimate: a slot counts by its last block, and windows and states are not examined. Thread: engine.
        """
        group, alignment = self._layout.prefix_group, self._layout.alignment_tokens
        num_held, num_slots = 0, limit_token // group.slot_tokens
        for first in range(0, num_slots, _RESIDENT_BATCH):
            batch = keys.of(group, first, min(first + _RESIDENT_BATCH, num_slots))
            held = self._device.resident(batch)
            num_held += next((i for i, one in enumerate(held) if not one), len(batch))
            if num_held < first + _RESIDENT_BATCH:
                break
        return max(num_held * group.slot_tokens // alignment * alignment - self._layout.skipped_tokens, 0)

    def find_boundary(self, keys: RequestKeys, hit_end: int) -> int:
        """Find where a request leaves the prefixes of requests before it.

        Full-attention groups have that prefix in the pool or on the device, though windows or states may be missing.
        Models without such a group have it if `record_scheduled` recorded it: a request that is scheduled together with
        the first one of its prefix stores the boundary already.

        Args:
            keys: The keys of the request.
            hit_end: The end of its hit, in tokens.

        Returns:
            The end of the hit that this prefix allows, in whole slots of every group; 0 if it is not longer than the
            request's.
        """
        if not self._windowed:
            return 0
        layout = self._layout
        end = keys.request.num_tokens - 1
        for group in layout.full_groups or layout.groups[:1]:
            if end <= hit_end:
                return 0
            first = hit_end // group.slot_tokens
            num_known = self._count_known(keys.of(group, first, end // group.slot_tokens))
            end = min(end, (first + num_known) * group.slot_tokens)
        end = (end - layout.skipped_tokens) // layout.slot_alignment_tokens * layout.slot_alignment_tokens
        return end if end > hit_end else 0

    def start_recording(self) -> None:
        """Record computed slots of models with full attention too, for lazy mode. Acquires the manager lock."""
        if self.seen is None:
            seen = self._new_ghosts()
            with self._manager.lock:
                self.seen = seen

    def record_scheduled(self, keys: RequestKeys) -> None:
        """Record the slots of a request that is about to be computed, for models without full attention."""
        if self.seen is None or self._layout.full_groups:
            return
        group = self._layout.prefix_group
        hashes = hash_keys(keys.of(group, 0, keys.request.num_tokens // group.slot_tokens))
        is_new = [seen is None for seen in self.seen.reasons(hashes)]
        self.seen.add(hashes[np.array(is_new, dtype=np.bool_)], _Seen.SCHEDULED)

    def record_computed(self, keys: RequestKeys, first_token: int, end_token: int) -> None:
        """Record that slots of a request are computed that end among these tokens; not with all models and modes."""
        if self.seen is None:
            return
        group = self._layout.prefix_group
        first, end = first_token // group.slot_tokens, end_token // group.slot_tokens
        if keys.recorded_end is not None:
            # The hashes of slots that end in tokens of steps ahead come later.
            first = min(first, keys.recorded_end)
        if first < end:
            computed = keys.of(group, first, end)
            keys.recorded_end = first + len(computed)
            self.seen.add(hash_keys(computed), _Seen.COMPUTED)

    def were_computed(self, keys: Sequence[Key]) -> list[bool]:
        """Return which keys `record_computed` has recorded."""
        if self.seen is None:
            return [False] * len(keys)
        return [seen is _Seen.COMPUTED for seen in self.seen.reasons(hash_keys(keys))]

    def _new_ghosts(self) -> Ghosts[_Seen]:
        return Ghosts(self._manager.num_slots, _Seen)

    def _count_known(self, keys: Sequence[Key]) -> int:
        """Count the leading keys that are in the pool or on the device, or belong to an earlier request."""
        if self.seen is not None and not self._layout.full_groups:
            seen = self.seen.reasons(hash_keys(keys))
            return next((i for i, known in enumerate(seen) if known is None), len(seen))
        count = len(self._manager.lookup(keys))
        if count == len(keys) or not self._device.resident([keys[count]])[0]:
            return count
        missing = np.flatnonzero(self._manager.lookup_each(keys) < 0).tolist()
        resident = self._device.resident([keys[i] for i in missing])
        return next((i for i, held in zip(missing, resident, strict=True) if not held), len(keys))

    def _find_leading(self, keys: Sequence[Key], also: Container[Key] | None) -> Slots:
        """Return the slots of the keys before the first that is missing."""
        if also is None:
            return self._manager.lookup(keys)
        slots = self._find_each(keys, also)
        gaps = np.flatnonzero(slots < 0)
        return slots[: gaps[0]] if len(gaps) else slots

    def _find_each(self, keys: Sequence[Key], also: Container[Key] | None) -> Slots:
        """Return the slot of each key, -1 if it is missing."""
        slots = self._manager.lookup_each(keys)
        if also:
            slots[[i for i in np.flatnonzero(slots < 0).tolist() if keys[i] in also]] = self.elsewhere
        return slots

    def _find_agreed_end(
        self,
        keys: RequestKeys,
        first_token: int,
        end_token: int,
        also: Container[Key] | None,
        found: dict[int, Slots],
    ) -> int:
        """Return the longest end up to `end_token` whose windows and states are all there, or `first_token`.

        Adds the slots of windowed groups to `found`, -1 where a slot is missing.
        """
        held: list[NDArray[np.bool_]] = []
        for group in self._windowed:
            first, end = first_token // group.slot_tokens, -(-end_token // group.slot_tokens)
            slots = np.full(end - first, -1, dtype=np.int64)
            hashed = keys.of(group, first, end)
            slots[: len(hashed)] = self._find_each(hashed, also)
            found[group.index] = slots
            held.append(slots >= 0)
        return find_agreed_end(self._windowed, held, first_token, end_token, self._layout.alignment_tokens)


def in_order(groups: Sequence[Group], by_group: Sequence[list[Key]], first_token: int, end_token: int) -> list[Key]:
    """Return the keys of all groups' slots with an end in (first_token, end_token], by that end."""
    parts = []
    for group, of_group in zip(groups, by_group, strict=True):
        size = group.slot_tokens
        first, end = first_token // size, end_token // size
        if len(groups) == 1:
            return of_group[first:end]
        parts.append([((i + 1) * size, key) for i, key in enumerate(of_group[first:end], first)])
    return [key for _, key in merge(*parts)]


def find_agreed_end(
    windowed: Sequence[Group],
    held: Sequence[NDArray[np.bool_]],
    first_token: int,
    end_token: int,
    alignment_tokens: int,
) -> int:
    """Return the longest aligned end up to `end_token` whose windows and states are all held, or `first_token`.

    `held` has, for each windowed group, which slots are held, from the slot of `first_token` to that of `end_token`.
    """
    ends = np.arange(first_token + alignment_tokens, end_token + 1, alignment_tokens)
    agreed = np.ones(len(ends), dtype=np.bool_)
    for group, slots in zip(windowed, held, strict=True):
        first = first_token // group.slot_tokens
        present = np.concatenate(([0], np.cumsum(slots)))
        needed = np.maximum(ends - (group.reach_tokens or 0), first_token)
        starts = needed // group.spec.block_size // group.slot_blocks - first
        stops = -(-ends // group.slot_tokens) - first
        agreed &= present[stops] - present[starts] == stops - starts
    good = np.flatnonzero(agreed)
    return int(ends[good[-1]]) if len(good) else first_token


def _group_hit(group: Group, slots: Slots, first_slot: int, first_token: int, end_token: int) -> GroupHit | None:
    """Return the blocks of a group that a hit needs, in `slots` from number `first_slot` on; None if any lacks there.

    The device already has the blocks before `first_token`; of windows, only the last is needed.
    """
    size = group.spec.block_size
    needed = first_token if group.reach_tokens is None else max(first_token, end_token - group.reach_tokens)
    first_block, end_block = needed // size, end_token // size
    first, end = first_block // group.slot_blocks, -(-end_block // group.slot_blocks)
    if first < first_slot or end > first_slot + len(slots):
        return None
    return GroupHit(group, first_block, end_block, first, slots[first - first_slot : end - first_slot])


def _hit(first_token: int, end_token: int, groups: Sequence[GroupHit]) -> PrefixHit:
    slots = groups[0].slots if len(groups) == 1 else np.concatenate([hit.slots for hit in groups])
    counts = [hit.end_block - hit.first_block for hit in groups]
    num_bytes = sum(count * hit.group.spec.block_bytes for count, hit in zip(counts, groups, strict=True))
    return PrefixHit(first_token, end_token, end_token - first_token, tuple(groups), slots, sum(counts), num_bytes)
