"""Compiled functions of the policy `hazard`, and the records of the keys that it remembers.

It sees every key of every prompt, in calls of some hundred keys. In NumPy these took 2.5 us a key, three times as long
as storing it with LRU, mostly in calls on the few keys of which rates are learned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.pool.native import QUEUE_LENGTH, KeyHashes, compiled

KEY_RECORD = np.dtype(
    [
        ("last_s", np.float64),
        ("older", np.int32),
        ("newer", np.int32),
        ("num_decays", np.int32),
        ("num_hits", np.uint8),
        ("output", np.uint8),
        ("age", np.int8),
    ],
    align=True,
)
"""A key that prompts used: the time of its latest use, its neighbors in the order of these, how often counts had lost
weight then, its hits, the class of the answer behind it, and for a sampled key, the bucket up to which its age was
counted."""
_MOST_HITS = 255
_Numbers = NDArray[np.int64]
_Links = NDArray[np.int32]
_Bytes = NDArray[np.uint8]
_Reals = NDArray[np.float64]


def find_bucket(bounds_s: _Reals, age_s: float, first: int | np.int64) -> int | np.int64:
    """Return the bucket of an age, which is `first` at least."""
    bucket = first
    while bucket < len(bounds_s) and bounds_s[bucket] <= age_s:
        bucket += 1
    return bucket


@functools.cache
def _register_find_bucket() -> None:
    """Let compiled functions of this file call `find_bucket`.

    They find the plain function by its global name, which is the same in each process, so that stored code is found.
    """
    from numba.extending import register_jitable

    register_jitable(find_bucket)


class KeyFunctions(NamedTuple):
    """Functions over the records of `UsedKeys`, which begin with (records, hashes of all keys, mask).

    A key is sampled if its hash has no bit of the mask. `class_of_hits` has a number of hits' class without an answer.
    Rates are learned from what is written to `out`, a column for each sampled key; the functions return how many.
    """

    use: Callable[..., tuple[int, int, int]]
    """(*keys, sorted hashes, their numbers, time, number of decays, class_of_hits, bounds of ages, new hashes, out):
    count a use of known keys. Writes their distinct numbers over the numbers, and the distinct hashes of the others.
    `out` gets classes before, buckets before, buckets now and classes after. Returns the numbers of known, new and
    sampled keys."""
    begin: Callable[..., int]
    """(*keys, numbers, time, number of decays): make new records. Returns how many are sampled."""
    count_ages: Callable[..., int]
    """(*keys, numbers, time, class_of_hits, bounds of ages, out): move sampled keys to the buckets that they have
    reached. `out` gets classes, buckets before and buckets now."""
    set_output: Callable[..., int]
    """(*keys, numbers, output, number of decays, class_of_hits, out): set the class of the answer. `out` gets classes
    before, classes after, buckets and numbers of decays since the use."""


@functools.cache
def key_functions() -> KeyFunctions:
    """Return the functions of `UsedKeys`."""
    from numba import from_dtype, types

    _register_find_bucket()
    number, real = types.int64, types.float64
    keys = (types.Array(from_dtype(KEY_RECORD), 1, "C"), types.uint64[::1], types.uint64)
    given_hashes = types.Array(types.uint64, 1, "A", readonly=True)
    given = types.Array(types.int64, 1, "A", readonly=True)
    constant_bytes, constant_reals = (types.Array(kind, 1, "C", readonly=True) for kind in (types.uint8, types.float64))
    numbers_out, out_type = types.int64[::1], types.int64[:, ::1]

    @compiled(
        types.UniTuple(number, 3)(
            *(*keys, given_hashes, numbers_out, real, number),
            *(constant_bytes, constant_reals, types.uint64[::1], out_type),
        )
    )
    def use(
        records: Any,
        all_hashes: KeyHashes,
        mask: np.uint64,
        hashes: KeyHashes,
        numbers: _Numbers,
        now_s: float,
        num_decays: int,
        class_of_hits: _Bytes,
        bounds_s: _Reals,
        new_hashes: KeyHashes,
        out: _Numbers,
    ) -> tuple[int, int, int]:
        num_known = num_new = num_sampled = 0
        for i in range(len(hashes)):
            if i > 0 and hashes[i] == hashes[i - 1]:
                continue
            if numbers[i] < 0:
                new_hashes[num_new] = hashes[i]
                num_new += 1
                continue
            numbers[num_known] = numbers[i]
            record = records[numbers[i]]
            num_known += 1
            if hashes[i] & mask == np.uint64(0):
                age = find_bucket(bounds_s, now_s - record.last_s, 0)
                out[0, num_sampled] = class_of_hits[record.num_hits] + record.output
                out[1, num_sampled] = record.age
                # A clock that was set back does not make a key younger.
                out[2, num_sampled] = max(age, int(record.age))
                out[3, num_sampled] = class_of_hits[min(record.num_hits + 1, _MOST_HITS)] + record.output
                num_sampled += 1
                record.age = 0
                record.num_decays = num_decays
            record.num_hits = min(record.num_hits + 1, _MOST_HITS)
            record.last_s = now_s
        return num_known, num_new, num_sampled

    @compiled(number(*keys, given, real, number))
    def begin(
        records: Any, all_hashes: KeyHashes, mask: np.uint64, numbers: _Numbers, now_s: float, num_decays: int
    ) -> int:
        num_sampled = 0
        for i in range(len(numbers)):
            record = records[numbers[i]]
            record.last_s = now_s
            record.num_hits = record.output = 0
            record.age = 0
            record.num_decays = num_decays
            if all_hashes[numbers[i]] & mask == np.uint64(0):
                num_sampled += 1
        return num_sampled

    @compiled(number(*keys, given, real, constant_bytes, constant_reals, out_type))
    def count_ages(
        records: Any,
        all_hashes: KeyHashes,
        mask: np.uint64,
        numbers: _Numbers,
        now_s: float,
        class_of_hits: _Bytes,
        bounds_s: _Reals,
        out: _Numbers,
    ) -> int:
        num_sampled = 0
        for i in range(len(numbers)):
            if all_hashes[numbers[i]] & mask != np.uint64(0):
                continue
            record = records[numbers[i]]
            out[0, num_sampled] = class_of_hits[record.num_hits] + record.output
            out[1, num_sampled] = record.age
            record.age = find_bucket(bounds_s, now_s - record.last_s, np.int64(record.age))
            out[2, num_sampled] = record.age
            num_sampled += 1
        return num_sampled

    @compiled(number(*keys, given, number, number, constant_bytes, out_type))
    def set_output(
        records: Any,
        all_hashes: KeyHashes,
        mask: np.uint64,
        numbers: _Numbers,
        output: int,
        num_decays: int,
        class_of_hits: _Bytes,
        out: _Numbers,
    ) -> int:
        num_sampled = 0
        for i in range(len(numbers)):
            record = records[numbers[i]]
            of_hits = class_of_hits[record.num_hits]
            if record.output != output and all_hashes[numbers[i]] & mask == np.uint64(0):
                out[0, num_sampled] = of_hits + record.output
                out[1, num_sampled] = of_hits + output
                out[2, num_sampled] = record.age
                out[3, num_sampled] = num_decays - record.num_decays
                num_sampled += 1
            record.output = output
        return num_sampled

    return KeyFunctions(use, begin, count_ages, set_output)


@functools.cache
def rate_function() -> Callable[..., None]:
    """Return the function (entered, classes, first, last, weights) that adds to the buckets after `first` to `last`."""
    from numba import types

    given = types.Array(types.int64, 1, "A", readonly=True)
    given_reals = types.Array(types.float64, 1, "A", readonly=True)

    @compiled(types.void(types.float64[:, ::1], given, given, given, given_reals))
    def enter(entered: _Reals, classes: _Numbers, first: _Numbers, last: _Numbers, weights: _Reals) -> None:
        for i in range(len(classes)):
            for age in range(first[i] + 1, last[i] + 1):
                entered[classes[i], age] += weights[i]

    return enter


class CandidateFunctions(NamedTuple):
    """Functions over the candidates of `HazardPolicy`.

    These are (columns of neighbors, `[priority class, class, QUEUE_COLUMNS]` of queues, columns of priority classes, of
    classes, and of times of use).
    """

    classify: Callable[..., None]
    """(records of keys, class_of_hits, numbers of keys, slots, classes, times of use, class without a key, whether
    those of keys are known, time of use, time): set class and time of use of slots; where the latter is negative, each
    gets that of its key, or the present without one."""
    take: Callable[..., int]
    """(*candidates, index, bounds of ages, time, out): remove the candidates that are evicted next, as many as there
    are and `out` has places for, and write them; return how many."""


@functools.cache
def candidate_functions() -> CandidateFunctions:
    """Return the functions of `HazardPolicy`."""
    from numba import from_dtype, types

    _register_find_bucket()
    given = types.Array(types.int64, 1, "A", readonly=True)
    links = types.Array(types.int32, 1, "A")
    number, real, flag = types.int64, types.float64, types.boolean
    candidates = (links, links, types.int64[:, :, ::1], types.Array(types.uint8, 1, "A"), types.uint8[::1], real[::1])
    key_records = types.Array(from_dtype(KEY_RECORD), 1, "C")
    constant = types.Array(types.uint8, 1, "C", readonly=True)

    @compiled(types.void(key_records, constant, given, given, types.uint8[::1], real[::1], number, flag, real, real))
    def classify(
        records: Any,
        class_of_hits: _Bytes,
        numbers: _Numbers,
        slots: _Numbers,
        classes: _Bytes,
        used_s: _Reals,
        unknown: int,
        are_known: bool,
        slot_used_s: float,
        now_s: float,
    ) -> None:
        for i in range(len(slots)):
            slot = slots[i]
            classes[slot] = unknown
            used_s[slot] = now_s if slot_used_s < 0 else slot_used_s
            if numbers[i] >= 0:
                record = records[numbers[i]]
                if are_known:
                    classes[slot] = class_of_hits[record.num_hits] + record.output
                if slot_used_s < 0:
                    used_s[slot] = record.last_s

    @compiled(number(*candidates, types.float64[:, ::1], types.Array(real, 1, "C", readonly=True), real, number[::1]))
    def take(
        older: _Links,
        newer: _Links,
        queues: _Numbers,
        priorities: _Bytes,
        classes: _Bytes,
        used_s: _Reals,
        index: _Reals,
        bounds_s: _Reals,
        now_s: float,
        out: _Numbers,
    ) -> int:
        num_classes = queues.shape[1]
        values, times = np.empty(num_classes), np.empty(num_classes)
        num_taken = 0
        for priority in range(len(queues)):
            of_priority, changed = queues[priority], -1
            while num_taken < len(out):
                # The class whose oldest candidate has the lowest index, of equal ones the one used first, and the next.
                lowest = following = -1
                for one in range(num_classes):
                    slot = of_priority[one, 0]
                    if slot < 0:
                        continue
                    if changed < 0 or changed == one:
                        times[one] = used_s[slot]
                        values[one] = index[one, find_bucket(bounds_s, now_s - times[one], 0)]
                    value, time_s = values[one], times[one]
                    if lowest < 0 or value < values[lowest] or (value == values[lowest] and time_s < times[lowest]):
                        lowest, following = one, lowest
                    elif (
                        following < 0
                        or value < values[following]
                        or (value == values[following] and time_s < times[following])
                    ):
                        following = one
                if lowest < 0:
                    break
                changed = lowest
                queue = of_priority[lowest]
                # Its candidates are taken until they are worth more than the oldest one of the next class.
                slot, is_first = queue[0], True
                while slot >= 0 and num_taken < len(out):
                    if following >= 0 and not is_first:
                        value = index[lowest, find_bucket(bounds_s, now_s - used_s[slot], 0)]
                        if value > values[following] or (
                            value == values[following] and used_s[slot] > times[following]
                        ):
                            break
                    is_first = False
                    out[num_taken] = slot
                    num_taken += 1
                    queue[QUEUE_LENGTH] -= 1
                    slot = np.int64(newer[slot])
                queue[0] = slot
                if slot < 0:
                    queue[1] = -1
                else:
                    older[slot] = -1
        return num_taken

    return CandidateFunctions(classify, take)
