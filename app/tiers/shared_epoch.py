"""Epoch of a namespace in a store that engines share.

An epoch is a number and a random id, which each reset replaces. It is part of the name of each block, so that a block
of an earlier epoch is never found. See docs/tier-guarantees.md.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvferry.core.keys import RANDOM_SEED

_log = logging.getLogger(__name__)

_ID_BYTES = 8
_NUMBERS = 1 << 64
_EPOCH = re.compile(rb"([0-9a-f]{1,16})-[0-9a-f]{16}")


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
        """Return a new epoch after this one."""
        return Epoch(b"%x-%s" % ((self.number + 1) % _NUMBERS or 1, secrets.token_hex(_ID_BYTES).encode()))

    def is_after(self, other: Epoch) -> bool:
        """Return whether this epoch began after another one, by their numbers, which start again after the highest.

        Whatever number another program has written, there is one after it. Compares like RFC 1982.
        """
        return self.number > 0 and (not other.number or 0 < (self.number - other.number) % _NUMBERS < _NUMBERS // 2)

    def find_loss(self, known: Epoch, place: str = "the server") -> str | None:
        """Return why this epoch, read in `place` after `known`, has to be replaced by a new one; None to adopt it."""
        if not self.number:
            return f"{place} has no epoch of its namespace"
        if self != known and not self.is_after(known):
            return f"{place} has lost its latest writes, among which may have been resets"
        return None


class KnownEpoch:
    """The epoch that this engine read last from a server."""

    def __init__(self, tier: str, on_change: Callable[[], None]) -> None:
        """`tier` is the name in logs. `on_change` is called after each change of the epoch."""
        self._tier = tier
        self._on_change = on_change
        self.latest = Epoch()

    def adopt(self, epoch: Epoch) -> None:
        """Use an epoch from now on. Calls of this method must not overlap."""
        known, self.latest = self.latest, epoch
        if known != epoch:
            if known.name:
                _log.info("tier %s: its namespace was reset", self._tier)
            self._on_change()

    def warn_of_loss(self, reason: str) -> None:
        """Log why the latest epoch is replaced without a reset, unless none was read before."""
        if self.latest.name:
            _log.warning("tier %s: starts empty: %s", self._tier, reason)


def sharing_problems(fingerprint: Mapping[str, object]) -> list[str]:
    """Return why engines with this fingerprint share nothing, for `BlockStore.health`."""
    if not str(fingerprint.get("hash_seed", "")).startswith(RANDOM_SEED):
        return []
    return [
        "block hashes are random, so no block is shared with other engines or found after a restart; set "
        "PYTHONHASHSEED to the same value for all engines"
    ]
