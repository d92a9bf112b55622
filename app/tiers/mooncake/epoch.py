"""Epoch of a namespace as an object of Mooncake Store, which loses it with the hosts that have it.

Mooncake has no conditional write. It has two operations that only one of many engines succeeds with: an object is
stored only if there is none of its name, and is removed only if there is one. A removal of the object therefore ends
its epoch for good, since an epoch is random and is stored once: what is lost is never followed by something earlier.
That a reset holds does not depend on an object being kept, only on one having been removed. See "The Mooncake tier" in
docs/tier-guarantees.md.
"""

from __future__ import annotations

import hashlib
import time

from kvferry.app.tiers.block_store import StoreUnavailable
from kvferry.app.tiers.mooncake.client import ABSENT, NO_SPACE, NOT_FOUND, SCRATCH_BYTES, Lane

REPLICAS = 3
"""Hosts that have a copy of the epoch, if there are as many."""
_PAUSE_S = 0.02
_DIGEST_BYTES = 16
_SPACE_TRIES = 20
"""Attempts to store the epoch in a full store, which evicts blocks meanwhile."""


class NoSpace(StoreUnavailable):
    """The store has no space for the epoch."""

    def __init__(self) -> None:
        super().__init__("the store has no space: no host gives it memory, or all of it is in use", is_transient=False)


class EpochObject:
    """An `EpochStore` in one object; a version is the name that was read. Uses the start of the lane's memory."""

    def __init__(self, lane: Lane, folder: str) -> None:
        self._lane = lane
        self._name = f"{folder}/epoch"

    def read_epoch(self) -> tuple[bytes, bytes]:
        """See `EpochStore`. Raises `StoreUnavailable` if the hosts of the object cannot be reached."""
        (code,) = self._lane.get([self._name], [(0, SCRATCH_BYTES)])
        if code in ABSENT:
            return b"", b""
        if code < 0:
            raise StoreUnavailable("the epoch of the namespace cannot be read")
        value = bytes(self._lane.view[:code])
        data = value[_DIGEST_BYTES:]
        # Its memory may have been used for another object while it was read.
        name = data if value[:_DIGEST_BYTES] == _digest(data) else b""
        return name, name

    def replace_epoch(self, version: bytes, name: bytes) -> bool:
        """See `EpochStore`. Raises `NoSpace`.

        An epoch that is being stored at the same time, by another engine, is a new one: it need not be removed.
        """
        if version:
            (code,) = self._lane.remove([self._name])
            if code not in (0, NOT_FOUND) and self._lane.exists([self._name]) == [True]:
                return False
        self._put(name)
        is_first = self.read_epoch() == (name, name)
        if not is_first:
            time.sleep(_PAUSE_S)
        return is_first

    def _put(self, name: bytes) -> None:
        """Store the object unless there is one."""
        value = _digest(name) + name
        for _ in range(_SPACE_TRIES):
            self._lane.view[: len(value)] = value
            (code,) = self._lane.put([self._name], [(0, len(value))], REPLICAS, pinned=True)
            if code == 0:
                return
            if code != NO_SPACE:
                raise StoreUnavailable("the epoch of the namespace cannot be stored")
            time.sleep(_PAUSE_S)
        raise NoSpace


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_DIGEST_BYTES]
