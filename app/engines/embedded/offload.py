"""What this engine asks of an offload scheduler and a copy engine, in the order it asks; and their absence.

This is the whole of the attachment: another engine attaches by calling the same methods at the same places. They are
called in `scheduler.py` (match, commit, preempted, finished) and `engine.py` (new request, plan, transfers), on the
engine's thread, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

from kvferry.core.engine_api import BlockTables, EngineRequest, StepProgress
from kvferry.core.scheduler import Hit, Later, Miss
from kvferry.core.transfers import LoadOutcome, StepPlan, TransferJob, TransferResult


class Offload(Protocol):
    """The part of `kvferry.core.scheduler.OffloadScheduler` that an engine uses."""

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
    """Nothing is stored and nothing is found: the engine alone."""

    def on_new_request(self, request: EngineRequest, now_s: float) -> None:
        """Nobody listens."""

    def match(self, request_id: str, num_computed_tokens: int, now_s: float) -> Hit | Miss | Later:
        """Always a miss."""
        return Miss()

    def commit(self, request_id: str, block_ids: BlockTables, num_loaded_tokens: int, now_s: float) -> None:
        """Nothing to load."""

    def plan_step(self, progress: Sequence[StepProgress], now_s: float) -> StepPlan:
        """No jobs."""
        return StepPlan()

    def on_step_failed(self, request_ids: Sequence[str], now_s: float) -> None:
        """Nothing is stored in any case."""

    def on_transfers_finished(self, results: Sequence[TransferResult], now_s: float) -> list[LoadOutcome]:
        """No loads end."""
        return []

    def on_preempted(self, request_id: str, now_s: float) -> None:
        """Nobody listens."""

    def on_request_finished(self, request_id: str, now_s: float) -> None:
        """Nobody listens."""

    def has_open_work(self) -> bool:
        """Never."""
        return False


class NoCopies:
    """A copy engine for an engine without offload, which never submits a job."""

    def submit(self, job: TransferJob) -> None:
        """Refuse the job: no copy engine is attached."""
        raise RuntimeError("a transfer was planned, and no copy engine is attached")

    def submit_ahead(self, job: TransferJob) -> None:
        """Refuse the job: no copy engine is attached."""
        self.submit(job)

    def poll(self) -> list[TransferResult]:
        """Nothing ended."""
        return []

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """Nothing to wait for."""
        return True

    def is_alive(self) -> bool:
        """Nothing to be dead."""
        return True

    def close(self) -> None:
        """Nothing to close."""
