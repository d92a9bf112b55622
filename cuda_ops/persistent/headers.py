"""One rank's slot headers, updated around each store so that a crash at any moment is safe.

A slot is marked as *writing* before the first byte of a store. After the last byte it is *sealed*: the checksum is
written, then *valid*. A slot that is reused in between is marked again with another generation, and the pending seal is
abandoned.

Headers are in a file mapping, where each access may block on the disk: no method may be called on the engine thread,
and headers are accessed without the interpreter lock.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from kvferry.core.transfers import NO_SLOTS, Direction, SlotLabels, Slots, TransferJob
from kvferry.cuda_ops.copy.native import word_copies
from kvferry.cuda_ops.persistent.format import (
    MAX_KEY_BYTES,
    SLOT_HEADER,
    Headers,
    HeaderState,
    are_sound,
    header_checksums,
    padded_keys,
    payload_checksums,
)
from kvferry.cuda_ops.persistent.pool_file import KeptFile
from kvferry.cuda_ops.pool.host_pool import HostPool

SEAL_SLOTS = 32
"""Slots sealed together; a new store may have to wait for one such batch."""

_WORDS = SLOT_HEADER.itemsize // 8


def _word_of(field: str) -> int:
    return SLOT_HEADER.fields[field][1] // 8 if SLOT_HEADER.fields else 0


_MARKED = np.array([_word_of("state"), _word_of("generation")])
_STATE_LAST = np.array(
    [word for word in range(_word_of("dropped_generation")) if word != _word_of("state")] + [_word_of("state")]
)
"""All words but `dropped_generation`, which `HeaderWriter` writes; the one with the state last."""


class SlotHeaders:
    """Slot headers of one rank. Thread: any but the engine's."""

    def __init__(self, file: KeptFile, pool: HostPool, rank: int | None = None) -> None:
        """Map the headers of `rank`, by default the pool's own rank."""
        self._file = file
        self._pool = pool
        self._rank = pool.rank if rank is None else rank
        self._words = file.header_words(self._rank)
        _, self._gather_rows, self._scatter_columns = word_copies()
        self._lock = threading.Lock()

    def before_copy(self, job: TransferJob) -> None:
        """Mark the slots of a store before its copy. Thread: copy. Raises `PoolTruncated` for any job."""
        self._file.check()
        if job.direction is Direction.STORE and job.labels is not None:
            self.begin(job.labels)

    def begin(self, labels: SlotLabels) -> None:
        """Mark slots as *writing* before their bytes are overwritten. Raises `PoolTruncated`."""
        self._file.check()
        marks = np.zeros(len(labels.slots), dtype=SLOT_HEADER)
        marks["state"], marks["generation"] = HeaderState.WRITING, labels.generations
        with self._lock:
            self._scatter_columns(self._words, labels.slots, _MARKED, _as_words(marks))

    def seal(self, labels: SlotLabels) -> int:
        """Seal slots whose store has ended; return how many are valid now. Raises `PoolTruncated`."""
        return sum(self._seal(labels.slice(at, at + SEAL_SLOTS)) for at in range(0, len(labels.slots), SEAL_SLOTS))

    def verify(self, slots: Slots) -> Slots:
        """Return those of these valid slots whose bytes do not match their headers. Raises `PoolTruncated`."""
        self._file.check()
        headers = self._read(slots)
        good = are_sound(headers, self._pool.slot_bytes)
        good[good] = self._checksums(headers[good], slots[good]) == headers["payload_checksum"][good]
        bad: Slots = slots[~good]
        return bad if len(bad) else NO_SLOTS

    def _seal(self, labels: SlotLabels) -> int:
        self._file.check()
        if not self._are_ours(labels).any():
            return 0
        written = np.zeros(len(labels.slots), dtype=SLOT_HEADER)
        written["generation"], written["epoch"] = labels.generations, labels.epochs
        # A block has parts of equal size on all ranks.
        written["length"] = np.minimum(labels.sizes // self._pool.num_ranks, self._pool.slot_bytes)
        written["key"] = padded_keys(labels.keys)
        written["key_length"] = [len(key) for key in labels.keys]
        written["state"] = HeaderState.VALID
        written["payload_checksum"] = self._checksums(written, labels.slots)
        written["checksum"] = header_checksums(written)
        with self._lock:
            ours = self._are_ours(labels)
            slots = labels.slots[ours]
            self._scatter_columns(self._words, slots, _STATE_LAST, _as_words(written[ours]))
        return len(slots)

    def _checksums(self, headers: Headers, slots: Slots) -> NDArray[np.uint64]:
        """Return the checksums of the bytes that these headers describe, in the rank's part of each slot."""
        rows = slots.tolist()
        return payload_checksums(
            headers, self._file.namespace, lambda i, length: self._pool.row(rows[i])[self._rank, :length]
        )

    def _read(self, slots: Slots) -> Headers:
        found = np.empty((len(slots), _WORDS), dtype=np.int64)
        self._gather_rows(self._words, slots, found)
        return found.view(SLOT_HEADER).ravel()

    def _are_ours(self, labels: SlotLabels) -> NDArray[np.bool_]:
        """Return which of these slots are still being written by these stores."""
        headers = self._read(labels.slots)
        fits = np.array([len(key) <= MAX_KEY_BYTES for key in labels.keys], dtype=np.bool_)
        same = headers["generation"] == labels.generations
        ours: NDArray[np.bool_] = fits & same & (headers["state"] == HeaderState.WRITING)
        return ours


def _as_words(headers: Headers) -> NDArray[np.int64]:
    return np.ascontiguousarray(headers).view(np.int64).reshape(len(headers), _WORDS)
