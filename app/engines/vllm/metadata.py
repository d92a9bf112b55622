"""What scheduler and workers tell each other, once a step: the jobs to start, and how the ones before have ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from core.keys import Key
from core.transfers import TransferJob, TransferResult

IDLE_WAIT_S = 0.005
"""How long a step that computes nothing waits for a copy or a tier, so that empty steps do not take their time."""


@dataclass
class StepOrders(KVConnectorMetadata):
    """One step's jobs. `lost` are requests whose load could not begin: workers report it as failed.

    `is_idle` says that the step computes nothing, so that a worker may wait a moment for its copies.
    """

    loads: list[TransferJob] = field(default_factory=list)
    stores: list[TransferJob] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    is_idle: bool = False


@dataclass
class StepReports(KVConnectorWorkerMetadata):
    """The jobs that ended on some ranks since their last report."""

    results: list[TransferResult] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepReports:
        """The reports of both."""
        theirs = other.results if isinstance(other, StepReports) else []
        return StepReports([*self.results, *theirs])


@dataclass
class RankFacts(KVConnectorHandshakeMetadata):
    """What a worker made of the configuration, for the scheduler to compare with its own, and what it found.

    `foreign_keys` are those that a kept pool held which was dropped, since it was another model's.
    """

    rank: int
    num_slots: int
    slot_bytes: int
    foreign_keys: list[Key] = field(default_factory=list)
