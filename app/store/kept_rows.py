"""The rows of all slots at once, for a restart that begins warm: read as columns."""

from __future__ import annotations

import json
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import BigInteger, Text, cast, func, select

from app.store.database import Database
from app.store.models import SlotRow
from core.events import Origin

_MICROS = 1_000_000
_NOT_OURS = "the table `slots` holds what no service has written"


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
    """All rows of an engine. Raises `StoreUnavailable`, and `ValueError` for rows that make no sense.

    The database answers one row a request, with the columns of its slots as text: to make a Python object of each value
    takes several times as long.
    """
    numbers = [
        SlotRow.slot,
        SlotRow.generation,
        SlotRow.position,
        SlotRow.hits,
        cast(SlotRow.stored_at * _MICROS, BigInteger),
        cast(func.coalesce(SlotRow.last_hit_at, 0.0) * _MICROS, BigInteger),
    ]
    names = (SlotRow.request, SlotRow.tenant, SlotRow.lora, SlotRow.aliases)
    columns = [func.aggregate_strings(cast(column, Text), ",") for column in (*numbers, SlotRow.key)]
    # All of the table, or nearly, is wanted: an index on its engine would only have it read in a random order.
    mine = func.coalesce(SlotRow.engine, "") == engine
    with database.read() as connection:
        found = connection.execute(select(*names, func.count(), *columns).where(mine).group_by(*names)).all()
    if not found:
        return KeptRows.none()
    requests, tenants, loras, aliases, counts, *texts, keys = zip(*found, strict=True)
    slots, generations, positions, hits, stored, hit = (
        np.fromstring(",".join(text), dtype=np.int64, sep=",") for text in texts
    )
    all_keys = ",".join(keys).split(",")
    if {len(slots), len(generations), len(positions), len(hits), len(stored), len(hit), len(all_keys)} != {sum(counts)}:
        raise ValueError(_NOT_OURS)
    origins = map(Origin, requests, tenants, loras, map(_listed, aliases))
    return KeptRows(
        slots,
        all_keys,
        generations,
        positions,
        list(chain.from_iterable(map(repeat, origins, counts))),
        stored / _MICROS,
        hit / _MICROS,
        hits,
    )


def _listed(aliases: str | None) -> tuple[str, ...]:
    names = [] if aliases is None else json.loads(aliases)
    if not isinstance(names, list):
        raise ValueError(_NOT_OURS)
    return tuple(map(str, names))
