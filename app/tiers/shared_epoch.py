"""Epoch of a namespace in a store that engines share.

An epoch is a number and a random id, which each reset replaces. It is part of the name of each block, so that a block
of an earlier epoch is never found. See docs/tier-guarantees.md.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from kvferry.app.tiers.block_store import StoreUnavailable
from kvferry.core.keys import RANDOM_SEED

_log = logging.getLogger(__name__)

MAX_NAME_BYTES = 33
_ID_BYTES = 8
_NUMBERS = 1 << 64
_EPOCH = re.compile(rb"([0-9a-f]{1,16})-[0-9a-f]{16}")
_NUM_TRIES = 20
"""Attempts to read or replace an epoch that other engines replace meanwhile."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch by its name, which another program may have written; without a name there is none."""

    name: bytes = b""

    @property
    def number(self) -> int:
        """Number of the epoch; 0 for none, and for what is no epoch."""
        parts = _EPOCH.fullmatch(self.name)
        return 0 if parts is None else int(parts[1], 16)

    def next(self) -> Epoch:
        """Return a new epoch after this one; after the highest number, which only another program writes, the first."""
        return Epoch(b"%x-%s" % ((self.number + 1) % _NUMBERS or 1, secrets.token_hex(_ID_BYTES).encode()))


class EpochStore(Protocol):
    """Where engines keep the epoch of a namespace. Methods raise `StoreUnavailable`."""

    def read_epoch(self) -> tuple[bytes, Any]:
        """Return the epoch's name, empty if there is none, and the version of what was read."""

    def replace_epoch(self, version: Any, name: bytes) -> bool:
        """Write an epoch, durably, if the store still has this version; return whether it did."""


class SharedEpoch:
    """The epoch that this engine read last from a store. Thread-safe."""

    def __init__(self, tier: str, on_change: Callable[[], None], place: str = "the server") -> None:
        """`tier` and `place` are the names in logs. `on_change` is called after each change of the epoch."""
        self.latest = Epoch()
        self.changing = threading.Lock()
        """Held while the epoch is compared with the store's, including the calls for that."""
        self._tier = tier
        self._on_change = on_change
        self._place = place

    def confirm(self, name: bytes, store: EpochStore) -> Epoch:
        """Return the epoch in the store at some time after the reading of `name`."""
        latest = self.latest
        return latest if name and name == latest.name else self.read(store)

    def read(self, store: EpochStore) -> Epoch:
        """Return the epoch in the store at some time after the call.

        Begins a new one if the store has none, or has lost its latest writes.
        """
        with self.changing:
            self._read(store)
            return self.latest

    def begin(self, store: EpochStore) -> None:
        """Begin a new epoch."""
        with self.changing:
            for _ in range(_NUM_TRIES):
                if self._replace(store, self._read(store)):
                    return
        raise _contended()

    def _read(self, store: EpochStore) -> Any:
        """Adopt the epoch in the store, and return its version. Requires: `changing` held."""
        for _ in range(_NUM_TRIES):
            name, version = store.read_epoch()
            loss = self._find_loss(Epoch(name))
            if loss is None:
                self._adopt(Epoch(name))
                return version
            if self._replace(store, version) and loss:
                _log.warning("tier %s: starts empty: %s", self._tier, loss)
        raise _contended()

    def _find_loss(self, epoch: Epoch) -> str | None:
        """Return why an epoch that was read has to be replaced, empty at first; None for one to adopt."""
        known = self.latest
        if epoch.number and (epoch == known or epoch.number > known.number):
            return None
        if not known.name:
            return ""
        lost = (
            "lost its latest writes, among which may have been resets" if epoch.number else "no epoch of its namespace"
        )
        return f"{self._place} has {lost}"

    def _replace(self, store: EpochStore, version: Any) -> bool:
        epoch = self.latest.next()
        is_written = store.replace_epoch(version, epoch.name)
        if is_written:
            self._adopt(epoch)
        return is_written

    def _adopt(self, epoch: Epoch) -> None:
        known, self.latest = self.latest, epoch
        if known != epoch:
            if known.name:
                _log.info("tier %s: its namespace was reset", self._tier)
            self._on_change()


def _contended() -> StoreUnavailable:
    return StoreUnavailable("the epoch of the namespace is being changed by other engines")


def sharing_problems(fingerprint: Mapping[str, object]) -> list[str]:
    """Return why engines with this fingerprint share nothing, for `BlockStore.health`."""
    if not str(fingerprint.get("hash_seed", "")).startswith(RANDOM_SEED):
        return []
    return [
        "block hashes are random, so no block is shared with other engines or found after a restart; set "
        "PYTHONHASHSEED to the same value for all engines"
    ]
