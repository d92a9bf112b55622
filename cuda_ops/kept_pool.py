"""A kept pool as core sees it: what leaves is void in the headers at once, and what an earlier process left is read.

Headers alone decide what exists. A slot is recovered only if the headers of all ranks are valid and agree.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from core.keys import Key
from core.transfers import Slots
from cuda_ops.pool_format import (
    SLOT_HEADER,
    Headers,
    HeaderState,
    PoolShape,
    are_sound,
    keys_of,
)

if TYPE_CHECKING:
    from cuda_ops.kept_file import KeptFile


class DropReason(StrEnum):
    """Why a slot's header does not bring its block back."""

    UNSEALED = "unsealed"
    DAMAGED = "damaged"
    TRUNCATED = "truncated"
    RESET = "reset"
    LEFT = "left"
    RANKS_DIFFER = "ranks_differ"
    DUPLICATE = "duplicate"
    FOREIGN = "foreign"
    """All of a pool that is another one's: its fingerprint, or a size, differs."""


@dataclass(frozen=True, slots=True)
class KeptSlots:
    """What the headers hold, as columns in the order of slots, and how many slots were dropped by reason.

    `sizes` are bytes of all ranks together.
    """

    slots: Slots
    keys: list[Key]
    generations: NDArray[np.int64]
    sizes: NDArray[np.int64]
    dropped: dict[DropReason, int]


class KeptRecord:
    """A `core.kept.PoolRecord` in the file's headers. Memory only; called under the manager's lock."""

    def __init__(self, file: KeptFile) -> None:
        self._file = file
        self._dropped = file.headers(0)["dropped_generation"]

    def void(self, slots: Slots, generations: NDArray[np.int64]) -> None:
        """See `PoolRecord`."""
        self._dropped[slots] = generations

    def void_before(self, epoch: int) -> None:
        """See `PoolRecord`."""
        self._file.min_epoch = epoch


def read_slots(ranks: list[Headers], shape: PoolShape, min_epoch: int, num_whole: int) -> KeptSlots:
    """What the headers of all ranks bring back, of the first `num_whole` slots. Changes nothing."""
    dropped: Counter[DropReason] = Counter()
    states = np.stack([headers["state"] for headers in ranks])
    candidates = (states != HeaderState.EMPTY).any(axis=0).nonzero()[0]

    def drop(reason: DropReason, bad: NDArray[np.bool_]) -> None:
        nonlocal candidates
        count = int(np.count_nonzero(bad))
        if count:
            dropped[reason] += count
            candidates = candidates[~bad]

    drop(DropReason.UNSEALED, ((states == HeaderState.WRITING) | (states == HeaderState.EMPTY)).any(axis=0)[candidates])
    for headers in ranks:
        drop(DropReason.DAMAGED, ~are_sound(headers[candidates], shape.slot_bytes))
    first = ranks[0]
    for headers in ranks[1:]:
        drop(DropReason.RANKS_DIFFER, _differ(first[candidates], headers[candidates]))
    drop(DropReason.RESET, first["epoch"][candidates] != min_epoch)
    drop(DropReason.LEFT, first["generation"][candidates] <= first["dropped_generation"][candidates])
    drop(DropReason.TRUNCATED, candidates >= num_whole)
    # The latest of a key comes first, and claims it.
    by_age = np.argsort(-first["generation"][candidates], kind="stable")
    keys = keys_of(first[candidates])
    in_order = by_age.tolist()
    owners: dict[Key, int] = {}
    for i in in_order:
        owners.setdefault(keys[i], i)
    if len(owners) < len(candidates):
        bad = np.ones(len(candidates), dtype=np.bool_)
        bad[list(owners.values())] = False
        keys = [keys[i] for i in (~bad).nonzero()[0].tolist()]
        drop(DropReason.DUPLICATE, bad)
    sizes = np.sum([headers["length"][candidates] for headers in ranks], axis=0).astype(np.int64)
    generations = first["generation"][candidates].astype(np.int64)
    return KeptSlots(candidates.astype(np.int64), keys, generations, sizes, dict(dropped))


def recover_slots(file: KeptFile) -> KeptSlots:
    """What an earlier process left, once the headers of all else have been emptied."""
    num_slots = file.found.num_slots
    ranks = [file.headers(rank)[:num_slots] for rank in range(file.shape.num_ranks)]
    kept = read_slots(ranks, file.shape, file.min_epoch, file.found.num_whole)
    gone = np.ones(num_slots, dtype=np.bool_)
    gone[kept.slots] = False
    for headers in ranks:
        headers["state"][gone] = HeaderState.EMPTY
        headers[gone] = np.zeros(1, dtype=SLOT_HEADER)
    return kept


def _differ(first: Headers, other: Headers) -> NDArray[np.bool_]:
    differ: NDArray[np.bool_] = np.zeros(len(first), dtype=np.bool_)
    for name in ("generation", "epoch", "key", "key_length"):
        differ |= first[name] != other[name]
    return differ
