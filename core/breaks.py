"""Where a prompt breaks off from an earlier one and is equal again behind: what one changed span near the front costs.

Linear in the tokens that are compared, of which there are at most `MAX_SIDE_TOKENS` a side.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.events import RequestBlocks
from kvferry.core.pool.native import KeyHashes

Tokens = NDArray[np.uint32]

MAX_SIDE_TOKENS = 1 << 15
MIN_RUN_TOKENS = 64
"""Fewest tokens that are equal again behind the span of a break."""
MAX_PLACES = 200
"""Places with breaks that are kept, and as many others."""
MAX_SPAN_TOKENS = 64
"""Tokens of each side of a span that are kept and shown."""
TOKENS_BEFORE = 16
"""Tokens before a span that are shown, so that it can be found in the prompt."""
LATEST_PROMPTS = 8
"""Prompts with which one may be compared: the latest that left the same prefix, and those that share most with it."""
ALIGNED_PER_S, ALIGNED_AT_ONCE = 2.0, 32.0
"""Comparisons of long prompts a second, and how many may come at once."""
_LONG_TOKENS = 1 << 12
"""A comparison of fewer tokens is a part of one."""
ALIGNED_PARTNERS = 3
"""Earlier prompts with which one is compared."""
ALIGNED_PAIRS = 8
"""Pairs of a place that are compared before only a sample of them is."""
SAMPLED_EVERY = 8
WINDOW_S = 3600.0
_BUCKET_S = 60.0
_PROMPT_BYTES, _MARK_BYTES, _PLACE_BYTES = 1000, 150, 4 * (2 * MAX_SPAN_TOKENS + TOKENS_BEFORE) + 1500
"""What a prompt, a mark, and a place take, besides token ids and hashes."""
_ANCHOR_TOKENS = 16  # Two to the power of the number of factors.
_MAX_MARKS = 64
_FACTORS = np.array([0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F], dtype=np.uint32)
"""Odd ones; 32 bits are multiplied by vectors."""


@dataclass(frozen=True, slots=True)
class Span:
    """What differs between an earlier prompt and a later one: tokens `start` to the end of each.

    Behind it both are equal for `num_equal` tokens.
    """

    start: int
    earlier_end: int
    later_end: int
    num_equal: int
    is_break: bool
    """Whether the equal run is long, and most of what follows in the shorter prompt; a branch otherwise."""


def compare(earlier: Tokens, later: Tokens) -> Span | None:
    """Return how two prompts differ that begin alike or not, None if one begins with the other."""
    start = count_equal(earlier, later)
    if start == min(len(earlier), len(later)):
        return None
    rest, others = earlier[start:], later[start:]
    shift = _most_common_shift(rest[:MAX_SIDE_TOKENS], others[:MAX_SIDE_TOKENS])
    if shift is None:
        return Span(start, len(earlier), len(later), 0, is_break=False)
    rest, others = rest[max(shift, 0) :], others[max(-shift, 0) :]
    begin, num_equal = _longest_run(rest, others)
    is_break = num_equal >= MIN_RUN_TOKENS and 2 * num_equal > min(len(rest), len(others)) - begin
    start_of_run = start + begin
    return Span(start, start_of_run + max(shift, 0), start_of_run + max(-shift, 0), num_equal, is_break)


def count_equal(some: NDArray[Any], others: NDArray[Any]) -> int:
    """Return how many of their first elements are equal."""
    length = min(len(some), len(others))
    different = np.flatnonzero(some[:length] != others[:length])
    return int(different[0]) if len(different) else length


def _most_common_shift(some: Tokens, others: Tokens) -> int | None:
    """Return by how many places most anchors of `some` stand behind those of `others`; None without a common one."""
    if min(len(some), len(others)) < _ANCHOR_TOKENS:
        return None
    _, places, other_places = np.intersect1d(_anchors(some), _anchors(others), return_indices=True)
    if not len(places):
        return None
    shifts, counts = np.unique(places - other_places, return_counts=True)
    return int(shifts[counts.argmax()])


def _anchors(tokens: Tokens) -> NDArray[np.uint32]:
    """Return a hash of the tokens from each place on. Equal runs have equal hashes; a wrong match is compared away."""
    hashes, length = tokens, 1
    for factor in _FACTORS:
        hashes, length = hashes[:-length] * factor + hashes[length:], 2 * length
    return hashes


def _marks(tokens: Tokens) -> list[int]:
    """Return hashes of at most `_MAX_MARKS` anchors. Of two texts with a long run in common some are equal."""
    if len(tokens) < MIN_RUN_TOKENS:
        return []
    hashes = _anchors(tokens)
    # The least hash of each run of `MIN_RUN_TOKENS`: where there are no more, equal runs have equal ones.
    for shift in (1, 2, 4, 8, 16, MIN_RUN_TOKENS - _ANCHOR_TOKENS - 31):
        hashes = np.minimum(hashes[:-shift], hashes[shift:])
    marks: list[int] = np.sort(hashes[np.append(hashes[1:] != hashes[:-1], True)])[:_MAX_MARKS].tolist()
    return marks


def _longest_run(some: Tokens, others: Tokens) -> tuple[int, int]:
    """Return place and length of the longest run that both have at the same places, the first of several."""
    length = min(len(some), len(others))
    borders = np.flatnonzero(np.diff(np.concatenate(([False], some[:length] == others[:length], [False]))))
    begins, ends = borders[::2], borders[1::2]
    if not len(begins):
        return length, 0
    longest = int((ends - begins).argmax())
    return int(begins[longest]), int(ends[longest] - begins[longest])


@dataclass(frozen=True, slots=True)
class Break:
    """A span at one place, and what it costs in a window."""

    position: int
    is_exact: bool
    is_estimated: bool
    shared_tokens: int
    num_requests: int
    num_tokens: int
    """Computed ones, in whole blocks that are equal again behind the span."""
    token_ids: Sequence[Sequence[int]]
    """The span in an earlier prompt and in a later one, or their beginnings; empty where the ids are equal."""
    ids_before: Sequence[int]
    """The last tokens before the span, which both have."""
    examples: tuple[str, str]
    """The ids of those two requests."""
    num_spanned: tuple[int, int]
    """Lengths of the span."""


@dataclass(slots=True, eq=False)
class _Bucket:
    """What came at a place in one minute."""

    time_s: float
    num_broken: int = 0
    num_tokens: int = 0
    num_compared_tokens: int = 0
    """Computed tokens behind the place, of the pairs that were compared."""
    num_skipped_tokens: int = 0
    """The same, of those that were not."""


@dataclass(slots=True, eq=False)
class _Place:
    """A prefix with which prompts part."""

    key: tuple[object, ...]
    shared_tokens: int
    latest: deque[int] = field(default_factory=lambda: deque(maxlen=LATEST_PROMPTS))
    """The numbers of the latest prompts that have the prefix."""
    compared: deque[_Bucket] = field(default_factory=deque)
    """Of the first pairs, which are all compared."""
    sampled: deque[_Bucket] = field(default_factory=deque)
    """Of those after them, for which a sample stands."""
    num_pairs: int = 0
    found: Break | None = None

    def answer(self, since_s: float) -> Break | None:
        """Return the break with its price since a time; None if there was none."""
        parts = [[one for one in part if one.time_s >= since_s] for part in (self.compared, self.sampled)]
        if not any(bucket.num_compared_tokens for bucket in parts[1]):
            # Only until there is a sample do the first pairs stand for all: the first prompt of a kind breaks nothing.
            parts = [[*parts[0], *parts[1]]]
        if self.found is None or not any(bucket.num_broken for part in parts for bucket in part):
            return None
        num_requests = num_tokens = 0.0
        for part in parts:
            compared = sum(bucket.num_compared_tokens for bucket in part)
            skipped = sum(bucket.num_skipped_tokens for bucket in part)
            scale = 1 + skipped / compared if compared else 1.0
            num_requests += scale * sum(bucket.num_broken for bucket in part)
            num_tokens += scale * sum(bucket.num_tokens for bucket in part)
        return replace(
            self.found,
            is_estimated=any(bucket.num_skipped_tokens for part in parts for bucket in part),
            token_ids=tuple(tuple(side) for side in self.found.token_ids),
            ids_before=tuple(self.found.ids_before),
            num_requests=round(num_requests),
            num_tokens=round(num_tokens),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Prompt:
    """A request that has ended, with its token ids from `first_token` on, which follow those of `parent`."""

    request_id: str
    first_token: int
    own: Tokens
    parent: _Prompt | None
    hashes: KeyHashes
    """Those of the keys of slots in `own`."""
    marks: Sequence[int]
    """Those of `own`."""

    def owner(self, num_tokens: int) -> _Prompt:
        """Return the prompt that has the last of this one's first tokens itself."""
        prompt = self
        while num_tokens <= prompt.first_token and prompt.parent is not None:
            prompt = prompt.parent
        return prompt

    def num_common(self, marks: frozenset[int], first_token: int, counts: dict[_Prompt, int]) -> int:
        """Return how many of these marks it has from a token on; `counts` are those of others for the same marks."""
        own: list[_Prompt] = []
        prompt: _Prompt | None = self
        while prompt is not None and prompt not in counts:
            own.append(prompt)
            prompt = prompt.parent if first_token < prompt.first_token else None
        count = 0 if prompt is None else counts[prompt]
        for each in reversed(own):
            count += len(marks.intersection(each.marks))
            counts[each] = count
        return count

    def tokens(self, first_token: int) -> Tokens:
        """Return the ids of prompt and answer from a token on."""
        prompt, parts = self, [self.own[max(first_token - self.first_token, 0) :]]
        while first_token < prompt.first_token and prompt.parent is not None:
            end, prompt = prompt.first_token, prompt.parent
            parts.append(prompt.own[max(first_token - prompt.first_token, 0) : end - prompt.first_token])
        return np.concatenate(parts[::-1])


@dataclass(frozen=True, slots=True, eq=False)
class _Pair:
    """How a prompt differs from an earlier one, by the ids of that one behind a place."""

    earlier: _Prompt
    ids: Tokens
    span: Span
    is_exact: bool

    @property
    def rank(self) -> tuple[bool, int]:
        """The larger it is, the more of the prompt the earlier one explains."""
        return self.span.is_break, self.span.num_equal


@dataclass(slots=True, eq=False)
class _Generation:
    """Prompts that ended one after another, which have their parents among them: all are forgotten together."""

    prompts: dict[int, _Prompt] = field(default_factory=dict)
    """By the request's number."""
    latest: dict[tuple[object, ...], dict[int | str | None, int]] = field(default_factory=dict)
    """The number of the latest prompt of a tenant and adapter that has a mark, or is of a session."""
    num_bytes: int = 0


class Breaks:
    """Finds breaks in prompts whose token ids are kept, in bounded memory. Thread: that of prompts.

    Ids of a prefix are kept once in a generation. When one takes half of the memory, the one before it is forgotten.
    """

    def __init__(self, slot_tokens: int) -> None:
        self._slot_tokens = slot_tokens
        self.max_bytes = 0
        self.clear()

    def clear(self) -> None:
        """Forget all token ids and places."""
        self._kept, self._older = _Generation(), _Generation()
        self._places: OrderedDict[tuple[object, ...], _Place] = OrderedDict()
        """Places at which no prompt was found to break off, the least recent first."""
        self._broken: dict[tuple[object, ...], _Place] = {}
        """The others."""
        self._computed: deque[_Bucket] = deque()
        self._credit, self._credited_s = ALIGNED_AT_ONCE, 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes that token ids and spans take."""
        return self._kept.num_bytes + self._older.num_bytes + self._num_place_bytes

    @property
    def _num_place_bytes(self) -> int:
        return (len(self._places) + len(self._broken)) * _PLACE_BYTES

    def count(self, request: RequestBlocks) -> None:
        """Count the prompt tokens that a request had computed."""
        if self.max_bytes:
            num_computed = max(request.num_prompt_tokens - request.num_served_tokens, 0)
            _bucket(self._computed, request.time_s).num_tokens += num_computed

    def observe(
        self,
        request: RequestBlocks,
        hashes: KeyHashes,
        latest: Callable[[int], int],
        shared_tokens: int,
        earlier: int | None,
    ) -> int | None:
        """Keep the token ids of a request that has ended, and compare its prompt with earlier ones.

        Args:
            request: The request, with its token ids.
            hashes: Those of its keys, of one at least.
            latest: Returns the number of the latest request that had the key of a slot; -1 if that is not known.
            shared_tokens: The longest prefix that an earlier request had, in whole slots.
            earlier: The number of that request, which went on differently; None if it did not.

        Returns:
            The first token that differs from `earlier`; None if its ids are not kept, or are equal.
        """
        if not self.max_bytes or request.token_ids is None:
            return None
        kept, position = self._kept.prompts, None
        num_shared = shared_tokens // self._slot_tokens
        # Where the ids of a slot are kept, those of all slots before it are.
        num_kept = bisect_left(range(num_shared), True, key=lambda at: latest(at) not in kept)
        first_token = num_kept * self._slot_tokens
        own = np.frombuffer(array("I", request.token_ids[first_token:]), dtype=np.uint32)
        parent = kept[latest(num_kept - 1)].owner(first_token) if num_kept else None
        prompt = _Prompt(request.origin.request_id, first_token, own, parent, hashes[num_kept:].copy(), _marks(own))
        tenant = (request.origin.tenant, request.origin.lora)
        later = own[shared_tokens - first_token : request.num_prompt_tokens - first_token]
        if num_shared == 0 or earlier is not None:
            place = self._place((int(hashes[num_shared - 1]),) if num_shared else tenant, shared_tokens)
            if earlier is not None and earlier not in place.latest:
                place.latest.append(earlier)
            is_sampled = place.num_pairs < ALIGNED_PAIRS or int(hashes[num_shared]) % SAMPLED_EVERY == 0
            self._compare(request, prompt, later, place, is_sampled=is_sampled)
            if (left := self._prompt(earlier)) is not None:
                num_equal = count_equal(left.tokens(shared_tokens), later[: self._slot_tokens])
                position = shared_tokens + num_equal if num_equal < self._slot_tokens else None
            place.latest.append(request.number)
        of_tenant = self._kept.latest.setdefault(tenant, {})
        of_tenant.update(dict.fromkeys((*prompt.marks, request.origin.session), request.number))
        self._keep(request.number, prompt)
        return position

    def find(self, now_s: float, window_s: float) -> tuple[int, list[Break]]:
        """Return how many prompt tokens were computed within the window, and the breaks, the most expensive first."""
        computed = sum(bucket.num_tokens for bucket in self._computed if bucket.time_s >= now_s - window_s)
        breaks = [one for place in self._broken.values() if (one := place.answer(now_s - window_s)) is not None]
        return computed, sorted(breaks, key=lambda one: -one.num_tokens)

    def _prompt(self, number: int | None) -> _Prompt | None:
        return None if number is None else self._kept.prompts.get(number) or self._older.prompts.get(number)

    def _partners(self, origin: RequestIdentity, prompt: _Prompt, place: _Place) -> list[_Prompt]:
        """Return prompts that have the prefix of a place and share more with one that parts there, most first.

        They are among its session's latest one, those that brought most of its marks, and the latest ones of the place.
        """
        tenant, generations = (origin.tenant, origin.lora), (self._kept, self._older)
        kept, older = (one.latest.get(tenant, {}).get for one in generations)
        brought = Counter(map(kept, prompt.marks)) + Counter(map(older, prompt.marks))
        del brought[None]
        numbers = [kept(origin.session) or older(origin.session)] if origin.session else []
        numbers += [number for number, _ in brought.most_common(LATEST_PROMPTS)]
        prompts = map(self._prompt, numbers)
        begun = [each for each in prompts if each is not None and self._has_prefix(each, place)]
        marks, counts = frozenset(prompt.marks), dict[_Prompt, int]()
        common = {each: each.num_common(marks, place.shared_tokens, counts) for each in (*begun, *self._latest(place))}
        return sorted(filter(common.get, common), key=lambda each: -common[each])[:ALIGNED_PARTNERS]

    def _has_prefix(self, prompt: _Prompt, place: _Place) -> bool:
        """Return whether a prompt has the prefix of a place."""
        owner = prompt.owner(place.shared_tokens)
        at = (place.shared_tokens - owner.first_token) // self._slot_tokens - 1
        return at < 0 or (at < len(owner.hashes) and place.key == (int(owner.hashes[at]),))

    def _latest(self, place: _Place) -> list[_Prompt]:
        """Return those of a place's latest prompts whose ids are kept, the latest first."""
        return [one for number in reversed(place.latest) if (one := self._prompt(number)) is not None]

    def _compare(
        self,
        request: RequestBlocks,
        prompt: _Prompt,
        later: Tokens,
        place: _Place,
        *,
        is_sampled: bool,
    ) -> None:
        """Compare a prompt, by its ids behind a place, with earlier ones, and count what the best of them shows."""
        bucket = _bucket(place.compared if place.num_pairs < ALIGNED_PAIRS else place.sampled, request.time_s)
        behind = request.num_prompt_tokens - max(place.shared_tokens, request.num_served_tokens)
        if not is_sampled or not self._has_credit(request.time_s) or (place.latest and not self._latest(place)):
            # With none of the latest prompts' ids kept, it is not known whether this is a break.
            bucket.num_skipped_tokens += behind
            return
        bucket.num_compared_tokens += behind
        best: _Pair | None = None
        for earlier in self._partners(request.origin, prompt, place):
            pair = self._align(earlier, later, place.shared_tokens)
            if best is None or pair.rank > best.rank:
                best = pair
            if best.span.is_break and 2 * best.span.num_equal > len(later) - best.span.later_end:
                break
        if best is not None:
            place.num_pairs += 1
            if best.span.is_break:
                self._count(place, bucket, request, later, best)

    def _place(self, key: tuple[object, ...], shared_tokens: int) -> _Place:
        """Return a place, which may be a new one."""
        place = self._broken.get(key) or self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(key, shared_tokens)
            if len(self._places) > MAX_PLACES:
                self._places.popitem(last=False)
        elif key in self._places:
            self._places.move_to_end(key)
        return place

    def _note_broken(self, place: _Place, now_s: float) -> None:
        """Keep a place at which a prompt broke off, instead of the one that cost least in the last hour."""
        self._places.pop(place.key, None)
        self._broken[place.key] = place
        if len(self._broken) > MAX_PLACES:
            costs = {key: each.answer(now_s - WINDOW_S) for key, each in self._broken.items()}
            del self._broken[min(costs, key=lambda key: 0 if (cost := costs[key]) is None else cost.num_tokens)]

    def _align(self, earlier: _Prompt, later: Tokens, first_token: int) -> _Pair:
        ids = earlier.tokens(first_token)
        self._credit -= min(max(len(ids), len(later)) / _LONG_TOKENS, 1.0)
        span = compare(ids, later)
        if span is not None and span.start < self._slot_tokens:
            return _Pair(earlier, ids, span, is_exact=True)
        # The keys differ in something else than tokens: an image, an adapter, embeddings.
        num_equal = min(len(ids), len(later)) if span is None else span.start
        return _Pair(earlier, ids, Span(0, 0, 0, num_equal, is_break=num_equal >= MIN_RUN_TOKENS), is_exact=False)

    def _count(self, place: _Place, bucket: _Bucket, request: RequestBlocks, later: Tokens, pair: _Pair) -> None:
        """Count what a break costs, given the ids behind the place."""
        span, first_token = pair.span, place.shared_tokens
        begin, end = first_token + span.later_end, first_token + span.later_end + span.num_equal
        begin = max(-(-begin // self._slot_tokens), -(-request.num_served_tokens // self._slot_tokens))
        bucket.num_broken += 1
        bucket.num_tokens += max(end // self._slot_tokens - begin, 0) * self._slot_tokens
        position = first_token + span.start
        if place.found is None or position < place.found.position:
            sides = (pair.ids[span.start : span.earlier_end], later[span.start : span.later_end])
            first_before = max(position - TOKENS_BEFORE, 0)
            before = pair.earlier.tokens(first_before)[: position - first_before]
            place.found = Break(
                position=position,
                is_exact=pair.is_exact,
                is_estimated=False,
                shared_tokens=first_token,
                num_requests=0,
                num_tokens=0,
                token_ids=[array("I", side[:MAX_SPAN_TOKENS].tolist()) for side in sides],
                ids_before=array("I", before.tolist()),
                examples=(pair.earlier.request_id, request.origin.request_id),
                num_spanned=(len(sides[0]), len(sides[1])),
            )
        self._note_broken(place, request.time_s)

    def _has_credit(self, now_s: float) -> bool:
        """Return whether a prompt may be compared now. It may take more credit than there is, which others pay."""
        gained = ALIGNED_PER_S * max(now_s - self._credited_s, 0.0)
        self._credit, self._credited_s = min(self._credit + gained, ALIGNED_AT_ONCE), now_s
        return self._credit >= 1.0

    def _keep(self, number: int, prompt: _Prompt) -> None:
        """Keep a prompt, and forget the oldest ones beyond the limit."""
        kept = self._kept
        kept.prompts[number] = prompt
        kept.num_bytes += _PROMPT_BYTES + _MARK_BYTES * len(prompt.marks) + prompt.own.nbytes + prompt.hashes.nbytes
        while (self._places or self._broken) and 2 * self._num_place_bytes > self.max_bytes:
            places = self._places or self._broken
            places.pop(next(iter(places)))
        most = self.max_bytes - self._num_place_bytes
        if 2 * kept.num_bytes > most or self.num_bytes > self.max_bytes:
            self._older, self._kept = kept if kept.num_bytes <= most else _Generation(), _Generation()


def _bucket(buckets: deque[_Bucket], now_s: float) -> _Bucket:
    """Return the bucket of this minute, without those older than the window."""
    if not buckets or now_s - buckets[-1].time_s >= _BUCKET_S:
        buckets.append(_Bucket(now_s))
    while now_s - buckets[0].time_s > WINDOW_S:
        buckets.popleft()
    return buckets[-1]
