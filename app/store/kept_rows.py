"""The rows of all slots at once, for a restart that begins warm: read as columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import BigInteger, Connection, Text, cast, func, literal_column, select

from kvferry.app.store.database import Database
from kvferry.app.store.models import SlotRow
from kvferry.core.keys import RequestIdentity
from kvferry.core.policy import PRIORITY_CLASS, Priority

_MICROS = 1_000_000
_PART_ROWS = 1 << 16
"""Rows in one answer, which bounds what it takes in memory beside the columns."""
_NOT_OURS = "the table `slots` holds what no service has written"


class KeptRows(NamedTuple):
    """What the table `slots` says of one engine, as columns of one length, in no order.

    `keys` are `bytes`; `origins` is each origin once, and `origin_numbers` says which of them a row has. `classes` are
    those of priority.
    """

    slots: NDArray[np.int64]
    keys: NDArray[np.object_]
    generations: NDArray[np.int64]
    positions: NDArray[np.int64]
    origins: list[RequestIdentity]
    origin_numbers: NDArray[np.int64]
    stored_s: NDArray[np.float64]
    hit_s: NDArray[np.float64]
    hits: NDArray[np.int64]
    classes: NDArray[np.uint8]

    @staticmethod
    def none() -> KeptRows:
        """No rows."""
        whole, real = np.empty(0, dtype=np.int64), np.empty(0)
        classes = np.empty(0, dtype=np.uint8)
        return KeptRows(whole, np.empty(0, dtype=object), whole, whole, [], whole, real, real, whole, classes)


class _Texts(NamedTuple):
    """The rows of one answer, each column as a text: origins apart by ends of lines, the rest by blanks."""

    num_rows: int
    last_place: int
    origins: str
    keys: str
    numbers: tuple[str, ...]


def read_kept_rows(database: Database, engine: str) -> KeptRows:
    """All rows of an engine. Raises `StoreUnavailable`, and `ValueError` for rows that make no sense.

    The database answers many rows as one, with their columns as text: to make a Python object of each value takes
    several times as long, and while it makes the text other threads run.
    """
    numbers: list[NDArray[np.int64]] = []
    keys: list[NDArray[np.object_]] = []
    origin_numbers: list[NDArray[np.int64]] = []
    known: dict[str, int] = {}
    with database.read() as connection:
        for texts in _read_texts(connection, engine):
            numbers.append(np.stack([_parse_numbers(text, texts.num_rows) for text in texts.numbers]))
            keys.append(_parse_keys(texts))
            names = texts.origins.split("\n")
            for name in dict.fromkeys(names):
                known.setdefault(name, len(known))
            origin_numbers.append(np.fromiter(map(known.__getitem__, names), dtype=np.int64, count=texts.num_rows))
    if not numbers:
        return KeptRows.none()
    slots, generations, positions, hits, stored, hit = np.concatenate(numbers, axis=1)
    origins, classes = zip(*map(_parse_origin, known), strict=True)
    all_origin_numbers = np.concatenate(origin_numbers)
    return KeptRows(
        slots,
        np.concatenate(keys),
        generations,
        positions,
        list(origins),
        all_origin_numbers,
        stored / _MICROS,
        hit / _MICROS,
        hits,
        np.array(classes, dtype=np.uint8)[all_origin_numbers],
    )


def _read_texts(connection: Connection, engine: str) -> Iterator[_Texts]:
    """The rows a part at a time: in the order of the file where that is known, for nearly all of it is wanted."""
    is_sqlite = connection.dialect.name == "sqlite"
    place = literal_column("slots.rowid" if is_sqlite else "slots.slot", BigInteger)
    # In SQLite an index on the engine would only have the rows read in a random order.
    mine = (func.coalesce(SlotRow.engine, "") if is_sqlite else SlotRow.engine) == engine
    as_json = func.json_array if is_sqlite else func.json_build_array
    origin = as_json(SlotRow.request, SlotRow.tenant, SlotRow.lora, SlotRow.aliases, SlotRow.priority)
    values: list[Any] = [
        origin.label("origin"),
        SlotRow.key,
        SlotRow.slot,
        SlotRow.generation,
        SlotRow.position,
        SlotRow.hits,
        cast(SlotRow.stored_at * _MICROS, BigInteger),
        cast(func.coalesce(SlotRow.last_hit_at, 0.0) * _MICROS, BigInteger),
    ]
    if not is_sqlite:
        # SQLite makes text of whatever it is to join, and takes twice as long when it is told to.
        values = [cast(value, Text) for value in values]
    last_place = -1
    while True:
        part = select(place.label("place"), *values).where(mine, place > last_place).order_by(place)
        rows = part.limit(_PART_ROWS).subquery()
        places, origins, *others = rows.c
        texts = [func.aggregate_strings(other, " ") for other in others]
        whole = select(func.count(), func.max(places), func.aggregate_strings(origins, "\n"), *texts)
        count, last_place, origins_text, keys_text, *number_texts = connection.execute(whole).one()
        if not count:
            return
        yield _Texts(count, last_place, origins_text, keys_text, tuple(number_texts))


def _parse_numbers(text: str, count: int) -> NDArray[np.int64]:
    numbers = np.fromstring(text, dtype=np.int64, sep=" ")
    if len(numbers) != count:
        raise ValueError(_NOT_OURS)
    return numbers


def _parse_keys(texts: _Texts) -> NDArray[np.object_]:
    """Keys of one length, which an engine's are, are cut from all of them together."""
    joined = bytes.fromhex(texts.keys)
    key_bytes = len(joined) // texts.num_rows
    ends = np.frombuffer(texts.keys.encode(), dtype=np.uint8)[2 * key_bytes :: 2 * key_bytes + 1]
    if key_bytes and len(texts.keys) == texts.num_rows * (2 * key_bytes + 1) - 1 and bool((ends == ord(" ")).all()):
        keys: list[bytes] = np.frombuffer(joined, dtype=f"V{key_bytes}").tolist()
    else:
        keys = list(map(bytes.fromhex, texts.keys.split(" ")))
    return np.fromiter(keys, dtype=object, count=texts.num_rows)


def _parse_origin(text: str) -> tuple[RequestIdentity, int]:
    """An origin, and the class of the slots that it has."""
    request, tenant, lora, aliases, priority = json.loads(text)
    names = [] if aliases is None else json.loads(aliases)
    if not isinstance(names, list):
        raise ValueError(_NOT_OURS)
    priority_class = PRIORITY_CLASS[Priority.NORMAL if priority is None else Priority(priority)]
    return RequestIdentity(request, tenant, lora, tuple(map(str, names))), priority_class
