"""Lazy mode: a block is submitted when it is about to leave the device, not when it fills.

What a device block holds is recorded by its number, since its request may have finished when the block is reused. Each
step walks the device's free queue from a cursor, so that as many blocks as a step may take are stored, or need not be,
before they are reused. Blocks that are reused earlier are stored by the step that takes them, ahead of its writes. Host
copies of blocks that the device still holds are evicted first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from kvferry.core.engine_api import DeviceView
from kvferry.core.groups import Group, GroupKind, GroupLayout
from kvferry.core.keys import Key
from kvferry.core.policy import PRIORITY_CLASS
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.eager import StorePlanner
from kvferry.core.scheduler.requests import GroupProgress, RequestState
from kvferry.core.scheduler.stores import StoreCandidate, StoreJobs
from kvferry.core.stats import NotStored

_AHEAD_SLOTS = 1000
"""Slots stored ahead of one step: as many as may be processed under one hold of the manager lock."""
_AHEAD_BYTES = 256 << 20
"""Bytes stored ahead of one step, which waits for them: about 10 ms over PCIe 4.0 and 30 ms in host memory."""
_PEAK_STEPS = 64
"""Steps after which most of a recent peak of taken blocks is forgotten."""
_MAX_WATERMARK = 1000
"""Limit of the watermark, which follows the peak: it is read whenever slots are evicted."""


@dataclass(slots=True, eq=False)
class PendingStore:
    """A slot's worth of device blocks that may be stored: `contents` are the keys of what its `block_ids` hold.

    `others` are requests with the same blocks whose policies allow more tiers. If the pool has the slot already,
    request-level tiers receive it once, after which it `is_cascaded`. The device could not find the `hidden` blocks
    when this was recorded. The slot `is_counted` once it was submitted or lost, and `is_refused` while it has no space.
    """

    request: RequestState
    group: Group
    number: int
    key: Key
    block_ids: tuple[int, ...]
    contents: tuple[Key, ...]
    priority_class: int
    hidden: frozenset[int] = frozenset()
    is_counted: bool = False
    is_refused: bool = False
    others: list[RequestState] = field(default_factory=list)
    is_cascaded: bool = False

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """All requests whose tiers receive the slot."""
        return (self.request, *self.others)

    def content_of(self, block: int) -> Key:
        """Return the key of what one of its blocks holds."""
        return self.contents[self.block_ids.index(block)]

    def matches(self, block: int, found: Key | None) -> bool:
        """Return whether a block still holds its contents, given the key that the device finds for it."""
        return found == self.content_of(block) or (found is None and block in self.hidden)


class LazyPlanner(StorePlanner):
    """Records full slots by device block and submits them before their blocks are reused.

    Thread: engine. Requires: manager lock held.
    """

    def __init__(
        self,
        manager: OffloadManager,
        stores: StoreJobs,
        layout: GroupLayout,
        null_block: int,
        device: DeviceView,
        watermark_blocks: int,
    ) -> None:
        """`watermark_blocks` at the head of the free queue are stored ahead of their reuse."""
        super().__init__(manager, stores, layout, null_block)
        self._device = device
        self._watermark = watermark_blocks
        self._max_ahead = max(min(_AHEAD_SLOTS, _AHEAD_BYTES // layout.slot_bytes), 1)
        self.pending: dict[int, PendingStore] = {}
        """What the recorded device blocks hold, by block."""
        self._cursor: int | None = None
        self._num_ahead = 0
        self._peak = 0
        self._refused_version: int | None = None

    # --- recording --------------------------------------------------------------------------------------------------

    def record_lost(self, state: RequestState) -> None:
        """Record why blocks were not stored that a request loses; its full slots stay recorded by device block."""
        self.record_parts(state)

    def _first_undecided(self, progress: GroupProgress) -> int:
        return min(progress.answered, progress.recorded)

    def _decide(self, state: RequestState, progress: GroupProgress, limit: int | None) -> None:
        full, group = self._count_full(state, progress), progress.group
        if full > progress.recorded:
            wanted = self._wanted(state, group, progress.recorded, full)
            first = wanted[0][0] if wanted else full
            progress.recorded = full if limit is None else min(full, first + limit)
            for start, end in wanted:
                self._record(
                    state, group, start, self._split_storable(state, group, start, min(end, progress.recorded))[0]
                )
        super()._decide(state, progress, limit)

    def _accept(
        self, state: RequestState, progress: GroupProgress, ranges: Sequence[tuple[int, int]], stop: int, is_last: bool
    ) -> bool:
        for first, end in ranges:
            self._pass_over(progress, min(first, stop))
            progress.answered = max(progress.answered, min(end, stop))
        return True

    def _state_end(self, state: RequestState) -> int:
        # The device confirms what the block holds when it is about to leave.
        return self._longest_hit(state, state.num_computed_tokens)

    def _record(self, state: RequestState, group: Group, first: int, end: int) -> None:
        """Record slots `first` to `end` of a request until they leave the device.

        Where the blocks are recorded for another request with the same contents, the higher priority stays, and the
        tiers of both requests receive them.
        """
        table = state.block_ids[group.index]
        priority = PRIORITY_CLASS[state.policy.policy.priority]
        for number, key in enumerate(state.keys.by_group[group.index][first:end], first):
            blocks = tuple(table[number * group.slot_blocks : (number + 1) * group.slot_blocks])
            if self._null_block in blocks:
                continue
            old = self.pending.get(blocks[0])
            if old is not None and (old.key != key or old.block_ids != blocks):
                old = None
            if old is not None and old.priority_class >= priority:
                self._join(old, state)
                continue
            start = number * group.slot_blocks
            contents = (*state.keys.of_parts(group, start, start + group.slot_blocks), key)
            if len(contents) < len(blocks):
                # The engine has withdrawn the hashes of the request.
                continue
            pending = PendingStore(
                state, group, number, key, blocks, contents, priority, self._find_hidden(group, blocks)
            )
            for other in () if old is None else old.requests:
                self._join(pending, other)
            replaced: list[PendingStore] = []
            for block, content in zip(blocks, contents, strict=True):
                for request in pending.requests:
                    if request.tiers.session is not None:
                        request.tiers.session.acquire()
                before = self._remove(block)
                if before is not None and before.content_of(block) != content:
                    replaced.append(before)
                self.pending[block] = pending
            self._count_lost(replaced)

    def _join(self, pending: PendingStore, state: RequestState) -> None:
        """Add a request with the same blocks if its policy allows tiers that the others' do not."""
        cascades = self._stores.cascades
        if cascades is None or not cascades.allows_more(state, pending.requests):
            return
        pending.others.append(state)
        pending.is_cascaded = False
        for block in pending.block_ids:
            if self.pending.get(block) is pending and state.tiers.session is not None:
                state.tiers.session.acquire()

    def _find_hidden(self, group: Group, blocks: Sequence[int]) -> frozenset[int]:
        """Return the blocks of a window that the device cannot find, since it keeps hits at some positions only.

        They hold what was computed until they are reused, which `store_reused` detects.
        """
        if group.spec.kind is not GroupKind.SLIDING:
            return frozenset()
        found = self._device.contents(blocks)
        return frozenset(block for block, key in zip(blocks, found, strict=True) if key is None)

    # --- submitting -------------------------------------------------------------------------------------------------

    def store_reused(self, reused: Mapping[int, Key | None], now_s: float) -> None:
        """Submit recorded blocks that this step has given to other requests, to be copied ahead of the step.

        Must be called first in every step: the records are of earlier steps, and are removed in the step that reuses
        the block, so that no block is stored under a key that it does not hold any more. `reused` has the keys that
        the blocks had before this step took them.
        """
        reused_now = list(dict.fromkeys(self.pending[block] for block in reused))
        self._submit(self._select(reused_now, reused)[0], now_s, ahead=True)
        for block in reused:
            self._remove(block)
        self._count_lost(reused_now)

    def walk(self, num_taken_blocks: int, now_s: float) -> None:
        """Submit the next blocks of the free queue; `num_taken_blocks` were taken from it since the last step."""
        self._num_ahead = max(self._num_ahead + self._stores.num_returned - num_taken_blocks, 0)
        self._peak = max(num_taken_blocks, self._peak - -(-self._peak // _PEAK_STEPS))
        self._stores.num_returned = 0
        if not self.pending or self._refused_version == self._manager.table.space_version:
            return
        blocks = None if self._cursor is None else self._device.free_blocks(self._cursor)
        if blocks is None:
            self.restart()
            blocks = self._device.free_blocks(None) or iter(())
        wanted = self._watermark_now() - self._num_ahead - self._stores.num_reused_soon
        walked = list(islice(blocks, max(wanted, 0)))
        self._refused_version = None
        if not walked:
            return
        found = dict.fromkeys(found for block in walked if (found := self.pending.get(block)) is not None)
        valid, gone = self._select(list(found), {})
        self._forget(gone)
        if self._submit(valid, now_s):
            left = [block for block in walked if block not in self._stores.storing]
            self._num_ahead += len(left)
            if left:
                self._cursor = left[-1]

    def residency(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Return which of these keys the device holds and will not lose soon: their host copies are evicted first."""
        reused_next = list(islice(self._device.free_blocks(None) or (), self._watermark_now()))
        lost_soon = set(self._device.contents(reused_next))
        resident = self._device.resident(keys)
        return [held and key not in lost_soon for held, key in zip(resident, keys, strict=True)]

    def forget_hidden(self) -> None:
        """Forget blocks that the device cannot find, since a step failed and their contents are unknown."""
        self._forget([pending for pending in dict.fromkeys(self.pending.values()) if pending.hidden])

    def restart(self) -> None:
        """Restart at the head of the free queue: the pool may lack what the cursor has passed."""
        self._cursor = None
        self._num_ahead = 0
        self._stores.num_returned = 0

    def abandon(self) -> None:
        """Forget the contents of all device blocks."""
        self.pending.clear()
        self._refused_version = None
        self.restart()

    def _watermark_now(self) -> int:
        """Return how many blocks at the head of the free queue the next steps may take; loads take the most."""
        return max(self._watermark, min(self._peak, _MAX_WATERMARK))

    def _submit(self, candidates: Sequence[PendingStore], now_s: float, *, ahead: bool = False) -> bool:
        """Submit slots that are not in the pool; return False if there was no space.

        `ahead` of the step only a bounded number is submitted, beginnings of prompts first.
        """
        found = self._manager.lookup_each([pending.key for pending in candidates])
        missing = [candidates[i] for i in np.flatnonzero(found < 0).tolist()]
        present = [candidates[i] for i in np.flatnonzero(found >= 0).tolist()]
        present_keys = list(dict.fromkeys(pending.key for pending in present))
        # These leave the device too: evicting their copies would make an idle engine store without end.
        self._manager.touch(present_keys)
        self._cascade_present(present, now_s)
        protected = frozenset(present_keys)
        if ahead and len(missing) > self._max_ahead:
            missing = sorted(missing, key=lambda pending: pending.number)[: self._max_ahead]
        has_space = True
        batches: dict[tuple[int, ...], list[PendingStore]] = {}
        for pending in missing:
            origin = (pending.group.index, pending.priority_class, *map(id, pending.requests))
            batches.setdefault(origin, []).append(pending)
        for batch in batches.values():
            batch.sort(key=lambda pending: pending.number)
            if not self._submit_pending(batch, protected, now_s, ahead):
                has_space = False
                if not ahead:
                    break
        return has_space

    def _submit_pending(
        self, batch: Sequence[PendingStore], protected: frozenset[Key], now_s: float, ahead: bool
    ) -> bool:
        first = batch[0]
        version = self._manager.table.space_version
        answered = self._stores.submit(
            StoreCandidate(
                request=first.request,
                group=first.group,
                numbers=np.array([pending.number for pending in batch]),
                keys=[pending.key for pending in batch],
                block_ids=[block for pending in batch for block in pending.block_ids],
                priority_class=first.priority_class,
                reused_soon=not ahead,
                ahead=ahead,
                protected=protected,
                others=tuple(first.others),
            ),
            now_s,
        )
        for pending in batch[:answered]:
            pending.is_refused = False
            pending.is_counted = pending.is_cascaded = True
        if answered == len(batch):
            return True
        self._refused_version = version
        for pending in batch[answered:]:
            pending.is_refused = True
        return False

    def _cascade_present(self, present: Sequence[PendingStore], now_s: float) -> None:
        """Cascade slots that the pool already has to the request-level tiers of their requests, once."""
        if self._stores.cascades is None:
            return
        batches: dict[tuple[int, ...], list[PendingStore]] = {}
        for pending in present:
            if not pending.is_cascaded:
                pending.is_cascaded = True
                batches.setdefault(tuple(map(id, pending.requests)), []).append(pending)
        for batch in batches.values():
            self._stores.cascades.submit_present(batch[0].requests, [pending.key for pending in batch], now_s)

    def _select(
        self, found: Sequence[PendingStore], reused: Mapping[int, Key | None]
    ) -> tuple[list[PendingStore], list[PendingStore]]:
        """Return the slots that can be submitted, and those whose blocks do not hold their contents any more.

        `reused` has the keys that blocks had before this step took them.
        """
        blocks = [block for pending in found for block in pending.block_ids]
        present = {**dict(zip(blocks, self._device.contents(blocks), strict=True)), **reused}
        named: set[int] = set()
        valid: list[PendingStore] = []
        gone: list[PendingStore] = []
        for pending in found:
            if not self._is_valid(pending, present):
                gone.append(pending)
            # Slots of requests that part within one have blocks in common, and a job names a block once.
            elif not any(block in named or block in self._stores.storing for block in pending.block_ids):
                named.update(pending.block_ids)
                valid.append(pending)
        return valid, gone

    def _is_valid(self, pending: PendingStore, present: Mapping[int, Key | None]) -> bool:
        """Return whether blocks hold the recorded contents, given the keys that the device finds for them."""
        return all(
            # A block that was reused in an earlier step has no record, or one of its new contents.
            (latest := self.pending.get(block)) is not None
            and latest.content_of(block) == pending.content_of(block)
            and latest.matches(block, present[block])
            for block in pending.block_ids
        )

    def _remove(self, block: int) -> PendingStore | None:
        """Remove and return the record of a block."""
        pending = self.pending.pop(block, None)
        if pending is not None:
            for request in pending.requests:
                if request.tiers.session is not None:
                    request.tiers.session.release()
        return pending

    def _forget(self, gone: Sequence[PendingStore]) -> None:
        """Remove the records of all blocks of these slots, and count the slots that are lost."""
        for pending in gone:
            for block in pending.block_ids:
                if self.pending.get(block) is pending:
                    self._remove(block)
        self._count_lost(gone)

    def _count_lost(self, removed: Sequence[PendingStore]) -> None:
        """Count slots that left the device without being submitted, and are neither in the pool nor on the device."""
        uncounted = [pending for pending in removed if not pending.is_counted]
        if not uncounted:
            return
        keys = [pending.key for pending in uncounted]
        found, resident = self._manager.lookup_each(keys).tolist(), self._device.resident(keys)
        for pending, slot, is_resident in zip(uncounted, found, resident, strict=True):
            if slot < 0 and not is_resident:
                pending.is_counted = True
                reason = NotStored.NO_SPACE if pending.is_refused else NotStored.LEFT_DEVICE
                self._stores.skip(pending.request, pending.group, reason, [pending.key])
