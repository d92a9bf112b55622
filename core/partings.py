"""Where prompts leave earlier ones, by the keys of requests that have ended.

A key stands for a slot and all tokens before it: two prompts are equal up to the end of the last key that they share.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvferry.core.breaks import Breaks, count_equal
from kvferry.core.pool.events import RequestBlocks, ResetEvent
from kvferry.core.pool.index import hash_keys
from kvferry.core.pool.native import KeyHashes

MAX_REQUESTS = 1000
"""Requests whose keys are kept, as many as have a view after their end."""
MAX_CHAIN_KEYS = 1 << 19
"""Keys of those requests, in 8 bytes each: fewer requests of long prompts are kept."""
TABLE_BITS = 20
"""The table has two to the power of this many keys, in 16 bytes each."""
MAX_WAYS = 1 << 14
"""Continuations that are remembered, in about 300 bytes each."""
WAYS_S = 3600.0
"""Time for which a continuation counts."""


@dataclass(frozen=True, slots=True)
class KeepTokenIds:
    """Token ids of prompts are kept in at most so many bytes from now on; those kept before are forgotten."""

    max_bytes: int


class PrefixOutcome(StrEnum):
    """How a prompt relates to the earlier request with the longest common prefix."""

    NEW = "new"
    PARTED = "parted"
    CONTINUED = "continued"
    REPEATED = "repeated"


@dataclass(frozen=True, slots=True)
class PrefixStory:
    """The longest prefix of a prompt that an earlier request had, stored or not."""

    outcome: PrefixOutcome = field(
        metadata={
            "description": "`new`: no earlier request begins alike; `parted`: it left an earlier one; `continued`: "
            "that one ended there; `repeated`: an earlier one has all its whole slots"
        }
    )
    shared_tokens: int = field(metadata={"description": "tokens of that prefix, in whole slots"})
    position: int | None = field(
        metadata={"description": "first token of the slot in which it left the earlier one; null if not"}
    )
    exact: bool = field(metadata={"description": "whether `position` is the first token that differs"})
    earlier: str | None = field(
        metadata={"description": "the latest request with that prefix; null if its id is not known any more"}
    )
    ways: int = field(metadata={"description": "in how many ways that prefix was continued in the last hour"})


@dataclass(frozen=True, slots=True)
class _Ended:
    """A request that has ended, by the hashes of its keys."""

    request_id: str
    time_s: float
    hashes: KeyHashes
    story: PrefixStory | None


class Partings:
    """The stories of the latest requests' prompts, in some 26 MiB at most, besides kept token ids.

    Thread: that of prompts; any for `story` and `parted_tokens`, which look up one value.

    The table has one place for each key, by its hash, where a later key replaces an earlier one. A prefix whose last
    keys were replaced is found shorter, unless the keys of its request are kept.
    """

    def __init__(self, slot_tokens: int, table_bits: int = TABLE_BITS) -> None:
        self.parted_tokens = 0
        """Prompt tokens that were computed behind the points at which prompts left earlier ones."""
        self.breaks = Breaks(slot_tokens)
        self._slot_tokens = slot_tokens
        self._num_places = 1 << table_bits
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all requests; the counter stays."""
        self.breaks.clear()
        table = np.zeros((self._num_places, 2), dtype=np.uint64)
        # Beside each other: a place is one access of memory, which is most of what a key costs.
        self._hashes = table[:, 0]
        self._owners = table.view(np.int64)[:, 1]
        """Twice the number of the latest request with the key, plus one if that request ended there."""
        self._ended: OrderedDict[int, _Ended] = OrderedDict()
        """The latest requests, by number."""
        self._num_kept_keys = 0
        self._ways: OrderedDict[tuple[int, int], float] = OrderedDict()
        """Times of continuations, the latest last: of the last key of a prefix by the next one."""
        self._num_ways: Counter[int] = Counter()
        """How many of them a prefix has."""

    def story(self, number: int) -> PrefixStory | None:
        """Return what is known of a request's prompt: None if it has no full slot, has not ended, or is too old."""
        ended = self._ended.get(number)
        return None if ended is None else ended.story

    def read(self, batch: Sequence[RequestBlocks | ResetEvent | KeepTokenIds]) -> None:
        """Compare the prompts of requests that have ended with earlier ones. A reset forgets their token ids only."""
        for event in batch:
            if isinstance(event, RequestBlocks):
                self._record(event)
            else:
                self.breaks.clear()
            if isinstance(event, KeepTokenIds):
                self.breaks.max_bytes = event.max_bytes

    def _record(self, request: RequestBlocks) -> None:
        hashes = hash_keys(request.keys)
        places = (hashes & np.uint64(self._num_places - 1)).astype(np.int64)
        num_slots = min(request.num_prompt_tokens // self._slot_tokens, len(hashes))
        story = None
        self.breaks.count(request)
        if num_slots:
            story, earlier = self._compare(request, hashes[:num_slots], places[:num_slots])
            if story.position is not None:
                first_computed = max(story.shared_tokens, request.num_served_tokens)
                self.parted_tokens += max(request.num_prompt_tokens - first_computed, 0)
            latest = partial(self._latest, hashes, places)
            position = self.breaks.observe(request, hashes, latest, story.shared_tokens, earlier)
            if position is not None and story.position is not None:
                story = replace(story, position=position, exact=True)
        self._hashes[places] = hashes
        self._owners[places] = 2 * request.number
        self._owners[places[-1:]] += 1
        self._keep(request.number, _Ended(request.origin.request_id, request.time_s, hashes, story))

    def _compare(
        self, request: RequestBlocks, hashes: KeyHashes, places: NDArray[np.int64]
    ) -> tuple[PrefixStory, int | None]:
        """Return the story of a prompt with these keys, and the number of the request that it left, if any."""
        known = np.flatnonzero(self._hashes[places] == hashes)
        if not len(known):
            return PrefixStory(PrefixOutcome.NEW, 0, None, exact=False, earlier=None, ways=0), None
        num_shared = int(known[-1]) + 1
        owner, has_ended = divmod(int(self._owners[places[num_shared - 1]]), 2)
        earlier = self._ended.get(owner)
        if earlier is not None:
            num_shared += count_equal(earlier.hashes[num_shared:], hashes[num_shared:])
            has_ended = len(earlier.hashes) == num_shared
        ways, point = 0, int(hashes[num_shared - 1])
        if earlier is not None and not has_ended and request.time_s - earlier.time_s < WAYS_S:
            self._continue(point, int(earlier.hashes[num_shared]), request.time_s)
        if num_shared < len(hashes):
            self._continue(point, int(hashes[num_shared]), request.time_s)
            ways = self._num_ways[point]
        outcome = PrefixOutcome.CONTINUED if has_ended else PrefixOutcome.PARTED
        if num_shared == len(hashes):
            outcome = PrefixOutcome.REPEATED
        has_parted = outcome is PrefixOutcome.PARTED
        num_tokens = num_shared * self._slot_tokens
        story = PrefixStory(
            outcome,
            num_tokens,
            num_tokens if has_parted else None,
            exact=False,
            earlier=None if earlier is None else earlier.request_id,
            ways=ways,
        )
        return story, owner if has_parted else None

    def _latest(self, hashes: KeyHashes, places: NDArray[np.int64], at: int) -> int:
        """Return the number of the latest request with the key `at` of these, -1 if it is not known."""
        place = places[at]
        return int(self._owners[place]) // 2 if self._hashes[place] == hashes[at] else -1

    def _continue(self, point: int, following: int, now_s: float) -> None:
        """Remember that a prefix was continued by a key, and forget what is too old or too much."""
        way = (point, following)
        if way not in self._ways:
            self._num_ways[point] += 1
        self._ways[way] = now_s
        self._ways.move_to_end(way)
        while len(self._ways) > MAX_WAYS or now_s - next(iter(self._ways.values())) > WAYS_S:
            (oldest, _), _ = self._ways.popitem(last=False)
            self._num_ways[oldest] -= 1
            if not self._num_ways[oldest]:
                del self._num_ways[oldest]

    def _keep(self, number: int, ended: _Ended) -> None:
        self._ended[number] = ended
        self._num_kept_keys += len(ended.hashes)
        while len(self._ended) > MAX_REQUESTS or (self._num_kept_keys > MAX_CHAIN_KEYS and len(self._ended) > 1):
            self._num_kept_keys -= len(self._ended.popitem(last=False)[1].hashes)
