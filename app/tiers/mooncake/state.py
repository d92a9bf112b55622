"""State of a namespace as objects of Mooncake Store, which loses them with the hosts that have them.

    <folder>/epoch                  the epoch in use
    <folder>/state/<epoch>/<n>      that epoch, and its n filters

Mooncake has no conditional write. It has two operations that only one of many engines succeeds with: an object is
stored only if there is none of its name, and is removed only if there is one.

- An epoch is random, and is stored once. A removal of the object `epoch` ends its epoch for good.
- Of an epoch there is one state at most: an engine that adds a filter removes the last state, which only one engine
  can do, and stores the next.
- A state is used only after it has been found and its epoch, after the call that uses it has begun.

What is lost is therefore never followed by something earlier: a new epoch begins. That a reset holds does not depend on
an object being kept, only on one having been removed. See "The Mooncake tier" in docs/tiers.md.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable

from kvferry.app.tiers.block_store import StoreUnavailable
from kvferry.app.tiers.mooncake.client import ABSENT, NO_SPACE, NOT_FOUND, SCRATCH_BYTES, Lane
from kvferry.app.tiers.shared_state import MAX_RESETS_BY_MATCH, SharedState

_log = logging.getLogger(__name__)

REPLICAS = 3
"""Hosts that have a copy of the state, if there are as many."""
LOST_AFTER_S = 2.0
"""Seconds without a state of the epoch in use, as while a filter is being added, after which it is lost."""
_NUM_TRIES = 10
_PLACE = "the store"
_PAUSE_S = 0.02
_DIGEST_BYTES = 16
_SPACE_TRIES = 20
"""Attempts to store a part of the state in a full store, which evicts blocks meanwhile."""


class NoSpace(StoreUnavailable):
    """The store has no space for the state."""

    def __init__(self) -> None:
        super().__init__("the store has no space: no host gives it memory, or all of it is in use", is_transient=False)


class StateObjects:
    """The state as this engine read it last. Methods raise `StoreUnavailable`, and use the start of a lane."""

    def __init__(self, folder: str, tier: str, on_epoch: Callable[[], None]) -> None:
        """`on_epoch` is called after each change of the epoch."""
        self._folder = folder
        self._tier = tier
        self._on_epoch = on_epoch
        self._state = SharedState()
        self._changing = threading.Lock()
        """Held while the state is compared with the store's, including the calls for that."""

    @property
    def latest(self) -> SharedState:
        """The state that was read last."""
        return self._state

    def read(self, lane: Lane) -> SharedState:
        """Return the state in the store at some time after the call.

        Begins a new epoch if the store has none, or has lost its latest writes.
        """
        known = self._state
        if known.epoch and self._is_in_use(lane, known):
            return known
        with self._changing:
            return self._follow(lane)

    def replace_epoch(self, lane: Lane) -> None:
        """Begin a new epoch."""
        with self._changing:
            self._end_epoch(lane, self._get(lane, self._epoch_name) or b"", None)
            self._follow(lane)

    def append(self, lane: Lane, match_item: bytes) -> SharedState | None:
        """Append a packed filter; return the state with it, or None if there are too many."""
        with self._changing:
            for _ in range(_NUM_TRIES):
                state = self._follow(lane)
                if match_item in state.items:
                    # Another engine has added a filter since.
                    return state
                longer = SharedState.of((*state.items, match_item))
                if len(state.filters) >= MAX_RESETS_BY_MATCH or len(longer.pack()) > SCRATCH_BYTES - _DIGEST_BYTES:
                    return None
                (code,) = lane.remove([self._name(state)])
                if code == NOT_FOUND:
                    # Another engine has added a filter, or begun a new epoch.
                    continue
                if code != 0:
                    raise _CONTENDED
                self._put(lane, self._name(longer), longer.pack())
                # Otherwise it is lost, or another engine has ended the epoch meanwhile.
                if self._is_in_use(lane, longer):
                    self._adopt(longer)
                    return longer
                lane.remove([self._name(longer)])
        raise _CONTENDED

    # --- inside -------------------------------------------------------------------------------------------------

    @property
    def _epoch_name(self) -> str:
        return f"{self._folder}/epoch"

    def _name(self, state: SharedState) -> str:
        return self._name_of(state.epoch, len(state.filters))

    def _name_of(self, epoch: bytes, num_filters: int) -> str:
        return f"{self._folder}/state/{epoch.decode()}/{num_filters}"

    def _is_in_use(self, lane: Lane, state: SharedState) -> bool:
        """Return whether a state was in use at some time during the call."""
        return lane.exists([self._name(state)]) == [True] and self._get(lane, self._epoch_name) == state.epoch

    def _follow(self, lane: Lane) -> SharedState:
        """Adopt the state in the store. Requires: `_changing` held."""
        for _ in range(_NUM_TRIES):
            epoch = self._get(lane, self._epoch_name)
            if epoch is None:
                if not self._begin(lane, b"", SharedState().find_loss(self._state, _PLACE)):
                    time.sleep(_PAUSE_S)
                continue
            state = self._wait_for(lane, epoch)
            # Another engine may have ended the epoch meanwhile.
            if self._get(lane, self._epoch_name) != epoch:
                continue
            reason = state.find_loss(self._state, _PLACE)
            if reason is None:
                self._adopt(state)
                return state
            self._end_epoch(lane, epoch, reason)
        raise _CONTENDED

    def _wait_for(self, lane: Lane, epoch: bytes) -> SharedState:
        """Return the state of an epoch, of which there is none while a filter is added; an empty one if it is lost."""
        end_s = time.monotonic() + LOST_AFTER_S
        while not (state := self._find(lane, epoch)).epoch and time.monotonic() < end_s:
            time.sleep(_PAUSE_S)
            if self._get(lane, self._epoch_name) != epoch:
                break
        return state

    def _find(self, lane: Lane, epoch: bytes) -> SharedState:
        """Return the state of an epoch; an empty one without, and for what another program wrote in its place."""
        if not SharedState((epoch,)).number:
            return SharedState()
        names = [self._name_of(epoch, number) for number in range(MAX_RESETS_BY_MATCH + 1)]
        for name in [name for name, exists in zip(names, lane.exists(names), strict=True) if exists]:
            state = SharedState.unpack(self._get(lane, name) or b"")
            if state.epoch == epoch and self._name(state) == name:
                return state
        return SharedState()

    def _end_epoch(self, lane: Lane, epoch: bytes, reason: str | None) -> None:
        """End the epoch in use, which was this one when it was read, and begin another. Requires: `_changing` held.

        An epoch that is being stored at the same time, by another engine, is a new one: it need not be removed.
        """
        (code,) = lane.remove([self._epoch_name])
        if code not in (0, NOT_FOUND) and lane.exists([self._epoch_name]) == [True]:
            raise _CONTENDED
        if epoch == self._state.epoch:
            # It would never be used again, and never be evicted.
            lane.remove([self._name(self._state)])
        self._begin(lane, epoch, reason)

    def _begin(self, lane: Lane, ended: bytes, reason: str | None) -> bool:
        """Begin an epoch after one that has ended; return False if the store has one. Requires: `_changing` held."""
        state = max(self._state, SharedState((ended,)), key=lambda one: one.number).next_epoch()
        # An epoch without a state would be lost.
        self._put(lane, self._name(state), state.pack())
        self._put(lane, self._epoch_name, state.epoch)
        if self._get(lane, self._epoch_name) == state.epoch:
            if reason is not None and self._state.epoch:
                _log.warning("tier %s: starts empty: %s", self._tier, reason)
            return True
        lane.remove([self._name(state)])
        return False

    def _put(self, lane: Lane, name: str, data: bytes) -> None:
        """Store an object unless there is one of that name. Raises `NoSpace`."""
        value = _digest(data) + data
        for _ in range(_SPACE_TRIES):
            lane.view[: len(value)] = value
            (code,) = lane.put([name], [(0, len(value))], REPLICAS, pinned=True)
            if code == 0:
                return
            if code != NO_SPACE:
                raise StoreUnavailable("the state of the namespace cannot be stored")
            time.sleep(_PAUSE_S)
        raise NoSpace

    def _get(self, lane: Lane, name: str) -> bytes | None:
        """Return an object; None if it does not exist. Raises `StoreUnavailable` if its hosts cannot be reached."""
        (code,) = lane.get([name], [(0, SCRATCH_BYTES)])
        if code in ABSENT:
            return None
        if code < 0:
            raise StoreUnavailable("the state of the namespace cannot be read")
        value = bytes(lane.view[:code])
        data = value[_DIGEST_BYTES:]
        # Its memory may have been used for another object while it was read.
        return data if value[:_DIGEST_BYTES] == _digest(data) else None

    def _adopt(self, state: SharedState) -> None:
        known, self._state = self._state, state
        if known.epoch != state.epoch:
            if known.epoch:
                _log.info("tier %s: its namespace was reset", self._tier)
            self._on_epoch()


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()[:_DIGEST_BYTES]


_CONTENDED = StoreUnavailable("the state of the namespace is being changed by other engines")
