"""The table `slots`, a projection of memory: written in checkpoints, read as columns by a restart.

Rows that could not be written stay pending until they are; meanwhile at most as many as one transaction takes are
pending. The other changes wait as dirty bits in the manager, which returns the newest row of each slot. Rows that the
database rejects are given up and counted, with those of the same transaction.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import BigInteger, ColumnElement, Connection, Text, cast, delete, func, literal_column, select

from kvferry.app.store.database import Database, clean, insert_rows, write_accepted
from kvferry.app.store.schema import SLOTS
from kvferry.core.keys import RequestIdentity, group_of, read_identity
from kvferry.core.policy import PRIORITY_CLASS, Priority
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.records import SlotRows

BATCH_ROWS = 1000
"""Rows copied at once, with the manager lock held."""
MAX_ROWS = 2000
"""Rows written in one transaction."""
MAX_DELETED_ROWS = 4000
_PRIORITIES = {priority_class: priority.value for priority, priority_class in PRIORITY_CLASS.items()}
_MICROS = 1_000_000
_INVALID = "the table `slots` holds rows that kvferry did not write"


class _Sweep(NamedTuple):
    """Deletion of the rows of epochs before `epoch`, from `next_slot` on; None once it has ended."""

    epoch: int
    next_slot: int | None


class WrittenSlots(NamedTuple):
    """What a transaction writes: the deletions as they are after it, slots, and the number of rejected rows."""

    wipe: int | None
    sweep: _Sweep
    slots: list[int]
    num_rejected: int


class SlotProjection:
    """Updates one engine's rows of `slots`, a bounded number in a transaction."""

    def __init__(self, engine: str, num_recovered_slots: int) -> None:
        """Rows left by an earlier process for slots from `num_recovered_slots` on are deleted first."""
        self._engine = engine
        self._pending: dict[int, dict[str, Any] | None] = {}
        """Rows to be written by slot, None for slots without a block."""
        self.rejected_rows = 0
        self._min_epoch = 0
        self._wipe: int | None = num_recovered_slots
        """Slot from which on rows of an earlier process are deleted next; None once they are."""
        self._sweep = _Sweep(0, None)

    def drop_before(self, epoch: int) -> None:
        """Have rows of earlier epochs deleted by later steps. Thread: any."""
        self._min_epoch = max(self._min_epoch, epoch)

    @property
    def is_up_to_date(self) -> bool:
        """Whether nothing is left to write of the rows copied."""
        return self._wipe is None and not self._pending and self._sweep == _Sweep(self._min_epoch, None)

    def prepare(self, source: Inventory) -> None:
        """Copy changed rows. Acquires the manager lock."""
        # Rows of lost slots are deleted before any is written.
        while self._wipe is None and len(self._pending) <= MAX_ROWS - BATCH_ROWS and self._read(source):
            pass

    def write(self, connection: Connection) -> WrittenSlots:
        """Execute the statements; return what they do. May be called again. Thread: writer."""
        if self._wipe is not None:
            return WrittenSlots(self._delete_some(connection, self._wipe), self._sweep, [], 0)
        min_epoch, sweep = self._min_epoch, self._sweep
        if sweep.epoch < min_epoch:
            sweep = _Sweep(min_epoch, 0)
        if sweep.next_slot is not None:
            older = SLOTS.c.epoch < min_epoch
            sweep = _Sweep(min_epoch, self._delete_some(connection, sweep.next_slot, older))
        slots, num_rejected = list(self._pending), 0
        if slots:
            live = [row for row in self._pending.values() if row is not None and row["epoch"] >= min_epoch]
            # Two statements for any number of rows: an upsert would take one per row.
            connection.execute(delete(SLOTS).where(SLOTS.c.engine == self._engine, SLOTS.c.slot.in_(slots)))
            num_rejected = write_accepted(connection, live, partial(insert_rows, connection, SLOTS))
        return WrittenSlots(None, sweep, slots, num_rejected)

    def confirm(self, written: WrittenSlots) -> bool:
        """Note that a transaction is committed; return whether more waits."""
        # More rows may have changed than were copied, all of which wait for the rows of lost slots to be deleted.
        is_partial = self._wipe is not None or len(written.slots) > MAX_ROWS - BATCH_ROWS
        self._wipe, self._sweep = written.wipe, written.sweep
        for slot in written.slots:
            del self._pending[slot]
        self.rejected_rows += written.num_rejected
        return is_partial or not self.is_up_to_date

    def _read(self, source: Inventory) -> bool:
        """Add changed rows to those pending; return False without any."""
        rows = source.dirty_rows(BATCH_ROWS)
        if rows is None:
            return False
        self._pending.update(_parameters(self._engine, rows))
        return True

    def _delete_some(self, connection: Connection, start: int, *which: ColumnElement[bool]) -> int | None:
        """Delete a bounded number of rows from slot `start` on; return the slot to go on at, or None at the end."""
        matching = (SLOTS.c.engine == self._engine, SLOTS.c.slot >= start, *which)
        slots = connection.scalars(
            select(SLOTS.c.slot).where(*matching).order_by(SLOTS.c.slot).limit(MAX_DELETED_ROWS)
        ).all()
        if slots:
            connection.execute(delete(SLOTS).where(*matching, SLOTS.c.slot <= slots[-1]))
        return slots[-1] + 1 if len(slots) == MAX_DELETED_ROWS else None


def _parameters(engine: str, rows: SlotRows) -> dict[int, dict[str, Any] | None]:
    """Return rows as parameters by slot, None for a slot without a block."""
    slots = rows.slots.tolist()
    parameters: dict[int, dict[str, Any] | None] = dict.fromkeys(slots)
    records = rows.records
    generations, epochs, sizes = (records[name].tolist() for name in ("generation", "epoch", "size"))
    positions, hits, classes = (records[name].tolist() for name in ("position", "hits", "priority_class"))
    stored_s, hit_s = records["stored_s"].tolist(), records["hit_s"].tolist()
    for i in np.flatnonzero(rows.live).tolist():
        key, origin = rows.keys[i], rows.origins[i]
        parameters[slots[i]] = {
            "engine": engine,
            "slot": slots[i],
            "key": key.hex(),
            "group_index": group_of(key),
            "generation": generations[i],
            "epoch": epochs[i],
            "size_bytes": sizes[i],
            "position": positions[i],
            "request": clean(origin.request_id),
            "tenant": clean(origin.tenant),
            "lora": clean(origin.lora),
            "stored_at": stored_s[i],
            "last_hit_at": hit_s[i] or None,
            "hits": hits[i],
            "priority": _PRIORITIES[classes[i]],
            "session": clean(origin.session),
            "aliases": json.dumps([clean(alias) for alias in origin.aliases]) if origin.aliases else None,
        }
    return parameters


class SlotColumns(NamedTuple):
    """All rows of one engine as columns of one length, in no order.

    `keys` are `bytes`; `origins` holds each origin once, and `origin_numbers` a row's index in it. `classes` are
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
    def none() -> SlotColumns:
        """Return columns without rows."""
        whole, real = np.empty(0, dtype=np.int64), np.empty(0)
        classes = np.empty(0, dtype=np.uint8)
        return SlotColumns(whole, np.empty(0, dtype=object), whole, whole, [], whole, real, real, whole, classes)


def read_slots(database: Database, engine: str, part_rows: int = 1 << 16) -> SlotColumns:
    """Read all rows of an engine.

    The database returns each column of many rows as one text: a Python object per value takes several times as long,
    and other threads run while the database makes the text. `part_rows` per query bound the memory beside the columns.

    Raises:
        DatabaseUnavailable: the database does not answer.
        ValueError: rows are not valid.
    """
    numbers: list[NDArray[np.int64]] = []
    keys: list[NDArray[np.object_]] = []
    origin_numbers: list[NDArray[np.int64]] = []
    known: dict[str, int] = {}
    with database.read() as connection:
        for count, origins_text, keys_text, *number_texts in _read_texts(connection, engine, part_rows):
            numbers.append(np.stack([_parse_numbers(text, count) for text in number_texts]))
            keys.append(_parse_keys(keys_text, count))
            names = origins_text.split("\n")
            for name in dict.fromkeys(names):
                known.setdefault(name, len(known))
            origin_numbers.append(np.fromiter(map(known.__getitem__, names), dtype=np.int64, count=count))
    if not numbers:
        return SlotColumns.none()
    slots, generations, positions, hits, stored, hit = np.concatenate(numbers, axis=1)
    origins, classes = zip(*map(_parse_origin, known), strict=True)
    all_origin_numbers = np.concatenate(origin_numbers)
    return SlotColumns(
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


def _read_texts(connection: Connection, engine: str, part_rows: int) -> Iterator[tuple[Any, ...]]:
    """Read the rows in parts, in the order of the file where that is known, since nearly all of it is read.

    Yields:
        The number of rows, and each column of them as a text: origins separated by newlines, the rest by spaces.
    """
    is_sqlite = connection.dialect.name == "sqlite"
    place = literal_column("slots.rowid" if is_sqlite else "slots.slot", BigInteger)
    # Without `coalesce`, SQLite would use an index and read the rows in a random order.
    matching = (func.coalesce(SLOTS.c.engine, "") if is_sqlite else SLOTS.c.engine) == engine
    as_json = func.json_array if is_sqlite else func.json_build_array
    origin = as_json(SLOTS.c.request, SLOTS.c.tenant, SLOTS.c.lora, SLOTS.c.aliases, SLOTS.c.priority, SLOTS.c.session)
    values: list[Any] = [
        origin.label("origin"),
        SLOTS.c.key,
        SLOTS.c.slot,
        SLOTS.c.generation,
        SLOTS.c.position,
        SLOTS.c.hits,
        cast(SLOTS.c.stored_at * _MICROS, BigInteger),
        cast(func.coalesce(SLOTS.c.last_hit_at, 0.0) * _MICROS, BigInteger),
    ]
    if not is_sqlite:
        # SQLite converts values to text when it joins them; an explicit cast doubles the time.
        values = [cast(value, Text) for value in values]
    last_place = -1
    while True:
        part = select(place.label("place"), *values).where(matching, place > last_place).order_by(place)
        rows = part.limit(part_rows).subquery()
        places, origins, *others = rows.c
        texts = [func.aggregate_strings(other, " ") for other in others]
        whole = select(func.count(), func.max(places), func.aggregate_strings(origins, "\n"), *texts)
        count, last_place, *joined = connection.execute(whole).one()
        if not count:
            return
        yield count, *joined


def _parse_numbers(text: str, count: int) -> NDArray[np.int64]:
    numbers = np.fromstring(text, dtype=np.int64, sep=" ")
    if len(numbers) != count:
        raise ValueError(_INVALID)
    return numbers


def _parse_keys(text: str, count: int) -> NDArray[np.object_]:
    """Return the keys; keys of one length, as an engine's are, are cut from the joined bytes."""
    joined = bytes.fromhex(text)
    key_bytes = len(joined) // count
    ends = np.frombuffer(text.encode(), dtype=np.uint8)[2 * key_bytes :: 2 * key_bytes + 1]
    if key_bytes and len(text) == count * (2 * key_bytes + 1) - 1 and bool((ends == ord(" ")).all()):
        keys: list[bytes] = np.frombuffer(joined, dtype=f"V{key_bytes}").tolist()
    else:
        keys = list(map(bytes.fromhex, text.split(" ")))
    return np.fromiter(keys, dtype=object, count=count)


def _parse_origin(text: str) -> tuple[RequestIdentity, int]:
    """Return an origin and the priority class of its slots; an unknown request for fields of another program."""
    request, tenant, lora, aliases, priority, session = json.loads(text)
    try:
        origin = read_identity(request, tenant, lora, [] if aliases is None else json.loads(aliases), session)
        return origin, PRIORITY_CLASS[Priority.NORMAL if priority is None else Priority(priority)]
    except (ValueError, TypeError, RecursionError):
        return RequestIdentity(""), PRIORITY_CLASS[Priority.NORMAL]
