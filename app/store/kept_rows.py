"""The rows of all slots at once, for a restart that begins warm: read as columns, a million in seconds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select

from app.store.database import Database
from app.store.models import SlotRow
from core.events import Origin

_FETCH_ROWS = 100_000


class KeptRows(NamedTuple):
    """What the table `slots` says of one engine, as columns of one length, in no order. Keys are hex text."""

    slots: NDArray[np.int64]
    keys: list[str]
    generations: NDArray[np.int64]
    positions: NDArray[np.int64]
    origins: list[Origin]
    stored_s: NDArray[np.float64]
    hit_s: NDArray[np.float64]
    hits: NDArray[np.int64]

    @staticmethod
    def none() -> KeptRows:
        """No rows."""
        whole, real = np.empty(0, dtype=np.int64), np.empty(0)
        return KeptRows(whole, [], whole, whole, [], real, real, whole)


def read_kept_rows(database: Database, engine: str) -> KeptRows:
    """All rows of an engine. Raises `StoreUnavailable`."""
    statement = select(
        SlotRow.slot,
        SlotRow.generation,
        SlotRow.position,
        SlotRow.hits,
        SlotRow.stored_at,
        SlotRow.last_hit_at,
        SlotRow.key,
        SlotRow.request,
        SlotRow.tenant,
        SlotRow.lora,
    ).where(SlotRow.engine == engine)
    numbers: list[NDArray[np.int64]] = []
    times: list[NDArray[np.float64]] = []
    keys: list[str] = []
    origins: list[Origin] = []
    known: dict[tuple[str, str | None, str | None], Origin] = {}
    with database.read() as connection:
        result = connection.execution_options(yield_per=_FETCH_ROWS).execute(statement)
        while rows := result.fetchmany(_FETCH_ROWS):
            slots, generations, positions, hits, stored_at, hit_at, texts, *names = zip(*rows, strict=True)
            numbers.append(np.array((slots, generations, positions, hits), dtype=np.int64))
            # A block that was never hit has no time, which becomes NaN.
            times.append(np.array((stored_at, hit_at), dtype=np.float64))
            keys += texts
            for name in zip(*names, strict=True):
                origin = known.get(name)
                if origin is None:
                    origin = known[name] = Origin(*name)
                origins.append(origin)
    if not keys:
        return KeptRows.none()
    columns = np.concatenate(numbers, axis=1)
    stored_s, hit_s = np.nan_to_num(np.concatenate(times, axis=1))
    return KeptRows(columns[0], keys, columns[1], columns[2], origins, stored_s, hit_s, columns[3])
