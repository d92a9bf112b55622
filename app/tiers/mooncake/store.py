"""Tier type `mooncake`: a block store in a Mooncake Store, shared by all engines with the same fingerprint.

    <prefix>/<namespace>/epoch              the epoch, see `kvferry.app.tiers.mooncake.epoch`
    <prefix>/<namespace>/b/<epoch>/<key>    one block, see `kvferry.app.tiers.block_format`

The namespace is a digest of the fingerprint. Every call that finds or loads blocks reads the epoch after its last
access to one, and discards its results if it has changed. See docs/tier-guarantees.md.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec

import numpy as np

from kvferry.app.settings.tiers import TierSettings
from kvferry.app.tiers.block_format import OVERHEAD_BYTES
from kvferry.app.tiers.block_store import BlockResult, Outcome, TierContext, TierRefused
from kvferry.app.tiers.mooncake.client import (
    ABSENT,
    NO_SPACE,
    SCRATCH_BYTES,
    TOO_LONG,
    Lane,
    MooncakeClient,
)
from kvferry.app.tiers.mooncake.epoch import EpochObject
from kvferry.app.tiers.mooncake.settings import MooncakeTierSettings
from kvferry.app.tiers.shared_epoch import Epoch
from kvferry.app.tiers.shared_values import ValueStore
from kvferry.core.keys import Key, RequestIdentity

BATCH_BYTES = 16 << 20
MAX_BATCH_BLOCKS = 32
_SWEEPS_S = (0.0, 2.0, 15.0)
"""Seconds after a reset at which earlier blocks are removed: again when leases of the time before have ended."""
_PACKAGES = {"libibverbs.so.1": "libibverbs1", "libnuma.so.1": "libnuma1", "libcurl.so.4": "libcurl4"}
"""Libraries of the system that the client is linked with, and the Debian packages that contain them."""


class MooncakeTier:
    """Blocks as objects in a Mooncake Store, which engines with the same fingerprint share."""

    Settings = MooncakeTierSettings

    @staticmethod
    def open(settings: MooncakeTierSettings, context: TierContext) -> MooncakeStore:
        """Return a store whose client is started by its probe. Raises `TierRefused`."""
        MooncakeTier.check(settings, context.slot_bytes)
        return MooncakeStore(settings, context)

    @staticmethod
    def check(settings: TierSettings, slot_bytes: int | None) -> None:
        """Raise `TierRefused` where the client or its libraries are not installed. The client is not loaded here."""
        prefix = f"KVFERRY_TIERS: tier {settings.name}: "
        if find_spec("mooncake") is None:
            raise TierRefused(f"{prefix}its client is not installed; pip install 'kvferry[mooncake]'")
        packages = missing_packages()
        if packages:
            raise TierRefused(f"{prefix}libraries of its client are missing; apt-get install {' '.join(packages)}")


class MooncakeStore(ValueStore):
    """An `kvferry.app.tiers.block_store.BlockStore`."""

    place = "the store"

    def __init__(self, settings: MooncakeTierSettings, context: TierContext) -> None:
        """`probe` starts the client. Blocks are of up to `context.slot_bytes`."""
        super().__init__(context)
        slot_bytes = context.slot_bytes
        self.batch_blocks = max(1, min(MAX_BATCH_BLOCKS, BATCH_BYTES // slot_bytes))
        self._replicas = settings.replicas
        self._folder = f"{settings.prefix}/{self._namespace.hex()}"
        self._client = MooncakeClient(settings, settings.threads + 2, self.batch_blocks * (slot_bytes + OVERHEAD_BYTES))
        self._sweeps_s: list[float] = []
        """When to remove blocks of earlier epochs."""

    # --- calls of the client ------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """See `ValueStore`. The epoch, like a block, is moved from a host, and stored first if there is none."""
        self._client.start()
        with self._client.lane() as lane:
            self._read_epoch(lane)

    def find_many(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See `BlockStore`."""
        with self._client.lane() as lane:
            begun = self._epoch.latest
            exist = lane.exists(self._names(begun, keys))
            return exist if self._read_epoch(lane) == begun else [False] * len(keys)

    def put_many(
        self, keys: Sequence[Key], data: Sequence[memoryview], origins: Sequence[RequestIdentity]
    ) -> Sequence[Outcome]:
        """See `BlockStore`.

        Reads no epoch: what is written in one that has ended is never found.
        """
        epoch = self._epoch.latest
        values = self._encode(epoch, keys, data, origins)
        spans = list(_spans([sum(map(len, value)) for value in values]))
        with self._client.lane() as lane:
            # By numpy, which releases the interpreter's lock while it copies.
            buffer = np.frombuffer(lane.view, dtype=np.uint8)
            for value, (start, _) in zip(values, spans, strict=True):
                for piece in filter(len, value):
                    np.copyto(buffer[start : start + len(piece)], np.frombuffer(piece, dtype=np.uint8))
                    start += len(piece)
            codes = lane.put(self._names(epoch, keys), spans, self._replicas, pinned=False)
        if NO_SPACE in codes:
            self._set_full()
        else:
            self._full_until_s = 0.0
        known = {0: Outcome.STORED, NO_SPACE: Outcome.DROPPED}
        outcomes = [known.get(code, Outcome.FAILED) for code in codes]
        self._count_stored(values, outcomes)
        return outcomes

    def get_many(self, keys: Sequence[Key], into: Sequence[memoryview]) -> Sequence[BlockResult]:
        """See `BlockStore`."""
        with self._client.lane() as lane:
            begun = self._epoch.latest
            spans = list(_spans([len(one) + OVERHEAD_BYTES for one in into]))
            codes = lane.get(self._names(begun, keys), spans)
            # After the last access to a block.
            read = self._read_epoch(lane)
            # One that is longer than it can be is no block.
            values = [
                lane.view[start : start + max(code, 0)] if code >= 0 or code == TOO_LONG else None
                for code, (start, _) in zip(codes, spans, strict=True)
            ]
            # The client may write to the lane again after a call that took too long.
            results = self._decode(begun, read, keys, values, into, copies=True)
        return [
            BlockResult(Outcome.FAILED) if code < 0 and code not in ABSENT and code != TOO_LONG else result
            for code, result in zip(codes, results, strict=True)
        ]

    def drop(self, keys: Sequence[Key]) -> None:
        """See `BlockStore`."""
        with self._client.lane() as lane:
            # Read after the drop: blocks of a later epoch were stored after it.
            names = self._names(self._read_epoch(lane), keys)
            self._count_removed(lane.remove(names).count(0))

    def maintain(self, stop: Callable[[], bool]) -> None:
        """See `BlockStore`."""
        with self._client.lane() as lane:
            epoch = self._read_epoch(lane).name.decode()
            if self._sweeps_s and time.monotonic() >= self._sweeps_s[0]:
                self._sweeps_s.pop(0)
                # Of the characters of a name only the dot has a meaning in regular expressions.
                lane.remove_matching(f"^{self._folder.replace('.', '[.]')}/b/(?!{epoch}/)")

    def close(self) -> None:
        """See `BlockStore`."""
        self._client.close()

    # --- inside -------------------------------------------------------------------------------------------------

    def _begin_epoch(self) -> None:
        """See `ValueStore`."""
        with self._client.lane() as lane:
            self._epoch.begin(EpochObject(lane, self._folder))
        now_s = time.monotonic()
        self._sweeps_s = [now_s + pause_s for pause_s in _SWEEPS_S]

    def _read_epoch(self, lane: Lane) -> Epoch:
        """Return the epoch in the store at some time after the call."""
        stored = EpochObject(lane, self._folder)
        name, _ = stored.read_epoch()
        return self._epoch.confirm(name, stored)

    def _names(self, epoch: Epoch, keys: Sequence[Key]) -> list[str]:
        prefix = f"{self._folder}/b/{epoch.name.decode()}/"
        return [prefix + key.hex() for key in keys]


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield places in a lane for values of these sizes, one after the other: starts and lengths."""
    start = SCRATCH_BYTES
    for size in sizes:
        yield start, size
        start += size


def missing_packages() -> list[str]:
    """Return the Debian packages of the libraries that cannot be loaded."""
    return [package for library, package in _PACKAGES.items() if _is_missing(library)]


def _is_missing(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return True
    return False
