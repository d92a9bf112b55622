"""Store planner: decides which full slots of a request are stored in either mode, and submits them in eager mode."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from kvferry.core.groups import Group, GroupKind, GroupLayout
from kvferry.core.policy import PRIORITY_CLASS, PolicyResolver
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.requests import GroupProgress, RequestState
from kvferry.core.scheduler.stores import StoreCandidate, StoreJobs, blocks_at
from kvferry.core.stats import NotStored

_SUBMIT_SLOTS = 512
"""Slots in one submission."""
_HOLD_SLOTS = 500
"""Slots of one request and group decided under one hold of the manager lock."""
_REQUEST_SLOTS = 20
"""A request takes as much of a hold of the manager lock as so many slots, however few it has."""
_RETRY_BLOCKS = 64
"""Blocks of one request submitted again in one step after they found no space."""


class StorePlanner:
    """Planner of eager mode. Thread: engine. Requires: manager lock held. Writes `RequestState.storing`.

    `LazyPlanner` makes the same decisions and submits the slots later.
    """

    def __init__(
        self, manager: OffloadManager, stores: StoreJobs, layout: GroupLayout, policies: PolicyResolver
    ) -> None:
        self._manager = manager
        self._stores = stores
        self._layout = layout
        self._policies = policies
        self._null_block = layout.null_block

    def plan(self, state: RequestState, now_s: float, max_batches: float) -> Iterator[float]:
        """Decide full slots of a request in batches, for as long as that makes progress.

        Slots without space wait until some was freed. After each batch the manager lock may be released.

        Yields:
            The share of a batch in what may be decided under one hold of the manager lock.
        """
        self._record_inner_blocks(state)
        decided: list[tuple[int, int]] = []
        while max_batches > 0 and self._has_undecided(state):
            before, decided = decided, [(each.num_decided, each.num_recorded) for each in state.storing]
            if decided == before:
                return
            self._update_policy(state, now_s)
            max_batches -= 1
            yield self._plan_batch(state)

    def may_decide(self, state: RequestState) -> bool:
        """Return whether a request may have undecided full slots or blocks; most steps of an answer fill none."""
        num_tokens = state.num_computed_tokens
        for progress in state.storing:
            group = progress.group
            if num_tokens - self._first_undecided(progress) * group.slot_tokens >= group.spec.block_size:
                return True
        return False

    def _has_undecided(self, state: RequestState) -> bool:
        """Return whether full slots of a request are undecided."""
        return any(self._count_full(state, each) > self._first_undecided(each) for each in state.storing)

    def _update_policy(self, state: RequestState, now_s: float) -> None:
        state.now_s = now_s
        if state.policy_version != self._policies.version:
            state.update_policy(self._policies, now_s)

    def _plan_batch(self, state: RequestState) -> float:
        """Decide a bounded number of full slots, and return their share in the work of one hold."""
        groups = state.storing
        before = sum(each.num_decided + each.num_recorded for each in groups)
        for progress in groups:
            if progress.output_start is not None:
                self._reopen(state, progress, progress.output_start)
            if progress.refused_version is None:
                self._decide(state, progress, _HOLD_SLOTS)
            elif progress.refused_version != self._manager.space_version(progress.refusal, state.origin.tenant):
                self._decide(state, progress, max(_RETRY_BLOCKS // (progress.group.slot_blocks * len(groups)), 1))
            else:
                first, full = progress.num_decided, self._count_full(state, progress)
                self._record_refused(state, progress, *self._split_storable(state, progress.group, first, full))
        self._stores.reorder(state)
        num_new = sum(each.num_decided + each.num_recorded for each in groups) - before
        return max(num_new / _HOLD_SLOTS, min(_REQUEST_SLOTS / self._manager.table.batch_slots, 1.0))

    def plan_rest(self, state: RequestState, now_s: float) -> None:
        """Decide all full slots of a request that has finished; those without space are not stored."""
        self._update_policy(state, now_s)
        for progress in state.storing:
            if progress.output_start is not None:
                self._reopen(state, progress, progress.output_start)
            self._decide(state, progress, None)
            if progress.group.spec.kind is GroupKind.SLIDING:
                self._submit_last_window(state, progress)
        self._record_inner_blocks(state)
        self._stores.reorder(state, is_last=True)

    def count_storable(self, state: RequestState, group: Group, end: int) -> int:
        """Return how many of a request's first `end` slots its policy allows to store."""
        return min(end, *_storable_ends(state, group, end)) if state.policy.policy.store else 0

    def storable_tokens(self, state: RequestState) -> int:
        """Return the end of the tokens whose slots are full and may be stored, in all groups with full attention."""
        progress = [each for each in state.storing if each.group.spec.kind is GroupKind.FULL]
        ends = (self.count_storable(state, each.group, self._count_full(state, each)) for each in progress)
        return min((end * each.group.slot_tokens for end, each in zip(ends, progress, strict=True)), default=0)

    def record_lost(self, state: RequestState) -> None:
        """Record why blocks were not stored that a request loses with its device blocks."""
        self._record_inner_blocks(state)
        for progress in state.storing:
            self._record_refused(state, progress, self._count_full(state, progress))

    def _record_inner_blocks(self, state: RequestState) -> None:
        """Record computed blocks that a look-up may need without the rest of their slot."""
        group = self._layout.prefix_group
        if group.slot_blocks == 1:
            return
        progress = state.storing[group.index]
        num_hashed = len(state.request.block_hashes) * self._layout.hash_block_size
        num_blocks = min(state.num_computed_tokens, num_hashed) // group.spec.block_size
        if num_blocks > progress.inner_blocks_end:
            keys = state.keys.of_inner_blocks(group, progress.inner_blocks_end, num_blocks)
            self._manager.history.record_not_stored(keys, NotStored.PART_OF_SLOT)
            progress.inner_blocks_end = num_blocks

    def _first_undecided(self, progress: GroupProgress) -> int:
        """Return the first slot of a group that is undecided."""
        return progress.num_decided

    def _accept(
        self, state: RequestState, progress: GroupProgress, ranges: Sequence[tuple[int, int]], stop: int, is_last: bool
    ) -> bool:
        """Advance `num_decided` over the storable slots of these ranges up to `stop`; False if there was no space."""
        return self._submit_ranges(state, progress, ranges, stop, is_last)

    def _count_full(self, state: RequestState, progress: GroupProgress) -> int:
        """Return how many slots of a group are full: computed for good, on the device, and hashed."""
        group, num_tokens = progress.group, state.num_computed_tokens
        table = state.block_ids[group.index] if state.block_ids else ()
        if self._layout.unsettled_tokens:
            # Drafts that may be rejected count as computed.
            num_tokens = max(min(num_tokens, state.request.num_tokens) - self._layout.unsettled_tokens, 0)
        full = min(num_tokens // group.slot_tokens, len(table) // group.slot_blocks)
        if full <= len(state.keys.by_group[group.index]) or full <= self._first_undecided(progress):
            return full
        return state.keys.extend(group, full)

    def _reopen(self, state: RequestState, progress: GroupProgress, start: int) -> None:
        """Decide the slots of output again that is part of a prompt now, as a session goes on behind it."""
        if (start + 1) * progress.group.slot_tokens > state.request.num_prompt_tokens:
            return
        progress.output_start = None
        progress.num_decided, progress.num_recorded = start, min(start, progress.num_recorded)
        progress.passed = [(first, min(end, start)) for first, end in progress.passed if first < start]

    def _decide(self, state: RequestState, progress: GroupProgress, limit: int | None) -> None:
        """Decide full slots of a group, at most `limit` (None: all, and those without space are not stored)."""
        full, group = self._count_full(state, progress), progress.group
        if full <= progress.num_decided:
            return
        progress.refused_version = None
        wanted = self._wanted(state, group, progress.num_decided, full)
        if not wanted:
            self._pass_over(progress, full)
            return
        self._pass_over(progress, wanted[0][0])
        end, skipped = self._split_storable(state, group, progress.num_decided, wanted[-1][1])
        stop = end if limit is None else min(end, progress.num_decided + limit)
        if not self._accept(state, progress, wanted, stop, is_last=limit is None):
            self._record_refused(state, progress, end, skipped)
        elif stop == end:
            for reason, count in skipped:
                if reason is NotStored.PROMPT_ONLY and progress.output_start is None:
                    progress.output_start = progress.num_decided
                self._skip(state, progress, reason, progress.num_decided + count)
            self._pass_over(progress, full)

    def _pass_over(self, progress: GroupProgress, end: int) -> None:
        """Advance `num_decided` to `end` over slots that are not offered."""
        if end > progress.num_decided:
            first, passed = progress.num_decided, progress.passed
            if passed and passed[-1][1] == first:
                first = passed.pop()[0]
            passed.append((first, end))
            progress.num_decided = end

    def _submit_ranges(
        self, state: RequestState, progress: GroupProgress, ranges: Sequence[tuple[int, int]], stop: int, is_last: bool
    ) -> bool:
        """Submit the slots of these ranges up to `stop`; False if there is no space and the rest waits."""
        has_space = True
        for first, end in ranges:
            end = min(end, stop)
            self._pass_over(progress, min(first, stop))
            if self._stores.is_paused and progress.num_decided < end:
                self._skip(state, progress, NotStored.PAUSED, end)
            while has_space and progress.num_decided < end:
                has_space = self._submit_batch(state, progress, min(end, progress.num_decided + _SUBMIT_SLOTS), is_last)
            if not has_space and not is_last:
                return False
            if progress.num_decided < end:
                self._skip(state, progress, progress.refusal, end)
        return True

    def _submit_last_window(self, state: RequestState, progress: GroupProgress) -> None:
        """Submit the window before the end of a request that was aborted within its prompt, so that a retry resumes."""
        group, computed, passed = progress.group, state.num_computed_tokens, progress.num_decided
        start = group.spec.needed_from(self._longest_hit(state, computed)) // group.slot_tokens
        full = min(self._count_full(state, progress), passed)
        if computed >= state.request.num_prompt_tokens or start >= full:
            return
        stop, _ = self._split_storable(state, group, start, full)
        ranges = [(max(first, start), end) for first, end in progress.passed if end > start]
        progress.num_decided = start
        self._submit_ranges(state, progress, ranges, stop, is_last=True)
        progress.num_decided = passed

    def _submit_batch(self, state: RequestState, progress: GroupProgress, end: int, is_last: bool) -> bool:
        """Submit slots `num_decided` to `end` of a group, and advance over the decided ones; False if the rest waits.

        It waits for space, or unless `is_last`, for the end of a store of another slot that has some of its blocks.
        """
        group, first = progress.group, progress.num_decided
        table = state.block_ids[group.index][first * group.slot_blocks : end * group.slot_blocks]
        numbers, busy, num_read = self._readable(group, first, table, stops=not is_last)
        waits, end = num_read < end - first, first + num_read
        if waits:
            progress.refusal, table = NotStored.IN_FLIGHT, table[: num_read * group.slot_blocks]
        if not num_read:
            return False
        every = state.keys.by_group[group.index][first:end]
        keys, block_ids = every, table
        if len(numbers) < len(every):
            chosen = (numbers - first).tolist()
            keys = [every[i] for i in chosen]
            block_ids = blocks_at(table, chosen, group.slot_blocks)
        priority = PRIORITY_CLASS[state.policy.policy.priority]
        slots, of_tenant = self._manager.table, None
        version = (slots.space_version,)
        if slots.tenants.is_limiting:
            of_tenant = slots.tenants.space_version(state.origin.tenant)
        num_decided = self._stores.submit(StoreCandidate(state, group, numbers, keys, block_ids, priority), state.now_s)
        if num_decided < len(keys):
            progress.refusal = self._stores.refusal
            progress.refused_version = of_tenant if progress.refusal is NotStored.TENANT_LIMIT else version
            end = int(numbers[num_decided])
        if busy:
            taken = [i for i, is_busy in enumerate(busy[: end - first]) if is_busy]
            self._stores.count_skipped(state, NotStored.IN_FLIGHT, len(taken) * group.slot_blocks)
            if group.slot_blocks > 1:
                self._manager.history.record_not_stored([every[i] for i in taken], NotStored.IN_FLIGHT)
            self._stores.follow(state, group, [first + i for i in taken])
        progress.num_decided = end
        return progress.refused_version is None and not waits

    def _readable(
        self, group: Group, first: int, table: Sequence[int], *, stops: bool
    ) -> tuple[NDArray[np.int64], Sequence[bool], int]:
        """Return the slots from `first` on that can be read now, whose blocks are in `table`, and which are busy.

        A busy slot has a block that is being stored or was named before. The rest has lost a block. The last value is
        the number of slots that were examined: with `stops`, those before one that parts from a slot being stored.
        """
        count, storing = len(table) // group.slot_blocks, self._stores.storing
        every = np.arange(first, first + count)
        if self._null_block not in table and storing.keys().isdisjoint(table) and len(set(table)) == len(table):
            return every, (), count
        named: set[int] = set()
        idle: list[bool] = []
        taken: list[bool] = []
        for start in range(0, count * group.slot_blocks, group.slot_blocks):
            blocks = table[start : start + group.slot_blocks]
            whole = self._null_block not in blocks
            is_named, is_stored = not named.isdisjoint(blocks), not storing.keys().isdisjoint(blocks)
            # A slot with the same last block has the same key. What is behind another one would not be found.
            if stops and whole and is_stored and not is_named and blocks[-1] not in storing:
                break
            busy = is_named or is_stored
            idle.append(whole and not busy)
            taken.append(whole and busy)
            named.update(blocks)
        return every[: len(idle)][np.array(idle, dtype=np.bool_)], taken, len(idle)

    def _wanted(self, state: RequestState, group: Group, first: int, end: int) -> list[tuple[int, int]]:
        """Return the slots of a request from `first` to `end` that a hit may read, as ranges in ascending order.

        Of windows, those from the end of the prompt on, before the point where it leaves other requests' prefixes, and
        before multiples of the layout's interval.
        """
        needed_from = group.spec.needed_from
        if group.spec.kind is GroupKind.FULL:
            return [(first, end)] if first < end else []
        if group.spec.kind is GroupKind.RECURRENT:
            starts = [(needed_from(self._state_end(state)), end)]
        else:
            starts = [(needed_from(self._longest_hit(state, state.request.num_prompt_tokens)), end)]
            boundary = state.load.boundary_tokens
            if boundary:
                starts.append((needed_from(boundary), (boundary + self._layout.skipped_tokens) // group.slot_tokens))
            starts += self._interval_windows(group, first, end)
        # Of a hit, the device has only what its end needs, whatever blocks the table has.
        hit_start = needed_from(state.load.device_tokens + state.load.loaded_tokens) // group.spec.block_size
        first = max(first, -(-hit_start // group.slot_blocks))
        ranges: list[tuple[int, int]] = []
        for token, last in sorted(starts):
            start, last = max(token // group.slot_tokens, first), min(last, end)
            if ranges and start <= ranges[-1][1]:
                start = ranges.pop()[0] if last > ranges[-1][1] else last
            if start < last:
                ranges.append((start, last))
        return ranges

    def _interval_windows(self, group: Group, first: int, end: int) -> list[tuple[int, int]]:
        """Return the windows before multiples of the layout's interval, as (first token, end slot).

        Of those that need any of the slots from `first` to `end`.
        """
        interval, reach = self._layout.window_interval_tokens, group.reach_tokens or 0
        if not interval:
            return []
        last = (end * group.slot_tokens + reach) // interval * interval
        ends = range(first * group.slot_tokens // interval * interval + interval, last + 1, interval)
        return [(group.spec.needed_from(token), -(-token // group.slot_tokens)) for token in ends]

    def _state_end(self, state: RequestState) -> int:
        """Return the number of tokens whose recurrent state is stored.

        A block that the computed tokens have passed may hold the state of any of its own tokens.
        """
        return state.num_computed_tokens

    def _split_storable(
        self, state: RequestState, group: Group, first: int, end: int
    ) -> tuple[int, list[tuple[NotStored, int]]]:
        """Return where the storable slots among `first` to `end` end, and why how many of the rest are skipped."""
        if not state.policy.policy.store:
            return first, [(NotStored.DISABLED, end - first)]
        prompt_end, cap_end = _storable_ends(state, group, end)
        storable_end = max(first, min(end, prompt_end, cap_end))
        decode = end - max(storable_end, min(prompt_end, end))
        capped = end - storable_end - decode
        skipped = [(NotStored.TOKEN_CAP, capped), (NotStored.PROMPT_ONLY, decode)]
        return storable_end, [(reason, count) for reason, count in skipped if count]

    def _longest_hit(self, state: RequestState, num_tokens: int) -> int:
        """Return the end of the longest hit of the first `num_tokens` tokens once all storable slots are stored.

        The last token is always computed.
        """
        alignment, end_token = self._layout.alignment_tokens, max(num_tokens - 1, 0)
        for group in self._layout.groups:
            full = num_tokens // group.slot_tokens
            end_token = min(end_token, group.slot_tokens * min(full, *_storable_ends(state, group, full)))
        return max(end_token // alignment * alignment - self._layout.skipped_tokens, 0)

    def _skip(self, state: RequestState, progress: GroupProgress, reason: NotStored, end: int) -> None:
        """Decide that the slots up to `end` are not stored."""
        first, progress.num_decided = progress.num_decided, end
        self._stores.skip(state, progress.group, reason, state.keys.by_group[progress.group.index][first:end])

    def _record_refused(
        self, state: RequestState, progress: GroupProgress, end: int, skipped: Sequence[tuple[NotStored, int]] = ()
    ) -> None:
        """Record that there is no space for slots up to `end` so far, and why those after them are to be `skipped`."""
        keys = state.keys.by_group[progress.group.index]
        first = max(progress.num_decided, progress.refused_end)
        for reason, count in ((progress.refusal, 0), *skipped):
            end += count
            if end > first:
                self._manager.history.record_not_stored(keys[first:end], reason)
                first = progress.refused_end = end


def _storable_ends(state: RequestState, group: Group, end: int) -> tuple[int, int]:
    """Return the ends of a group's storable slots by prompt and by token cap; `end` if there is no such limit."""
    policy = state.policy.policy
    prompt_end = state.request.num_prompt_tokens // group.slot_tokens if policy.offload_prompt_only else end
    cap_end = end if policy.max_offload_tokens is None else policy.max_offload_tokens // group.slot_tokens
    return prompt_end, cap_end
