"""Copy-engine protocol: jobs are submitted, results are polled, and only `wait` and `submit_ahead` block."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kvferry.core.transfers import TransferJob, TransferResult

AHEAD_S = 0.5
"""A step waits at most this long for stores ahead of it: many times the copy time of one step's blocks."""
OVERTAKEN = "overtaken: the blocks were not read before the step that overwrites them"


class CopyEngine(Protocol):
    """Executes transfer jobs concurrently with the engine thread.

    Every submitted job ends in exactly one `TransferResult`, also after an exception or a close. A job's blocks and
    slots must stay allocated until its result has been polled.
    """

    def submit(self, job: TransferJob) -> None:
        """Queue a job. Never blocks. On CUDA the copy is ordered after all work queued so far on the current stream."""

    def submit_ahead(self, job: TransferJob) -> None:
        """Copy a store out of blocks that the caller is about to overwrite.

        The blocks are read before any later work of the caller, or of the current stream, starts. Blocks until this
        order is guaranteed, at most `AHEAD_S`. A job without that guarantee fails, and later jobs ahead of a step fail
        at once until it has ended.
        """

    def poll(self) -> list[TransferResult]:
        """Return the results of jobs that ended since the last call. Never blocks."""

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """Wait until these jobs have ended, so that `poll` returns their results.

        Returns:
            Whether all ended in time. Jobs that were never submitted count as ended.
        """

    def is_alive(self) -> bool:
        """Return whether jobs still make progress."""

    def close(self) -> None:
        """Finish running jobs, fail those not started, and stop. Results can still be polled."""
