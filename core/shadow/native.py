"""Compiled functions of the shadow caches, and the layout of the state that they share.

Each cache is a row of arrays over the sampled keys, which have numbers: the list that a key is in, and its neighbors
there. Lists are in order of use. A request takes some microseconds for all caches, in Python some milliseconds.

Import this module only on the thread that simulates: the import compiles its functions, or loads stored code. They run
without the interpreter lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from kvferry.core.pool.native import compiled

LRU, ARC, HAZARD = 0, 1, 2
"""Kinds of caches."""
ABSENT, ON_DEVICE, FIRST = 0, 1, 2
"""Lists: keys that are in none, keys whose blocks the device holds too (lazy mode), and the first one of the policy."""
FREQUENT, RECENT_GHOSTS, FREQUENT_GHOSTS = FIRST + 1, FIRST + 2, FIRST + 3
"""Further lists of ARC: `FIRST` is T1 of its authors, these are T2, B1 and B2. Ghosts are not in the cache."""
LEAVING = FIRST + 1
"""Further list of the device: blocks at the head of the free queue, which lazy mode has stored."""
NUM_LISTS = 32

_number, _real = types.int64, types.float64
_lists, _links, _ends, _sizes = types.uint8[::1], types.int32[::1], types.int64[:, ::1], types.float64[::1]
_row = (_lists, _links, _links, _ends, _sizes, types.float64[::1])
_rows = (
    types.uint8[:, ::1],
    types.int32[:, ::1],
    types.int32[:, ::1],
    types.int64[:, :, ::1],
    types.float64[:, ::1],
    types.float64[::1],
)
_numbers, _flags, _reals = types.int64[::1], types.uint8[::1], types.float64[::1]


@compiled(types.void(*_row, _number, _number), nogil=True)
def move(lists: Any, older: Any, newer: Any, ends: Any, sizes: Any, costs: Any, number: int, to: int) -> None:
    """Remove a key from its list, and append it at the newest end of another one, unless that is `ABSENT`."""
    at = lists[number]
    if at != ABSENT:
        before, after = older[number], newer[number]
        if before < 0:
            ends[at, 0] = after
        else:
            newer[before] = after
        if after < 0:
            ends[at, 1] = before
        else:
            older[after] = before
        sizes[at] -= costs[number]
    lists[number] = to
    if to != ABSENT:
        newest = ends[to, 1]
        older[number], newer[number] = newest, -1
        if newest < 0:
            ends[to, 0] = number
        else:
            newer[newest] = number
        ends[to, 1] = number
        sizes[to] += costs[number]


@compiled(types.void(*_rows, _numbers), nogil=True)
def forget(lists: Any, older: Any, newer: Any, ends: Any, sizes: Any, costs: Any, numbers: Any) -> None:
    """Remove keys from all caches."""
    for row in range(len(lists)):
        for number in numbers:
            move(lists[row], older[row], newer[row], ends[row], sizes[row], costs, number, ABSENT)


_use_device = types.Tuple((_number, _number))(
    *_row, _numbers, _number, _real, _real, _reals, _flags, _reals, _reals, _numbers
)


@compiled(_use_device, nogil=True)
def use_device(
    lists: Any,
    older: Any,
    newer: Any,
    ends: Any,
    sizes: Any,
    costs: Any,
    numbers: Any,
    num_hittable: int,
    capacity: float,
    leaving_capacity: float,
    weights: Any,
    groups: Any,
    found: Any,
    references: Any,
    left: Any,
) -> tuple[int, int]:
    """Use the keys of a request on the device, of which the first `num_hittable` may be hits.

    Adds the weights of its hits to `found`, and of all hittable keys to `references`, by group.

    Returns:
        The number of leading keys that were found, and how many keys, written to `left`, are about to leave the device.
    """
    num_found = 0
    while num_found < num_hittable and lists[numbers[num_found]] != ABSENT:
        number = numbers[num_found]
        found[groups[number]] += weights[number]
        num_found += 1
    for number in numbers[:num_hittable]:
        references[groups[number]] += weights[number]
    for i in range(len(numbers) - 1, -1, -1):
        move(lists, older, newer, ends, sizes, costs, numbers[i], FIRST)
    num_left = 0
    while sizes[FIRST] > capacity and ends[FIRST, 0] >= 0 and num_left < len(left):
        oldest = ends[FIRST, 0]
        move(lists, older, newer, ends, sizes, costs, oldest, LEAVING)
        left[num_left] = oldest
        num_left += 1
    while sizes[LEAVING] > leaving_capacity and ends[LEAVING, 0] >= 0:
        move(lists, older, newer, ends, sizes, costs, ends[LEAVING, 0], ABSENT)
    return num_found, num_left


_policy = (_number, _real, _real, _reals, types.float64[:, ::1], _real)


@compiled(_number(*_row, *_policy, _flags), nogil=True)
def next_victim(
    lists: Any,
    older: Any,
    newer: Any,
    ends: Any,
    sizes: Any,
    costs: Any,
    kind: int,
    capacity: float,
    target: float,
    used_s: Any,
    index: Any,
    now_s: float,
    from_frequent_ghosts: Any,
) -> Any:
    """Return the key that the policy evicts next, -1 if there is none."""
    if ends[ON_DEVICE, 0] >= 0:
        return ends[ON_DEVICE, 0]
    if kind == LRU:
        return ends[FIRST, 0]
    if kind == ARC:
        is_longer = sizes[FIRST] > target or (from_frequent_ghosts[0] and sizes[FIRST] == target)
        if ends[FIRST, 0] >= 0 and (is_longer or ends[FREQUENT, 0] < 0):
            return ends[FIRST, 0]
        return ends[FREQUENT, 0]
    lowest, lowest_value, lowest_s = -1, 0.0, 0.0
    for number_of_class in range(len(index)):
        oldest = ends[FIRST + number_of_class, 0]
        if oldest < 0:
            continue
        age_s = now_s - used_s[oldest]
        bucket = 0
        if age_s >= 1:
            # The bounds of `kvferry.core.pool.eviction.learning`: half octaves from a second on.
            bucket = min(int(2 * np.log2(age_s)) + 1, index.shape[1] - 1)
        value = index[number_of_class, bucket]
        if lowest < 0 or value < lowest_value or (value == lowest_value and used_s[oldest] < lowest_s):
            lowest, lowest_value, lowest_s = oldest, value, used_s[oldest]
    return lowest


_replay = types.void(
    *_rows,
    *(_numbers, types.boolean[::1], _reals, _reals),
    *(_numbers, _number, _number, _number, _numbers),
    *(_reals, _flags, _flags, _flags, _reals, types.float64[:, :, ::1], _numbers, _real),
    *(_numbers, _number, types.float64[:, ::1]),
)


@compiled(_replay, nogil=True)
def replay(
    lists: Any,
    older: Any,
    newer: Any,
    ends: Any,
    sizes: Any,
    costs: Any,
    kinds: Any,
    are_lazy: Any,
    capacities: Any,
    targets: Any,
    numbers: Any,
    num_on_device: int,
    num_hittable: int,
    num_storable: int,
    left: Any,
    weights: Any,
    groups: Any,
    are_storable: Any,
    classes: Any,
    used_s: Any,
    orders: Any,
    order_numbers: Any,
    now_s: float,
    stamps: Any,
    stamp: int,
    found: Any,
) -> None:
    """Use the keys of a request in all caches: hits, then stores with their evictions.

    In eager mode the first `num_storable` keys are stored, in lazy mode those that `left` the device and are storable.
    Keys whose stamp is `stamp` belong to the request, and are not evicted for it. The weights of hits, of the keys
    behind those on the device, are added to `found` by cache and group.
    """
    flag = np.zeros(1, dtype=np.uint8)
    for row in range(len(kinds)):
        kind, capacity, index = kinds[row], capacities[row], orders[order_numbers[row]]
        at, before, after, end, size = lists[row], older[row], newer[row], ends[row], sizes[row]
        num_resident_lists = FIRST + 1
        if kind == ARC:
            num_resident_lists = FREQUENT + 1
        elif kind == HAZARD:
            num_resident_lists = FIRST + len(index)
        num_found = num_on_device
        while num_found < num_hittable:
            number = numbers[num_found]
            if at[number] == ABSENT or at[number] >= num_resident_lists:
                break
            found[row, groups[number]] += weights[number]
            num_found += 1
        if are_lazy[row]:
            for i in range(num_found - 1, -1, -1):
                number = numbers[i]
                if at[number] != ABSENT and at[number] < num_resident_lists:
                    move(at, before, after, end, size, costs, number, ON_DEVICE)
            stored = left
        else:
            for i in range(num_storable):
                number = numbers[i]
                if at[number] != ABSENT and at[number] < num_resident_lists:
                    to = FIRST
                    if kind == ARC:
                        to = FREQUENT
                    elif kind == HAZARD:
                        to = FIRST + classes[number]
                    move(at, before, after, end, size, costs, number, to)
            stored = numbers[:num_storable]
        for number in stored:
            place = at[number]
            if place != ABSENT and place < num_resident_lists:
                if are_lazy[row]:
                    to = place
                    if place == ON_DEVICE:
                        to = FREQUENT if kind == ARC else FIRST
                        if kind == HAZARD:
                            to = FIRST + classes[number]
                    move(at, before, after, end, size, costs, number, to)
                continue
            if are_lazy[row] and not are_storable[number]:
                continue
            to = FIRST
            flag[0] = 0
            if kind == HAZARD:
                to = FIRST + classes[number]
            elif place == RECENT_GHOSTS:
                step = max(1.0, size[FREQUENT_GHOSTS] / size[RECENT_GHOSTS])
                targets[row] = min(targets[row] + step * costs[number], capacity)
                to = FREQUENT
            elif place == FREQUENT_GHOSTS:
                step = max(1.0, size[RECENT_GHOSTS] / size[FREQUENT_GHOSTS])
                targets[row] = max(targets[row] - step * costs[number], 0.0)
                to = FREQUENT
                flag[0] = 1
            move(at, before, after, end, size, costs, number, ABSENT)
            num_resident = costs[number]
            for one in range(ON_DEVICE, num_resident_lists):
                num_resident += size[one]
            has_space = True
            while num_resident > capacity:
                victim = next_victim(
                    at, before, after, end, size, costs, kind, capacity, targets[row], used_s, index, now_s, flag
                )
                if victim < 0 or (not are_lazy[row] and stamps[victim] == stamp):
                    has_space = False
                    break
                ghost_list = ABSENT
                if kind == ARC and at[victim] != ON_DEVICE:
                    ghost_list = RECENT_GHOSTS if at[victim] == FIRST else FREQUENT_GHOSTS
                move(at, before, after, end, size, costs, victim, ghost_list)
                num_resident -= costs[victim]
            if not has_space:
                break
            move(at, before, after, end, size, costs, number, to)
            if kind == ARC:
                while end[RECENT_GHOSTS, 0] >= 0 and size[FIRST] + size[RECENT_GHOSTS] > capacity:
                    move(at, before, after, end, size, costs, end[RECENT_GHOSTS, 0], ABSENT)
                while end[FREQUENT_GHOSTS, 0] >= 0 and size[RECENT_GHOSTS] + size[FREQUENT_GHOSTS] > capacity:
                    move(at, before, after, end, size, costs, end[FREQUENT_GHOSTS, 0], ABSENT)
        for i in range(num_storable - 1, -1, -1):
            # The request's end is evicted first, and its blocks have the class of its answer.
            number = numbers[i]
            place = at[number]
            if place < FIRST or place >= num_resident_lists:
                continue
            to = FIRST + classes[number] if kind == HAZARD else place
            if not are_lazy[row] or to != place:
                move(at, before, after, end, size, costs, number, to)
