"""Hits: the longest prefix that every group of a model can bring back from the pool, and the blocks it consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.core.groups import Group, GroupKind, GroupLayout
from kvferry.core.transfers import NO_SLOTS, BlockRun, Slots


@dataclass(frozen=True, slots=True)
class GroupHit:
    """The slots of one group that a hit reads, from number `first_slot` of the request on."""

    group: Group
    first_slot: int
    slots: Slots

    @property
    def end_slot(self) -> int:
        """The number of the request's slot behind the last one read."""
        return self.first_slot + len(self.slots)


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """`num_tokens` tokens behind the first `first_token`, and where their blocks lie, group by group."""

    first_token: int
    num_tokens: int
    groups: tuple[GroupHit, ...]

    @property
    def end_token(self) -> int:
        """The first token that is not part of it."""
        return self.first_token + self.num_tokens

    @property
    def slots(self) -> Slots:
        """All slots that it reads, each once."""
        if len(self.groups) == 1:
            return self.groups[0].slots
        return np.concatenate([hit.slots for hit in self.groups]) if self.groups else NO_SLOTS

    @property
    def num_blocks(self) -> int:
        """Blocks to copy, of all groups."""
        return sum(end - first for first, end in (self.blocks_of(hit.group) for hit in self.groups))

    @property
    def num_bytes(self) -> int:
        """Bytes to copy, of all groups."""
        return sum(
            (end - first) * hit.group.spec.block_bytes
            for hit in self.groups
            for first, end in (self.blocks_of(hit.group),)
        )

    def blocks_of(self, group: Group) -> tuple[int, int]:
        """First and end of the group's blocks that have to be copied, as indices into the request's table.

        Not what the device has, and nothing that the tokens behind the hit will never look at.
        """
        needed = max(self.first_token, group.spec.needed_from(self.end_token))
        return needed // group.spec.block_size, self.end_token // group.spec.block_size

    def shorten(self, num_tokens: int) -> PrefixHit | None:
        """The first `num_tokens` tokens of it; None if they need slots that it does not name, as windows may."""
        if num_tokens == self.num_tokens:
            return self
        shorter = PrefixHit(self.first_token, num_tokens, self.groups)
        groups: list[GroupHit] = []
        for hit in self.groups:
            first, end = shorter.slots_of(hit.group)
            if first < hit.first_slot or end > hit.end_slot:
                return None
            groups.append(GroupHit(hit.group, first, hit.slots[first - hit.first_slot : end - hit.first_slot]))
        return PrefixHit(self.first_token, num_tokens, tuple(groups))

    def slots_of(self, group: Group) -> tuple[int, int]:
        """First and end of the group's slots that its blocks lie in, as numbers within the request."""
        first, end = self.blocks_of(group)
        return first // group.slot_blocks, -(-end // group.slot_blocks)

    def runs(self, tables: Sequence[Sequence[int]], null_block: int) -> tuple[BlockRun, ...] | None:
        """What to copy to which device blocks; None if a table is too short. Placeholders are passed over."""
        runs: list[BlockRun] = []
        for hit in self.groups:
            first, end = self.blocks_of(hit.group)
            block_ids = np.array(tables[hit.group.index][first:end], dtype=np.int64)
            if len(block_ids) < end - first:
                return None
            blocks = np.arange(first, end)
            slots = hit.slots[blocks // hit.group.slot_blocks - hit.first_slot]
            run = BlockRun(hit.group.index, block_ids, slots, blocks % hit.group.slot_blocks)
            real = block_ids != null_block
            if not real.all():
                run = BlockRun(run.group, block_ids[real], slots[real], run.parts[real])
            runs.append(run)
        return tuple(runs)


Finder = Callable[[Group, int, int], Slots]
"""The pool's slots for a request's slots `first` to `end` of a group."""


def find_hit(
    layout: GroupLayout, first_token: int, limit_token: int, find_prefix: Finder, find_each: Finder
) -> PrefixHit:
    """The longest hit behind `first_token` that ends at or before `limit_token`; it may be of no tokens.

    `find_prefix` answers up to the first slot that is missing, `find_each` has -1 for every missing one.
    """
    alignment = layout.alignment_tokens
    nothing = PrefixHit(first_token, 0, ())
    end_token = limit_token // alignment * alignment
    if first_token % alignment or end_token <= first_token:
        return nothing
    found: dict[int, GroupHit] = {}
    for group in layout.groups:
        if group.spec.kind is not GroupKind.FULL:
            continue
        first = first_token // group.slot_tokens
        slots = find_prefix(group, first, -(-end_token // group.slot_tokens))
        found[group.index] = GroupHit(group, first, slots)
        end_token = min(end_token, (first + len(slots)) * group.slot_tokens // alignment * alignment)
        if end_token <= first_token:
            return nothing
    windowed = [group for group in layout.groups if group.index not in found]
    if windowed:
        end_token = _agree(windowed, first_token, end_token, alignment, find_each, found)
        if end_token <= first_token:
            return nothing
    whole = PrefixHit(first_token, end_token - first_token, ())
    groups = []
    for group in layout.groups:
        hit = found[group.index]
        first, end = whole.slots_of(group)
        groups.append(GroupHit(group, first, hit.slots[first - hit.first_slot : end - hit.first_slot]))
    return PrefixHit(first_token, whole.num_tokens, tuple(groups))


def _agree(
    groups: Sequence[Group],
    first_token: int,
    end_token: int,
    alignment: int,
    find_each: Finder,
    found: dict[int, GroupHit],
) -> int:
    """The longest length up to `end_token` whose blocks all of these groups have; `first_token` if there is none."""
    ends = np.arange(first_token + alignment, end_token + 1, alignment)
    agreed = np.ones(len(ends), dtype=np.bool_)
    for group in groups:
        first = first_token // group.slot_tokens
        slots = find_each(group, first, -(-end_token // group.slot_tokens))
        found[group.index] = GroupHit(group, first, slots)
        present = np.concatenate(([0], np.cumsum(slots >= 0)))
        needed = np.maximum(ends - (group.spec.reach_tokens or 0), first_token)
        starts = needed // group.spec.block_size // group.slot_blocks - first
        stops = -(-ends // group.slot_tokens) - first
        agreed &= present[stops] - present[starts] == stops - starts
    good = np.flatnonzero(agreed)
    return int(ends[good[-1]]) if len(good) else first_token
