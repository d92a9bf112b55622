"""The host pool as tiers see it: the bytes of its slots, to be read or written in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.cuda_ops.host_pool import HostPool


class PoolSlots:
    """A `kvferry.core.tiers.SlotBytes`. A block has a part of equal size on every rank, one behind the other."""

    def __init__(self, pool: HostPool, before_access: Callable[[int], None] | None = None) -> None:
        """`before_access` is called with each slot before its bytes are handed out, on the tier's thread."""
        self._pool = pool
        self._before_access = before_access

    def views(self, slot: int, num_bytes: int) -> Sequence[NDArray[np.uint8]]:
        """See `kvferry.core.tiers.SlotBytes`. Raises `ValueError` for a length that no block can have."""
        part_bytes, rest = divmod(num_bytes, self._pool.num_ranks)
        if rest or not 0 <= part_bytes <= self._pool.slot_bytes:
            raise ValueError(
                f"{num_bytes} bytes are no block of {self._pool.num_ranks} ranks with slots of {self._pool.slot_bytes}"
            )
        if self._before_access is not None:
            self._before_access(slot)
        return [part[:part_bytes] for part in self._pool.row(slot)]
