"""Leaders: who brings back which prefix, so that others who need the same wait for that one."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.core.groups import GroupLayout
from kvferry.core.patience import Patience
from kvferry.core.prefixes import PrefixFinder
from kvferry.core.requests import RequestState


class Leaders:
    """Requests that load or promote, by the hashes of the prefixes that they bring."""

    def __init__(self, layout: GroupLayout, finder: PrefixFinder, patience: Patience) -> None:
        self._layout = layout
        self._finder = finder
        self._patience = patience
        self._by_mark: dict[bytes, RequestState] = {}

    def __len__(self) -> int:
        return len(self._by_mark)

    def lead(self, state: RequestState, first_token: int, end_token: int) -> None:
        """From now on this request brings these tokens, as far as nobody else does."""
        self.stop(state)
        state.leads = self._marks(state, first_token, end_token)
        for mark in state.leads:
            self._by_mark.setdefault(mark, state)

    def stop(self, state: RequestState) -> None:
        """This request brings nothing any more."""
        for mark in state.leads:
            if self._by_mark.get(mark) is state:
                del self._by_mark[mark]
        state.leads = ()

    def clear(self) -> None:
        """Forget all leaders."""
        self._by_mark.clear()

    def follows(self, state: RequestState, first_token: int) -> bool:
        """Whether another request is bringing what this one needs next, and waiting for it still pays.

        It waits for one leader, once: then it finds the blocks on the device, or loads its own copy.
        """
        step = self._layout.alignment_tokens
        marks = self._marks(state, first_token, first_token + step)
        leader = self._by_mark.get(marks[0]) if marks else None
        if leader is None or leader is state:
            return False
        if state.follow_until_s is None:
            num_led = 0
            for mark in self._marks(state, first_token, state.loadable_tokens // step * step):
                if self._by_mark.get(mark) is not leader:
                    break
                num_led += step
            num_tokens = max(num_led, self._finder.find(state, first_token).num_tokens)
            state.follow_until_s = self._patience.until(state, num_tokens)
            state.leader = leader.sequence
        return leader.sequence == state.leader and state.now_s < state.follow_until_s

    def _marks(self, state: RequestState, first_token: int, end_token: int) -> Sequence[bytes]:
        """The hashes of a request's prefixes that end behind `first_token`, up to `end_token`, where hits may end."""
        if end_token > state.request.num_tokens - 1:
            return ()
        step = self._layout.alignment_tokens // self._layout.hash_block_size
        first = first_token // self._layout.hash_block_size + step - 1
        return state.request.block_hashes[first : end_token // self._layout.hash_block_size : step]
