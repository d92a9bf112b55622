"""Prefixes in flight: which request loads or promotes which prefix, so that others wait for it, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.groups import GroupLayout
from kvferry.core.policy import TierWaitMode
from kvferry.core.scheduler.lookup import PrefixLookup
from kvferry.core.scheduler.requests import RequestPhase, RequestState
from kvferry.core.tiers.client import TierClient

DEFAULT_WAIT_S = 1.0
"""Time limit of a wait while the rate of computing is unknown."""


class InflightPrefixes:
    """Requests that load or promote, by the block hashes of their prefixes. Requires: manager lock held.

    Owns `RequestState.wait`. All waits of one request together end when recomputing it would have ended, or those for
    tiers when its `tier_wait` ends.
    """

    def __init__(
        self, layout: GroupLayout, lookup: PrefixLookup, cost_model: LoadOrCompute, clients: Sequence[TierClient]
    ) -> None:
        self._layout = layout
        self._lookup = lookup
        self._cost_model = cost_model
        self._clients = clients
        self.loaders: dict[bytes, RequestState] = {}
        """The request that loads or promotes each prefix, by block hash."""

    def begin(self, state: RequestState, first_token: int, end_token: int) -> None:
        """Record that a request loads these tokens, except prefixes that another request already loads."""
        self.end(state)
        state.wait.loading = hashes = self._hashes(state, first_token, end_token)
        if self.loaders:
            hashes = [block_hash for block_hash in hashes if block_hash not in self.loaders]
        self.loaders.update(dict.fromkeys(hashes, state))

    def end(self, state: RequestState) -> None:
        """Record that a request loads nothing any more."""
        for block_hash in state.wait.loading:
            if self.loaders.get(block_hash) is state:
                del self.loaders[block_hash]
        state.wait.loading = ()

    def forget(self, state: RequestState) -> None:
        """End all waits of a request; the next one has a new deadline. It loads nothing any more."""
        wait = state.wait
        wait.deadline_s = wait.tier_until_s = wait.follow_until_s = wait.demand_until_s = None
        wait.demand = None
        self.end(state)

    def is_loading(self, state: RequestState, first_token: int) -> bool:
        """Return whether another request loads or promotes the next tokens of this one."""
        hashes = self._hashes(state, first_token, first_token + self._layout.alignment_tokens)
        loader = self.loaders.get(hashes[0]) if hashes else None
        return loader is not None and loader is not state

    def must_wait(self, state: RequestState, first_token: int) -> bool:
        """Return whether another request loads the next tokens of this one, and a wait for them is not too long.

        A request waits for one loader, once; afterwards the blocks are on the device, or it loads its own copy.
        """
        step, wait = self._layout.alignment_tokens, state.wait
        hashes = self._hashes(state, first_token, first_token + step)
        loader = self.loaders.get(hashes[0]) if hashes else None
        if loader is None or loader is state:
            return False
        if wait.follow_until_s is None:
            num_loading, limit = 0, state.keys.loadable_tokens(state.policy.policy)
            for block_hash in self._hashes(state, first_token, limit // step * step):
                if self.loaders.get(block_hash) is not loader:
                    break
                num_loading += step
            hit = self._lookup.find(state.keys, first_token, limit)
            # A loader that waits itself promotes.
            deadline = self.wait_deadline if loader.phase is RequestPhase.LOADING else self.tier_deadline
            wait.follow_until_s = deadline(state, max(num_loading, hit.num_tokens))
            wait.loader = loader.sequence
        return loader.sequence == wait.loader and state.now_s < wait.follow_until_s

    def wait_deadline(self, state: RequestState, num_tokens: int) -> float:
        """Return when a wait for `num_tokens` tokens that begins now has to end."""
        if state.wait.deadline_s is None:
            state.wait.deadline_s = state.now_s + self._compute_s(state.request.num_tokens)
        return min(state.wait.deadline_s, state.now_s + self._compute_s(num_tokens))

    def tier_deadline(self, state: RequestState, num_tokens: int) -> float:
        """Return when a wait for tiers to provide `num_tokens` tokens that begins now has to end."""
        tier_wait, wait = state.policy.policy.tier_wait, state.wait
        if tier_wait.mode is TierWaitMode.BEST_EFFORT:
            return state.now_s
        if tier_wait.mode is TierWaitMode.WAIT_COMPLETE:
            return state.now_s + max((client.timeout_s for client in self._clients), default=0.0)
        if tier_wait.timeout_s is None:
            return self.wait_deadline(state, num_tokens)
        if wait.tier_until_s is None:
            wait.tier_until_s = state.now_s + tier_wait.timeout_s
        return wait.tier_until_s

    def is_overdue(self, state: RequestState) -> bool:
        """Return whether a request has waited for tiers for as long as it may."""
        tier_wait, wait = state.policy.policy.tier_wait, state.wait
        if tier_wait.mode is not TierWaitMode.TIMEOUT:
            return tier_wait.mode is TierWaitMode.BEST_EFFORT
        deadline_s = wait.deadline_s if tier_wait.timeout_s is None else wait.tier_until_s
        return deadline_s is not None and state.now_s >= deadline_s

    def _compute_s(self, num_tokens: int) -> float:
        estimate_s = self._cost_model.tokens_rate.estimate_s(num_tokens)
        return DEFAULT_WAIT_S if estimate_s is None else estimate_s

    def _hashes(self, state: RequestState, first_token: int, end_token: int) -> Sequence[bytes]:
        """Return the block hashes of a request's prefixes with an end in (first_token, end_token], at possible hits."""
        if end_token > state.request.num_tokens - 1:
            return ()
        step = self._layout.alignment_tokens // self._layout.hash_block_size
        first = first_token // self._layout.hash_block_size + step - 1
        return state.request.block_hashes[first : end_token // self._layout.hash_block_size : step]
