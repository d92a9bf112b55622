"""How much of a pool's memory is there already, as the kernel tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from numpy.typing import NDArray


class HasSlots(Protocol):
    def slot(self, slot: int) -> NDArray[Any]: ...


def resident_bytes(pool: HasSlots, slot: int) -> int:
    """What the kernel says is in memory of the mapping that holds a slot."""
    address, inside = pool.slot(slot).ctypes.data, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *_ = line.split()
        if "-" in head:
            start, end = (int(part, 16) for part in head.split("-"))
            inside = start <= address < end
        elif inside and head == "Rss:":
            return int(line.split()[1]) << 10
    raise LookupError("no such mapping")
