"""The seam of every copy engine: jobs go in, results come out, and no call but `wait` waits for a byte to move."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kvferry.core.transfers import TransferJob, TransferResult

AHEAD_S = 0.5
"""A step waits at most this long for stores ahead of it: many times what the bytes of one step take to copy."""
OVERTAKEN = "overtaken: the blocks were not read before the step that overwrites them"


class CopyEngine(Protocol):
    """Carries out transfer jobs beside the engine's thread.

    Every submitted job ends in exactly one `TransferResult`, also when copying it raised or the engine was closed.
    A job's blocks and slots must stay allocated until its result has been polled.
    """

    def submit(self, job: TransferJob) -> None:
        """Queue a job. On CUDA it reads and writes after all work queued so far on the current stream. Never blocks."""

    def submit_ahead(self, job: TransferJob) -> None:
        """Copy a store out of blocks that the caller is about to overwrite.

        The blocks have been read before anything that the caller does, or queues on the current stream, from now on.
        Waits until that is certain, at most `AHEAD_S`; a job for which it is not certain by then fails, and so do later
        ones, at once, until it has ended.
        """

    def poll(self) -> list[TransferResult]:
        """Results of the jobs that ended since the last call. Never blocks."""

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """Wait until these jobs have ended, so that `poll` has their results; whether they have. Ended jobs and such
        as were never submitted count as ended."""

    def is_alive(self) -> bool:
        """Whether jobs still make progress."""

    def close(self) -> None:
        """Let the jobs under way end, fail those that have not started, and stop. Their results can still be polled."""
