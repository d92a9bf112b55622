"""Sealing of the slots of a kept pool: after stores, by a copy engine around any other, and after writes of tiers.

The copy engine seals slots after a store, and verifies slots of an earlier process before their first load, both on a
thread of its own. Slots are marked by the copying threads.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue

from kvferry.core.transfers import Direction, SlotLabels, TransferJob, TransferResult
from kvferry.cuda_ops.copy.engine import CopyEngine
from kvferry.cuda_ops.persistent.headers import SlotHeaders
from kvferry.cuda_ops.pool.processors import run_on

_log = logging.getLogger(__name__)

CLOSE_S = 10.0
_RECHECK_S = 0.1
_NOT_SEALED = "blocks from a tier are not sealed and lost at a restart: %d: %s"


class KeptCopies:
    """A `CopyEngine` whose store jobs have labels."""

    def __init__(
        self,
        copies: CopyEngine,
        headers: SlotHeaders,
        on_finished: Callable[[], None],
        worker: int = 0,
        cpus: Collection[int] | None = None,
        close_s: float = CLOSE_S,
    ) -> None:
        """Start the checksum thread.

        Args:
            copies: the wrapped engine, which calls `headers.before_copy` before each job.
            headers: this rank's slot headers.
            on_finished: called on the checksum thread when there are results; may only notify.
            worker: rank reported in results.
            cpus: processors of the checksum thread; by default those of the calling thread.
            close_s: limit of `close`.
        """
        self._copies = copies
        self._headers = headers
        self._on_finished = on_finished
        self._worker = worker
        self._cpus = cpus
        self._close_s = close_s
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
        """Return the number of finished stores whose slots are not sealed."""
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

    def begin_tier_write(self, labels: SlotLabels) -> None:
        """See `TierWriteSealer`. Thread: any but the engine's."""
        self._headers.begin(labels)

    def end_tier_write(self, labels: SlotLabels) -> None:
        """See `TierWriteSealer`. The slots are sealed like those of stores. Any thread."""
        with self._changed:
            if not self._closing:
                self._to_seal.append(labels)
                self._changed.notify_all()
                return
        _log.warning(_NOT_SEALED, len(labels.slots), "the engine is closing")

    def wait(self, job_ids: Collection[int], timeout_s: float) -> bool:
        """See `CopyEngine`."""
        deadline_s = time.monotonic() + timeout_s
        wanted = set(job_ids)
        while True:
            with self._changed:
                is_verifying = any(job.job_id in wanted for job in self._to_verify)
                if is_verifying:
                    self._changed.wait(min(max(deadline_s - time.monotonic(), 0.0), _RECHECK_S))
            self._replace_dead_thread()
            self._go_on()
            left_s = deadline_s - time.monotonic()
            if not is_verifying:
                return self._copies.wait(job_ids, max(left_s, 0.0))
            if left_s <= 0:
                return False

    def wait_for_readers(self, timeout_s: float) -> bool:
        """Wait until all slots stored so far are sealed; return whether that happened in time. Any thread.

        Until then the checksum thread reads slots that may have left the pool: their memory must not be freed.
        """
        with self._changed:
            wanted = self._num_sealed + len(self._to_seal)
            return self._changed.wait_for(lambda: self._num_sealed >= wanted, timeout_s)

    def is_alive(self) -> bool:
        """See `CopyEngine`."""
        return self._thread.is_alive() and self._copies.is_alive()

    def close(self) -> None:
        """See `CopyEngine`. Seals finished stores, within a time limit."""
        self._copies.close()
        self._early = self.poll()
        with self._changed:
            self._closing = True
            self._give_up_s = time.monotonic() + self._close_s
            self._changed.notify_all()
        # A thread that a disk blocks for longer ends with the process.
        self._thread.join(self._close_s)
        # The copy engine is closed and fails the loads that were still to be verified.
        self._early = self.poll()
        if self._to_seal:
            _log.warning("stores not sealed in time, a restart will not recover them: %d", len(self._to_seal))

    def _start_thread(self) -> threading.Thread:
        thread = threading.Thread(target=self._serve, name="kvferry-seal", daemon=True)
        thread.start()
        return thread

    def _replace_dead_thread(self) -> None:
        """Restart a dead thread. Its current job fails: a load is not verified, a store is not sealed."""
        if self._thread.is_alive() or self._closing:
            return
        _log.error("checksum thread died: its current job fails, and the thread is restarted")
        with self._changed:
            if self._to_verify:
                self._verified.append((self._to_verify.popleft(), (), "not verified: the checksum thread died"))
            elif self._to_seal:
                self._to_seal.popleft()
                self._num_sealed += 1
            self._changed.notify_all()
        self._thread = self._start_thread()

    def _go_on(self) -> None:
        """Submit the loads whose slots are verified, and fail those with corrupt slots. Thread: engine."""
        while self._verified:
            job, corrupt, error = self._verified.popleft()
            if error is None:
                try:
                    self._copies.submit(job)
                    continue
                except Exception as failure:  # noqa: BLE001 - the job must end, whatever failed
                    error = f"not submitted: {failure}"
            self._early.append(TransferResult(job.job_id, self._worker, error, corrupt=corrupt))

    # ---- on the checksum thread --------------------------------------------------------------------------------------

    def _serve(self) -> None:
        run_on(self._cpus)
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._to_verify or self._to_seal or self._closing)
                if self._closing and (self._is_over() or not (self._to_verify or self._to_seal)):
                    return
                # The job stays in the queue until it is done, so that `wait` sees it.
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
                error = f"{len(corrupt)} of {job.num_blocks} slots of an earlier process are corrupt"
        except Exception as failure:  # noqa: BLE001 - the job must end, and the next ones must be processed
            _log.exception("verifying slots failed")
            error = f"not verified: {type(failure).__name__}: {failure}"
        with self._changed:
            self._to_verify.popleft()
            self._verified.append((job, corrupt, error))
            self._changed.notify_all()
        self._on_finished()

    def _seal(self, labels: SlotLabels) -> None:
        try:
            self._headers.seal(labels)
        except Exception:  # noqa: BLE001 - a restart will not recover these slots; the next ones are unaffected
            _log.exception("sealing slots failed")
        with self._changed:
            self._to_seal.popleft()
            self._num_sealed += 1
            self._changed.notify_all()


class TierSealer:
    """Seals slots that tiers wrote to; implements `TierWriteSealer` of a pool record. Thread: any, except `close`."""

    def __init__(self, headers: Sequence[SlotHeaders], close_s: float = CLOSE_S) -> None:
        """Start the thread for the headers of each column. `close_s` is the limit of `close`."""
        self._headers = headers
        self._close_s = close_s
        self._queue: SimpleQueue[tuple[SlotLabels, threading.Event] | None] = SimpleQueue()
        self._last: threading.Event | None = None
        self._closing = False
        # The interpreter waits for an executor's thread when it ends, however long a disk blocks that.
        self._thread = threading.Thread(target=self._serve, name="kvferry-seal", daemon=True)
        self._thread.start()

    def begin_tier_write(self, labels: SlotLabels) -> None:
        """See `TierWriteSealer`. Thread: any except the engine's."""
        for headers in self._headers:
            headers.begin(labels)

    def end_tier_write(self, labels: SlotLabels) -> None:
        """See `TierWriteSealer`."""
        if self._closing:
            _log.warning(_NOT_SEALED, len(labels.slots), "the engine is closing")
            return
        self._last = is_over = threading.Event()
        self._queue.put((labels, is_over))

    def wait_for_readers(self, timeout_s: float) -> bool:
        """See `TierWriteSealer`."""
        last = self._last
        return last is None or last.wait(timeout_s)

    def close(self) -> None:
        """Seal the remaining slots within a time limit."""
        has_ended = self.wait_for_readers(self._close_s)
        self._closing = True
        self._queue.put(None)
        if not has_ended:
            _log.warning("blocks from tiers were not sealed within %.0f s and are lost at a restart", self._close_s)

    def _serve(self) -> None:
        while (work := self._queue.get()) is not None and not self._closing:
            labels, is_over = work
            try:
                for headers in self._headers:
                    headers.seal(labels)
            except BaseException:  # noqa: BLE001 - only these blocks are lost at a restart
                _log.exception("slots could not be sealed")
            is_over.set()
