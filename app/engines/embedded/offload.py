"""Interface of the engine to an offload scheduler and a copy engine, in call order, with implementations that do
nothing.

This is the whole attachment: another engine attaches by calling the same methods at the same places. They are called in
`scheduler.py` (match, commit, preempted, finished) and `engine.py` (new request, plan, transfers), on the engine
thread, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from kvferry.core.engine_api import BlockTables, EngineRequest, StepProgress
from kvferry.core.scheduler.scheduler import Hit, Later, Miss
from kvferry.core.transfers import LoadOutcome, StepPlan, TransferJob, TransferResult


class Offload(Protocol):
    """The part of `kvferry.core.scheduler.scheduler.OffloadScheduler` that an engine uses."""

    def on_new_request(self, request: EngineRequest, now_s: float) -> None: ...
    def match(self, request_id: str, num_computed_tokens: int, now_s: float) -> Hit | Miss | Later: ...
    def commit(self, request_id: str, block_ids: BlockTables, num_loaded_tokens: int, now_s: float) -> None: ...
    def plan_step(self, progress: Sequence[StepProgress], now_s: float) -> StepPlan: ...
    def on_step_failed(self, request_ids: Sequence[str], now_s: float) -> None: ...
    def on_transfers_finished(self, results: Sequence[TransferResult], now_s: float) -> list[LoadOutcome]: ...
    def on_preempted(self, request_id: str, now_s: float) -> None: ...
    def on_request_finished(self, request_id: str, now_s: float) -> None: ...
    def has_open_work(self) -> bool: ...


class NoOffload:
    """An `Offload` that stores and finds nothing."""

    def on_new_request(self, request: EngineRequest, now_s: float) -> None:
        """Do nothing."""

    def match(self, request_id: str, num_computed_tokens: int, now_s: float) -> Hit | Miss | Later:
        """Return a miss."""
        return Miss()

    def commit(self, request_id: str, block_ids: BlockTables, num_loaded_tokens: int, now_s: float) -> None:
        """Do nothing."""

    def plan_step(self, progress: Sequence[StepProgress], now_s: float) -> StepPlan:
        """Return an empty plan."""
        return StepPlan()

    def on_step_failed(self, request_ids: Sequence[str], now_s: float) -> None:
        """Do nothing."""

    def on_transfers_finished(self, results: Sequence[TransferResult], now_s: float) -> list[LoadOutcome]:
        """Return no outcomes."""
        return []

    def on_preempted(self, request_id: str, now_s: float) -> None:
        """Do nothing."""

    def on_request_finished(self, request_id: str, now_s: float) -> None:
        """Do nothing."""

    def has_open_work(self) -> bool:
        """Return False."""
        return False


class NoCopies:
    """A copy engine for an engine without offloading, to which no job is submitted."""

    def submit(self, job: TransferJob) -> None:
        """Raise: no copy engine is attached."""
        raise RuntimeError("transfer submitted, but no copy engine is attached")

    def submit_ahead(self, job: TransferJob) -> None:
        """Raise: no copy engine is attached."""
        self.submit(job)

    def poll(self) -> list[TransferResult]:
        """Return no results."""
        return []

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """Return True: no job is open."""
        return True

    def is_alive(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Do nothing."""
