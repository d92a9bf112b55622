"""Recovery of slots from the headers of a kept pool, which alone decide what exists.

A slot is recovered only if the headers of all ranks are valid and agree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key
from kvferry.core.pool.index import hash_keys
from kvferry.core.transfers import NO_SLOTS, Slots
from kvferry.cuda_ops.persistent.format import Headers, HeaderState, PoolShape, are_sound, keys_of

_PART_SLOTS = 1 << 14
"""Headers processed together: two megabytes, which fit in the processor's cache."""


class DropReason(StrEnum):
    """Reasons why a slot is not recovered."""

    UNSEALED = "unsealed"
    DAMAGED = "damaged"
    TRUNCATED = "truncated"
    RESET = "reset"
    LEFT = "left"
    RANKS_DIFFER = "ranks_differ"
    DUPLICATE = "duplicate"
    FOREIGN = "foreign"
    """The whole pool was dropped because its fingerprint or a size differs."""


@dataclass(frozen=True, slots=True)
class RecoveredSlots:
    """Recovered slots as columns in the order of slots, and the number of dropped slots by reason.

    `sizes` are bytes of all ranks together.
    """

    slots: Slots
    keys: list[Key]
    generations: NDArray[np.int64]
    sizes: NDArray[np.int64]
    dropped: dict[DropReason, int]


def read_slots(ranks: list[Headers], shape: PoolShape, min_epoch: int, num_whole: int) -> RecoveredSlots:
    """Return what the headers of all ranks recover among the first `num_whole` slots. Changes nothing."""
    dropped: Counter[DropReason] = Counter()
    parts = [
        _read_part([headers[at : at + _PART_SLOTS] for headers in ranks], at, shape, min_epoch, num_whole, dropped)
        for at in range(0, len(ranks[0]), _PART_SLOTS)
    ]
    slots = np.concatenate([NO_SLOTS, *(part.slots for part in parts)])
    keys = list(chain.from_iterable(part.keys for part in parts))
    generations = np.concatenate([NO_SLOTS, *(part.generations for part in parts)])
    sizes = np.concatenate([NO_SLOTS, *(part.sizes for part in parts)])
    older = _older_of_equals(keys, generations)
    if older:
        dropped[DropReason.DUPLICATE] += len(older)
        stays = np.ones(len(slots), dtype=np.bool_)
        stays[older] = False
        keys = [keys[i] for i in stays.nonzero()[0].tolist()]
        slots, generations, sizes = slots[stays], generations[stays], sizes[stays]
    return RecoveredSlots(slots, keys, generations, sizes, dict(dropped))


def _read_part(
    ranks: list[Headers], start: int, shape: PoolShape, min_epoch: int, num_whole: int, dropped: Counter[DropReason]
) -> RecoveredSlots:
    """Return what the headers of the slots from `start` on recover, without removing duplicates."""
    slots: Slots = np.any([headers["state"] != HeaderState.EMPTY for headers in ranks], axis=0).nonzero()[0]
    ranks = [headers[slots] for headers in ranks]
    slots = slots + start

    def drop(reason: DropReason, bad: NDArray[np.bool_]) -> None:
        nonlocal slots, ranks
        count = int(np.count_nonzero(bad))
        if count:
            dropped[reason] += count
            slots, ranks = slots[~bad], [headers[~bad] for headers in ranks]

    unsealed = (HeaderState.WRITING, HeaderState.EMPTY)
    drop(DropReason.UNSEALED, np.any([np.isin(headers["state"], unsealed) for headers in ranks], axis=0))
    for rank in range(len(ranks)):
        drop(DropReason.DAMAGED, ~are_sound(ranks[rank], shape.slot_bytes))
    for rank in range(1, len(ranks)):
        drop(DropReason.RANKS_DIFFER, _differ(ranks[0], ranks[rank]))
    drop(DropReason.RESET, ranks[0]["epoch"] != min_epoch)
    drop(DropReason.LEFT, ranks[0]["generation"] <= ranks[0]["dropped_generation"])
    drop(DropReason.TRUNCATED, slots >= num_whole)
    first = ranks[0]
    sizes = np.sum([headers["length"] for headers in ranks], axis=0).astype(np.int64)
    return RecoveredSlots(slots, keys_of(first), first["generation"].astype(np.int64), sizes, {})


def _older_of_equals(keys: list[Key], generations: NDArray[np.int64]) -> list[int]:
    """Return the indices of keys that also occur with a later generation."""
    marks = hash_keys(keys)
    in_order = np.sort(marks)
    twice = in_order[1:][in_order[1:] == in_order[:-1]]
    if not len(twice):
        return []
    suspects = np.isin(marks, twice).nonzero()[0]
    older: list[int] = []
    owners: set[Key] = set()
    for i in suspects[np.argsort(-generations[suspects], kind="stable")].tolist():
        if keys[i] in owners:
            older.append(i)
        owners.add(keys[i])
    return older


def _differ(first: Headers, other: Headers) -> NDArray[np.bool_]:
    differ: NDArray[np.bool_] = np.zeros(len(first), dtype=np.bool_)
    for name in ("generation", "epoch", "key", "key_length"):
        differ |= first[name] != other[name]
    return differ
