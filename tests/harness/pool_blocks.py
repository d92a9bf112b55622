"""Keys and blocks of a pool without an engine, for tests of the manager and its parts."""

from __future__ import annotations

import numpy as np

from kvferry.core.keys import Key, RequestIdentity
from kvferry.core.pool.admission import Reservation
from kvferry.core.pool.events import CacheEvent, EvictionBatch
from kvferry.core.pool.manager import OffloadManager

ANYONE = RequestIdentity("r")
LOW, NORMAL, HIGH = 0, 1, 2


class Recorder:
    """Records evictions."""

    def __init__(self) -> None:
        self.batches: list[EvictionBatch] = []

    def __call__(self, event: CacheEvent) -> None:
        if isinstance(event, EvictionBatch):
            self.batches.append(event)


def key(number: int) -> Key:
    return number.to_bytes(16, "big") + b"\0"


def keys(first: int, count: int) -> list[Key]:
    return [key(number) for number in range(first, first + count)]


def offer(
    manager: OffloadManager,
    wanted: list[Key],
    priority: int = NORMAL,
    origin: RequestIdentity = ANYONE,
    now_s: float = 1.0,
) -> Reservation:
    """Reserve slots for blocks."""
    return manager.prepare_store(wanted, origin, np.arange(len(wanted)), priority, now_s)


def store(
    manager: OffloadManager,
    wanted: list[Key],
    priority: int = NORMAL,
    origin: RequestIdentity = ANYONE,
    now_s: float = 1.0,
) -> Reservation:
    """Reserve slots for blocks and publish them."""
    answer = offer(manager, wanted, priority, origin, now_s)
    manager.complete_store(answer.slots, now_s)
    return answer


def load(manager: OffloadManager, wanted: list[Key]) -> int:
    """Load the prefix of these keys that the pool has, and return its number of blocks."""
    pin = manager.pin(manager.lookup(wanted))
    assert manager.prepare_load(pin, 1.0)
    assert manager.complete_load(pin)
    return len(pin)


def held(manager: OffloadManager, wanted: list[Key]) -> list[bool]:
    return (manager.lookup_each(wanted) >= 0).tolist()
