"""Query of a prompt by an operator or a router: how many of its tokens the device, the pool and each tier hold.

A query promises nothing: blocks may come and go while it runs. It pins nothing, and counts as no use of a block.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.core.engine_api import DeviceView
from kvferry.core.groups import Group, GroupKind, GroupLayout
from kvferry.core.keys import Key, make_keys
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.lookup import find_agreed_end, in_order
from kvferry.core.tiers.base import TierResult
from kvferry.core.tiers.client import TierClient

_MAX_TRIES = 3

Held = list[NDArray[np.bool_]]
"""By group: which of the prompt's blocks are held."""


@dataclass(frozen=True, slots=True)
class PrefixHeld:
    """Tokens of the longest prefix of a prompt that is held by the device, the pool, each tier, and all together.

    A tier that did not answer in time is None, and counts as empty in `anywhere`.
    """

    device: int
    pool: int
    tiers: Mapping[str, int | None]
    anywhere: int


@dataclass(frozen=True, slots=True)
class MissingSlots:
    """Slots of a prompt, by their positions in a group, that the pool lacks and the tier `name` has."""

    group: Group
    name: str
    positions: NDArray[np.int64]


class PrefixQuery:
    """One query. Thread: any, but one at a time; the manager lock is acquired in short holds."""

    def __init__(
        self,
        manager: OffloadManager,
        layout: GroupLayout,
        device: DeviceView,
        clients: Sequence[TierClient],
        block_hashes: Sequence[bytes],
    ) -> None:
        """`block_hashes` are those of the prompt, as the engine makes them; the caller limits their number."""
        self.batch_keys = step = manager.table.batch_slots
        """Keys that are looked up under one hold of the manager lock, or at once in a tier."""
        self._manager = manager
        self._layout = layout
        # Device blocks have keys of their own; a slot of the pool has that of its last block.
        self._blocks = GroupLayout([group.spec for group in layout.groups], 1, layout.hash_block_size)
        self.num_tokens = len(block_hashes) * layout.hash_block_size
        self._end_token = self.num_tokens - self.num_tokens % layout.alignment_tokens
        self.keys = [_keys_of(group, block_hashes) for group in layout.groups]
        """By group: the keys of the prompt's slots."""
        self._in_pool = [self._find_slots(keys) for keys in self.keys]
        self._pool = self._to_blocks(self._in_pool)
        hashes = block_hashes[: self._end_token // layout.hash_block_size]
        self._device = [_find_resident(device, _keys_of(group, hashes), step) for group in self._blocks.groups]
        self._found: Mapping[str, Held | None] = {}
        self._answers = {client.name: _TierAnswer(client, layout.groups, self.keys, step) for client in clients}

    def ask_tiers(self, now_s: float) -> None:
        """Look the keys up in the tiers; their answers come with the results of `Tiering.poll`."""
        with self._manager.lock:
            for answer in self._answers.values():
                answer.ask(now_s)

    def has_answers(self) -> bool:
        """Return whether every tier has answered, or will not."""
        with self._manager.lock:
            return not any(answer.is_open for answer in self._answers.values())

    def close(self) -> PrefixHeld:
        """Stop looking, and return what was found."""
        with self._manager.lock:
            held_by_tier = self._found = {name: answer.close() for name, answer in self._answers.items()}
        in_tiers = {name: None if held is None else self._to_blocks(held) for name, held in held_by_tier.items()}
        places = [self._device, self._pool, *(held for held in in_tiers.values() if held is not None)]
        together = [np.logical_or.reduce(of_group) for of_group in zip(*places, strict=True)]
        return PrefixHeld(
            self._longest(self._device),
            self._longest(self._pool),
            {name: None if held is None else self._longest(held) for name, held in in_tiers.items()},
            self._longest(together),
        )

    def keys_at(self, part: MissingSlots) -> list[Key]:
        """Return the keys of these slots."""
        keys = self.keys[part.group.index]
        return [keys[position] for position in part.positions.tolist()]

    def missing_slots(self, names: Collection[str]) -> list[MissingSlots]:
        """Return what the pool lacks of the longest prefix that it would hold with the blocks of these tiers.

        A block is taken from the first of the tiers that has it. Requires: closed.
        """
        chosen = [(name, held) for name, held in self._found.items() if name in names and held is not None]
        places = [self._in_pool, *(held for _, held in chosen)]
        together = [np.logical_or.reduce(of_group) for of_group in zip(*places, strict=True)]
        end_token = self._longest(self._to_blocks(together))
        missing: list[MissingSlots] = []
        for group in self._layout.groups:
            first = group.spec.needed_from(end_token) // group.slot_tokens
            end = -(-end_token // group.slot_tokens)
            needed = np.zeros(len(self.keys[group.index]), dtype=np.bool_)
            needed[first:end] = ~self._in_pool[group.index][first:end]
            for name, held in chosen:
                positions = np.flatnonzero(needed & held[group.index])
                needed[positions] = False
                if len(positions):
                    missing.append(MissingSlots(group, name, positions))
        return missing

    def _find_slots(self, keys: Sequence[Key]) -> NDArray[np.bool_]:
        step = self.batch_keys
        parts = [self._manager.lookup_each(keys[i : i + step]) >= 0 for i in range(0, len(keys), step)]
        return np.concatenate(parts) if parts else np.zeros(0, dtype=np.bool_)

    def _to_blocks(self, slots: Held) -> Held:
        """Return which blocks are held, given which slots are."""
        held: Held = []
        for group, of_group in zip(self._layout.groups, slots, strict=True):
            blocks = np.zeros(self._end_token // group.spec.block_size, dtype=np.bool_)
            in_slots = np.repeat(of_group, group.slot_blocks)[: len(blocks)]
            blocks[: len(in_slots)] = in_slots
            held.append(blocks)
        return held

    def _longest(self, held: Held) -> int:
        """Return the tokens of the longest prefix that every group of the model could be loaded with.

        Blocks that `GroupLayout.skipped_tokens` leaves out count: the prompt may go on.
        """
        end_token, alignment = self._end_token, self._blocks.alignment_tokens
        windowed: list[Group] = []
        for group in self._blocks.groups:
            if group.spec.kind is not GroupKind.FULL:
                windowed.append(group)
                continue
            gaps = np.flatnonzero(~held[group.index])
            num_blocks = int(gaps[0]) if len(gaps) else len(held[group.index])
            end_token = min(end_token, num_blocks * group.spec.block_size // alignment * alignment)
        if not windowed:
            return end_token
        of_windows = [held[group.index][: end_token // group.spec.block_size] for group in windowed]
        return find_agreed_end(windowed, of_windows, 0, end_token, alignment)


class _TierAnswer:
    """Which keys a tier has, looked up batch by batch. Requires: manager lock held."""

    def __init__(
        self, client: TierClient, groups: Sequence[Group], keys: Sequence[Sequence[Key]], batch_keys: int
    ) -> None:
        self.is_open = client.is_usable
        self._client = client
        self._groups = groups
        self._keys = keys
        self._batch_keys = batch_keys
        self._held: Held = [np.zeros(len(of_group), dtype=np.bool_) for of_group in keys]
        self._group = 0
        self._first = 0
        self._is_complete = False

    def ask(self, now_s: float) -> None:
        """Look up the next batch; the answer is complete if there is none."""
        while self.is_open and self._group < len(self._keys) and self._first >= len(self._keys[self._group]):
            self._group, self._first = self._group + 1, 0
        if not self.is_open:
            return
        if self._group == len(self._keys):
            self.is_open, self._is_complete = False, True
            return
        batch = self._keys[self._group][self._first : self._first + self._batch_keys]
        self._client.look_up(batch, now_s, self._take)

    def close(self) -> Held | None:
        """Return what was found, None unless the tier has answered everything."""
        self.is_open = False
        return self._held if self._is_complete else None

    def _take(self, result: TierResult | None, now_s: float) -> None:
        if result is None or not self.is_open:
            self.is_open = False
            return
        of_group = self._held[self._group]
        of_group[self._first : self._first + len(result.ok)] = result.ok
        is_full = self._groups[self._group].spec.kind is GroupKind.FULL
        # What is behind a gap of a group with full attention is no part of a prefix.
        self._first = len(of_group) if is_full and not result.ok.all() else self._first + len(result.ok)
        self.ask(now_s)


def _keys_of(group: Group, block_hashes: Sequence[bytes]) -> list[Key]:
    return make_keys(block_hashes[group.hashes_per_slot - 1 :: group.hashes_per_slot], group.index)


def keys_in_order(layout: GroupLayout, block_hashes: Sequence[bytes]) -> list[Key]:
    """Return the keys of all groups' slots of a prompt with these block hashes, in the order of their ends."""
    num_tokens = len(block_hashes) * layout.hash_block_size
    return in_order(layout.groups, [_keys_of(group, block_hashes) for group in layout.groups], 0, num_tokens)


def _find_resident(device: DeviceView, keys: Sequence[Key], batch_keys: int) -> NDArray[np.bool_]:
    """Return which keys the device holds; a batch that the engine keeps changing meanwhile counts as missing."""
    is_resident = np.zeros(len(keys), dtype=np.bool_)
    for first in range(0, len(keys), batch_keys):
        batch = keys[first : first + batch_keys]
        for _ in range(_MAX_TRIES):
            try:
                is_resident[first : first + len(batch)] = device.resident(batch)
            except (RuntimeError, StopIteration):
                # A container of the engine was changed while it was read.
                continue
            break
    return is_resident
