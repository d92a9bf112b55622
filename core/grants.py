"""What the manager hands out: slots for offered blocks, pins on blocks that were found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.transfers import NO_SLOTS, Slots


class Offer(NamedTuple):
    """The answer to a batch of offered keys, which is given in order and may stop early.

    The first `num_answered` keys have their answer: those at the indices `stored_at` got `slots`, to be filled, those
    at `held_back_at` were not offered often enough to be stored, and the others were there already. The keys after them
    found no space.
    """

    num_answered: int
    stored_at: NDArray[np.int64]
    slots: Slots
    held_back_at: NDArray[np.int64] = NO_SLOTS


@dataclass(frozen=True, slots=True)
class Pin:
    """Ready slots that nobody may evict until the pin is released. It is void once its epoch is over."""

    slots: Slots
    epoch: int

    def __len__(self) -> int:
        return len(self.slots)

    @staticmethod
    def empty() -> Pin:
        """A pin of nothing."""
        return Pin(NO_SLOTS, 0)


class BlockState(StrEnum):
    """What a block that can be found is under. One that is being loaded is pinned, too."""

    READY = "ready"
    PINNED = "pinned"
    LOADING = "loading"


class BlockHold(NamedTuple):
    """What keeps a block from eviction now, and when an operator's pin ends, if there is one."""

    state: BlockState
    pinned_until_s: float | None


class PinOutcome(Enum):
    """What became of an operator's wish to pin a block."""

    PINNED = "pinned"
    NOT_FOUND = "not_found"
    LIMIT = "limit"
    LEAVING = "leaving"
