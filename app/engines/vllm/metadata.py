"""Metadata exchanged once per step between the scheduler process and the worker ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.core.keys import Key
from kvferry.core.transfers import TransferJob, TransferResult
from kvferry.cuda_ops.persistent.pool_file import FoundPool
from kvferry.cuda_ops.persistent.recovery import DropReason

IDLE_WAIT_S = 0.005
"""Longest wait for a copy or a tier in a step that computes nothing, so that empty steps do not starve copy threads."""


@dataclass(frozen=True, slots=True)
class ResizeCommand:
    """Command to `ranks`: map exactly `num_slots` slots of the pool and report the result.

    When the pool shrinks, `free` also returns the memory to the system; the last rank to unmap does so.
    """

    number: int
    num_slots: int
    ranks: tuple[int, ...]
    free: bool = False


@dataclass(frozen=True, slots=True)
class ResizeResult:
    """Result of a `ResizeCommand` on one rank; on an error the rank's mapping is unchanged."""

    number: int
    rank: int
    error: str | None = None


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Work of one step for the worker ranks.

    `stores_ahead` are copied before the step writes to any block. `failed_loads` are ids of requests whose load
    could not start; workers report them as failed. In an idle step, which computes nothing, a worker may wait
    `IDLE_WAIT_S` for its copies.
    """

    loads: list[TransferJob] = field(default_factory=list)
    stores: list[TransferJob] = field(default_factory=list)
    failed_loads: list[str] = field(default_factory=list)
    is_idle: bool = False
    resizes: list[ResizeCommand] = field(default_factory=list)
    stores_ahead: list[TransferJob] = field(default_factory=list)


@dataclass
class WorkerReports(KVConnectorWorkerMetadata):
    """Jobs and resize commands that ended on some ranks since their previous report.

    `errors` are unexpected errors on those ranks, one line of text each, without tracebacks. `hook_s` is the time that
    the slowest rank has spent in hooks since the previous report.
    """

    results: list[TransferResult] = field(default_factory=list)
    resizes: list[ResizeResult] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    hook_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.results or self.resizes or self.errors)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReports:
        """Merge the reports of two groups of ranks."""
        if not isinstance(other, WorkerReports):
            return self
        return WorkerReports(
            self.results + other.results,
            self.resizes + other.resizes,
            self.errors + other.errors,
            max(self.hook_s, other.hook_s),
        )


@dataclass
class RankHandshake(KVConnectorHandshakeMetadata):
    """Description of the file of a persistent pool as the first rank `found` it.

    `dropped` counts the slots dropped when it was opened, and `foreign_keys` are the keys of a pool that was dropped as
    a whole.
    """

    found: FoundPool | None = None
    foreign_keys: list[Key] = field(default_factory=list)
    dropped: dict[DropReason, int] = field(default_factory=dict)
