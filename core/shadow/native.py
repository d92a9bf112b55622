"""Compiled functions of the shadow caches, and the layout of the state that they share.

Sampled keys have numbers. Each cache is a row of an array over them: the list that a key is in, and its neighbors
there. Lists are in order of use. A request takes some microseconds for all caches, in Python some milliseconds.

Import this module only on the thread that simulates: the import compiles its functions, or loads stored code. Those
that go through all caches run without the interpreter lock.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import from_dtype, types

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
SAMPLE_BITS = 24
"""Low bits of a hash that decide whether its key is sampled; the bits above them say in which group it is."""
PLACE_RECORD = np.dtype([("older", np.int32), ("newer", np.int32), ("list", np.uint8)])
"""A key in a cache: its neighbors in its list, and the list. A victim's is one access to memory, not three."""
KEY_RECORD = np.dtype(
    [
        ("cost", np.float64),
        ("weight", np.float64),
        ("used_s", np.float64),
        ("stamp", np.int64),
        ("group", np.uint8),
        ("hazard_class", np.uint8),
        ("is_storable", np.uint8),
    ],
    align=True,
)
"""A simulated key: the slots that it takes, the keys that its hits stand for, the time and the number of the latest
request with it, its group, its class in caches with `hazard`, and whether the latest request may store it."""

_number, _real = types.int64, types.float64
_place = from_dtype(PLACE_RECORD)
_keys = types.Array(from_dtype(KEY_RECORD), 1, "C")
_row = (types.Array(_place, 1, "C"), types.int64[:, ::1], types.float64[::1], _keys)
_rows = (types.Array(_place, 2, "C"), types.int64[:, :, ::1], types.float64[:, ::1], _keys)
_numbers, _flags, _reals = types.int64[::1], types.uint8[::1], types.float64[::1]
_given_numbers, _given_hashes = (types.Array(kind, 1, "A", readonly=True) for kind in (types.int64, types.uint64))


@compiled(types.void(*_row, _number, _number), nogil=True)
def move(places: Any, ends: Any, sizes: Any, keys: Any, number: int, to: int) -> None:
    """Remove a key from its list, and append it at the newest end of another one, unless that is `ABSENT`."""
    place = places[number]
    at = place.list
    if at != ABSENT:
        before, after = place.older, place.newer
        if before < 0:
            ends[at, 0] = after
        else:
            places[before].newer = after
        if after < 0:
            ends[at, 1] = before
        else:
            places[after].older = before
        sizes[at] -= keys[number].cost
    place.list = to
    if to != ABSENT:
        newest = ends[to, 1]
        place.older, place.newer = newest, -1
        if newest < 0:
            ends[to, 0] = number
        else:
            places[newest].newer = number
        ends[to, 1] = number
        sizes[to] += keys[number].cost


@compiled(_number(types.uint16[::1], _given_hashes, _real))
def count_frequent(counts: Any, hashes: Any, limit: float) -> int:
    """Count the keys of a request, and return how many of its first ones occurred more often than the limit.

    `counts` has a place for each value of the high bits of a hash.
    """
    num_counted = len(hashes)
    places, after = np.empty(len(hashes), dtype=np.int64), np.empty(len(hashes), dtype=np.uint16)
    for i in range(len(hashes)):
        if i == num_counted:
            break
        places[i] = np.int64(hashes[i] >> np.uint64(46))
        count = counts[places[i]]
        if count < 2 and num_counted == len(hashes):
            # No key behind one that was seen once was seen more often. The number doubles with each request.
            num_counted = min(2 * i + 16, len(hashes))
        after[i] = count + 1
    num_frequent = num_counted
    for i in range(num_counted):
        counts[places[i]] = after[i]
        if after[i] <= limit:
            num_frequent = min(num_frequent, i)
    return num_frequent


_choose = types.UniTuple(_number, 6)(
    *(_given_hashes, _numbers, _keys, _number, types.uint64),
    *(_number, _number, _number, _number, _number),
    *(types.uint64[::1], _numbers, types.boolean[::1]),
)


@compiled(_choose)
def choose(
    hashes: Any,
    numbers: Any,
    keys: Any,
    num_groups: int,
    sampled_below: Any,
    num_frequent: int,
    num_prompt: int,
    num_hittable: int,
    num_storable: int,
    limit: int,
    chosen: Any,
    chosen_numbers: Any,
    are_exact: Any,
) -> tuple[int, int, int, int, int, int]:
    """Choose the keys of a request that are simulated, `limit` at most, and their order.

    These are the keys with low bits below `sampled_below`, the first `num_frequent`, and those whose group says that
    they are simulated in any case. Of keys that are simulated in any case for the first time, no cache knows whether it
    holds them. They must not end a hit: they are behind the prompt's other keys this time, or left out if those are not
    all stored.

    Args:
        hashes: Of the request's keys.
        numbers: Of the keys, -1 for those without one.
        num_prompt: Keys of the prompt, of which the first `num_hittable` may be hits.
        num_storable: Leading keys that may be stored.
        chosen: Receives the hashes of the keys that are simulated; the others their numbers, and whether they are
            simulated in any case.

    Returns:
        The number of keys that are simulated; of those that may be hits; of those that may be stored; of those of the
        prompt; of keys that may be hits and are not simulated in any case; and of those of them that are simulated.
    """
    order, waiting = np.empty(len(hashes), dtype=np.int64), np.empty(len(hashes), dtype=np.int64)
    exact = np.empty(len(hashes), dtype=np.bool_)
    num_sampled = num_chosen = num_waiting = num_hits = num_known = has_sampled = 0
    end = len(hashes)
    for i in range(len(hashes) + 1):
        if i == num_prompt or i >= end:
            for j in range(num_waiting):
                order[num_chosen] = waiting[j]
                num_chosen += 1
            num_waiting = 0
        if i >= end:
            break
        is_sampled = hashes[i] & np.uint64((1 << SAMPLE_BITS) - 1) < sampled_below
        is_exact = i < num_frequent or (numbers[i] >= 0 and keys[numbers[i]].group == num_groups)
        exact[i] = is_exact
        if not is_sampled and not is_exact:
            continue
        if num_sampled == limit:
            # The keys behind count as computed.
            num_hittable = min(num_hittable, i)
            end = i
            continue
        num_sampled += 1
        is_unknown = not is_sampled and numbers[i] < 0
        if i < num_hittable:
            num_known += is_exact and not is_unknown
            if not is_exact:
                has_sampled = 1
            num_hits += not is_unknown
        if not is_unknown:
            order[num_chosen] = i
            num_chosen += 1
        elif num_storable >= num_prompt:
            waiting[num_waiting] = i
            num_waiting += 1
    num_stores = num_uses = 0
    for j in range(num_chosen):
        i = order[j]
        chosen[j], chosen_numbers[j] = hashes[i], numbers[i]
        are_exact[j] = exact[i]
        num_stores += i < num_storable
        num_uses += i < num_prompt
    return num_chosen, num_hits, num_stores, num_uses, max(num_hittable - num_known, 0), has_sampled


_use_device = types.Tuple((_number, _number))(
    *_rows,
    *(_given_hashes, _given_numbers, types.boolean[::1], _given_numbers, _number, _real),
    *(_number, _number, _real, _number, _real, _real),
    *(_reals, _reals, _numbers),
)


@compiled(_use_device, nogil=True)
def use_device(
    places: Any,
    ends: Any,
    sizes: Any,
    keys: Any,
    hashes: Any,
    numbers: Any,
    are_exact: Any,
    reused: Any,
    num_groups: int,
    share: float,
    num_hittable: int,
    num_storable: int,
    now_s: float,
    stamp: int,
    capacity: float,
    leaving_capacity: float,
    found: Any,
    references: Any,
    left: Any,
) -> tuple[int, int]:
    """Use the keys of a request on the device, the last row, after all caches have forgotten `reused` numbers.

    Args:
        hashes: Of the keys, of which the first `num_hittable` may be hits, and the first `num_storable` be stored.
        numbers: Of the keys.
        are_exact: Whether each is simulated in any case. Such a key stands for itself, and takes less of the caches.
        reused: Numbers that other keys had before.
        share: Share of the other keys that is simulated.
        now_s: Time of the request.
        stamp: Its number.
        capacity: Of the device without the blocks about to leave it, of which it has `leaving_capacity`.
        found: The weights of hits are added to it by group.
        references: The weights of all keys that may be hits are added to it by group.
        left: Receives the numbers of the keys that are about to leave the device.

    Returns:
        The number of leading keys that were found, and how many are in `left`.
    """
    num_rows = len(ends)
    for number in reused:
        for row in range(num_rows):
            move(places[row], ends[row], sizes[row], keys, number, ABSENT)
        keys[number].group = 0
    for i in range(len(numbers)):
        key = keys[numbers[i]]
        # A number stays exact until another key has it.
        is_exact = are_exact[i] or key.group == num_groups
        cost = share if is_exact else 1.0
        if key.cost != cost:
            # The caches that hold it have counted it with its cost so far.
            for row in range(num_rows):
                at = places[row, numbers[i]].list
                if at != ABSENT:
                    sizes[row, at] += cost - key.cost
            key.cost = cost
        key.weight = 1.0 if is_exact else 1 / share
        key.group = num_groups if is_exact else np.int64(hashes[i] >> np.uint64(SAMPLE_BITS)) & (num_groups - 1)
        key.is_storable = i < num_storable
        key.used_s = now_s
        key.stamp = stamp
    of_row, end, size = places[-1], ends[-1], sizes[-1]
    num_found = 0
    while num_found < num_hittable and of_row[numbers[num_found]].list != ABSENT:
        key = keys[numbers[num_found]]
        found[key.group] += key.weight
        num_found += 1
    for number in numbers[:num_hittable]:
        references[keys[number].group] += keys[number].weight
    for i in range(len(numbers) - 1, -1, -1):
        move(of_row, end, size, keys, numbers[i], FIRST)
    num_left = 0
    while size[FIRST] > capacity and end[FIRST, 0] >= 0 and num_left < len(left):
        oldest = end[FIRST, 0]
        move(of_row, end, size, keys, oldest, LEAVING)
        left[num_left] = oldest
        num_left += 1
    while size[LEAVING] > leaving_capacity and end[LEAVING, 0] >= 0:
        move(of_row, end, size, keys, end[LEAVING, 0], ABSENT)
    return num_found, num_left


@compiled(_number(*_row[1:], _number, _real, _real, types.float64[:, ::1], _real, _flags), nogil=True)
def next_victim(
    ends: Any,
    sizes: Any,
    keys: Any,
    kind: int,
    capacity: float,
    target: float,
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
        age_s = now_s - keys[oldest].used_s
        bucket = 0
        if age_s >= 1:
            # The bounds of `kvferry.core.pool.eviction.learning`: half octaves from a second on.
            bucket = min(int(2 * np.log2(age_s)) + 1, index.shape[1] - 1)
        value = index[number_of_class, bucket]
        if lowest < 0 or value < lowest_value or (value == lowest_value and keys[oldest].used_s < lowest_s):
            lowest, lowest_value, lowest_s = oldest, value, keys[oldest].used_s
    return lowest


_replay = types.void(
    *_rows,
    *(_numbers, types.boolean[::1], _reals, _reals),
    *(_given_numbers, _number, _number, _number, _given_numbers),
    *(types.float64[:, :, ::1], _numbers, _real, _number, types.float64[:, ::1]),
)


@compiled(_replay, nogil=True)
def replay(
    places: Any,
    ends: Any,
    sizes: Any,
    keys: Any,
    kinds: Any,
    are_lazy: Any,
    capacities: Any,
    targets: Any,
    numbers: Any,
    num_on_device: int,
    num_hittable: int,
    num_storable: int,
    left: Any,
    orders: Any,
    order_numbers: Any,
    now_s: float,
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
        of_row, end, size = places[row], ends[row], sizes[row]
        num_resident_lists = FIRST + 1
        if kind == ARC:
            num_resident_lists = FREQUENT + 1
        elif kind == HAZARD:
            num_resident_lists = FIRST + len(index)
        num_found = num_on_device
        while num_found < num_hittable:
            number = numbers[num_found]
            if of_row[number].list == ABSENT or of_row[number].list >= num_resident_lists:
                break
            found[row, keys[number].group] += keys[number].weight
            num_found += 1
        if are_lazy[row]:
            for i in range(num_found - 1, -1, -1):
                number = numbers[i]
                if of_row[number].list != ABSENT and of_row[number].list < num_resident_lists:
                    move(of_row, end, size, keys, number, ON_DEVICE)
            stored = left
        else:
            for i in range(num_storable):
                number = numbers[i]
                if of_row[number].list != ABSENT and of_row[number].list < num_resident_lists:
                    to = FIRST
                    if kind == ARC:
                        to = FREQUENT
                    elif kind == HAZARD:
                        to = FIRST + keys[number].hazard_class
                    move(of_row, end, size, keys, number, to)
            stored = numbers[:num_storable]
        for number in stored:
            place = of_row[number].list
            if place != ABSENT and place < num_resident_lists:
                if are_lazy[row]:
                    to = place
                    if place == ON_DEVICE:
                        to = FREQUENT if kind == ARC else FIRST
                        if kind == HAZARD:
                            to = FIRST + keys[number].hazard_class
                    move(of_row, end, size, keys, number, to)
                continue
            if are_lazy[row] and not keys[number].is_storable:
                continue
            to = FIRST
            flag[0] = 0
            if kind == HAZARD:
                to = FIRST + keys[number].hazard_class
            elif place == RECENT_GHOSTS:
                step = max(1.0, size[FREQUENT_GHOSTS] / size[RECENT_GHOSTS])
                targets[row] = min(targets[row] + step * keys[number].cost, capacity)
                to = FREQUENT
            elif place == FREQUENT_GHOSTS:
                step = max(1.0, size[RECENT_GHOSTS] / size[FREQUENT_GHOSTS])
                targets[row] = max(targets[row] - step * keys[number].cost, 0.0)
                to = FREQUENT
                flag[0] = 1
            move(of_row, end, size, keys, number, ABSENT)
            num_resident = keys[number].cost
            for one in range(ON_DEVICE, num_resident_lists):
                num_resident += size[one]
            has_space = True
            while num_resident > capacity:
                victim = next_victim(end, size, keys, kind, capacity, targets[row], index, now_s, flag)
                if victim < 0 or (not are_lazy[row] and keys[victim].stamp == stamp):
                    has_space = False
                    break
                ghost_list = ABSENT
                if kind == ARC and of_row[victim].list != ON_DEVICE:
                    ghost_list = RECENT_GHOSTS if of_row[victim].list == FIRST else FREQUENT_GHOSTS
                move(of_row, end, size, keys, victim, ghost_list)
                num_resident -= keys[victim].cost
            if not has_space:
                break
            move(of_row, end, size, keys, number, to)
            if kind == ARC:
                while end[RECENT_GHOSTS, 0] >= 0 and size[FIRST] + size[RECENT_GHOSTS] > capacity:
                    move(of_row, end, size, keys, end[RECENT_GHOSTS, 0], ABSENT)
                while end[FREQUENT_GHOSTS, 0] >= 0 and size[RECENT_GHOSTS] + size[FREQUENT_GHOSTS] > capacity:
                    move(of_row, end, size, keys, end[FREQUENT_GHOSTS, 0], ABSENT)
        for i in range(num_storable - 1, -1, -1):
            # The request's end is evicted first, and its blocks have the class of its answer.
            number = numbers[i]
            place = of_row[number].list
            if place < FIRST or place >= num_resident_lists:
                continue
            to = FIRST + keys[number].hazard_class if kind == HAZARD else place
            if not are_lazy[row] or to != place:
                move(of_row, end, size, keys, number, to)
