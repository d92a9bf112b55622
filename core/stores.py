"""The store side of the scheduler: which full blocks are offered, what became of them, and the jobs that carry them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvferry.core.cascades import CascadeSide
from kvferry.core.groups import Group, GroupKind, GroupLayout
from kvferry.core.jobs import DeviceHolds, JobTable, OpenJob, StorePart
from kvferry.core.keys import Key, Prefix, RequestFilter
from kvferry.core.policy import PRIORITY_CLASS
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.requests import GroupProgress, RequestPhase, RequestState, RequestView, chain
from kvferry.core.stats import NotStored, SkipReason, StoreCounts
from kvferry.core.transfers import BlockRun, Direction, Slots, TransferJob

_OFFER_SLOTS = 512
"""Slots in one offer to the manager."""
_STEP_SLOTS = 1000
"""Slots of one request offered in one step, of each group; the rest follows in the next."""
_RETRY_BLOCKS = 64
"""Blocks of one request that are offered again in one step after there was no space for them."""
_REORDER_SHARE = 16
"""A request's blocks are put in order again when a sixteenth of them is new, and at its end: so the cost is bounded."""

_ORDERED_SLOTS = 1000
"""Slots of one request that are put in order under one hold of the lock."""
_MAX_REORDERINGS = 64
"""Long requests that wait to be put in order; beyond that, the oldest stay as they are."""


@dataclass(slots=True)
class _Reordering:
    """A long request whose slots up to `end_token` are still to be put in order, and then those up to `again_token`."""

    groups: tuple[GroupProgress, ...]
    end_token: int
    again_token: int = 0


@dataclass(frozen=True, slots=True)
class Offering:
    """Slots of one request and group that can be read now, in their order: `numbers` within it, and their keys.

    `block_ids` has the device blocks of each, one after the other. With `ahead` they are copied before the compute of
    this step, which overwrites them. Nothing in `spared` is evicted for them. `others`
    had the same blocks, and let more tiers have them.
    """

    request: RequestState
    groups: tuple[GroupProgress, ...]
    group: Group
    numbers: NDArray[np.int64]
    keys: Sequence[Key]
    block_ids: Sequence[int]
    priority_class: int
    leaving: bool = False
    ahead: bool = False
    spared: frozenset[Key] = frozenset()
    others: Sequence[RequestState] = ()


Keeper = Callable[[RequestState, GroupProgress, int, int], None]


class StoreSide:
    """Called under the manager's lock, on the engine's thread but for what a reset asks."""

    def __init__(
        self, manager: OffloadManager, holds: DeviceHolds, jobs: JobTable, layout: GroupLayout, null_block: int
    ) -> None:
        self.counts = StoreCounts()
        self.num_leaving = 0
        """Device blocks in flight that were stored because they are about to leave the device."""
        self.num_returned = 0
        """How many of them have come back to the head of the free queue since this was last set to zero."""
        self.keep: Keeper | None = None
        """Told of whole slots that may be stored, instead of storing them now; None in eager mode."""
        self.cascades: CascadeSide | None = None
        """Told of what is stored, or was stored before; None without tiers."""
        self._manager = manager
        self._holds = holds
        self._jobs = jobs
        self._layout = layout
        self._null_block = null_block
        self._parts: list[StorePart] = []
        self._storing: dict[int, StorePart] = {}
        self._reorderings: deque[_Reordering] = deque(maxlen=_MAX_REORDERINGS)

    def has_pending(self) -> bool:
        """Whether blocks were given slots since the last plan, or the blocks of a request wait to be put in order."""
        return bool(self._parts or self._reorderings)

    def has_unanswered(self, state: RequestState) -> bool:
        """Whether full slots of a request have no answer yet."""
        return any(self._count_full(state, each) > self._first_open(each) for each in state.groups)

    def offer_step(self, state: RequestState) -> None:
        """Offer what has filled, in bounds. What found no space waits until some was freed."""
        for progress in state.groups:
            if progress.refused_at is None:
                self._offer(state, progress, _STEP_SLOTS)
            elif progress.refused_at != self._manager.evictor.version:
                self._offer(state, progress, max(_RETRY_BLOCKS // (progress.group.slot_blocks * len(state.groups)), 1))
        answered = state.answered_tokens
        if (answered - state.ordered_tokens) * _REORDER_SHARE >= answered:
            self._reorder(state)

    def offer_rest(self, state: RequestState) -> None:
        """Offer all that is full, since the request is over; what finds no space now never will."""
        for progress in state.groups:
            self._offer(state, progress, None)
            if progress.group.spec.kind is GroupKind.SLIDING:
                self._offer_last_window(state, progress)
        self.note_parts(state)
        self._reorder(state)

    def note_lost(self, state: RequestState) -> None:
        """Note why blocks were not stored that a request loses with its device blocks, in eager mode."""
        self.note_parts(state)
        if self.keep is None:
            for progress in state.groups:
                self._note_refused(progress, self._count_full(state, progress))

    def note_parts(self, state: RequestState) -> None:
        """Note the computed blocks that may be asked for without the rest of their slot."""
        progress = state.groups[self._layout.prefix_group.index]
        group = progress.group
        if group.slot_blocks == 1:
            return
        num_hashed = len(state.request.block_hashes) * self._layout.hash_block_size
        num_blocks = min(state.num_computed_tokens, num_hashed) // group.spec.block_size
        if num_blocks > progress.noted_parts:
            parts = state.keys_of_parts(group, progress.noted_parts, num_blocks)
            self._manager.history.record_not_stored(parts, NotStored.PART_OF_SLOT)
            progress.noted_parts = num_blocks

    def _note_refused(self, progress: GroupProgress, end: int) -> None:
        """Note that slots up to `end` are not stored so far, as there is no space for them."""
        first = max(progress.answered, progress.noted_refused)
        if end > first:
            progress.noted_refused = end
            self._manager.history.record_not_stored(progress.keys[first:end], NotStored.NO_SPACE)

    def _count_full(self, state: RequestState, progress: GroupProgress) -> int:
        """How many slots of a group are whole: computed, on the device, and hashed."""
        group = progress.group
        table = state.block_ids[group.index] if state.block_ids else ()
        full = min(state.num_computed_tokens // group.slot_tokens, len(table) // group.slot_blocks)
        return progress.extend_keys(state.request.block_hashes, full) if full > self._first_open(progress) else full

    def _first_open(self, progress: GroupProgress) -> int:
        """The first slot of a group that something is still to be decided about."""
        return progress.answered if self.keep is None else min(progress.answered, progress.kept)

    def _offer(self, state: RequestState, progress: GroupProgress, limit: int | None) -> None:
        full = self._count_full(state, progress)
        group = progress.group
        if self.keep is not None and full > progress.kept:
            # What no hit will read is neither offered nor counted.
            wanted = self._wanted(state, group, progress.kept, full)
            first = wanted[0][0] if wanted else full
            progress.kept = full if limit is None else min(full, first + limit)
            for start, end in wanted:
                self.keep(state, progress, start, state.split_storable(group, start, min(end, progress.kept))[0])
        if full <= progress.answered:
            return
        progress.refused_at = None
        wanted = self._wanted(state, group, progress.answered, full)
        if not wanted:
            progress.pass_over(full)
            return
        progress.pass_over(wanted[0][0])
        end, kept_back = state.split_storable(group, progress.answered, wanted[-1][1])
        stop = end if limit is None else min(end, progress.answered + limit)
        if self.keep is not None:
            for first, last in wanted:
                progress.pass_over(min(first, stop))
                progress.answered = max(progress.answered, min(last, stop))
        if not self._offer_ranges(state, progress, wanted, stop, is_last=limit is None):
            self._note_refused(progress, end)
            return
        if stop == end:
            for reason, count in kept_back:
                self._keep_out(state, progress, reason, progress.answered + count)
            progress.pass_over(full)

    def _offer_ranges(
        self, state: RequestState, progress: GroupProgress, ranges: Sequence[tuple[int, int]], stop: int, is_last: bool
    ) -> bool:
        """Offer the slots of these ranges up to `stop`; False where the pool has no room and the rest is to wait."""
        room = True
        for first, end in ranges:
            end = min(end, stop)
            progress.pass_over(min(first, stop))
            while room and progress.answered < end:
                room = self._offer_batch(state, progress, min(end, progress.answered + _OFFER_SLOTS))
            if not room and not is_last:
                return False
            if progress.answered < end:
                self._keep_out(state, progress, SkipReason.NO_SPACE, end)
        return True

    def _offer_last_window(self, state: RequestState, progress: GroupProgress) -> None:
        """Offer the window before the end of a request that was aborted within its prompt, so that a retry resumes."""
        group, computed, passed = progress.group, state.num_computed_tokens, progress.answered
        start = group.spec.needed_from(state.longest_hit(self._layout.alignment_tokens, computed)) // group.slot_tokens
        full = min(self._count_full(state, progress), passed)
        if computed >= state.request.num_prompt_tokens or start >= full:
            return
        stop, _ = state.split_storable(group, start, full)
        ranges = [(max(first, start), end) for first, end in progress.passed if end > start]
        progress.answered = start
        self._offer_ranges(state, progress, ranges, stop, is_last=True)
        progress.answered = passed

    def _wanted(self, state: RequestState, group: Group, first: int, end: int) -> list[tuple[int, int]]:
        """The slots of a request from `first` to `end` that a hit may read, as ranges in ascending order.

        Of windows, those from the end of the prompt on and before the point where it leaves other requests' prefixes.
        """
        needed_from, alignment = group.spec.needed_from, self._layout.alignment_tokens
        if group.spec.kind is GroupKind.FULL:
            starts = [(0, end)]
        elif group.spec.kind is GroupKind.RECURRENT:
            computed = state.num_computed_tokens
            # A block that the tokens have passed may hold the state of any of its own. Lazy mode asks the device.
            at = computed if self.keep is None else state.longest_hit(alignment, computed)
            starts = [(needed_from(at), end)]
        else:
            starts = [(needed_from(state.longest_hit(alignment, state.request.num_prompt_tokens)), end)]
            if state.boundary_tokens:
                starts.insert(0, (needed_from(state.boundary_tokens), state.boundary_tokens // group.slot_tokens))
        if group.spec.kind is not GroupKind.FULL:
            # Of a hit nothing was read that its end does not need, whatever blocks the engine has for it.
            hit_start = needed_from(state.device_tokens + state.loaded_tokens) // group.spec.block_size
            first = max(first, -(-hit_start // group.slot_blocks))
        ranges: list[tuple[int, int]] = []
        for token, last in starts:
            start = max(token // group.slot_tokens, first, ranges[-1][1] if ranges else 0)
            if start < min(last, end):
                ranges.append((start, min(last, end)))
        return ranges

    def _keep_out(self, state: RequestState, progress: GroupProgress, reason: SkipReason, end: int) -> None:
        """The slots up to `end` have their answer: they are not stored."""
        first, progress.answered = progress.answered, end
        self._count_skipped(state, reason, (end - first) * progress.group.slot_blocks)
        self._manager.history.record_not_stored(progress.keys[first:end], NotStored(reason.value))

    def _reorder(self, state: RequestState) -> None:
        """What was offered last has moved up, and the blocks before it have to be younger still."""
        answered = state.answered_tokens
        if state.ordered_tokens < answered:
            self._manager.touch(self._chain_in_order(state.groups, answered))
            state.ordered_tokens = answered

    def _chain_in_order(self, groups: tuple[GroupProgress, ...], end_token: int) -> Sequence[Key]:
        """The keys to put in order at once; those of a long request are put in order by the next steps instead."""
        if sum(end_token // progress.group.slot_tokens for progress in groups) <= _ORDERED_SLOTS:
            return chain(groups, end_token)
        waiting = next((one for one in self._reorderings if one.groups is groups), None)
        if waiting is None:
            self._reorderings.append(_Reordering(groups, end_token))
        else:
            waiting.again_token = max(waiting.again_token, end_token)
        return ()

    def continue_reordering(self) -> None:
        """Put the next part of a long request in order, from its end to its beginning: a bounded number of slots."""
        if not self._reorderings:
            return
        first = self._reorderings[0]
        size = min(progress.group.slot_tokens for progress in first.groups)
        step = max(_ORDERED_SLOTS // len(first.groups) * size // self._layout.alignment_tokens, 1)
        start = max(first.end_token - step * self._layout.alignment_tokens, 0)
        self._manager.touch(chain(first.groups, first.end_token, start))
        first.end_token = start
        if not start:
            self._reorderings.popleft()
            if first.again_token:
                self._reorderings.append(_Reordering(first.groups, first.again_token))

    def _offer_batch(self, state: RequestState, progress: GroupProgress, end: int) -> bool:
        """Offer slots `answered` to `end` of a group, and advance over those that were answered; False without room."""
        group, first = progress.group, progress.answered
        table = state.block_ids[group.index][first * group.slot_blocks : end * group.slot_blocks]
        numbers, busy = self._offerable(group, first, table)
        keys, block_ids = progress.keys[first:end], table
        if len(numbers) < len(keys):
            chosen = (numbers - first).tolist()
            keys = [keys[i] for i in chosen]
            block_ids = _blocks_at(table, chosen, group.slot_blocks)
        priority = PRIORITY_CLASS[state.policy.policy.priority]
        offering = Offering(state, state.groups, group, numbers, keys, block_ids, priority)
        version = self._manager.evictor.version
        answered = self.offer_slots(offering, state.now_s)
        if answered < len(keys):
            progress.refused_at = version
            end = int(numbers[answered])
        self._count_skipped(state, SkipReason.IN_FLIGHT, sum(busy[: end - first]) * group.slot_blocks)
        if busy and group.slot_blocks > 1:
            taken = [progress.keys[first + i] for i, is_busy in enumerate(busy[: end - first]) if is_busy]
            self._manager.history.record_not_stored(taken, NotStored.IN_FLIGHT)
        if busy and self.cascades is not None and self.cascades.wishers(state):
            self._follow(state, progress, [first + i for i, taken in enumerate(busy[: end - first]) if taken])
        progress.answered = end
        return progress.refused_at is None

    def offer_slots(self, offering: Offering, now_s: float) -> int:
        """Offer slots whose blocks can be read to the manager; how many have their answer, for the rest is no room."""
        state, group = offering.request, offering.group
        own = Prefix({each.group.index: (each.keys, each.answered) for each in offering.groups}, offering.spared)
        keys, numbers = offering.keys, offering.numbers
        answer = self._manager.prepare_store(
            keys, state.origin, numbers, offering.priority_class, now_s, prefix=own, size_bytes=group.slot_bytes
        )
        num_held_back = len(answer.held_back_at)
        num_known = answer.num_answered - len(answer.slots) - num_held_back
        self._count_skipped(state, SkipReason.ALREADY_STORED, num_known * group.slot_blocks)
        wishers = (state, *offering.others)
        if num_known and self.cascades is not None and any(map(self.cascades.wishers, wishers)):
            absent = {*answer.stored_at.tolist(), *answer.held_back_at.tolist()}
            self.cascades.found(wishers, [keys[i] for i in range(answer.num_answered) if i not in absent], now_s)
        self._count_skipped(state, SkipReason.ADMISSION, num_held_back * group.slot_blocks)
        if num_held_back:
            self._manager.history.record_not_stored(
                [keys[i] for i in answer.held_back_at.tolist()], NotStored.ADMISSION
            )
        if len(answer.slots):
            self._begin_storing(offering, answer.stored_at.tolist(), answer.slots)
        return answer.num_answered

    def _follow(self, state: RequestState, progress: GroupProgress, numbers: Sequence[int]) -> None:
        """These slots are being stored for others: once they are ready, this request's tiers want them too."""
        size, table = progress.group.slot_blocks, state.block_ids[progress.group.index]
        for number in numbers:
            blocks = table[number * size : (number + 1) * size]
            part = next((self._storing[block] for block in blocks if block in self._storing), None)
            if part is None or state.session is None:
                continue
            if not part.followers or part.followers[-1][0] is not state:
                state.session.hold()
                part.followers.append((state, []))
            part.followers[-1][1].append(progress.keys[number])

    def is_storing(self, block_id: int) -> bool:
        """Whether a device block is being stored."""
        return block_id in self._storing

    def count_lost(self, state: RequestState, reason: NotStored, key: Key, count: int) -> None:
        """Count a slot of `count` blocks that left the device and is in no pool, and remember why."""
        self._count_skipped(state, SkipReason(reason.value), count)
        self._manager.history.record_not_stored([key], reason)

    def _offerable(self, group: Group, first: int, table: Sequence[int]) -> tuple[NDArray[np.int64], Sequence[bool]]:
        """Of the slots from `first` on whose blocks are in `table`, which can be read now, and which are busy.

        Busy ones have a block under a store already, or one that was named before. The rest has lost a block.
        """
        count = len(table) // group.slot_blocks
        every = np.arange(first, first + count)
        if self._null_block not in table and self._storing.keys().isdisjoint(table) and len(set(table)) == len(table):
            return every, ()
        named: set[int] = set()
        idle: list[bool] = []
        taken: list[bool] = []
        for start in range(0, count * group.slot_blocks, group.slot_blocks):
            blocks = table[start : start + group.slot_blocks]
            whole = self._null_block not in blocks
            busy = not (named.isdisjoint(blocks) and self._storing.keys().isdisjoint(blocks))
            idle.append(whole and not busy)
            taken.append(whole and busy)
            named.update(blocks)
        return every[np.array(idle, dtype=np.bool_)], taken

    def _begin_storing(self, offering: Offering, stored_at: list[int], slots: Slots) -> None:
        """Hold the device blocks of slots that were given out, until their job has ended."""
        group = offering.group
        block_ids = _blocks_at(offering.block_ids, stored_at, group.slot_blocks)
        end_token = (int(offering.numbers[stored_at[-1]]) + 1) * group.slot_tokens
        part = StorePart(
            request=offering.request,
            groups=offering.groups,
            group=group,
            epoch=self._manager.epoch,
            slots=slots,
            block_ids=block_ids,
            end_token=end_token,
            leaving=offering.leaving,
            ahead=offering.ahead,
            others=offering.others,
        )
        self._parts.append(part)
        if not part.ahead:
            self._holds.hold(part, block_ids)
            self._storing.update(dict.fromkeys(block_ids, part))
        for state in (part.request, *part.others):
            if state.session is not None:
                state.session.hold()
        self.num_leaving += len(block_ids) if part.leaving else 0
        for counts in (self.counts, offering.request.store):
            counts.offered += len(block_ids)
            counts.in_flight += len(block_ids)

    def _count_skipped(self, state: RequestState, reason: SkipReason, count: int) -> None:
        if count:
            for counts in (self.counts, state.store):
                counts.offered += count
                counts.skipped[reason.value] += count

    def drop_disowned(self, now_s: float) -> None:
        """What a reset met before it was in a job is stored by none; its device blocks may be offered again."""
        decided = self._parts
        self._parts = [part for part in decided if not self._is_disowned(part)]
        if len(self._parts) < len(decided):
            for part in decided:
                if self._is_disowned(part):
                    self._end_part(part, failed=False, now_s=now_s)

    def take_job(self, now_s: float, *, ahead: bool = False) -> list[TransferJob]:
        """One job of all blocks that were given a slot since the last step, or none; `ahead` of the step or after."""
        parts = [part for part in self._parts if part.ahead is ahead]
        self._parts = [part for part in self._parts if part.ahead is not ahead]
        if not parts:
            return []
        runs = [run for group in self._layout.groups if (run := _run_of(group, parts)) is not None]
        slots = parts[0].slots if len(parts) == 1 else np.concatenate([part.slots for part in parts])
        labels = self._manager.labels(slots)
        job = TransferJob(self._jobs.new_id(), Direction.STORE, tuple(runs), labels=labels)
        self._jobs.open(OpenJob(job, now_s, slots, parts=parts))
        return [job]

    def end(self, ended: OpenJob, now_s: float) -> None:
        """Publish what a job stored, or free it. Its seconds are shared among its requests by their blocks."""
        num_blocks = sum(len(part.block_ids) for part in ended.parts)
        for part in ended.parts:
            self._end_part(part, bool(ended.errors), now_s)
            part.request.store.seconds += ended.seconds * len(part.block_ids) / num_blocks
        self.counts.seconds += ended.seconds

    def fail_decided(self, states: Sequence[RequestState], now_s: float) -> None:
        """What was decided for these requests and is in no job yet will never be there to store."""
        failed = [part for part in self._parts if any(part.request is state for state in states)]
        self._parts = [part for part in self._parts if not any(part is one for one in failed)]
        for part in failed:
            self._end_part(part, failed=True, now_s=now_s)

    def _end_part(self, part: StorePart, failed: bool, now_s: float) -> None:
        group, count = part.group, len(part.block_ids)
        self._forget_blocks(part)
        self._holds.release(part, reuse_first=part.leaving)
        if part.leaving:
            self.num_leaving -= count
            self.num_returned += count
        disowned = self._is_disowned(part)
        published = 0
        keys = [] if self.cascades is None and not failed else self._manager.table.keys[part.slots].tolist()
        if failed and not disowned:
            self._manager.history.record_not_stored(keys, NotStored.FAILED)
        elif disowned and part.epoch == self._manager.epoch:
            self._manager.history.record_not_stored(self._manager.table.keys[part.slots].tolist(), NotStored.RESET)
        if failed or disowned:
            self._manager.abort_store(part.slots)
        else:
            last = part.request.phase is RequestPhase.FINISHED
            reorder = last or len(part.slots) * group.slot_tokens * _REORDER_SHARE >= part.end_token
            used = self._chain_in_order(part.groups, part.end_token) if reorder else ()
            published = self._manager.complete_store(part.slots, now_s, used) * group.slot_blocks
        if self.cascades is not None:
            self._cascade(self.cascades, part, keys, not (failed or disowned), now_s)
        for counts in (self.counts, part.request.store):
            counts.in_flight -= count
            counts.stored += published
            counts.bytes += published * group.spec.block_bytes
            if disowned:
                counts.skipped[SkipReason.RESET.value] += count
            elif failed:
                counts.failed += count
            else:
                counts.skipped[SkipReason.ALREADY_STORED.value] += count - published

    def _cascade(self, cascades: CascadeSide, part: StorePart, keys: Sequence[Key], ok: bool, now_s: float) -> None:
        """What a part stored goes on to tiers; its request, and those that waited for it, may be over for them now."""
        states = (part.request, *part.others)
        if ok:
            won = self._manager.table.is_ready(part.slots)
            cascades.stored(states, part.slots[won], now_s)
            cascades.found(states, [keys[i] for i in np.flatnonzero(~won).tolist()], now_s)
        for follower, wanted in part.followers:
            cascades.found((follower,), wanted, now_s)
        for state in (*states, *(follower for follower, _ in part.followers)):
            if state.session is not None:
                state.session.let_go()

    def _is_disowned(self, part: StorePart) -> bool:
        return part.disowned or part.epoch != self._manager.epoch

    def _forget_blocks(self, part: StorePart) -> None:
        """Its device blocks are in flight no more, but for those that were offered again since a reset."""
        for block_id in part.block_ids:
            if self._storing.get(block_id) is part:
                del self._storing[block_id]

    def touched_slots(self) -> list[Slots]:
        """The slots that were given out and are in no job yet."""
        return [part.slots for part in self._parts]

    def disown(self, match: RequestFilter) -> list[int]:
        """Publish nothing of what is being stored of matching requests; the jobs concerned."""
        self._disown_parts(self._parts, match)
        return [job.job.job_id for job in self._jobs if self._disown_parts(job.parts, match)]

    def disown_all(self) -> None:
        """A new epoch began: what is under way belongs to the old one, and its device blocks may be offered again."""
        self._storing.clear()

    def abandon(self, requests: Iterable[RequestState | RequestView]) -> None:
        """Drop what is in no job, and set the counters to what the open jobs still store."""
        self._parts = []
        self._storing = {}
        self._reorderings.clear()
        self.num_leaving = self.num_returned = 0
        in_flight: Counter[int] = Counter()
        for job in self._jobs:
            for part in job.parts:
                part.disowned = True
                in_flight[id(part.request.store)] += len(part.block_ids)
                self.num_leaving += len(part.block_ids) if part.leaving else 0
        for request in requests:
            request.store.settle(in_flight[id(request.store)])
        self.counts.settle(in_flight.total())

    def _disown_parts(self, parts: Sequence[StorePart], match: RequestFilter) -> bool:
        matching = [part for part in parts if match.matches(part.request.origin)]
        for part in matching:
            part.disowned = True
            self._manager.invalidate(part.slots)
            self._forget_blocks(part)
        return bool(matching)


def _blocks_at(block_ids: Sequence[int], chosen: Sequence[int], slot_blocks: int) -> list[int]:
    """The blocks of the slots at these places."""
    if slot_blocks == 1:
        return [block_ids[i] for i in chosen]
    return [block for i in chosen for block in block_ids[i * slot_blocks : (i + 1) * slot_blocks]]


def _run_of(group: Group, parts: Sequence[StorePart]) -> BlockRun | None:
    """What these parts store of one group."""
    mine = [part for part in parts if part.group is group]
    if not mine:
        return None
    slots = mine[0].slots if len(mine) == 1 else np.concatenate([part.slots for part in mine])
    block_ids = np.array([block_id for part in mine for block_id in part.block_ids], dtype=np.int64)
    if group.slot_blocks == 1:
        return BlockRun(group.index, block_ids, slots, np.zeros(len(slots), dtype=np.int64))
    parts_of_slots = np.tile(np.arange(group.slot_blocks), len(slots))
    return BlockRun(group.index, block_ids, np.repeat(slots, group.slot_blocks), parts_of_slots)
