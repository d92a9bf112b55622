"""A tier on a bench: slots, a tier of some kind over them, and the results of the jobs that a test submits."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.app.settings.tiers import TierSettings, TierType
from kvferry.app.tiers.block_store import BlockStore, SlotBytes, TierContext
from kvferry.app.tiers.fs import FileTier
from kvferry.app.tiers.threaded import CopyHangs, ThreadedTier
from kvferry.core.keys import Key, RequestFilter, RequestIdentity, make_keys
from kvferry.core.tiers.base import Tier, TierCounts, TierResetResult, TierResult
from tests.harness.reference_tier import ReferenceTier
from tests.harness.tier_slots import ORIGIN, SLOT_BYTES, SlotArray, job_of
from tests.harness.waiting import DEADLINE_S, wait_until

FINGERPRINT = {"model": "tiny", "dtype": "float32", "block_size": 16}
WAIT_S = DEADLINE_S
MAINTAIN_S = 0.1
"""Interval of housekeeping: many tests wait for one or two rounds."""
SHORT = {"connect_timeout_s": 0.5, "io_timeout_s": 0.5, "timeout_s": 5.0}
"""Time limits of a tier, in seconds, for tests in which its server does not answer."""


Make = Callable[[TierContext, SlotBytes, Callable[[], None]], Tier]
"""Opens a tier."""


class Rig:
    """Submits jobs to a tier and waits for their results. `turn` makes time pass for a tier with a clock of its own."""

    def __init__(self, slots: SlotArray, make: Make, turn: Callable[[], None]) -> None:
        self.slots = slots
        self.results: dict[int, TierResult | TierResetResult] = {}
        self.told = 0
        self.tier = make(TierContext("bench", FINGERPRINT, SLOT_BYTES), slots, self._tell)
        self.turn = turn
        self.numbers = itertools.count(1)

    def _tell(self) -> None:
        self.told += 1

    def poll(self) -> None:
        self.turn()
        for result in self.tier.poll():
            assert result.number not in self.results, "a result came twice"
            self.results[result.number] = result

    def has(self, number: int) -> bool:
        self.poll()
        return number in self.results

    def wait(self, number: int) -> TierResult:
        wait_until(lambda: self.has(number), f"a result of job {number}", WAIT_S)
        result = self.results[number]
        assert isinstance(result, TierResult)
        return result

    def submit_store(self, keys: Sequence[Key], origin: RequestIdentity = ORIGIN, first_slot: int = 0) -> int:
        number = next(self.numbers)
        for slot, key in enumerate(keys, start=first_slot):
            self.slots.fill(slot, key)
        self.tier.store(job_of(number, keys, first_slot, [origin] * len(keys)))
        return number

    def submit_load(self, keys: Sequence[Key], first_slot: int = 0) -> int:
        number = next(self.numbers)
        self.tier.load(job_of(number, keys, first_slot))
        return number

    def store(self, keys: Sequence[Key], origin: RequestIdentity = ORIGIN) -> list[bool]:
        return self.wait(self.submit_store(keys, origin)).ok.tolist()

    def load(self, keys: Sequence[Key]) -> list[bool]:
        """Load into wiped slots, and check that each holds its block if that is what was said."""
        self.slots.wipe()
        ok = self.wait(self.submit_load(keys)).ok.tolist()
        for slot, (key, loaded) in enumerate(zip(keys, ok, strict=True)):
            assert not loaded or self.slots.holds(slot, key), "a loaded block holds something else"
        return ok

    def find(self, keys: Sequence[Key]) -> list[bool]:
        number = next(self.numbers)
        self.tier.look_up(number, keys)
        return self.wait(number).ok.tolist()

    def serves(self, keys: Sequence[Key]) -> bool:
        """Whether all of these can be stored and loaded."""
        return all(self.store(keys)) and all(self.load(keys))

    def submit_reset(self, match: RequestFilter | None = None) -> int:
        number = next(self.numbers)
        self.tier.reset(number, match)
        return number

    def reset(self, match: RequestFilter | None = None) -> TierResetResult:
        number = self.submit_reset(match)
        wait_until(lambda: self.has(number), "the reset", WAIT_S)
        result = self.results[number]
        assert isinstance(result, TierResetResult)
        return result

    def drop(self, keys: Sequence[Key]) -> int:
        """Drop keys; return the number of the result."""
        number = next(self.numbers)
        self.tier.drop(number, keys)
        return number

    def health(self) -> Sequence[str]:
        """What the tier says once its store was asked again."""
        self._ask_store()
        return self.tier.health()

    def counts(self) -> TierCounts:
        """What the tier counts once its store was asked again."""
        self._ask_store()
        return self.tier.counts()

    def shared_epoch(self) -> bytes:
        """The epoch that the tier knows once its store was asked again."""
        self._ask_store()
        assert isinstance(self.tier, ThreadedTier)
        return self.tier.shared_epoch()

    def _ask_store(self) -> None:
        if isinstance(self.tier, ThreadedTier):
            self.tier._refresh()

    def cancel(self, number: int) -> None:
        """Cancel a job and return once its slots are free: at once, or when a job in progress has ended."""
        try:
            self.tier.cancel(number)
        except CopyHangs:
            self.wait(number)

    def wait_maintained(self) -> None:
        """Wait until housekeeping has been at whatever was dropped before."""
        last = [make_keys([next(self.numbers).to_bytes(32, "big")], 99)[0]]
        self.slots.wipe()
        assert self.wait(self.submit_store(last)).ok.tolist() == [True]
        self.drop(last)
        # A block that is yet to be deleted cannot be stored.
        self._maintain_now()
        wait_until(lambda: self.store(last) == [True], "housekeeping", WAIT_S)
        self.drop(last)

    def _maintain_now(self) -> None:
        assert isinstance(self.tier, ThreadedTier)
        self.tier._maintain_requested.set()

    def wait_healthy(self, keys: Sequence[Key] = ()) -> None:
        """Wait, looking up `keys` if there are any: a failed call stays a reason until one works, or for a minute."""

        def is_healthy() -> bool:
            if keys:
                self.find(keys)
            return not self.health()

        wait_until(is_healthy, "healthy", WAIT_S)

    def wait_for_reason(self, words: str) -> None:
        """Wait until the health has a reason with these words."""
        wait_until(lambda: any(words in reason for reason in self.health()), words, WAIT_S)

    def wait_unavailable(self, keys: Sequence[Key]) -> None:
        """Look up until nothing is stored any more: a failed call alone is a reason in `health`, too.

        A store that answers look-ups from memory has a reason of its own, and may not open the circuit breaker.
        """

        def is_unused() -> bool:
            assert isinstance(self.tier, ThreadedTier)
            is_known = self.tier.counts().unavailable or self.tier._store.health()
            return not any(self.find(keys)) and bool(is_known)

        wait_until(is_unused, "unavailable", WAIT_S)

    def close(self) -> None:
        self.tier.close(WAIT_S)


class StoreBench(ABC):
    """A store, and the tiers of it that a test opens one after the other, as processes do."""

    _rig: Rig | None = None

    def open(self, fingerprint: dict[str, object] | None = None, **settings: Any) -> Rig:
        """Close the tier that is open, if any, and open one with these settings."""
        self.close()
        self._rig = self.make_rig(fingerprint, **settings)
        return self._rig

    def close(self) -> None:
        """Close the open tier."""
        if self._rig is not None:
            self._rig.close()

    @abstractmethod
    def make_rig(self, fingerprint: dict[str, object] | None, **settings: Any) -> Rig:
        """Open a tier."""

    def hung(self) -> AbstractContextManager[None]:
        """Calls that store blocks hang meanwhile."""
        raise NotImplementedError("a call of this store ends within a time limit")

    @abstractmethod
    def down(self) -> AbstractContextManager[None]:
        """Every call fails meanwhile. The blocks are back afterwards."""

    @abstractmethod
    def spoil(self, key: Key) -> None:
        """Change a byte of a stored block."""


def reference_rig() -> Rig:
    now_s = 0.0

    def turn() -> None:
        nonlocal now_s
        now_s += 0.25

    slots = SlotArray(16)
    return Rig(slots, lambda *_: ReferenceTier(slots, lambda: now_s), turn)


def noop() -> None:
    return


def threaded_rig(store: BlockStore, num_slots: int = 16, num_ranks: int = 1, **settings: object) -> Rig:
    given = {"type": "bench", "name": "bench", "max_bytes": 1 << 40, "threads": 2} | settings
    entry = TierSettings(**given)  # type: ignore[arg-type]
    return Rig(
        SlotArray(num_slots, num_ranks=num_ranks), partial(ThreadedTier, store, entry, maintain_s=MAINTAIN_S), noop
    )


def rig_of(
    kind: TierType,
    entry: TierSettings,
    fingerprint: dict[str, object] | None = None,
    num_slots: int = 16,
) -> Rig:
    """A tier of these settings."""

    def make(context: TierContext, slots: SlotBytes, on_finished: Callable[[], None]) -> Tier:
        context = replace(context, name=entry.name, fingerprint=fingerprint or FINGERPRINT)
        return ThreadedTier(kind.open(entry, context), entry, context, slots, on_finished, MAINTAIN_S)

    return Rig(SlotArray(num_slots), make, noop)


def file_rig(
    path: Path,
    max_bytes: object = "1GiB",
    num_slots: int = 16,
    fingerprint: dict[str, object] | None = None,
    **settings: Any,
) -> Rig:
    """A file system tier in a folder, once it has read what lies there."""
    entry = FileTier.Settings(type="fs", name="disk", path=path, max_bytes=max_bytes, **settings)
    rig = rig_of(FileTier, entry, fingerprint, num_slots)
    wait_until(lambda: " is being " not in "".join(rig.health()), "the folder has been read", WAIT_S)
    return rig
