"""LRU hit rate at each cache size, by reuse distances (Mattson), from the keys of requests that have ended.

A unit is a slot of the group whose hits are prefixes. The distance of a unit is the number of different units used
since its last use, its own included: a cache of that many finds it, if it finds all units of the prompt before it.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from kvferry.core.pool.events import RequestBlocks
from kvferry.core.pool.index import hash_keys

MAX_KEYS = 1 << 17
"""Units whose last use is remembered, in about 150 bytes each."""
_CHUNK_BITS = 9
_CHUNK = 1 << _CHUNK_BITS
_HASH_RANGE = 1 << 64
_FALL = 0.75
_REFILL_KEYS = 1 << 10
_EXACT_BITS = 6
"""Distances below `1 << _EXACT_BITS` have a bucket each; above, an octave has half as many."""
_HALF = 1 << _EXACT_BITS - 1
_NUM_BUCKETS = _HALF * (_HASH_RANGE.bit_length() - _EXACT_BITS + 2)


class ReuseCurve:
    """Reuse distances of a stream of requests, in bounded memory.

    Uses have rising stamps, of which only each unit's last one is live. Once the stamps are used up, the live ones are
    numbered anew. If they are too many, units with large hashes are forgotten: further ones beyond `near_units`, where
    distances are too large to matter, first. Units with hash below the threshold of their distance stand for all.
    As in SHARDS, what the sample has too much or too little of the units that were used counts as the smallest
    distance: hits are what is left of all units without those that the sample shows to miss.
    """

    def __init__(self, unit_tokens: int, max_keys: int = MAX_KEYS) -> None:
        self.unit_tokens = unit_tokens
        self.near_units = 0
        """Size of the largest cache of interest."""
        self._max_keys = max_keys
        self._hashes = array("Q", bytes(8 * max_keys))
        self.clear()
        self.restart()

    def clear(self) -> None:
        """Forget all uses, as a reset of the cache does; counts stay."""
        self._stamps: dict[int, int] = {}
        self._live = bytearray(self._max_keys)
        self._live_of_chunk = [0] * len(range(0, self._max_keys, _CHUNK))
        self._next = 0
        self._num_far = 0
        """Stamps below this one are of units beyond `near_units`."""
        self.sampled_share = self._far_share = 1.0
        """Shares of the units that are remembered: of those that are not beyond `near_units`, and of the others."""
        self._near_threshold = self._far_threshold = _threshold(1.0)

    def restart(self) -> None:
        """Begin to count anew; uses stay."""
        self.prompt_tokens = 0
        self.served_tokens = 0
        self._units = 0
        """Units that could have been hits."""
        self._cold_units = 0.0
        self._buckets = [0.0] * _NUM_BUCKETS
        """Units by distance."""

    def record(self, requests: Sequence[RequestBlocks]) -> None:
        """Count requests, and record their uses.

        With more than `max_keys / 2` units in one call, the last of them may be left out.
        """
        hashes = hash_keys([key for request in requests for key in request.keys])
        sampled = (hashes < self._near_threshold).nonzero()[0]
        if self._next + len(sampled) > self._max_keys:
            self._renumber()
            sampled = (hashes < self._near_threshold).nonzero()[0]
        places, names, num_left = sampled.tolist(), hashes[sampled].tolist(), self._max_keys - self._next
        # What is behind cannot be remembered.
        limit = places[num_left] if len(places) > num_left else len(hashes)
        first = end = 0
        for request in requests:
            begin, end = end, min(end + len(request.keys), limit)
            num_hittable = max(min((request.num_prompt_tokens - 1) // self.unit_tokens, end - begin), 0)
            self.prompt_tokens += request.num_prompt_tokens
            self.served_tokens += request.num_served_tokens
            self._units += num_hittable
            num_sampled = bisect_left(places, begin + num_hittable, first) - first
            num_storable = bisect_left(places, min(begin + request.num_storable, end), first) - first
            some = names[first : first + max(num_sampled, num_storable)]
            stamps = list(map(self._stamps.get, some))
            num_used = max(self._count(some, stamps, num_sampled), num_storable)
            self._use(some[:num_used], stamps[:num_used])
            first = bisect_left(places, end, first)

    def hit_rate(self, units: float) -> float:
        """Return the share of the prompt tokens that a cache of this size would have served."""
        if units < 1:
            return 0.0
        at = _bucket(int(units))
        low, width = _bounds(at)
        missed = sum(self._buckets[at + 1 :]) + self._buckets[at] * max(low + width - 1 - units, 0) / width
        return self._rate(self._units - self._cold_units - missed)

    def ceiling(self) -> float:
        """Return the share that a cache which keeps everything would have served."""
        return self._rate(self._units - self._cold_units)

    def _rate(self, units: float) -> float:
        return max(units, 0.0) * self.unit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def _count(self, names: Sequence[int], stamps: Sequence[int | None], num_hittable: int) -> int:
        """Count the distances of a prompt's sampled units; return how many of them are hits in some cache."""
        num_far, buckets = self._num_far, self._buckets
        units, threshold = 1 / self.sampled_share, _HASH_RANGE
        distance = worst = 0.0
        bucket = bucket_end = 0
        expected = -1
        for at in range(num_hittable):
            stamp = stamps[at]
            if (stamp is None or stamp < num_far) and threshold == _HASH_RANGE:
                # What is behind a unit that is far, or forgotten, is far as well.
                units, threshold, expected = 1 / self._far_share, int(self._far_threshold), -1
            if names[at] >= threshold:
                continue
            if stamp is None:
                num_cold = num_hittable - at
                if threshold < _HASH_RANGE:
                    num_cold = sum(name < threshold for name in names[at:num_hittable])
                self._cold_units += units * num_cold
                return at
            # Units of a prompt mostly have successive stamps.
            distance = distance + units if stamp == expected else self._distance(stamp)
            expected = stamp - 1
            if distance > worst:
                worst = distance
                if worst >= bucket_end:
                    bucket = _bucket(int(worst))
                    bucket_end = sum(_bounds(bucket))
            buckets[bucket] += units
        return num_hittable

    def _distance(self, stamp: int) -> float:
        """Return the number of different units used since a stamp, its own included."""
        if stamp >= self._num_far:
            return self._num_live(stamp, self._next) / self.sampled_share
        num_near = self._num_live(self._num_far, self._next)
        return num_near / self.sampled_share + self._num_live(stamp, self._num_far) / self._far_share

    def _num_live(self, first: int, end: int) -> int:
        """Return the number of live stamps in a range."""
        first_chunk, end_chunk = -(-first >> _CHUNK_BITS), end >> _CHUNK_BITS
        if first_chunk >= end_chunk:
            return self._live.count(1, first, end)
        num_whole = sum(self._live_of_chunk[first_chunk:end_chunk])
        head = self._live.count(1, first, first_chunk << _CHUNK_BITS)
        return head + num_whole + self._live.count(1, end_chunk << _CHUNK_BITS, end)

    def _use(self, names: Sequence[int], stamps: Sequence[int | None]) -> None:
        """Record the use of units, the first one of a prompt as the last, since prefixes are evicted from their end."""
        live, live_of_chunk, first, end = self._live, self._live_of_chunk, self._next, self._next + len(names)
        for stamp in stamps:
            if stamp is not None:
                live[stamp] = 0
                live_of_chunk[stamp >> _CHUNK_BITS] -= 1
        self._stamps.update(zip(reversed(names), range(first, end), strict=True))
        self._hashes[first:end] = array("Q", reversed(names))
        live[first:end] = b"\1" * len(names)
        for chunk in range(first >> _CHUNK_BITS, -(-end >> _CHUNK_BITS)):
            begin = chunk << _CHUNK_BITS
            live_of_chunk[chunk] += min(end, begin + _CHUNK) - max(first, begin)
        self._next = end

    def _renumber(self) -> None:
        """Number the live stamps from zero, and forget units until at most half of the stamps are live."""
        is_live = np.frombuffer(self._live, dtype=np.bool_)[: self._next]
        names = np.frombuffer(self._hashes, dtype=np.uint64)[: self._next][is_live]
        most, near_units = self._max_keys // 2, max(self.near_units, self._max_keys // 4)
        while True:
            num_near = min(len(names), math.ceil(near_units * self.sampled_share))
            far, near = np.split(names, [len(names) - num_near])
            far = far[far < self._far_threshold]
            if len(far) + len(near) <= most:
                break
            if len(far) > most // 4:
                self._far_share *= _FALL
            else:
                self.sampled_share *= _FALL
                self._far_share = min(self._far_share, self.sampled_share)
            self._near_threshold, self._far_threshold = _threshold(self.sampled_share), _threshold(self._far_share)
            names = names[names < self._near_threshold]
        names = np.concatenate([far, near])
        self._next, self._num_far = len(names), len(far)
        self._stamps.clear()
        for first in range(0, len(names), _REFILL_KEYS):
            # In parts, between which other threads can run.
            some = names[first : first + _REFILL_KEYS].tolist()
            self._stamps.update(zip(some, range(first, first + len(some)), strict=True))
        self._hashes[: self._next] = array("Q", names.tobytes())
        self._live = bytearray(b"\1" * self._next + bytes(self._max_keys - self._next))
        chunks = range(0, self._max_keys, _CHUNK)
        self._live_of_chunk = [min(max(self._next - first, 0), _CHUNK) for first in chunks]


def _threshold(share: float) -> np.uint64:
    """Return the hash below which units are remembered."""
    return np.uint64(min(int(share * _HASH_RANGE), _HASH_RANGE - 1))


def _bucket(distance: int) -> int:
    """Return the bucket of a distance. One that begins at `2**n` holds distances up to 3% larger."""
    octave = max(distance.bit_length() - _EXACT_BITS, 0)
    return octave * _HALF + (distance >> octave)


def _bounds(bucket: int) -> tuple[int, int]:
    """Return the smallest distance of a bucket, and how many it holds."""
    octave = max(bucket // _HALF - 1, 0)
    return bucket - octave * _HALF << octave, 1 << octave
