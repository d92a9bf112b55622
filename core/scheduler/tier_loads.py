"""Look-ups in tiers, by request, and loads into slots of the pool, until their blocks are published or freed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.tiers.base import TierJob, TierResult
from kvferry.core.tiers.client import TierClient
from kvferry.core.transfers import Slots


class LookupPhase(Enum):
    """Progress of a request's tier look-up."""

    LOOKING = "looking"
    PROMOTING = "promoting"
    DONE = "done"


@dataclass(slots=True, eq=False)
class TierLookup:
    """One request's look-up in the tiers, and the promotions that follow from it, from `began_s` until `deadline_s`.

    `waits_for` counts the open look-ups or promotions by tier, `answers` are the keys that each tier has. Answers are
    discarded after any reset, which changes `version`, and in another `epoch` of the pool. Keys of the tokens from
    `first_token` to `limit_token` were looked up, before the first match if it `is_early`; `num_lost` blocks were not
    promoted. The pool lacked `num_bytes` in the groups of which a prefix needs every block.
    """

    version: int
    epoch: int
    began_s: float
    deadline_s: float
    first_token: int
    limit_token: int
    is_early: bool
    num_bytes: int
    phase: LookupPhase = LookupPhase.LOOKING
    waits_for: Counter[TierClient] = field(default_factory=Counter)
    num_lost: int = 0
    answers: dict[str, set[Key]] = field(default_factory=dict)
    loads_anyway: dict[TierClient, bool] = field(default_factory=dict)
    """Whether to load from tiers that are slower than computing, decided before they answer; declined answers go."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose keys were looked up."""
        return self.limit_token - self.first_token

    def count_down(self, client: TierClient) -> None:
        """Count the end of a look-up or promotion that the request waits for."""
        if client in self.waits_for:
            self.waits_for[client] -= 1
            if not self.waits_for[client]:
                del self.waits_for[client]


@dataclass(slots=True, eq=False)
class ResetsSince:
    """Resets and drops of blocks by operators since a promotion has begun."""

    is_whole: bool = False
    matches: list[RequestFilter] = field(default_factory=list)
    dropped: set[Key] = field(default_factory=set)

    def add(self, match: RequestFilter | None) -> None:
        """Add a reset of matching origins, or of everything."""
        if match is None:
            self.is_whole = True
        else:
            self.matches.append(match)

    def concern(self, key: Key, origin: RequestIdentity | None) -> bool:
        """Return whether they concern a block that this request stored; a block of an unknown origin matches."""
        if self.is_whole or key in self.dropped:
            return True
        return bool(self.matches) and (origin is None or any(match.matches(origin) for match in self.matches))


@dataclass(frozen=True, slots=True, eq=False)
class OpenPromotion:
    """Slots that a tier writes to, of one epoch of the pool. Blocks that `resets` concern are not published."""

    client: TierClient
    epoch: int
    slots: Slots
    keys: Sequence[Key]
    num_bytes: int
    resets: ResetsSince
    is_early: bool
    is_prefetch: bool


class TierLoads:
    """Loads of tiers for `Promotions` and `Prefetches`. Requires: manager lock held. Thread: any."""

    def __init__(self, manager: OffloadManager) -> None:
        self.open: list[OpenPromotion] = []
        self.num_resets = 0
        """Resets so far: look-ups that began before the latest are outdated."""
        self._num_loading: Counter[Key] = Counter()
        """In how many open promotions each key is."""
        self._manager = manager

    def is_loading(self, key: Key) -> bool:
        """Return whether a tier loads a block."""
        return key in self._num_loading

    def load(
        self,
        client: TierClient,
        job: TierJob,
        now_s: float,
        on_end: Callable[[NDArray[np.bool_]], None],
        *,
        is_early: bool = False,
        is_prefetch: bool = False,
    ) -> None:
        """Load blocks into slots that were reserved for them, and publish those that arrive.

        `on_end` receives which of them were published, whatever becomes of the job. `is_early`: no match waits for the
        job yet; `is_prefetch`: none will.
        """
        num_bytes = int(job.num_bytes.sum())
        self._manager.begin_tier_write(job.slots)
        promotion = OpenPromotion(
            client, self._manager.epoch, job.slots, job.keys, num_bytes, ResetsSince(), is_early, is_prefetch
        )
        self.open.append(promotion)
        self._num_loading.update(promotion.keys)
        client.bytes_in_flight += num_bytes

        def end(result: TierResult | None, now_s: float) -> None:
            client.bytes_in_flight -= num_bytes
            self.open = [other for other in self.open if other is not promotion]
            for key in promotion.keys:
                if self._num_loading[key] > 1:
                    self._num_loading[key] -= 1
                else:
                    del self._num_loading[key]
            published = self._publish(promotion, result, now_s)
            if result is not None and result.ok.all():
                client.cost_model.bytes_rate.observe(result.num_bytes, result.seconds)
            client.use.promotions_failed += len(job) - int(np.count_nonzero(published))
            on_end(published)

        client.load(job, now_s, end)

    def _publish(self, promotion: OpenPromotion, result: TierResult | None, now_s: float) -> NDArray[np.bool_]:
        """Publish the blocks that arrived, with the origin that stored them, and free the rest.

        Returns whether each block was published.
        """
        slots, keys = promotion.slots, promotion.keys
        ok = np.zeros(len(slots), dtype=np.bool_) if result is None else result.ok.copy()
        if promotion.epoch != self._manager.epoch:
            ok[:] = False
        origins: list[RequestIdentity | None] = list(result.origins) if result is not None else []
        origins += [None] * (len(slots) - len(origins))
        resets = promotion.resets
        if resets.is_whole or resets.matches or resets.dropped:
            for i in np.flatnonzero(ok).tolist():
                ok[i] = not resets.concern(keys[i], origins[i])
        self._manager.abort_store(slots[~ok])
        # Events of a batch name one origin.
        for origin, run in groupby(np.flatnonzero(ok).tolist(), key=lambda i: origins[i]):
            chosen = slots[list(run)]
            if origin is not None:
                self._manager.set_origin(chosen, origin)
            self._manager.complete_store(chosen, now_s)
            self._manager.end_tier_write(chosen)
        promotion.client.record_held(slots[ok], self._manager.table.last_generation)
        return ok

    def reset(self, match: RequestFilter | None, clients: Sequence[TierClient] | None) -> None:
        """Discard earlier look-ups, and do not publish affected blocks of some tiers, or of any (None)."""
        self.num_resets += 1
        for resets in self._resets_of(clients):
            resets.add(match)

    def drop(self, key: Key) -> None:
        """Prevent the publication of a block that an operator dropped."""
        for resets in self._resets_of(None):
            resets.dropped.add(key)

    def _resets_of(self, clients: Sequence[TierClient] | None) -> Sequence[ResetsSince]:
        return [one.resets for one in self.open if clients is None or one.client in clients]

    def abandon(self, clients: Sequence[TierClient]) -> None:
        """Forget loads that are not open in any of these clients, and publish none of the others."""
        slots_in_use = {id(job.slots) for client in clients for job in client.open_jobs}
        self.open = [promotion for promotion in self.open if id(promotion.slots) in slots_in_use]
        self._num_loading = Counter(key for promotion in self.open for key in promotion.keys)
        for client in clients:
            client.bytes_in_flight = sum(one.num_bytes for one in self.open if one.client is client)
        self.reset(None, None)
