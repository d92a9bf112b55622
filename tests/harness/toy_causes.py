"""Which prompt tokens a toy engine ever computed, held against the causes that core counts for those it missed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvferry.core.scheduler.requests import RequestPhase, RequestState
from kvferry.core.stats import Misses
from tests.harness.toy_tokens import ToyRequest

if TYPE_CHECKING:
    from tests.harness.toy_engine import ToyEngine


@dataclass(slots=True)
class LookUp:
    """The state at a request's latest look-up: where its whole blocks and the prefix of computed ones ended."""

    state: RequestState
    whole_end: int
    computed_end: int
    misses: Misses | None = None


class CauseOracle:
    """Knows every block that was ever computed. `is_sure` ends where core cannot know what it would have to count."""

    def __init__(self, engine: ToyEngine) -> None:
        self.is_sure = True
        self._manager = engine.manager
        self._size = engine.layout.alignment_tokens
        self._skipped = engine.layout.skipped_tokens
        self._hash_size = engine.layout.hash_block_size
        self._block_size = engine.layout.prefix_group.spec.block_size
        self._computed: set[bytes] = set()
        self._look_ups: dict[str, LookUp] = {}
        self._least: dict[str, tuple[int, LookUp]] = {}

    def computed(self, request: ToyRequest, num_tokens: int) -> None:
        """Core was told that the first tokens of a request are computed."""
        if self.is_sure:
            self._computed.update(request.block_hashes[: num_tokens // request.hash_block_size])

    def matched(self, request: ToyRequest, state: RequestState) -> None:
        """A request was looked up."""
        if not self.is_sure or state.prefill.counted or state.prefill.planned:
            return
        whole_end = (request.num_tokens - 1) // self._size * self._size
        count = 0
        for block_hash in request.block_hashes[: whole_end // self._hash_size]:
            if block_hash not in self._computed:
                break
            count += self._hash_size
        self._look_ups[request.request_id] = LookUp(
            state, whole_end, count // self._block_size * self._block_size, state.load.misses
        )

    def committed(self, request: ToyRequest, state: RequestState) -> None:
        """A request got its blocks."""
        look_up = self._look_ups.get(request.request_id)
        if look_up is not None and not state.prefill.counted:
            look_up.misses = state.load.misses

    def preempted(self, request: ToyRequest, state: RequestState) -> None:
        """A request loses its blocks. The least that an attempt found counts, as later ones find what it computed."""
        look_up = self._look_ups.get(request.request_id)
        # Before its first step it has computed nothing that it could find.
        if look_up is None or state.phase is not RequestPhase.RUNNING or state.prefill.counted or state.prefill.planned:
            return
        found = state.load.device_tokens + state.load.loaded_tokens
        least = self._least.get(request.request_id)
        if least is None or found < least[0]:
            self._least[request.request_id] = found, look_up

    def forget(self, request: ToyRequest) -> None:
        """A request's prompt has grown: core counts the first one, or the one at the end of the step after it."""
        self._look_ups.pop(request.request_id, None)
        self._least.pop(request.request_id, None)

    def check(self, request: ToyRequest, *, is_over: bool = False) -> None:
        """Once a prompt is accounted for: what was computed before is neither `new` nor `tail`, and all else is."""
        look_up = self._look_ups.get(request.request_id)
        if look_up is None or not (look_up.state.prefill.counted or is_over):
            return
        del self._look_ups[request.request_id]
        state, least = look_up.state, self._least.pop(request.request_id, None)
        if not self.is_sure or self._manager.epoch or not state.prefill.counted:
            return
        total = state.prefill.prompt_tokens.total
        served = total - state.prefill.prompt_tokens.recomputed
        if least is not None:
            assert served <= least[0], f"{request.request_id}: {served} tokens were served, and once {least[0]} found"
            if served == min(least[0], total):
                look_up = least[1]
        causes = dict.fromkeys(("new", "tail"), 0) | {c: t for c, t in state.prefill.missed_tokens.flat().items() if t}
        if "unexamined" in causes or state.unhashed is not None:
            return
        whole = max(min(look_up.whole_end, total), served)
        known = min(max(look_up.computed_end, served), whole)
        # The block behind a hit that a hit may not read, since it is the last one known, may have either cause.
        most = min(known - served, self._skipped)
        least = total - whole
        assert (causes["new"], least <= causes["tail"] <= least + most) == (whole - known, True), (
            f"{request.request_id}: of {total} tokens {served} were served, {known} computed before, and {whole} in "
            f"whole blocks, and the causes are {causes}"
        )
