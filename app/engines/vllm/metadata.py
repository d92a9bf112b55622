"""What scheduler and workers tell each other, once a step: the jobs to start, how the ones before have ended, and the
same of the pool's size."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.core.keys import Key
from kvferry.core.transfers import TransferJob, TransferResult

IDLE_WAIT_S = 0.005
"""How long a step that computes nothing waits for a copy or a tier, so that empty steps do not take their time."""


@dataclass(frozen=True, slots=True)
class SizeOrder:
    """Each of these ranks is to map so many slots of the pool, no more and no less, and to report it.

    Whoever has mapped more unmaps the rest; `free` gives its memory back as well, and is for the last to do.
    """

    number: int
    num_slots: int
    ranks: tuple[int, ...]
    free: bool = False


@dataclass(frozen=True, slots=True)
class SizeReport:
    """A rank has carried out an order; on an error it has mapped what it had before."""

    number: int
    rank: int
    error: str | None = None


@dataclass
class StepOrders(KVConnectorMetadata):
    """One step's jobs. `lost` are requests whose load could not begin: workers report it as failed.

    Stores in `ahead` are copied before anything of the step writes to a block.
    `is_idle` says that the step computes nothing, so that a worker may wait a moment for its copies.
    """

    loads: list[TransferJob] = field(default_factory=list)
    stores: list[TransferJob] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    is_idle: bool = False
    sizes: list[SizeOrder] = field(default_factory=list)
    ahead: list[TransferJob] = field(default_factory=list)


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """The jobs, and the orders of another size, that ended on some ranks since their last report.

    `errors` are unexpected errors on those ranks, each as a line of text without its traceback.
    """

    results: list[TransferResult] = field(default_factory=list)
    sizes: list[SizeReport] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.results or self.sizes or self.errors)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        """The reports of both."""
        if not isinstance(other, StepReports):
            return self
        return StepReports([*self.results, *other.results], [*self.sizes, *other.sizes], [*self.errors, *other.errors])


@dataclass
class RankFacts(KVConnectorHandshakeMetadata):
    """What a worker made of the configuration, for the scheduler to compare with its own, and what it found.

    `dropped` says why a kept pool was dropped as a whole, and `foreign_keys` are those that it held. Its file lost
    `num_cut_off` blocks with its end.
    """

    rank: int
    num_slots: int
    slot_bytes: int
    dropped: str | None = None
    foreign_keys: list[Key] = field(default_factory=list)
    num_cut_off: int = 0
