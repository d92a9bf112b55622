"""Epoch of a namespace as an object of Mooncake Store, which loses it with the hosts that have it.

Mooncake has no conditional write. It has two operations that only one of many engines succeeds with: an object is
stored only if there is none of its name, and is removed only if there is one. A removal of the object therefore ends
its epoch for good, since an epoch is random and is stored once: what is lost is never followed by something earlier.
That a reset holds does not depend on an object being kept, only on one having been removed. See "The Mooncake tier" in
docs/tier-guarantees.md.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable

from kvferry.app.tiers.block_store import StoreUnavailable
from kvferry.app.tiers.mooncake.client import ABSENT, NO_SPACE, NOT_FOUND, SCRATCH_BYTES, Lane
from kvferry.app.tiers.shared_epoch import Epoch, KnownEpoch

REPLICAS = 3
"""Hosts that have a copy of the epoch, if there are as many."""
_NUM_TRIES = 10
_PLACE = "the store"
_PAUSE_S = 0.02
_DIGEST_BYTES = 16
_SPACE_TRIES = 20
"""Attempts to store the epoch in a full store, which evicts blocks meanwhile."""


class NoSpace(StoreUnavailable):
    """The store has no space for the epoch."""

    def __init__(self) -> None:
        super().__init__("the store has no space: no host gives it memory, or all of it is in use", is_transient=False)


class EpochObject:
    """The epoch as this engine read it last. Methods raise `StoreUnavailable`, and use the start of a lane."""

    def __init__(self, folder: str, tier: str, on_epoch: Callable[[], None]) -> None:
        """`on_epoch` is called after each change of the epoch."""
        self._name = f"{folder}/epoch"
        self._known = KnownEpoch(tier, on_epoch)
        self._changing = threading.Lock()
        """Held while the epoch is compared with the store's, including the calls for that."""

    @property
    def latest(self) -> Epoch:
        """The epoch that was read last."""
        return self._known.latest

    def read(self, lane: Lane) -> Epoch:
        """Return the epoch in the store at some time after the call.

        Begins a new one if the store has none, or has lost its latest writes.
        """
        known = self._known.latest
        if known.name and self._get(lane) == known.name:
            return known
        with self._changing:
            return self._follow(lane)

    def replace(self, lane: Lane) -> None:
        """Begin a new epoch."""
        with self._changing:
            self._end(lane, self._get(lane) or b"", None)
            self._follow(lane)

    # --- inside -------------------------------------------------------------------------------------------------

    def _follow(self, lane: Lane) -> Epoch:
        """Adopt the epoch in the store. Requires: `_changing` held."""
        for _ in range(_NUM_TRIES):
            name = self._get(lane)
            if name is None:
                if not self._begin(lane, b"", Epoch().find_loss(self._known.latest, _PLACE)):
                    time.sleep(_PAUSE_S)
                continue
            reason = Epoch(name).find_loss(self._known.latest, _PLACE)
            if reason is None:
                self._known.adopt(Epoch(name))
                return self._known.latest
            self._end(lane, name, reason)
        raise _CONTENDED

    def _end(self, lane: Lane, name: bytes, reason: str | None) -> None:
        """End the epoch in use, which had this name when it was read, and begin another. Requires: `_changing` held.

        An epoch that is being stored at the same time, by another engine, is a new one: it need not be removed.
        """
        (code,) = lane.remove([self._name])
        if code not in (0, NOT_FOUND) and lane.exists([self._name]) == [True]:
            raise _CONTENDED
        self._begin(lane, name, reason)

    def _begin(self, lane: Lane, ended: bytes, reason: str | None) -> bool:
        """Begin an epoch after one that has ended; return False if the store has one. Requires: `_changing` held."""
        known, last = self._known.latest, Epoch(ended)
        epoch = (last if last.is_after(known) else known).next()
        self._put(lane, epoch.name)
        if self._get(lane) != epoch.name:
            return False
        if reason is not None:
            self._known.warn_of_loss(reason)
        return True

    def _put(self, lane: Lane, data: bytes) -> None:
        """Store the object unless there is one. Raises `NoSpace`."""
        value = _digest(data) + data
        for _ in range(_SPACE_TRIES):
            lane.view[: len(value)] = value
            (code,) = lane.put([self._name], [(0, len(value))], REPLICAS, pinned=True)
            if code == 0:
                return
            if code != NO_SPACE:
                raise StoreUnavailable("the epoch of the namespace cannot be stored")
            time.sleep(_PAUSE_S)
        raise NoSpace

    def _get(self, lane: Lane) -> bytes | None:
        """Return the object; None if it does not exist. Raises `StoreUnavailable` if its hosts cannot be reached."""
        (code,) = lane.get([self._name], [(0, SCRATCH_BYTES)])
        if code in ABSENT:
            return None
        if code < 0:
            raise StoreUnavailable("the epoch of the namespace cannot be read")
        value = bytes(lane.view[:code])
        data = value[_DIGEST_BYTES:]
        # Its memory may have been used for another object while it was read.
        return data if value[:_DIGEST_BYTES] == _digest(data) else None


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_DIGEST_BYTES]


_CONTENDED = StoreUnavailable("the epoch of the namespace is being changed by other engines")
