"""Store jobs: reserve slots for candidates of the store planners, copy them, and publish or free the slots."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

from kvferry.core.groups import Group, GroupLayout
from kvferry.core.keys import Key, RequestFilter
from kvferry.core.pool.index import Prefix, hash_keys
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.cascades import Cascades
from kvferry.core.scheduler.jobs import JobTable, OpenJob, StoreCause, StorePart
from kvferry.core.scheduler.lookup import RequestKeys, in_order
from kvferry.core.scheduler.prefills import TenantUsage
from kvferry.core.scheduler.requests import RequestPhase, RequestState, StageKind, TraceStage
from kvferry.core.stats import NotStored, StoreCounts
from kvferry.core.transfers import BlockRun, Direction, Slots, TransferJob

_REORDER_SHARE = 16
"""A request's blocks are reordered when 1/16 of them is new, and at its end, which bounds the cost."""
_REORDER_SLOTS = 1000
"""Slots of one request reordered under one hold of the manager lock."""
_MAX_REORDERINGS = 64
"""Long requests that wait to be reordered; beyond that, the oldest keep their order."""


@dataclass(slots=True)
class _Reordering:
    """A long request to be reordered from `end_token` down to its start, and then again from `again_token`."""

    keys: RequestKeys
    end_token: int
    again_token: int = 0


@dataclass(frozen=True, slots=True)
class StoreCandidate:
    """Slots of one request and group that can be read now, in ascending order of their `numbers` in the request.

    `block_ids` has the device blocks of all slots, one after another. Keys in `protected` are not evicted for the
    candidate. `others` are requests with the same blocks whose policies allow more tiers.
    """

    request: RequestState
    group: Group
    numbers: NDArray[np.int64]
    keys: Sequence[Key]
    block_ids: Sequence[int]
    priority_class: int
    cause: StoreCause = StoreCause.FILLED
    protected: frozenset[Key] = frozenset()
    others: Sequence[RequestState] = ()

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """All requests whose tiers receive the blocks."""
        return (self.request, *self.others)


class StoreJobs:
    """Reserves slots for candidates, makes store jobs and publishes or frees the slots. Requires: manager lock held.

    Thread: engine, except `disown`, `drop` and `forget_blocks`.
    """

    def __init__(
        self,
        manager: OffloadManager,
        jobs: JobTable,
        layout: GroupLayout,
        cascades: Cascades,
        tenants: TenantUsage,
        counts: StoreCounts,
        is_paused: bool,
    ) -> None:
        self.counts = counts
        self.storing: dict[int, StorePart] = {}
        """The store in flight of each device block."""
        self.is_paused = is_paused
        """Whether the planners submit nothing."""
        self.refusal = NotStored.NO_SPACE
        """Why the latest `submit` decided fewer slots than the candidate has."""
        self.in_flight: Counter[StoreCause] = Counter()
        """Device blocks in flight by the cause of their store."""
        self.num_returned = 0
        """Blocks stored as `REUSED_SOON` that are back in the free queue since the lazy planner last read this."""
        self.cascades = cascades
        self._manager = manager
        self._table = manager.table
        self._jobs = jobs
        self._layout = layout
        self._tenants = tenants
        self.parts: list[StorePart] = []
        """Parts that are in no job yet."""
        self.reorderings: deque[_Reordering] = deque(maxlen=_MAX_REORDERINGS)
        """Long requests that `continue_reordering` puts in order."""

    def submit(self, candidate: StoreCandidate, now_s: float) -> int:
        """Reserve slots for those blocks that are not in the pool; return how many slots of the candidate are decided.

        The slots after those found no space, for the reason in `refusal`.
        """
        state, group, keys = candidate.request, candidate.group, candidate.keys
        decided = {each.group.index: each.num_decided for each in state.storing}
        prefix = Prefix({i: (state.keys.by_group[i], count) for i, count in decided.items()}, candidate.protected)
        offer = self._manager.prepare_store(
            keys,
            state.origin,
            candidate.numbers,
            candidate.priority_class,
            now_s,
            prefix=prefix,
            size_bytes=group.slot_bytes,
        )
        self.refusal = offer.refusal
        num_present = offer.num_decided - len(offer.slots) - len(offer.not_admitted_at)
        if num_present:
            self.count_skipped(state, NotStored.ALREADY_STORED, num_present * group.slot_blocks)
            if any(map(self.cascades.request_level_tiers, candidate.requests)):
                absent = {*offer.stored_at.tolist(), *offer.not_admitted_at.tolist()}
                present = [keys[i] for i in range(offer.num_decided) if i not in absent]
                self.cascades.submit_present(candidate.requests, present, now_s)
        if len(offer.not_admitted_at):
            self.skip(state, group, NotStored.ADMISSION, [keys[i] for i in offer.not_admitted_at.tolist()])
        if len(offer.slots):
            self._begin(candidate, offer.stored_at.tolist(), offer.slots)
        return offer.num_decided

    def follow(self, state: RequestState, group: Group, numbers: Sequence[int]) -> None:
        """Cascade these slots of a request, which are stored for other requests, once they are stored."""
        if not self.cascades.request_level_tiers(state):
            return
        size, table = group.slot_blocks, state.block_ids[group.index]
        for number in numbers:
            blocks = table[number * size : (number + 1) * size]
            part = next((self.storing[block] for block in blocks if block in self.storing), None)
            if part is None:
                continue
            if not part.followers or part.followers[-1][0] is not state:
                part.followers.append((state, []))
            part.followers[-1][1].append(state.keys.by_group[group.index][number])

    def skip(self, state: RequestState, group: Group, reason: NotStored, keys: Sequence[Key]) -> None:
        """Count slots that are not stored, and record the reason for later misses."""
        self.count_skipped(state, reason, len(keys) * group.slot_blocks)
        self._manager.history.record_not_stored(keys, reason)

    def count_skipped(self, state: RequestState, reason: NotStored, num_blocks: int) -> None:
        """Count blocks that were offered and are not stored."""
        if num_blocks:
            for counts in (self.counts, state.store):
                counts.offered += num_blocks
                counts.skipped[reason.value] += num_blocks

    def _begin(self, candidate: StoreCandidate, stored_at: list[int], slots: Slots) -> None:
        """Hold the device blocks of the reserved slots until their job has ended."""
        group = candidate.group
        part = StorePart(
            request=candidate.request,
            group=group,
            epoch=self._table.epoch,
            slots=slots,
            block_ids=blocks_at(candidate.block_ids, stored_at, group.slot_blocks),
            end_token=(int(candidate.numbers[stored_at[-1]]) + 1) * group.slot_tokens,
            cause=candidate.cause,
            others=candidate.others,
        )
        num_blocks = len(part.block_ids)
        self.parts.append(part)
        if part.cause is not StoreCause.REUSED:
            self._jobs.hold(part, part.block_ids)
            self.storing.update(dict.fromkeys(part.block_ids, part))
        self.in_flight[part.cause] += num_blocks
        for counts in (self.counts, part.request.store):
            counts.offered += num_blocks
            counts.in_flight += num_blocks

    # --- jobs -------------------------------------------------------------------------------------------------------

    def take_jobs(self, now_s: float) -> tuple[list[TransferJob], list[TransferJob]]:
        """Return a job for the slots reserved since the last step, if any, and one for those copied ahead of it."""
        parts, self.parts = self.parts, []
        jobs: tuple[list[TransferJob], list[TransferJob]] = ([], [])
        for ahead in (False, True):
            of_job = [part for part in parts if (part.cause is StoreCause.REUSED) is ahead]
            if of_job:
                runs = [run for group in self._layout.groups if (run := _run_of(group, of_job)) is not None]
                slots = of_job[0].slots if len(of_job) == 1 else np.concatenate([part.slots for part in of_job])
                labels = self._manager.labels(slots)
                job = TransferJob(self._jobs.new_id(), Direction.STORE, tuple(runs), labels=labels)
                num_blocks = sum(len(part.block_ids) for part in of_job)
                self._jobs.open(OpenJob(job, now_s, slots, num_blocks, parts=of_job))
                jobs[ahead].append(job)
        return jobs

    def end_disowned(self, now_s: float) -> None:
        """End the parts that a reset disowned before they were in a job; their blocks may be submitted again."""
        self._end_parts(self._is_disowned, failed=False, now_s=now_s)

    def end_failed(self, states: Sequence[RequestState], now_s: float) -> None:
        """End the parts of these requests that are in no job yet: their blocks were not computed."""
        self._end_parts(lambda part: any(part.request is state for state in states), failed=True, now_s=now_s)

    def fail_all(self, error: str, now_s: float) -> None:
        """Fail all stores in flight: those in a job when the job ends, the others now."""
        self._end_parts(lambda part: True, failed=True, now_s=now_s)
        for job in self._jobs:
            if job.is_store:
                job.errors.append(error)

    def _end_parts(self, is_ended: Callable[[StorePart], bool], failed: bool, now_s: float) -> None:
        ended = [part for part in self.parts if is_ended(part)]
        if ended:
            self.parts = [part for part in self.parts if not is_ended(part)]
        for part in ended:
            self._end_part(part, failed, now_s)

    def end(self, ended: OpenJob, now_s: float) -> None:
        """Publish or free the slots of a job. Its seconds are divided among its requests by their blocks."""
        reordered: dict[int, tuple[RequestKeys, int]] = {}
        for part in ended.parts:
            if self._end_part(part, bool(ended.errors), now_s) and _must_reorder(part):
                keys, end_token = part.request.keys, part.end_token
                reordered[id(keys)] = keys, max(end_token, reordered.get(id(keys), (keys, 0))[1])
            num_blocks, trace = len(part.block_ids), part.request.trace
            part.request.store.seconds += ended.seconds * num_blocks / ended.num_blocks
            if trace is not None:
                trace.receive(
                    TraceStage(
                        StageKind.STORE,
                        ended.opened_s,
                        now_s,
                        num_blocks=num_blocks,
                        num_bytes=num_blocks * part.group.spec.block_bytes,
                        copy_s=ended.seconds,
                        error=next(iter(ended.errors), None),
                    )
                )
        # Once for each request, not for each of its parts.
        for keys, end_token in reordered.values():
            self._manager.reorder(self._begin_reordering(keys, end_token))
        self.counts.seconds += ended.seconds

    def _end_part(self, part: StorePart, failed: bool, now_s: float) -> bool:
        """Publish or free the slots of a part; return False if they were freed."""
        group, count, missing = part.group, len(part.block_ids), self._manager.history
        self._forget_blocks(part)
        self._jobs.release(part, reuse_first=part.cause in (StoreCause.REUSED_SOON, StoreCause.DEMANDED))
        self.in_flight[part.cause] -= count
        self.num_returned += count if part.cause is StoreCause.REUSED_SOON else 0
        disowned = self._is_disowned(part)
        ok = not failed and not disowned
        keys = [] if ok and not self.cascades.has_tiers else self._table.keys[part.slots].tolist()
        published, num_reset = 0, count if disowned else 0
        if ok:
            slots = self._free_dropped(part)
            num_reset = (len(part.slots) - len(slots)) * group.slot_blocks
            published = self._manager.complete_store(slots, now_s) * group.slot_blocks
        else:
            if failed and not disowned:
                missing.record_not_stored(keys, NotStored.FAILED)
            elif part.epoch == self._table.epoch:
                missing.record_not_stored(keys, NotStored.RESET)
            self._manager.abort_store(part.slots)
            if part.reorders:
                # To be repeated with the request's next store, or at its end.
                part.request.ordered_tokens = 0
        if ok and part.request.policy.policy.tiers is not None:
            self.cascades.allowed.record(part.slots, [state.policy.policy for state in (part.request, *part.others)])
        self._cascade(part, keys if ok else (), now_s)
        if published:
            of_tenant = self._tenants.of(part.request.origin.tenant)
            of_tenant.stored_blocks += published
            of_tenant.stored_bytes += published * group.spec.block_bytes
        for counts in (self.counts, part.request.store):
            counts.in_flight -= count
            counts.stored += published
            counts.bytes += published * group.spec.block_bytes
            if num_reset:
                counts.skipped[NotStored.RESET.value] += num_reset
            if failed and not disowned:
                counts.failed += count
            elif ok:
                counts.skipped[NotStored.ALREADY_STORED.value] += count - published - num_reset
        return ok

    def _free_dropped(self, part: StorePart) -> Slots:
        """Free the slots of a part whose blocks an operator deleted, and return the others."""
        if not part.dropped:
            return part.slots
        is_dropped = np.isin(part.slots, list(part.dropped))
        slots = part.slots[is_dropped]
        self._manager.history.record_not_stored(self._table.keys[slots].tolist(), NotStored.RESET)
        self._manager.abort_store(slots)
        return part.slots[~is_dropped]

    def _cascade(self, part: StorePart, keys: Sequence[Key], now_s: float) -> None:
        """Cascade the stored `keys` of a part; there are none if it failed, and without tiers."""
        states, cascades = (part.request, *part.others), self.cascades
        if keys:
            is_published = self._table.is_ready(part.slots)
            cascades.submit_stored(states, part.slots[is_published], now_s)
            cascades.submit_present(states, [keys[i] for i in np.flatnonzero(~is_published).tolist()], now_s)
        for follower, wanted in part.followers:
            cascades.submit_present((follower,), wanted, now_s)

    # --- eviction order ---------------------------------------------------------------------------------------------

    def reorder(self, state: RequestState, *, is_last: bool = False) -> None:
        """Put the decided slots of a request in eviction order, its end first, if enough of them are new.

        With a store to begin, at the end of that store, which makes more of them ready.
        """
        ordered = state.ordered_tokens
        decided = max(each.num_decided * each.group.slot_tokens for each in state.storing)
        if ordered < decided and (is_last or (decided - ordered) * _REORDER_SHARE >= decided):
            # Its parts of this step are the last ones.
            begun = list(takewhile(lambda part: part.request is state, reversed(self.parts)))
            for part in begun:
                part.reorders = True
            if not begun:
                self._manager.reorder(self._begin_reordering(state.keys, decided))
            state.ordered_tokens = decided

    def _begin_reordering(self, keys: RequestKeys, end_token: int) -> Sequence[Key]:
        """Return the keys to reorder now; those of a long request are reordered by the next steps instead."""
        if sum(end_token // group.slot_tokens for group in self._layout.groups) <= _REORDER_SLOTS:
            return in_order(self._layout.groups, keys.by_group, 0, end_token)
        waiting = next((one for one in self.reorderings if one.keys is keys), None)
        if waiting is None:
            self.reorderings.append(_Reordering(keys, end_token))
        else:
            waiting.again_token = max(waiting.again_token, end_token)
        return ()

    def continue_reordering(self) -> None:
        """Reorder the next part of a long request, from its end to its start: a bounded number of slots."""
        first, alignment = self.reorderings[0], self._layout.alignment_tokens
        size = min(group.slot_tokens for group in self._layout.groups)
        step = max(_REORDER_SLOTS // len(self._layout) * size // alignment, 1)
        start = max(first.end_token - step * alignment, 0)
        self._manager.reorder(in_order(self._layout.groups, first.keys.by_group, start, first.end_token))
        first.end_token = start
        if not start:
            self.reorderings.popleft()
            if first.again_token:
                self.reorderings.append(_Reordering(first.keys, first.again_token))

    # --- resets -----------------------------------------------------------------------------------------------------

    def disown(self, match: RequestFilter) -> list[int]:
        """Prevent the publication of stores from matching origins; return the affected jobs."""
        self._disown_parts(self.parts, match)
        return [job.job.job_id for job in self._jobs if self._disown_parts(job.parts, match)]

    def forget_blocks(self) -> None:
        """Let the blocks of stores in flight be submitted again, after a reset."""
        self.storing.clear()

    def drop(self, key: Key) -> None:
        """Prevent the publication of one key by stores in flight."""
        table, (hashed,) = self._table, hash_keys([key])
        for part in (*self.parts, *(part for job in self._jobs for part in job.parts)):
            slots = part.slots[table.hashes[part.slots] == hashed]
            if key in table.keys[slots].tolist():
                part.dropped.update(slots.tolist())
                self._manager.invalidate(slots)

    def _disown_parts(self, parts: Sequence[StorePart], match: RequestFilter) -> bool:
        matching = [part for part in parts if match.matches(part.request.origin)]
        for part in matching:
            part.disowned = True
            self._manager.invalidate(part.slots)
            self._manager.leases.end_with(self._table.keys[part.slots].tolist())
            self._forget_blocks(part)
        return bool(matching)

    def _is_disowned(self, part: StorePart) -> bool:
        return part.disowned or part.epoch != self._table.epoch

    def _forget_blocks(self, part: StorePart) -> None:
        """Remove a part from `storing`, except blocks that were submitted again since a reset."""
        for block_id in part.block_ids:
            if self.storing.get(block_id) is part:
                del self.storing[block_id]


def _must_reorder(part: StorePart) -> bool:
    """Return whether a request is put in eviction order now that this part of it is stored."""
    is_last = part.reorders or part.request.phase is RequestPhase.FINISHED
    return is_last or len(part.slots) * part.group.slot_tokens * _REORDER_SHARE >= part.end_token


def blocks_at(block_ids: Sequence[int], chosen: Sequence[int], slot_blocks: int) -> list[int]:
    """Return the device blocks of the slots at these indices."""
    if slot_blocks == 1:
        return [block_ids[i] for i in chosen]
    return [block for i in chosen for block in block_ids[i * slot_blocks : (i + 1) * slot_blocks]]


def _run_of(group: Group, parts: Sequence[StorePart]) -> BlockRun | None:
    """Return the copies of one group in these parts."""
    mine = [part for part in parts if part.group is group]
    if not mine:
        return None
    slots = mine[0].slots if len(mine) == 1 else np.concatenate([part.slots for part in mine])
    block_ids = np.array([block_id for part in mine for block_id in part.block_ids], dtype=np.int64)
    if group.slot_blocks == 1:
        return BlockRun(group.index, block_ids, slots, np.zeros(len(slots), dtype=np.int64))
    numbers = np.tile(np.arange(group.slot_blocks), len(slots))
    return BlockRun(group.index, block_ids, np.repeat(slots, group.slot_blocks), numbers)
