"""Header writer of a kept pool: queues core's invalidations, and writes them to the slot headers on its thread."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvferry.core.transfers import NO_SLOTS, SlotLabels, Slots
from kvferry.cuda_ops.copy.native import word_copies
from kvferry.cuda_ops.persistent.format import SLOT_HEADER, HeaderState
from kvferry.cuda_ops.persistent.pool_file import KeptFile, PoolTruncated
from kvferry.cuda_ops.persistent.recovery import RecoveredSlots, read_slots

_log = logging.getLogger(__name__)

CLOSE_S = 10.0
PAUSE_S = 0.002
"""Pause between rounds, so that the evictions of several steps are written together and wake the thread once."""
ROUND_SLOTS = 4096
"""Slots of a round: it collects them under the lock that `invalidate` acquires."""
_DROPPED_WORD = SLOT_HEADER.fields["dropped_generation"][1] // 8 if SLOT_HEADER.fields else 0


class TierWriteSealer(Protocol):
    """Marks slots before a tier writes to them, and seals them afterwards on a thread of its own."""

    def begin_tier_write(self, labels: SlotLabels) -> None: ...
    def end_tier_write(self, labels: SlotLabels) -> None: ...
    def wait_for_readers(self, timeout_s: float) -> bool:
        """Wait until no thread reads slots written so far; return whether that happened in time."""


_Round = tuple[int, Slots, NDArray[np.int64], int | None]
"""Invalidations being written: the number of the last, slots, generations, and the epoch if a reset is among them."""


class HeaderWriter:
    """A `kvferry.core.pool.records.HeaderQueue` in the file's headers, written by the thread `kvferry-invalidate`.

    The queue is bounded to one entry per slot, however long the disk blocks.
    """

    def __init__(self, file: KeptFile) -> None:
        """Prepare the queue. Nothing is written before `start`."""
        self._sealer: TierWriteSealer | None = None
        self.file = file
        self._dropped = file.header_words(0).reshape(-1)
        self._words_per_slot = SLOT_HEADER.itemsize // 8
        self._lock = threading.Lock()
        self._waiting = np.zeros(file.shape.max_slots, dtype=np.int64)
        """Per slot the generation to invalidate if the slot is in `_queue`, else 0."""
        self._queue: deque[tuple[int, Slots]] = deque()
        self._epoch: int | None = None
        self._num_queued = 0
        self._num_written = self._num_flushed = self._flush_to = 0
        self._flush_failed = False
        self._round: _Round | None = None
        self._unmarked: dict[int, SlotLabels] = {}
        self._has_work = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def seal_with(self, sealer: TierWriteSealer) -> None:
        """Seal blocks promoted from tiers; without it, they do not outlive this process. Call before the first one."""
        self._sealer = sealer

    @property
    def epoch(self) -> int:
        """See `HeaderQueue`."""
        return self.file.min_epoch

    # --- any thread, manager lock held: accesses process memory only --------------------------------------------------

    def invalidate(self, slots: Slots, generations: NDArray[np.int64]) -> None:
        """See `HeaderQueue`."""
        with self._lock:
            self._num_queued += 1
            new = slots[self._waiting[slots] == 0]
            self._waiting[slots] = generations
            if len(new):
                self._queue.append((self._num_queued, new))
            if self._unmarked:
                for slot in slots.tolist():
                    self._unmarked.pop(slot, None)
        self._wake()

    def invalidate_before(self, epoch: int) -> None:
        """See `HeaderQueue`."""
        with self._lock:
            self._num_queued += 1
            if self._epoch is None:
                self._queue.append((self._num_queued, NO_SLOTS))
            self._epoch = epoch
        self._wake()

    def num_invalidations(self) -> int:
        """See `HeaderQueue`."""
        return self._num_queued

    def are_flushed(self, count: int) -> bool:
        """See `HeaderQueue`. The next start drops a truncated file as a whole.

        Invalidations are flushed to the disk for this call only: most are evictions.
        """
        if self._num_flushed >= count or self.file.fault is not None:
            return True
        self._flush_to = max(self._flush_to, count)
        self._wake()
        return False

    def begin_tier_write(self, labels: SlotLabels) -> None:
        """See `HeaderQueue`. `before_tier_write` marks the slots."""
        if self._sealer is not None:
            unmarked = {int(slot): labels.slice(i, i + 1) for i, slot in enumerate(labels.slots)}
            with self._lock:
                self._unmarked |= unmarked

    def end_tier_write(self, labels: SlotLabels) -> None:
        """See `HeaderQueue`."""
        if self._sealer is not None:
            self._sealer.end_tier_write(labels)

    # --- other threads ------------------------------------------------------------------------------------------------

    def before_tier_write(self, slot: int) -> None:
        """Mark a slot that a tier is about to write. Thread: tier. Raises `PoolTruncated`."""
        self.file.check()
        with self._lock:
            labels = self._unmarked.pop(slot, None)
        if labels is not None and self._sealer is not None:
            self._sealer.begin_tier_write(labels)

    def wait_for_readers(self, timeout_s: float) -> bool:
        """Wait until no thread reads slots that have left the pool; return whether that happened in time.

        Requires: no lock held.
        """
        return self._sealer is None or self._sealer.wait_for_readers(timeout_s)

    def start(self) -> None:
        """Start the thread unless it runs. After a thread's death its unfinished round is written again."""
        if self._thread is not None:
            if self._thread.is_alive() or self._closing.is_set() or self.file.fault is not None:
                return
            _log.error("invalidation thread died, restarting it")
        self._thread = threading.Thread(target=self._serve, name="kvferry-invalidate", daemon=True)
        self._thread.start()

    def problem(self) -> str | None:
        """Return why invalidations are not written, or None. A truncated file is reported elsewhere."""
        if self._thread is None or self._thread.is_alive() or self._closing.is_set() or self.file.fault is not None:
            return None
        return "the thread that writes invalidations to the pool's headers has stopped; see its log lines"

    def close(self) -> None:
        """Write what is queued, within a time limit, and stop. Must be called before the file is closed."""
        self._closing.set()
        self._has_work.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        if self._num_written < self._num_queued and self.file.fault is None:
            _log.warning("evictions not written to the pool's headers, a restart may recover evicted blocks")

    # --- invalidation thread ------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                while self._write_round():
                    continue
                self._flush()
            except PoolTruncated as error:
                _log.error("writing invalidations stopped: %s", error)
                return
            if self._closing.is_set():
                return
            self._has_work.wait()
            self._has_work.clear()
            self._closing.wait(PAUSE_S)

    def _write_round(self) -> bool:
        """Write one round; return False if the queue was empty."""
        taken = self._round or self._take_round()
        if taken is None:
            return False
        last, slots, generations, epoch = taken
        self.file.check()
        if epoch is not None:
            self.file.write_min_epoch(epoch)
        places = slots * self._words_per_slot + _DROPPED_WORD
        scatter, _, _ = word_copies()
        scatter(self._dropped, places, generations)
        self._num_written = last
        self._round = None
        return True

    def _flush(self) -> None:
        """Flush what is written to the disk, if a caller of `are_flushed` needs that; retried at its next call."""
        if self._flush_to <= self._num_flushed:
            return
        num_written = self._num_written
        try:
            self.file.flush_invalidations()
        except OSError as error:
            if not self._flush_failed:
                _log.error("invalidations not flushed to the disk, a power failure may undo them: %s", error)
            self._flush_failed = True
            return
        self._num_flushed, self._flush_failed = num_written, False

    def _take_round(self) -> _Round | None:
        """Move a round from the queue to `_round`; return None if the queue was empty.

        The queue changes once nothing can fail any more: an exception must lose no invalidation.
        """
        with self._lock:
            if not self._queue:
                # Calls whose slots were all queued already.
                self._num_written = self._num_queued
                return None
            taken: list[Slots] = []
            last = count = 0
            for number, part in self._queue:
                if count >= ROUND_SLOTS:
                    break
                last = number
                taken.append(part)
                count += len(part)
            slots = np.concatenate(taken)
            generations = self._waiting[slots]
            if len(taken) == len(self._queue):
                last = self._num_queued
            found = (last, slots, generations, self._epoch)
            self._waiting[slots] = 0
            for _ in taken:
                self._queue.popleft()
            self._epoch, self._round = None, found
            return found

    def _wake(self) -> None:
        if not self._has_work.is_set():
            self._has_work.set()


def recover_slots(file: KeptFile) -> RecoveredSlots:
    """Return the slots left by an earlier process, after emptying all other headers."""
    num_slots = file.found.num_slots if file.found.is_kept else 0
    ranks = [file.headers(rank)[:num_slots] for rank in range(file.shape.num_ranks)]
    recovered = read_slots(ranks, file.shape, file.min_epoch, file.found.num_whole)
    if len(recovered.slots) == num_slots:
        return recovered
    gone = np.ones(num_slots, dtype=np.bool_)
    gone[recovered.slots] = False
    for headers in ranks:
        headers["state"][gone] = HeaderState.EMPTY
        headers[gone] = np.zeros(1, dtype=SLOT_HEADER)
    return recovered
