"""One rank's slot headers while the pool is in use: written around each store, so that any moment may be the last.

A store marks its slots as *writing* before their first byte. Once its bytes are there they are *sealed*: the checksum,
then *valid*. Whoever is given a slot in between marks it again, with another generation, and the seal is abandoned.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

from core.transfers import NO_SLOTS, SlotLabels, Slots
from cuda_ops.host_pool import HostPool
from cuda_ops.pool_format import (
    MAX_KEY_BYTES,
    SLOT_HEADER,
    Headers,
    HeaderState,
    are_sound,
    header_checksums,
    keys_of,
    padded_keys,
    payload_checksum,
)

SEAL_SLOTS = 32
"""Slots that are made valid together, and for which a store that begins may have to wait."""

_CHECKED = [name for name in SLOT_HEADER.names or () if name not in ("state", "dropped_generation", "unused")]


class SlotHeaders:
    """Any thread may call anything."""

    def __init__(self, headers: Headers, pool: HostPool, rank: int | None = None) -> None:
        """`headers` are those of `rank`, by default the pool's own."""
        self._headers = headers
        self._pool = pool
        self._rank = pool.rank if rank is None else rank
        self._lock = threading.Lock()

    def begin(self, labels: SlotLabels) -> None:
        """The bytes of these slots are about to be overwritten."""
        with self._lock:
            self._headers["state"][labels.slots] = HeaderState.WRITING
            self._headers["generation"][labels.slots] = labels.generations

    def seal(self, labels: SlotLabels) -> int:
        """Vouch for the bytes of slots whose store has ended; how many are valid now."""
        return sum(self._seal(labels.part(at, at + SEAL_SLOTS)) for at in range(0, len(labels.slots), SEAL_SLOTS))

    def verify(self, slots: Slots) -> Slots:
        """Those of these valid slots whose bytes are not what their headers say."""
        headers = self._headers[slots]
        good = are_sound(headers, self._pool.slot_bytes)
        candidates = good.nonzero()[0]
        columns = zip(
            candidates.tolist(),
            slots[candidates].tolist(),
            keys_of(headers[candidates]),
            headers["epoch"][candidates].tolist(),
            headers["length"][candidates].tolist(),
            headers["payload_checksum"][candidates].tolist(),
            strict=True,
        )
        for i, slot, key, epoch, length, checksum in columns:
            good[i] = payload_checksum(key, epoch, self._bytes(slot, length)) == checksum
        bad: Slots = slots[~good]
        return bad if len(bad) else NO_SLOTS

    def _seal(self, labels: SlotLabels) -> int:
        written = np.zeros(len(labels.slots), dtype=SLOT_HEADER)
        written["generation"], written["epoch"] = labels.generations, labels.epochs
        # A block has a part of equal size on every rank.
        written["length"] = np.minimum(labels.sizes // self._pool.num_ranks, self._pool.slot_bytes)
        written["key"] = padded_keys(labels.keys)
        written["key_length"] = [len(key) for key in labels.keys]
        written["state"] = HeaderState.VALID
        columns = zip(
            labels.slots.tolist(), labels.keys, written["epoch"].tolist(), written["length"].tolist(), strict=True
        )
        if not self._are_ours(labels).any():
            return 0
        written["payload_checksum"] = [
            payload_checksum(key, epoch, self._bytes(slot, length)) for slot, key, epoch, length in columns
        ]
        written["checksum"] = header_checksums(written)
        with self._lock:
            ours = self._are_ours(labels)
            slots, written = labels.slots[ours], written[ours]
            for name in _CHECKED:
                self._headers[name][slots] = written[name]
            self._headers["state"][slots] = HeaderState.VALID
        return len(slots)

    def _bytes(self, slot: int, length: int) -> NDArray[np.uint8]:
        """The rank's first bytes of a slot, not a copy."""
        mine: NDArray[np.uint8] = self._pool.row(slot)[self._rank, :length]
        return mine

    def _are_ours(self, labels: SlotLabels) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which of these slots have not been given to another store since."""
        headers = self._headers
        fits = np.array([len(key) <= MAX_KEY_BYTES for key in labels.keys], dtype=np.bool_)
        same = headers["generation"][labels.slots] == labels.generations
        ours: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
            fits & same & (headers["state"][labels.slots] == HeaderState.WRITING)
        )
        return ours
