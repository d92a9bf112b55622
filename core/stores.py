"""The store side of the scheduler: which full blocks are offered, what became of them, and the jobs that carry them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.engine import DeviceView
from core.jobs import JobTable, OpenJob, StorePart
from core.manager import OffloadManager
from core.origins import OriginMatch
from core.policy import PRIORITY_CLASS
from core.requests import RequestPhase, RequestState
from core.stats import SkipReason, StoreCounts
from core.transfers import Direction, Slots, TransferJob

_OFFER_BLOCKS = 512
"""Blocks in one offer to the manager."""
_STEP_BLOCKS = 1000
"""Blocks of one request offered in one step; the rest follows in the next."""
_RETRY_BLOCKS = 64
"""Blocks of one request that are offered again in one step after there was no space for them."""
_REORDER_SHARE = 16
"""A request's blocks are put in order again when a sixteenth of them is new, and at its end: so the cost is bounded."""


class StoreSide:
    """Called under the manager's lock, on the engine's thread but for what a reset asks."""

    def __init__(self, manager: OffloadManager, device: DeviceView, jobs: JobTable, block_size: int) -> None:
        self.counts = StoreCounts()
        self._manager = manager
        self._device = device
        self._jobs = jobs
        self._block_size = block_size
        self._parts: list[StorePart] = []
        self._storing: dict[int, StorePart] = {}

    def has_pending(self) -> bool:
        """Whether blocks were given slots since the last plan."""
        return bool(self._parts)

    def unanswered(self, state: RequestState) -> int:
        """How many full blocks of a request have no answer yet."""
        full = min(state.num_computed_tokens // self._block_size, len(state.block_ids))
        return state.extend_keys(full) - state.answered

    def offer_step(self, state: RequestState) -> None:
        """Offer what has filled, in bounds. What found no space waits until some was freed."""
        if state.refused_at is None:
            self._offer(state, _STEP_BLOCKS)
        elif state.refused_at != self._manager.space_version:
            self._offer(state, _RETRY_BLOCKS)

    def offer_rest(self, state: RequestState) -> None:
        """Offer all that is full, since the request is over; what finds no space now never will."""
        self._offer(state, None)
        self._put_in_order(state)

    def _offer(self, state: RequestState, limit: int | None) -> None:
        full = state.answered + self.unanswered(state)
        if full <= state.answered:
            return
        end, kept_back = state.split_storable(state.answered, full, self._block_size)
        stop = end if limit is None else min(end, state.answered + limit)
        state.refused_at = None
        room = True
        while room and state.answered < stop:
            room = self._offer_batch(state, min(stop, state.answered + _OFFER_BLOCKS))
        if not room and limit is None:
            self._count_skipped(state, SkipReason.NO_SPACE, end - state.answered)
            state.answered = end
        if (state.answered - state.ordered) * _REORDER_SHARE >= state.answered:
            self._put_in_order(state)
        if state.answered == end:
            for reason, count in kept_back:
                self._count_skipped(state, reason, count)
            state.answered = full

    def _put_in_order(self, state: RequestState) -> None:
        """What was offered last has moved up, and the blocks before it have to be younger still."""
        if state.ordered < state.answered:
            self._manager.touch(state.keys[: state.answered])
            state.ordered = state.answered

    def _offer_batch(self, state: RequestState, end: int) -> bool:
        """Offer blocks `state.answered` to `end`, and advance over those that were answered; False if room ran out."""
        first = state.answered
        positions = np.arange(first, end)
        offered = state.block_ids[first:end]
        if not self._storing.keys().isdisjoint(offered) or len(set(offered)) < len(offered):
            named: set[int] = set()
            idle: list[bool] = []
            for block_id in offered:
                idle.append(block_id not in self._storing and block_id not in named)
                named.add(block_id)
            positions = positions[np.array(idle, dtype=np.bool_)]
        wanted = state.keys[first:end]
        if len(positions) < len(wanted):
            wanted = [state.keys[i] for i in positions.tolist()]
        priority = PRIORITY_CLASS[state.policy.policy.priority]
        answer = self._manager.offer(wanted, state.origin, positions, priority, state.now_s, state.keys[:first])
        if answer.num_answered < len(wanted):
            state.refused_at = self._manager.space_version
            end = int(positions[answer.num_answered])
        self._count_skipped(state, SkipReason.IN_FLIGHT, end - first - answer.num_answered)
        self._count_skipped(state, SkipReason.ALREADY_STORED, answer.num_answered - len(answer.slots))
        state.answered = end
        if len(answer.slots):
            stored = positions[answer.stored_at].tolist()
            block_ids, last = [state.block_ids[i] for i in stored], stored[-1]
            part = StorePart(state, self._manager.epoch, answer.slots, block_ids, state.keys, last + 1)
            self._parts.append(part)
            self._storing.update(dict.fromkeys(block_ids, part))
            self._device.hold(block_ids)
            for counts in (self.counts, state.store):
                counts.offered += len(block_ids)
                counts.in_flight += len(block_ids)
        return state.refused_at is None

    def _count_skipped(self, state: RequestState, reason: SkipReason, count: int) -> None:
        if count:
            for counts in (self.counts, state.store):
                counts.offered += count
                counts.skipped[reason.value] += count

    def take_job(self, now_s: float) -> list[TransferJob]:
        """One job of all blocks that were given a slot since the last step, or none."""
        parts, self._parts = self._parts, []
        if not parts:
            return []
        slots = parts[0].slots if len(parts) == 1 else np.concatenate([part.slots for part in parts])
        block_ids = np.array([block_id for part in parts for block_id in part.block_ids], dtype=np.int64)
        job = TransferJob(self._jobs.new_id(), Direction.STORE, block_ids, slots)
        self._jobs.open(OpenJob(job, now_s, parts=parts))
        return [job]

    def end(self, ended: OpenJob, now_s: float) -> None:
        """Publish what a job stored, or free it."""
        for part in ended.parts:
            self._end_part(part, bool(ended.errors), now_s)
        self.counts.seconds += ended.seconds

    def fail_decided(self, states: Sequence[RequestState], now_s: float) -> None:
        """What was decided for these requests and is in no job yet will never be there to store."""
        failed = [part for part in self._parts if any(part.request is state for state in states)]
        self._parts = [part for part in self._parts if not any(part is one for one in failed)]
        for part in failed:
            self._end_part(part, failed=True, now_s=now_s)

    def _end_part(self, part: StorePart, failed: bool, now_s: float) -> None:
        count = len(part.slots)
        self._forget_blocks(part)
        self._device.release(part.block_ids)
        disowned = part.disowned or part.epoch != self._manager.epoch
        published = 0
        if failed or disowned:
            self._manager.abandon(part.slots)
        else:
            last = part.request.phase is RequestPhase.FINISHED
            reorder = last or count * _REORDER_SHARE >= part.end_block
            published = self._manager.publish(part.slots, now_s, part.keys[: part.end_block] if reorder else ())
        for counts in (self.counts, part.request.store):
            counts.in_flight -= count
            counts.stored += published
            counts.bytes += published * self._manager.slot_bytes
            if disowned:
                counts.skipped[SkipReason.RESET.value] += count
            elif failed:
                counts.failed += count
            else:
                counts.skipped[SkipReason.ALREADY_STORED.value] += count - published

    def _forget_blocks(self, part: StorePart) -> None:
        """Its device blocks are in flight no more, but for those that were offered again since a reset."""
        for block_id in part.block_ids:
            if self._storing.get(block_id) is part:
                del self._storing[block_id]

    def touched_slots(self) -> list[Slots]:
        """The slots that were given out and are in no job yet."""
        return [part.slots for part in self._parts]

    def disown(self, match: OriginMatch) -> list[int]:
        """Publish nothing of what is being stored of matching requests; the jobs concerned."""
        self._disown_parts(self._parts, match)
        return [job.job.job_id for job in self._jobs if self._disown_parts(job.parts, match)]

    def disown_all(self) -> None:
        """A new epoch began: what is under way belongs to the old one, and its device blocks may be offered again."""
        self._storing.clear()

    def _disown_parts(self, parts: Sequence[StorePart], match: OriginMatch) -> bool:
        matching = [part for part in parts if match.matches(part.request.origin)]
        for part in matching:
            part.disowned = True
            self._forget_blocks(part)
        return bool(matching)
