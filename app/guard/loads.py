"""Requests that wait for a load, so that each gets exactly one outcome, whatever fails."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from kvferry.core.transfers import LoadOutcome, TransferJob, TransferResult


@dataclass(slots=True)
class _Load:
    """A load job that the workers have. `wait` numbers the wait of the request that it loads for."""

    request_id: str
    wait: int | None
    reported: set[int] = field(default_factory=set)


class LoadWaits:
    """Requests that wait for a load, and the load jobs that the workers have. Thread: engine."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._num_waits = 0
        self._waiting: dict[str, int] = {}
        self._loads: dict[int, _Load] = {}
        self._failed: list[str] = []

    @property
    def request_ids(self) -> list[str]:
        """The requests that wait."""
        return list(self._waiting)

    @property
    def has_failed(self) -> bool:
        """Whether a failure is to be reported by the next `outcomes`."""
        return bool(self._failed)

    def begin(self, request_id: str) -> None:
        """Record that a request waits for a load from now on."""
        self._num_waits += 1
        self._waiting[request_id] = self._num_waits

    def cancel(self, request_id: str) -> None:
        """Forget a request, which needs no outcome any more."""
        self._waiting.pop(request_id, None)

    def submit(self, jobs: Sequence[TransferJob]) -> None:
        """Record load jobs that the workers get."""
        for job in jobs:
            if job.request_id is not None:
                self._loads[job.job_id] = _Load(job.request_id, self._waiting.get(job.request_id))

    def report(self, results: Sequence[TransferResult]) -> list[str]:
        """Record workers' results; return the waiting requests whose load all workers have reported."""
        ended: list[str] = []
        for result in results:
            load = self._loads.get(result.job_id)
            if load is None:
                continue
            load.reported.add(result.worker)
            if len(load.reported) == self._num_workers:
                del self._loads[result.job_id]
                if self._waiting.get(load.request_id) == load.wait:
                    ended.append(load.request_id)
        return ended

    def fail(self, request_ids: Iterable[str]) -> None:
        """Have the loads of these requests fail; a request that does not wait is ignored."""
        self._failed += request_ids

    def fail_without_job(self) -> None:
        """Fail the waits for which the workers have no job."""
        loading = {load.wait for load in self._loads.values()}
        self.fail(request_id for request_id, wait in self._waiting.items() if wait not in loading)

    def outcomes(self, ended: Iterable[LoadOutcome]) -> list[LoadOutcome]:
        """Return one outcome per request that waited: those that ended, then those that failed."""
        failed, self._failed = self._failed, []
        found = [*ended, *(LoadOutcome(request_id, False, 0, 0) for request_id in failed)]
        return [one for one in found if self._waiting.pop(one.request_id, None) is not None]
