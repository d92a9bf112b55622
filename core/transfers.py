"""Transfers: the jobs a step asks of a copy engine, and what comes back.

A job moves whole blocks between device and host in one direction. It ends once, done or failed, after every worker
has reported; only success publishes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]
BlockIds = NDArray[np.int64]

NO_SLOTS: Slots = np.empty(0, dtype=np.int64)


class Direction(StrEnum):
    """Which way bytes go: `store` is device to host, `load` is host to device."""

    STORE = "store"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks of one group: for every i, device block `block_ids[i]` and block number `parts[i]` within `slots[i]`.

    Three int64 arrays of one length. A block of a group lies `parts[i]` times the group's block bytes into its slot.
    """

    group: int
    block_ids: BlockIds
    slots: Slots
    parts: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.block_ids)


@dataclass(frozen=True, slots=True)
class TransferJob:
    """Copy what the runs name, all in one direction. A device block and a place in a slot are named at most once.

    `request_id` is the request that waits for a load.
    """

    job_id: int
    direction: Direction
    runs: tuple[BlockRun, ...]
    request_id: str | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks to copy."""
        return sum(map(len, self.runs))


@dataclass(frozen=True, slots=True)
class TransferResult:
    """One worker's report on one job: `error` is None when every byte was copied. `num_bytes` is that worker's part."""

    job_id: int
    worker: int = 0
    error: str | None = None
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The jobs of one engine step.

    Loads may start at once. Stores read blocks that this very step fills: they start after its compute, in order.
    """

    loads: list[TransferJob] = field(default_factory=list)
    stores: list[TransferJob] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores)


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """The end of a request's load: of `num_tokens` tokens, behind the first `first_token` that the device had.

    When it failed, no block that holds one of these tokens may be read, and the request recomputes them.
    """

    request_id: str
    ok: bool
    first_token: int
    num_tokens: int
