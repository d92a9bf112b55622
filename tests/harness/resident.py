"""How much memory is there already, as the kernel tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_PAGE_BYTES = 4096
_IN_MEMORY = np.uint64(0b11 << 62)
"""Of an entry in pagemap: it is there, or swapped out."""


class HasSlots(Protocol):
    def slot(self, slot: int) -> NDArray[Any]: ...


def resident_bytes(pool: HasSlots, slot: int) -> int:
    """What the kernel says is in memory of the mapping that holds a slot."""
    return _of_mapping(pool.slot(slot))["Rss:"]


def dirty_bytes(array: NDArray[Any]) -> int:
    """What the kernel says is not yet written to the disk of the mapping that holds an array."""
    counts = _of_mapping(array)
    return counts["Private_Dirty:"] + counts["Shared_Dirty:"]


def _of_mapping(array: NDArray[Any]) -> dict[str, int]:
    counts, inside = dict[str, int](), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split()
        if "-" in head:
            start, end = (int(part, 16) for part in head.split("-"))
            inside = start <= array.ctypes.data < end
        elif inside and rest[-1] == "kB":
            counts[head] = int(rest[0]) << 10
    return counts


def resident_share(array: NDArray[Any]) -> float:
    """How much of the whole pages of an array is in memory, from 0 to 1."""
    start = -(-array.ctypes.data // _PAGE_BYTES)
    end = (array.ctypes.data + array.nbytes) // _PAGE_BYTES
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(8 * start)
        entries = np.frombuffer(pagemap.read(8 * (end - start)), dtype=np.uint64)
    return float(np.count_nonzero(entries & _IN_MEMORY) / (end - start))
