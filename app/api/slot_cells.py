"""The slots of the pool, aggregated for drawing: neighbors form a cell, which counts its slots by class.

Slots are read in batches, each copied under the manager lock, and classified without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.records import SlotRows
from kvferry.core.pool.slots import SlotState

Codes = NDArray[np.int32]
"""The class of each slot."""

MAX_TENANTS = 6
"""Tenants with a class of their own: those with the most blocks."""
EMPTY = "no block"
AGES_S = {"up to 10 s": 10.0, "up to 1 min": 60.0, "up to 10 min": 600.0, "up to 1 h": 3600.0, "up to 1 day": 86400.0}
OLDER = "over 1 day"
HITS = {"0": 0, "1": 1, "2 to 3": 3, "4 to 15": 15, "16 to 63": 63}
MORE_HITS = "64 or more"
NO_TENANT = "no tenant"
OTHER_TENANTS = "other tenants"


class CellsBy(StrEnum):
    """What slots are classified by."""

    STATE = "state"
    AGE = "age"
    HITS = "hits"
    TENANT = "tenant"


class Cells(NamedTuple):
    """Slots by class and cell: `counts` has a row per class and a column per cell, of `slots_per_cell` slots each.

    The last cell may have fewer.
    """

    slots_per_cell: int
    classes: Sequence[str]
    counts: NDArray[np.int64]


def count_cells(inventory: Inventory, by: CellsBy, max_cells: int, now_s: float) -> Cells:
    """Classify all slots, and count them in at most `max_cells` cells of the same number of slots."""
    if by is CellsBy.STATE:
        names: Sequence[str] = [state.name.lower() for state in SlotState]
        codes = inventory.slot_states().astype(np.int32)
    elif by is CellsBy.TENANT:
        names, codes = _by_tenant(inventory.all_rows())
    else:
        bounds, last = (AGES_S, OLDER) if by is CellsBy.AGE else (HITS, MORE_HITS)
        names = [EMPTY, *bounds, last]
        codes = _by_bounds(inventory.all_rows(), by, list(bounds.values()), now_s)
    per_cell = max(1, -(-len(codes) // max_cells))
    num_cells = -(-len(codes) // per_cell)
    padding = num_cells * per_cell - len(codes)
    cells = np.pad(codes, (0, padding), constant_values=len(names)).reshape(num_cells, per_cell)
    counts = np.array([np.count_nonzero(cells == code, axis=1) for code in range(len(names))], dtype=np.int64)
    return Cells(per_cell, names, counts)


def _by_bounds(batches: Iterable[SlotRows], by: CellsBy, bounds: Sequence[float], now_s: float) -> Codes:
    def classify(rows: SlotRows) -> Codes:
        values = now_s - rows.records["stored_s"] if by is CellsBy.AGE else rows.records["hits"]
        return np.where(rows.live, np.searchsorted(bounds, values) + 1, 0).astype(np.int32)

    return _joined(map(classify, batches))


def _by_tenant(batches: Iterable[SlotRows]) -> tuple[Sequence[str], Codes]:
    """Return classes and codes: one class for each of the largest tenants, and one for all others."""
    numbers: dict[str | None, int] = {None: 1}

    def classify(rows: SlotRows) -> Codes:
        tenants = (
            numbers.setdefault(origin.tenant, len(numbers) + 1) if live else 0
            for live, origin in zip(rows.live.tolist(), rows.origins, strict=True)
        )
        return np.fromiter(tenants, dtype=np.int32, count=len(rows.slots))

    codes = _joined(map(classify, batches))
    num_blocks = np.bincount(codes, minlength=len(numbers) + 1)
    tenants = [tenant for tenant in numbers if tenant is not None]
    shown = sorted(tenants, key=lambda tenant: num_blocks[numbers[tenant]], reverse=True)[:MAX_TENANTS]
    names = [EMPTY, NO_TENANT, *shown, OTHER_TENANTS]
    class_of = np.full(len(numbers) + 1, len(names) - 1, dtype=np.int32)
    class_of[:2] = 0, 1
    class_of[[numbers[tenant] for tenant in shown]] = np.arange(2, 2 + len(shown))
    return names, class_of[codes]


def _joined(parts: Iterator[Codes]) -> Codes:
    cells = list(parts)
    return np.concatenate(cells) if cells else np.zeros(0, dtype=np.int32)
