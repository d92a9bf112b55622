"""Sessions: counters of the latest ones, and the block hashes of the latest request of each.

By the hashes, operators query, prefetch and retain the blocks of a session without its prompt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from kvferry.core.counters import copy_counts
from kvferry.core.keys import SessionKey
from kvferry.core.stats import PromptTokens

MAX_SESSIONS = 1000
"""Sessions with counters; those without a request for longest lose theirs to others."""
MAX_HASH_BYTES = 64 << 20
"""Memory for block hashes; those of the sessions without a request for longest are forgotten first."""


@dataclass(frozen=True, slots=True)
class SessionCounts:
    """Counts of the requests of a session that have ended. `sequence` increases with each end of a request."""

    key: SessionKey
    sequence: int = 0
    num_requests: int = 0
    last_seen_s: float = 0.0
    prompt_tokens: PromptTokens = field(default_factory=PromptTokens)


class _Chain(NamedTuple):
    """Block hashes of one length, joined: an object for each would take more than twice the memory."""

    joined: bytes
    hash_bytes: int

    def hashes(self, first: int = 0) -> list[bytes]:
        """Return the hashes from number `first` on."""
        step = self.hash_bytes
        return [self.joined[start : start + step] for start in range(first * step, len(self.joined), step)]

    def num_shared(self, other: _Chain, num_known: int) -> int:
        """Return how many hashes two chains share, or `num_known` if they share no more than so many.

        A hash stands for all tokens before it, too: what is equal at one place is equal before it.
        """
        if self.hash_bytes != other.hash_bytes:
            return num_known
        end = min(len(self.joined), len(other.joined)) // self.hash_bytes
        return bisect_left(range(end), True, lo=num_known, key=lambda at: self._hash(at) != other._hash(at))

    def _hash(self, at: int) -> bytes:
        return self.joined[at * self.hash_bytes : (at + 1) * self.hash_bytes]


class SessionTable:
    """Sessions by key, in the order of their latest request. Acquires the manager lock, but for `record`."""

    def __init__(
        self,
        lock: AbstractContextManager[object, None],
        max_sessions: int = MAX_SESSIONS,
        max_hash_bytes: int = MAX_HASH_BYTES,
    ) -> None:
        self._lock = lock
        self._max_sessions = max_sessions
        self._max_hash_bytes = max_hash_bytes
        self._counts: dict[SessionKey, SessionCounts] = {}
        self._chains: dict[SessionKey, _Chain] = {}
        self._num_hash_bytes = 0
        self._last_sequence = 0

    def record(self, key: SessionKey, tokens: PromptTokens, block_hashes: Sequence[bytes] | None, now_s: float) -> None:
        """Count a request that has ended. Requires: manager lock held.

        Args:
            key: Its session.
            tokens: Prompt tokens of the request by source.
            block_hashes: Hashes of its computed blocks; None leaves those of an earlier request.
            now_s: The time.
        """
        before = self._counts.pop(key, None) or SessionCounts(key)
        if len(self._counts) >= self._max_sessions:
            oldest = next(iter(self._counts))
            del self._counts[oldest]
            self._forget_hashes(oldest)
        self._last_sequence += 1
        total = copy_counts(before.prompt_tokens)
        total.add(tokens)
        self._counts[key] = SessionCounts(key, self._last_sequence, before.num_requests + 1, now_s, total)
        if block_hashes is None:
            return
        self._forget_hashes(key)
        chain = self._chains[key] = _Chain(b"".join(block_hashes), len(block_hashes[0]) if block_hashes else 1)
        self._num_hash_bytes += len(chain.joined)
        while self._num_hash_bytes > self._max_hash_bytes:
            self._forget_hashes(next(iter(self._chains)))

    def page(self, before: int | None, limit: int) -> list[SessionCounts]:
        """Return sessions, the latest first; `before` is the last sequence of the previous page."""
        with self._lock:
            latest = reversed(self._counts.values())
            return list(islice((one for one in latest if before is None or one.sequence < before), limit))

    def named(self, session: str) -> list[SessionCounts]:
        """Return the sessions of this id, one for each tenant."""
        with self._lock:
            return [counts for key, counts in self._counts.items() if key.session == session]

    def hashes(self, key: SessionKey) -> list[bytes] | None:
        """Return the hashes of a session's blocks in prefix order, None if they are not known."""
        with self._lock:
            chain = self._chains.get(key)
        return None if chain is None else chain.hashes()

    def own_hashes(self, key: SessionKey, alignment: int) -> list[bytes]:
        """Return the last hashes of a session that no other session has, from a multiple of `alignment` on."""
        with self._lock:
            chain = self._chains.get(key)
            others = [other for each, other in self._chains.items() if each != key]
        if chain is None:
            return []
        num_shared = 0
        for other in others:
            num_shared = chain.num_shared(other, num_shared)
        return chain.hashes(-(-num_shared // alignment) * alignment)

    def _forget_hashes(self, key: SessionKey) -> None:
        chain = self._chains.pop(key, None)
        if chain is not None:
            self._num_hash_bytes -= len(chain.joined)
