"""Compiled functions of the pool, and the arrays they work on.

The scheduler works on batches of blocks. In plain Python a store takes 2.2 us a block instead of 0.85, and a look-up of
8,192 blocks holds the lock twice as long (bench/RESULTS.md). The functions are compiled for this machine with Numba
when a pool is made, and stored beside the source, or else in the user's cache; the variable NUMBA_CACHE_DIR names
another place. Where none can be written, or the stored code cannot be read, a function is compiled again, which takes
some tenths of a second. All functions keep the interpreter lock, as they take microseconds.

Functions come in groups, one for each data structure, which are compiled on the first call of their getter. A start
without stored code takes the longer, the more expressions and branches they have. So unsigned constants are globals:
Numba makes a float of an unsigned and a signed number, and each conversion in a body is compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kvferry.core.pool.records import SLOT_RECORD

F = TypeVar("F", bound=Callable[..., Any])
KeyHashes = NDArray[np.uint64]
"""64-bit hashes of keys. Where only they are compared, one key may be taken for another with a chance of 2**-64."""
_Numbers = NDArray[np.int64]
_Flags = NDArray[np.bool_]
_Links = NDArray[np.int32]

_LINE_BYTES = 64
_NONE, _ONE = np.uint64(0), np.uint64(1)


def compiled(signature: Any, *, nogil: bool = False) -> Callable[[F], F]:
    """Return a decorator that compiles a function for one Numba signature, at once.

    With `nogil` the function runs without the interpreter lock. It may use constants of its own file, a change of which
    invalidates the stored code. It must not have another compiled function in its closure: that is a different object
    in each process, so the stored code would never be found again. It may call a plain function of its own file, once
    that is registered (`find_bucket` in `core/pool/eviction/native.py`).
    """
    # Imported here, as it takes a third of a second and the command line imports core, too.
    from numba import njit

    def compile_it(function: F) -> F:
        # The functions are called from Python only.
        options = {"nogil": nogil, "no_cfunc_wrapper": True}
        try:
            return cast("F", njit([signature], cache=True, **options)(function))
        except Exception:  # noqa: BLE001 - any error of the cache; an error in the function is raised below
            return cast("F", njit([signature], **options)(function))

    return compile_it


def aligned_zeros(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return zeros whose first element starts a cache line. Untouched pages take no memory.

    Not for arrays written at random places, where each first write may clear two megabytes.
    """
    raw = np.zeros(count * dtype.itemsize + _LINE_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % _LINE_BYTES
    return raw[start : start + count * dtype.itemsize].view(dtype)


def resident_zeros(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return zeros whose pages are all in memory, for writes at random places. Requires: no lock held."""
    zeros = aligned_zeros(count, dtype)
    zeros.view(np.uint8)[:] = 0
    return zeros


# --- hashes of keys ---------------------------------------------------------------------------------------------

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio: odd, so that multiplication maps no two words to one, and without a pattern."""
_FIRST_MIX, _SECOND_MIX = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
"""Constants of MurmurHash3's finalizer (Appleby, public domain): each bit of a hash depends on every bit before."""
_HALF, _MIX_BITS, _BYTE_BITS = np.uint64(32), np.uint64(33), np.uint64(8)
_WORD_BYTES = 8


@functools.cache
def key_hasher() -> Callable[[bytes, int, KeyHashes], None]:
    """Return the function (joined keys, bytes of each key, out) that hashes adjacent keys of one length."""
    from numba import types

    text = types.Bytes(types.uint8, 1, "C", readonly=True)

    @compiled(types.void(text, types.int64, types.uint64[::1]))
    def hash_joined(joined: bytes, key_bytes: int, hashes: KeyHashes) -> None:
        at = 0
        for i in range(len(hashes)):
            end = at + key_bytes
            key_hash = np.uint64(key_bytes) * _SPREAD
            while at < end:
                word = _NONE
                if at + _WORD_BYTES <= end:
                    # In this order compilers make one load of it.
                    for byte in range(_WORD_BYTES):
                        word |= np.uint64(joined[at + byte]) << np.uint64(8 * byte)
                    at += _WORD_BYTES
                else:
                    # In this order they make no vectors of it, which would take long to compile.
                    for byte in range(end - 1, at - 1, -1):
                        word = word << _BYTE_BITS | np.uint64(joined[byte])
                    at = end
                key_hash = (key_hash ^ word) * _SPREAD
                key_hash ^= key_hash >> _HALF
            key_hash = (key_hash ^ key_hash >> _MIX_BITS) * _FIRST_MIX
            key_hash = (key_hash ^ key_hash >> _MIX_BITS) * _SECOND_MIX
            hashes[i] = key_hash ^ key_hash >> _MIX_BITS

    return hash_joined


# --- hash tables ------------------------------------------------------------------------------------------------

NUMBER_BITS = 32
"""A cell of a hash table is a hash and an entry: a number in the low bits of the entry, the epoch above them."""
_NUMBER_BITS, _NUMBER_MASK = np.uint64(NUMBER_BITS), np.uint64((1 << NUMBER_BITS) - 1)


@functools.cache
def table_functions() -> tuple[Callable[..., int], Callable[..., int], Callable[..., int]]:
    """Return the functions over the cells of a `HashTable`, which is (cells, shift, epoch).

    Returns:
        find: (*table, hashes, out): write the number of each hash, -1 if absent; return how many were found.
        claim: (*table, column of hashes, numbers, free cells, out): enter numbers by their hash unless it is present,
            write the number that holds each hash afterwards; return how many were entered.
        remove: (*table, column of hashes, numbers): remove numbers that hold their hash; return how many.
    """
    from numba import types

    number, unsigned, column = types.int64, types.uint64, types.uint64[::1]
    table = (types.uint64[:, ::1], unsigned, unsigned)
    given_hashes = types.Array(types.uint64, 1, "A", readonly=True)
    given_numbers = types.Array(types.int64, 1, "A", readonly=True)

    @compiled(number(*table, given_hashes, types.int64[::1]))
    def find(cells: KeyHashes, shift: np.uint64, epoch: np.uint64, hashes: KeyHashes, numbers: _Numbers) -> int:
        last = np.uint64(len(cells) - 1)
        num_found = 0
        for i in range(len(hashes)):
            key_hash = hashes[i]
            at = key_hash >> shift
            numbers[i] = -1
            while cells[at, 1] >> _NUMBER_BITS == epoch:
                if cells[at, 0] == key_hash:
                    numbers[i] = np.int64(cells[at, 1] & _NUMBER_MASK)
                    num_found += 1
                    break
                at = (at + _ONE) & last
        return num_found

    @compiled(number(*table, column, given_numbers, number, types.int64[::1]))
    def claim(
        cells: KeyHashes,
        shift: np.uint64,
        epoch: np.uint64,
        hashes: KeyHashes,
        numbers: _Numbers,
        num_free: int,
        holders: _Numbers,
    ) -> int:
        last = np.uint64(len(cells) - 1)
        added = 0
        for i in range(len(numbers)):
            number = numbers[i]
            key_hash = hashes[number]
            at, holder = key_hash >> shift, np.int64(-1)
            while cells[at, 1] >> _NUMBER_BITS == epoch:
                if cells[at, 0] == key_hash:
                    holder = np.int64(cells[at, 1] & _NUMBER_MASK)
                    break
                at = (at + _ONE) & last
            if holder < 0 and added < num_free:
                cells[at, 0] = key_hash
                cells[at, 1] = epoch << _NUMBER_BITS | np.uint64(number)
                holder = number
                added += 1
            holders[i] = holder
        return added

    @compiled(number(*table, column, given_numbers))
    def remove(cells: KeyHashes, shift: np.uint64, epoch: np.uint64, hashes: KeyHashes, numbers: _Numbers) -> int:
        last = np.uint64(len(cells) - 1)
        removed = 0
        for number in numbers:
            key_hash = hashes[number]
            at = key_hash >> shift
            while cells[at, 1] >> _NUMBER_BITS == epoch and cells[at, 0] != key_hash:
                at = (at + _ONE) & last
            if cells[at, 1] != epoch << _NUMBER_BITS | np.uint64(number):
                continue
            removed += 1
            hole = at
            at = (at + _ONE) & last
            # Backward-shift deletion: move up entries whose probe sequence crosses the hole.
            while cells[at, 1] >> _NUMBER_BITS == epoch:
                home = cells[at, 0] >> shift
                if (at - home) & last >= (at - hole) & last:
                    cells[hole, 0] = cells[at, 0]
                    cells[hole, 1] = cells[at, 1]
                    hole = at
                at = (at + _ONE) & last
            cells[hole, 1] = _NONE
        return removed

    return find, claim, remove


# --- slot records -----------------------------------------------------------------------------------------------

TENANT_COLUMNS = 16
"""32-bit numbers in the row of a tenant: a cache line."""
TENANT_EPOCH, TENANT_SLOTS, TENANT_LIMIT, TENANT_ADDED, TENANT_ENDS, TENANT_QUEUED = 0, 1, 2, 3, 4, 10
"""Columns of a row: the epoch of its counts, slots in use, limit, how often a slot was added to its queues, the ends of
these, two a priority class, and how many slots they have. An epoch begins without the last two."""
AS_DEFAULT, UNLIMITED = 0, -1
"""Limits of a tenant that are no number. Of n slots the column has n + 1; that of row 0 is the default of the others.
"""
_LINK = 2
"""Added to a slot's number as the end of a queue, where 0 is no slot, and as a neighbor, where 1 is none."""
_NO_NEIGHBOR = 1
OLDEST, NEWEST, NO_END = 0, 1, -1
"""Ends of a tenant's queue."""


class RecordFunctions(NamedTuple):
    """Functions over the records of a `SlotTable`. Slot numbers are not checked."""

    begin_storing: Callable[..., None]
    """(records, hashes of all slots, rows of tenants, slots, their hashes, their positions, state, epoch, generation,
    bytes, priority class, number of the tenant): slots that hold a block are victims."""
    make_ready: Callable[..., None]
    """(records, dirty, slots, state, Unix seconds)"""
    hit: Callable[..., None]
    """(records, dirty, slots, Unix seconds)"""
    change_pins: Callable[..., int]
    """(records, slots, 1 or -1, out): write the slots that had no pin before, or have none afterwards; return how many.
    """


@functools.cache
def record_functions() -> RecordFunctions:
    """Return the functions of `SlotTable`."""
    from numba import from_dtype, types

    table = types.Array(from_dtype(SLOT_RECORD), 1, "C")
    dirty_type, hashes_type = types.boolean[::1], types.uint64[::1]
    given_slots = types.Array(types.int64, 1, "A", readonly=True)
    given_hashes = types.Array(types.uint64, 1, "A", readonly=True)
    number, seconds = types.int64, types.float64

    tenants_type = types.int32[:, ::1]

    @compiled(
        types.void(
            table,
            hashes_type,
            tenants_type,
            *[given_slots, given_hashes, given_slots],
            *[number] * 6,
        )
    )
    def begin_storing(
        records: Any,
        all_hashes: KeyHashes,
        tenants: _Links,
        slots: _Numbers,
        hashes: KeyHashes,
        positions: _Numbers,
        state: int,
        epoch: int,
        generation: int,
        size_bytes: int,
        priority_class: int,
        tenant: int,
    ) -> None:
        for i in range(len(slots)):
            slot, key_hash, position = slots[i], hashes[i], positions[i]
            record = records[slot]
            if record.state != 0 and record.epoch == epoch:
                tenants[record.tenant, TENANT_SLOTS] -= 1
            record.tenant = tenant
            record.state = state
            record.epoch = epoch
            record.generation = generation
            record.position = position
            record.size = size_bytes
            record.priority_class = priority_class
            all_hashes[slot] = key_hash
        if tenants[tenant, TENANT_EPOCH] != epoch:
            tenants[tenant, TENANT_EPOCH] = epoch
            tenants[tenant, TENANT_SLOTS] = 0
            for column in range(TENANT_ENDS, TENANT_QUEUED + 1):
                tenants[tenant, column] = 0
        tenants[tenant, TENANT_SLOTS] += len(slots)

    @compiled(types.void(table, dirty_type, given_slots, number, seconds))
    def make_ready(records: Any, dirty: _Flags, slots: _Numbers, state: int, now_s: float) -> None:
        for slot in slots:
            record = records[slot]
            record.state = state
            record.stored_s = now_s
            record.hit_s = 0.0
            record.hits = 0
            dirty[slot] = True

    @compiled(types.void(table, dirty_type, given_slots, seconds))
    def hit(records: Any, dirty: _Flags, slots: _Numbers, now_s: float) -> None:
        for slot in slots:
            record = records[slot]
            record.hits += 1
            record.hit_s = now_s
            dirty[slot] = True

    @compiled(number(table, given_slots, number, types.int64[::1]))
    def change_pins(records: Any, slots: _Numbers, change: int, out: _Numbers) -> int:
        count = 0
        for slot in slots:
            record = records[slot]
            before = record.pins
            record.pins = before + change
            if min(before, before + change) == 0:
                out[count] = slot
                count += 1
        return count

    return RecordFunctions(begin_storing, make_ready, hit, change_pins)


# --- queues -----------------------------------------------------------------------------------------------------

QUEUE_COLUMNS, QUEUE_LENGTH = 3, 2
"""Numbers of a queue: its oldest and its newest slot, -1 for none, and its length."""


@functools.cache
def queue_functions() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the functions over the links of queues: columns of neighbors, and each queue's ends and length.

    Slots are distinct.

    Returns:
        relink: (older, newer, queues, priorities, classes, slots, removes, appends): from the last slot to the first,
            remove slots of their queues, append slots that are in none at the newest end, or move slots of their
            queues there (both). A slot's queue is `queues[priority, class]`; with empty columns of these there is one.
            One function instead of three, since each adds a tenth of a second to a start without stored code.
        oldest: (older, newer, ends, removes, out): write the oldest slots, as many as `out` has places for, which must
            be there; remove them if `removes`.
    """
    from numba import types

    column, ends_type = types.Array(types.int32, 1, "A"), types.int64[::1]
    given, flag = types.Array(types.int64, 1, "A", readonly=True), types.boolean
    number_column = types.Array(types.uint8, 1, "A")

    @compiled(types.void(column, column, types.int64[:, :, ::1], number_column, number_column, given, flag, flag))
    def relink(
        older: _Links,
        newer: _Links,
        queues: _Numbers,
        priorities: NDArray[np.uint8],
        classes: NDArray[np.uint8],
        slots: _Numbers,
        removes: bool,
        appends: bool,
    ) -> None:
        queue, is_one = queues[0, 0], len(classes) == 0
        for i in range(len(slots) - 1, -1, -1):
            slot = slots[i]
            if not is_one:
                queue = queues[priorities[slot], classes[slot]]
            if removes:
                before, after = older[slot], newer[slot]
                if before < 0:
                    queue[0] = after
                else:
                    newer[before] = after
                if after < 0:
                    queue[1] = before
                else:
                    older[after] = before
                queue[QUEUE_LENGTH] -= 1
            if appends:
                newest = queue[1]
                older[slot], newer[slot] = newest, -1
                if newest < 0:
                    queue[0] = slot
                else:
                    newer[newest] = slot
                queue[1] = slot
                queue[QUEUE_LENGTH] += 1

    @compiled(types.void(column, column, ends_type, flag, types.int64[::1]))
    def oldest(older: _Links, newer: _Links, ends: _Numbers, removes: bool, out: _Numbers) -> None:
        slot = ends[0]
        for i in range(len(out)):
            out[i] = slot
            slot = np.int64(newer[slot])
        if removes:
            ends[0] = slot
            if slot < 0:
                ends[1] = -1
            else:
                older[slot] = -1
            ends[QUEUE_LENGTH] -= len(out)

    return relink, oldest


@functools.cache
def tenant_functions() -> tuple[Callable[..., None], Callable[..., int]]:
    """Return the functions over the queues of tenants, one for each priority class, which `links` [slots, 2] connect.

    Returns:
        requeue: (records, rows of tenants, links, slots, end): from the last slot to the first, remove slots from the
            queues that they are in, and add those whose tenants are limited at the `OLDEST` or the `NEWEST` end, or at
            `NO_END`.
        oldest: (rows of tenants, links, number of the tenant, out): write the oldest slots, as many as there are and
            `out` has places for; return how many.
    """
    from numba import from_dtype, types

    table, rows_type = types.Array(from_dtype(SLOT_RECORD), 1, "C"), types.int32[:, ::1]
    given = types.Array(types.int64, 1, "A", readonly=True)

    @compiled(types.void(table, rows_type, rows_type, given, types.int64))
    def requeue(records: Any, tenants: _Links, links: _Links, slots: _Numbers, end: int) -> None:
        for i in range(len(slots) - 1, -1, -1):
            slot = slots[i]
            tenant, first = records[slot].tenant, TENANT_ENDS + 2 * np.int64(records[slot].priority_class)
            before, after = links[slot, 0], links[slot, 1]
            if before != 0:
                tenants[tenant, TENANT_QUEUED] -= 1
                if before == _NO_NEIGHBOR:
                    tenants[tenant, first] = 0 if after == _NO_NEIGHBOR else after
                else:
                    links[before - _LINK, 1] = after
                if after == _NO_NEIGHBOR:
                    tenants[tenant, first + 1] = 0 if before == _NO_NEIGHBOR else before
                else:
                    links[after - _LINK, 0] = before
                links[slot, 0] = links[slot, 1] = 0
            limit = tenants[tenant, TENANT_LIMIT]
            is_limited = tenant != 0 and (limit > 0 or (limit == AS_DEFAULT and tenants[0, TENANT_LIMIT] > 0))
            if end >= 0 and is_limited:
                tenants[tenant, TENANT_QUEUED] += 1
                tenants[tenant, TENANT_ADDED] += before == 0
                neighbor = tenants[tenant, first + end]
                links[slot, end] = _NO_NEIGHBOR
                if neighbor == 0:
                    links[slot, 1 - end] = _NO_NEIGHBOR
                    tenants[tenant, first + 1 - end] = slot + _LINK
                else:
                    links[slot, 1 - end] = neighbor
                    links[neighbor - _LINK, end] = slot + _LINK
                tenants[tenant, first + end] = slot + _LINK

    @compiled(types.int64(rows_type, rows_type, types.int64, types.int64[::1]))
    def oldest(tenants: _Links, links: _Links, tenant: int, out: _Numbers) -> int:
        count = 0
        for end in range(TENANT_ENDS, TENANT_QUEUED, 2):
            place = tenants[tenant, end]
            while place > _NO_NEIGHBOR and count < len(out):
                out[count] = place - _LINK
                count += 1
                place = links[place - _LINK, 1]
        return count

    return requeue, oldest


# --- ghosts -----------------------------------------------------------------------------------------------------

WAYS = 8
"""Places for a hash in a table of ghosts: one cache line of 64-bit entries."""
_LINE = ~np.uint64(WAYS - 1)
"""Of the number of a place, the bits that it has in common with the other places of its line."""
GHOST_CODE_BITS = 5
"""An entry of a table of ghosts is a hash with a note in its low bits: the code of a reason, and the epoch above it."""
GHOST_EPOCHS = 255
"""Epochs are counted from 1 to this, so that a place that was never used belongs to none."""
GHOST_NOTE_BITS = 13
AS_NOTED = 1 << GHOST_NOTE_BITS
"""Passed instead of a note: enter each entry with the note that it has."""
_AS_NOTED = np.uint64(AS_NOTED)
_OF_KEY, _OF_EPOCH = ~np.uint64((1 << GHOST_NOTE_BITS) - 1), np.uint64(GHOST_EPOCHS << GHOST_CODE_BITS)
"""Bits of an entry that are those of the hash, and of the epoch."""


@functools.cache
def put_ghosts() -> Callable[..., object]:
    """Return the function (table, times, shift, hashes, note, time of each, time of all) that enters ghosts.

    Both arrays of times may be empty. An entry displaces one of its own hash, else one of an older epoch, else the
    one at its first place.
    """
    from numba import types

    given, given_times = types.Array(types.uint64, 1, "A", readonly=True), types.Array(types.float64, 1, "A")
    tables = types.uint64[::1], types.float64[::1], types.uint64

    @compiled(types.uint64(*tables, given, types.uint64, given_times, types.float64))
    def put(
        table: KeyHashes,
        times: NDArray[np.float64],
        shift: np.uint64,
        hashes: KeyHashes,
        note: np.uint64,
        of_each: NDArray[np.float64],
        now_s: float,
    ) -> Any:
        touched = _NONE
        # Independent loads overlap their cache misses. The result keeps the compiler from removing them.
        for key_hash in hashes:
            touched |= table[key_hash >> shift]
        for i in range(len(hashes)):
            entry = hashes[i] if note == _AS_NOTED else hashes[i] & _OF_KEY | note
            place, is_vacant = entry >> shift, False
            first = place & _LINE
            for way in range(WAYS):
                at = first + np.uint64(way)
                difference = table[at] ^ entry
                if difference & _OF_EPOCH == _NONE:
                    if difference & _OF_KEY == _NONE:
                        place = at
                        break
                elif not is_vacant:
                    place, is_vacant = at, True
            table[place] = entry
            if len(times):
                times[place] = of_each[i] if len(of_each) else now_s
        return touched

    return put
