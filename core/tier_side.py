"""The tier side of the scheduler: announces requests to all tiers, takes their results, and carries resets to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from kvferry.core.cascades import CascadeSide
from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.groups import GroupLayout
from kvferry.core.keys import Key, RequestFilter
from kvferry.core.leaders import Leaders
from kvferry.core.patience import Patience
from kvferry.core.policy import Level
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.prefixes import PrefixFinder
from kvferry.core.promotions import PromotionSide
from kvferry.core.requests import RequestState
from kvferry.core.tier_links import TierInquiry, TierLink
from kvferry.core.tier_sessions import TierSession
from kvferry.core.tier_stats import TierStats
from kvferry.core.tiers import Tier, TierRequest, TierResetResult

_log = logging.getLogger(__name__)


class TierSide:
    """The tiers below the pool, of which there may be none. Called under the manager's lock.

    What operators see and do takes the lock itself. Only what is done for a request in `match` happens on the engine's
    thread.
    """

    def __init__(
        self,
        manager: OffloadManager,
        layout: GroupLayout,
        tiers: Mapping[str, Tier],
        new_number: Callable[[], int],
        finder: PrefixFinder,
        leaders: Leaders,
        patience: Patience,
        choice: LoadOrCompute,
    ) -> None:
        """`tiers` by name, the fastest first. `choice` is how fast loading and computing are."""
        self.links = [TierLink(name, tier, choice, new_number) for name, tier in tiers.items()]
        self.cascades = CascadeSide(manager, self.links, new_number)
        self.promotions = PromotionSide(manager, layout, self.links, new_number, finder, leaders, patience, choice)
        self._lock = manager.lock
        self._sessions: dict[str, TierSession] = {}
        self._closed = False

    def announce(self, state: RequestState) -> None:
        """Ask every tier once what it needs of a request. An earlier one of its id is over for them by then."""
        request = state.request
        known = self._sessions.get(request.request_id)
        if known is not None:
            known.end()
        if self._closed or not self.links:
            return
        about = TierRequest(
            request.request_id, request.num_prompt_tokens, request.tenant, request.lora, request.kv_transfer_params
        )
        answers = [(link, link.announce(about)) for link in self.links]
        announced = [link for link, level in answers if level is not None]
        wishers = [link for link, level in answers if level is Level.REQUEST]
        state.session = TierSession(request.request_id, announced, wishers, self._forget)
        self._sessions[request.request_id] = state.session

    def fetch(self) -> None:
        """Get the tiers' results for the next `take_results`. Any thread, without the manager lock."""
        for link in self.links:
            link.fetch()

    def fetch_counts(self) -> None:
        """Get the tiers' counts for the next `stats`. Any thread, without the manager lock."""
        for link in self.links:
            link.fetch_counts()

    def take_results(self, now_s: float) -> None:
        """Take the results that were fetched, and give up what takes too long."""
        for link in self.links:
            link.poll(now_s)

    # --- resets -------------------------------------------------------------------------------------------------

    def named(self, names: Sequence[str] | None) -> list[TierLink]:
        """The tiers of these names, or all. Raises `ValueError` for a name that there is not."""
        unknown = [] if names is None else sorted(set(names) - {link.name for link in self.links})
        if unknown:
            raise ValueError(f"there is no tier called {', '.join(unknown)}")
        return [link for link in self.links if names is None or link.name in names]

    def reset(
        self, links: Sequence[TierLink], match: RequestFilter | None, is_of_pool: bool, now_s: float
    ) -> dict[str, int]:
        """Have tiers forget, and publish nothing of what is under way that is meant. The numbers of the resets.

        When the pool is meant, too, nothing that is meant may come into it from any tier.
        """
        self.promotions.forget_looks()
        self.promotions.disown(match, None if is_of_pool else links)
        return {link.name: link.reset(match, now_s) for link in links}

    def abandon(self) -> None:
        """Tell the tiers of the end of every request, and publish nothing of what is under way."""
        for session in list(self._sessions.values()):
            session.end()
        for link in self.links:
            link.ask_again()
        self.cascades.abandon()
        self.promotions.abandon()

    def reset_results(self, numbers: Mapping[str, int]) -> dict[str, TierResetResult]:
        """What these resets dropped, as far as they are carried out."""
        found = {link.name: link.reset_result(numbers[link.name]) for link in self.links if link.name in numbers}
        return {name: result for name, result in found.items() if result is not None}

    def drop(self, key: Key) -> None:
        """Have all tiers forget a key, and whatever is under way of it."""
        self.promotions.disown_key(key)
        for link in self.links:
            link.drop(key)

    def open_transfers(self) -> list[int]:
        """The numbers of what the tiers are at, without look-ups."""
        return [job.number for link in self.links for job in link.open_jobs if len(job.slots)]

    def count_open(self, numbers: Sequence[int]) -> int:
        """How many of these have not ended."""
        asked = set(numbers)
        jobs = sum(job.number in asked for link in self.links for job in link.open_jobs)
        return jobs + sum(reset.ticket in asked for link in self.links for reset in link.open_resets)

    # --- what operators see and do ------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The tiers, the fastest first."""
        return tuple(link.name for link in self.links)

    def poll(self, now_s: float) -> None:
        """Take what the tiers have to say, as every step does: an idle engine takes none."""
        self.fetch()
        with self._lock:
            self.take_results(now_s)
        self.log_complaints()

    def inquire(self, keys: Sequence[Key], now_s: float) -> dict[str, TierInquiry]:
        """Ask the tiers that can be used which of these keys they have, a batch at most. `poll` brings the answers."""
        with self._lock:
            return {link.name: link.inquire(keys, now_s) for link in self.links if link.is_usable}

    def health(self) -> list[str]:
        """Why tiers do less than they should, one reason an item."""
        for link in self.links:
            link.fetch_health()
        with self._lock:
            return [reason for link in self.links for reason in link.health()]

    def stats(self) -> dict[str, TierStats]:
        """What each tier held when its counts were fetched last, and did."""
        with self._lock:
            return {link.name: TierStats(*link.counts()) for link in self.links}

    def close(self, now_s: float) -> None:
        """Tell the tiers of the end of every request, and have them touch no slot any more. They get nothing more."""
        with self._lock:
            self._closed = True
            for session in list(self._sessions.values()):
                session.end()
            for link in self.links:
                link.close(now_s)
        self.log_complaints()

    def log_complaints(self) -> None:
        """Say what the tiers complain of; never under the lock."""
        if not self.links:
            return
        with self._lock:
            complaints = [text for link in self.links for text in link.complaints]
            for link in self.links:
                link.complaints.clear()
        for complaint in complaints:
            _log.warning("%s; the engine goes on without it", complaint)

    # --- inside -------------------------------------------------------------------------------------------------

    def _forget(self, session: TierSession) -> None:
        if self._sessions.get(session.request_id) is session:
            del self._sessions[session.request_id]
