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
ENTERED, USES, HITS = range(3)
"""Kinds of counts of sampled keys, by class and age bucket: those that reached the bucket unused, those used again in
it, and those of these uses that the device did not serve."""
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


def count_age(record: Any, counts: _Reals, of_class: int, bounds_s: _Reals, now_s: float) -> int | np.int64:
    """Count a sampled key of this class in the buckets that it has reached since it was counted last.

    Returns:
        The last one. A clock that was set back does not make a key younger.
    """
    age = find_bucket(bounds_s, now_s - record.last_s, np.int64(record.age))
    for bucket in range(record.age + 1, age + 1):
        counts[ENTERED, of_class, bucket] += 1
    record.age = age
    return age


@functools.cache
def _register_functions() -> None:
    """Let compiled functions of this file call `find_bucket` and `count_age`.

    The global names stay those of the plain functions, as Numba's cache finds stored code by them.
    """
    from numba.extending import register_jitable

    register_jitable(find_bucket)
    register_jitable(count_age)


class KeyFunctions(NamedTuple):
    """Functions over the records of `UsedKeys`; `keys` are (records, hashes of all keys, mask).

    A key's number is the index of its record, -1 for an unknown key. A key is sampled if its hash has no bit of the
    mask. Sampled keys are counted in `rates`: (counts by kind, class and age, number of decays, class_of_hits, bounds
    of ages), where `class_of_hits` has a number of hits' class without an answer.
    """

    use: Callable[..., tuple[int, int, int]]
    """(*keys, *rates, sorted hashes, their numbers, time, whether that is a hit, new hashes, classes and ages of hits):
    count a use of known keys. Writes their distinct numbers over the numbers, the distinct hashes of the others, and
    class and age of each sampled key that is hit. Returns the numbers of known keys, new keys and hits."""
    begin: Callable[..., None]
    """(*keys, *rates, numbers, their new hashes, number of fresh ones, time): make new records. Those behind the fresh
    ones belonged to other keys: their ages are counted first."""
    count_ages: Callable[..., None]
    """(*keys, *rates, first number, end, time): move sampled keys to the buckets that they have reached."""
    set_output: Callable[..., None]
    """(*keys, *rates, numbers, output, weight that a decay leaves): set the class of the answer of the known keys.
    Sampled ones are counted as if they had had it since their use."""
    classes: Callable[..., None]
    """(records, class_of_hits, numbers, class of unknown keys, out): write the class of each key."""


@functools.cache
def key_functions() -> KeyFunctions:
    """Return the functions of `UsedKeys`."""
    from numba import from_dtype, types

    _register_functions()
    number, real = types.int64, types.float64
    given_hashes = types.Array(types.uint64, 1, "A", readonly=True)
    given = types.Array(types.int64, 1, "A", readonly=True)
    constant_bytes, constant_reals = (types.Array(kind, 1, "C", readonly=True) for kind in (types.uint8, types.float64))
    keys = (
        *(types.Array(from_dtype(KEY_RECORD), 1, "C"), types.uint64[::1], types.uint64),
        *(types.float64[:, :, ::1], number, constant_bytes, constant_reals),
    )

    hits = types.uint8[::1], types.float64[::1]

    @compiled(
        types.UniTuple(number, 3)(*keys, given_hashes, types.int64[::1], real, types.boolean, types.uint64[::1], *hits)
    )
    def use(
        records: Any,
        all_hashes: KeyHashes,
        mask: np.uint64,
        counts: _Reals,
        num_decays: int,
        class_of_hits: _Bytes,
        bounds_s: _Reals,
        hashes: KeyHashes,
        numbers: _Numbers,
        now_s: float,
        is_hit: bool,
        new_hashes: KeyHashes,
        hit_classes: _Bytes,
        hit_ages_s: _Reals,
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
            num_hits = min(record.num_hits + 1, _MOST_HITS)
            if hashes[i] & mask == np.uint64(0):
                of_class = class_of_hits[record.num_hits] + record.output
                age = count_age(record, counts, of_class, bounds_s, now_s)
                counts[USES, of_class, age] += 1
                if is_hit:
                    counts[HITS, of_class, age] += 1
                    hit_classes[num_sampled] = of_class
                    hit_ages_s[num_sampled] = now_s - record.last_s
                    num_sampled += 1
                counts[ENTERED, class_of_hits[num_hits] + record.output, 0] += 1
                record.age = 0
                record.num_decays = num_decays
            record.num_hits = num_hits
            record.last_s = now_s
        return num_known, num_new, num_sampled

    @compiled(types.void(*keys, given, given_hashes, number, real))
    def begin(
        records: Any,
        all_hashes: KeyHashes,
        mask: np.uint64,
        counts: _Reals,
        num_decays: int,
        class_of_hits: _Bytes,
        bounds_s: _Reals,
        numbers: _Numbers,
        hashes: KeyHashes,
        num_fresh: int,
        now_s: float,
    ) -> None:
        for i in range(len(numbers)):
            record = records[numbers[i]]
            if i >= num_fresh and all_hashes[numbers[i]] & mask == np.uint64(0):
                count_age(record, counts, class_of_hits[record.num_hits] + record.output, bounds_s, now_s)
            all_hashes[numbers[i]] = hashes[i]
            record.last_s = now_s
            record.num_hits = record.output = 0
            record.age = 0
            record.num_decays = num_decays
            if hashes[i] & mask == np.uint64(0):
                counts[ENTERED, class_of_hits[0], 0] += 1

    @compiled(types.void(*keys, number, number, real))
    def count_ages(
        records: Any,
        all_hashes: KeyHashes,
        mask: np.uint64,
        counts: _Reals,
        num_decays: int,
        class_of_hits: _Bytes,
        bounds_s: _Reals,
        first: int,
        end: int,
        now_s: float,
    ) -> None:
        for i in range(first, end):
            if all_hashes[i] & mask == np.uint64(0):
                record = records[i]
                count_age(record, counts, class_of_hits[record.num_hits] + record.output, bounds_s, now_s)

    @compiled(types.void(*keys, given, number, real))
    def set_output(
        records: Any,
        all_hashes: KeyHashes,
        mask: np.uint64,
        counts: _Reals,
        num_decays: int,
        class_of_hits: _Bytes,
        bounds_s: _Reals,
        numbers: _Numbers,
        output: int,
        decay: float,
    ) -> None:
        for i in range(len(numbers)):
            if numbers[i] < 0:
                continue
            record = records[numbers[i]]
            if record.output != output and all_hashes[numbers[i]] & mask == np.uint64(0):
                of_hits = class_of_hits[record.num_hits]
                # What is left of the weight of their use.
                weight = decay ** (num_decays - record.num_decays)
                for age in range(record.age + 1):
                    counts[ENTERED, of_hits + record.output, age] -= weight
                    counts[ENTERED, of_hits + output, age] += weight
            record.output = output

    @compiled(types.void(keys[0], constant_bytes, given, number, types.uint8[::1]))
    def classes(records: Any, class_of_hits: _Bytes, numbers: _Numbers, unknown: int, out: _Bytes) -> None:
        for i in range(len(numbers)):
            out[i] = unknown
            if numbers[i] >= 0:
                record = records[numbers[i]]
                out[i] = class_of_hits[record.num_hits] + record.output

    return KeyFunctions(use, begin, count_ages, set_output, classes)


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

    _register_functions()
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
