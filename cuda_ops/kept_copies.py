"""A copy engine for a kept pool, around any other: it seals slots after a store, and verifies what an earlier process
left before the first load. Both are done on a thread of its own; slots are marked by the threads that copy.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection

from kvferry.core.transfers import Direction, SlotLabels, TransferJob, TransferResult
from kvferry.cuda_ops.affinity import run_on
from kvferry.cuda_ops.copy_engine import CopyEngine
from kvferry.cuda_ops.slot_headers import SlotHeaders

_log = logging.getLogger(__name__)

CLOSE_S = 10.0
_RECHECK_S = 0.1


class KeptCopies:
    """A `CopyEngine`. What it is asked to store into a kept pool has labels."""

    def __init__(
        self,
        copies: CopyEngine,
        headers: SlotHeaders,
        on_finished: Callable[[], None],
        worker: int = 0,
        cpus: Collection[int] | None = None,
    ) -> None:
        """`copies` calls `headers.before_copy` before each job. `on_finished` is called on the hashing thread when
        there is something to poll; it may only notify. That thread runs on `cpus`, by default on those of the thread
        that makes the engine."""
        self._copies = copies
        self._headers = headers
        self._on_finished = on_finished
        self._worker = worker
        self._cpus = cpus
        self._labels: dict[int, SlotLabels] = {}
        self._to_verify: deque[TransferJob] = deque()
        self._verified: deque[tuple[TransferJob, tuple[int, ...], str | None]] = deque()
        self._early: list[TransferResult] = []
        self._to_seal: deque[SlotLabels] = deque()
        self._num_sealed = 0
        self._changed = threading.Condition()
        self._closing = False
        self._give_up_s: float | None = None
        self._thread = self._start_thread()

    @property
    def num_unsealed(self) -> int:
        """Stores that have ended and whose slots are not sealed yet."""
        return len(self._to_seal)

    def submit(self, job: TransferJob) -> None:
        """See `CopyEngine`."""
        if job.direction is Direction.STORE and job.labels is not None:
            self._labels[job.job_id] = job.labels
        elif job.verify is not None and len(job.verify):
            with self._changed:
                if not self._closing:
                    self._to_verify.append(job)
                    self._changed.notify_all()
                    return
        self._copies.submit(job)

    def submit_ahead(self, job: TransferJob) -> None:
        """See `CopyEngine`."""
        if job.labels is not None:
            self._labels[job.job_id] = job.labels
        self._copies.submit_ahead(job)

    def poll(self) -> list[TransferResult]:
        """See `CopyEngine`."""
        self._replace_dead_thread()
        self._go_on()
        results = self._copies.poll()
        sealable = [
            labels
            for result in results
            if (labels := self._labels.pop(result.job_id, None)) is not None and result.error is None
        ]
        if sealable:
            with self._changed:
                self._to_seal.extend(sealable)
                self._changed.notify_all()
        early, self._early = self._early, []
        return early + results

    def begin_filling(self, labels: SlotLabels) -> None:
        """See `Fillings`. Thread: any but the engine's."""
        self._headers.begin(labels)

    def end_filling(self, labels: SlotLabels) -> None:
        """See `Fillings`: they are sealed like stores. Any thread."""
        with self._changed:
            if not self._closing:
                self._to_seal.append(labels)
                self._changed.notify_all()

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """See `CopyEngine`."""
        deadline_s = time.monotonic() + timeout_s
        wanted = set(job_ids)
        while True:
            with self._changed:
                hashing = any(job.job_id in wanted for job in self._to_verify)
                if hashing:
                    self._changed.wait(min(max(deadline_s - time.monotonic(), 0.0), _RECHECK_S))
            self._replace_dead_thread()
            self._go_on()
            left_s = deadline_s - time.monotonic()
            if not hashing:
                return self._copies.wait(job_ids, max(left_s, 0.0))
            if left_s <= 0:
                return False

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that has been stored by now is sealed; whether that came true in time. Any thread.

        Slots that have left the pool are looked at until then, and their memory must not be freed before.
        """
        with self._changed:
            wanted = self._num_sealed + len(self._to_seal)
            return self._changed.wait_for(lambda: self._num_sealed >= wanted, timeout_s)

    def is_alive(self) -> bool:
        """See `CopyEngine`."""
        return self._thread.is_alive() and self._copies.is_alive()

    def close(self) -> None:
        """See `CopyEngine`. What has been stored is sealed, within its time."""
        self._copies.close()
        self._early = self.poll()
        with self._changed:
            self._closing = True
            self._give_up_s = time.monotonic() + CLOSE_S
            self._changed.notify_all()
        self._thread.join()
        # Loads that were still to be verified: the copy engine, which is closed, fails them.
        self._early = self.poll()
        if self._to_seal:
            _log.warning("%d stores were not sealed in time: a restart will not find them", len(self._to_seal))

    def _start_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._serve, name="kvferry-seal", daemon=True)
        thread.start()
        return thread

    def _replace_dead_thread(self) -> None:
        """Start a dead thread again. What it had in hand fails: a load is not verified, a store is not sealed."""
        if self._thread.is_alive() or self._closing:
            return
        _log.error("the thread that seals and verifies slots died; what it had in hand fails and it is started again")
        with self._changed:
            if self._to_verify:
                self._verified.append((self._to_verify.popleft(), (), "not verified: the thread died"))
            elif self._to_seal:
                self._to_seal.popleft()
                self._num_sealed += 1
            self._changed.notify_all()
        self._thread = self._start_thread()

    def _go_on(self) -> None:
        """Start the loads whose slots have been verified, on the engine's thread, and fail those that had bad ones."""
        while self._verified:
            job, corrupt, error = self._verified.popleft()
            if error is None:
                try:
                    self._copies.submit(job)
                    continue
                except Exception as failure:  # noqa: BLE001 - whatever it was, the job must end
                    error = f"not submitted: {failure}"
            self._early.append(TransferResult(job.job_id, self._worker, error, corrupt=corrupt))

    # ---- on the hashing thread ---------------------------------------------------------------------------------------

    def _serve(self) -> None:
        run_on(self._cpus)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._to_verify or self._to_seal or self._closing)
                if self._closing and (self._is_over() or not (self._to_verify or self._to_seal)):
                    return
                # It stays in the queue until it is done, so that whoever waits for it can see it.
                job = self._to_verify[0] if self._to_verify else None
                labels = None if job is not None else self._to_seal[0]
            if job is not None:
                self._verify(job)
            elif labels is not None:
                self._seal(labels)

    def _is_over(self) -> bool:
        return self._give_up_s is not None and time.monotonic() >= self._give_up_s

    def _verify(self, job: TransferJob) -> None:
        corrupt: tuple[int, ...] = ()
        error = None
        try:
            if job.verify is not None:
                corrupt = tuple(self._headers.verify(job.verify).tolist())
            if corrupt:
                error = f"{len(corrupt)} of {job.num_blocks} slots of an earlier process failed verification"
        except Exception as failure:  # noqa: BLE001 - the job must end, and the next ones be looked at
            _log.exception("slots could not be verified")
            error = f"not verified: {type(failure).__name__}: {failure}"
        with self._changed:
            self._to_verify.popleft()
            self._verified.append((job, corrupt, error))
            self._changed.notify_all()
        self._on_finished()

    def _seal(self, labels: SlotLabels) -> None:
        try:
            self._headers.seal(labels)
        except Exception:  # noqa: BLE001 - these slots are lost to a restart, the next ones need not be
            _log.exception("slots could not be sealed")
        with self._changed:
            self._to_seal.popleft()
            self._num_sealed += 1
            self._changed.notify_all()
