"""Transfers: the jobs of a step for the copy engine, and their results.

A job moves whole blocks between device and host in one direction. It ends once, done or failed, after every worker
has reported; only success publishes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key

Slots = NDArray[np.int64]
BlockIds = NDArray[np.int64]

NO_SLOTS: Slots = np.empty(0, dtype=np.int64)


class Direction(StrEnum):
    """Direction of a job: `store` is device to host, `load` is host to device."""

    STORE = "store"
    LOAD = "load"


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks of one group: for every i, device block `block_ids[i]` and block number `numbers[i]` within `slots[i]`.

    Three int64 arrays of one length. A block of a group lies `numbers[i]` times the group's block bytes into its slot.
    """

    group: int
    block_ids: BlockIds
    slots: Slots
    numbers: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.block_ids)


class SlotLabels(NamedTuple):
    """Contents of the headers of slots in a pool that outlives its process, as columns of one length."""

    slots: Slots
    keys: Sequence[Key]
    generations: NDArray[np.int64]
    epochs: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def slice(self, start: int, end: int) -> SlotLabels:
        """Return the labels from `start` up to `end`."""
        return SlotLabels(
            self.slots[start:end],
            self.keys[start:end],
            self.generations[start:end],
            self.epochs[start:end],
            self.sizes[start:end],
        )


@dataclass(frozen=True, slots=True)
class TransferJob:
    """Copies of blocks in one direction. No device block and no part of a slot occurs twice.

    `request_id` is the request that waits for a load. A store into a pool that outlives its process has `labels`.
    `verify` are slots of a load that an earlier process wrote: their checksums are verified before a byte is copied.
    """

    job_id: int
    direction: Direction
    runs: tuple[BlockRun, ...]
    request_id: str | None = None
    labels: SlotLabels | None = None
    verify: Slots | None = None

    @property
    def num_blocks(self) -> int:
        """Number of blocks to copy."""
        return sum(map(len, self.runs))


@dataclass(frozen=True, slots=True)
class TransferResult:
    """One worker's report on one job: `error` is None if every byte was copied. `num_bytes` are those of the worker.

    If slots of a load failed verification, they are in `corrupt`, and nothing was copied.
    """

    job_id: int
    worker: int = 0
    error: str | None = None
    num_bytes: int = 0
    seconds: float = 0.0
    corrupt: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The jobs of one engine step.

    `stores_ahead` read blocks that this step has given to other requests: they are copied before this step writes to
    the blocks, and before its loads start. The other stores read blocks that this step fills: they start after its
    compute, in order.
    """

    loads: list[TransferJob] = field(default_factory=list)
    stores: list[TransferJob] = field(default_factory=list)
    stores_ahead: list[TransferJob] = field(default_factory=list)

    @property
    def jobs(self) -> list[TransferJob]:
        """All jobs of the step, in the order of their start."""
        return [*self.stores_ahead, *self.loads, *self.stores]

    def __bool__(self) -> bool:
        return bool(self.stores_ahead or self.loads or self.stores)


@dataclass(frozen=True, slots=True)
class LoadOutcome:
    """The end of a request's load of `num_tokens` tokens, after the `first_token` tokens that the device had.

    After a failure no block that holds one of these tokens may be read, and the request recomputes them.
    """

    request_id: str
    ok: bool
    first_token: int
    num_tokens: int
