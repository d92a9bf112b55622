"""Lazy mode: a block is submitted when it is about to leave the device, not when it fills.

What a device block holds is recorded by its number, since its request may have finished when the block is reused.
Walks of the device's free queue, from its head, store blocks that the next steps may take, where they are not in the
pool. Blocks that are reused earlier are stored by the step that takes them, ahead of its writes. On a full device the
next steps take what requests free that end: what one step could not store ahead is stored while requests still use it.
Blocks that a waiting request could load are stored at once (`Demands`). Host copies of blocks that the device still
holds are evicted first.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

import numpy as np

from kvferry.core.engine_api import DeviceView
from kvferry.core.groups import Group, GroupKind, GroupLayout
from kvferry.core.keys import Key
from kvferry.core.policy import PRIORITY_CLASS, PolicyResolver
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.scheduler.jobs import StoreCause
from kvferry.core.scheduler.requests import GroupProgress, RequestPhase, RequestState
from kvferry.core.scheduler.store_planner import StorePlanner
from kvferry.core.scheduler.stores import StoreCandidate, StoreJobs
from kvferry.core.stats import NotStored

_AHEAD_SLOTS = 1000
"""Slots stored ahead of one step."""
_AHEAD_BYTES = 256 << 20
"""Bytes stored ahead of one step, which waits for them: about 10 ms over PCIe 4.0 and 30 ms in host memory."""
_DEMAND_SHARE = 4
"""Stores for waiting requests hold at most this part of the device's free blocks, beside blocks in use."""
_PEAK_STEPS = 64
"""Steps after which most of a recent peak of taken blocks is forgotten."""
_WALK_SHARE = 4
"""A walk goes beyond the watermark by this part of it."""
_FREE_SHARE = 2
"""Where a walk reaches the end of the free queue, this part of the free blocks stays free.

An engine without free blocks preempts running requests and begins others later.
"""
_MAX_EQUAL = 4
"""Slots with equal contents that can be found by their key."""
_MAX_WATERMARK = 1000
"""Limit of the watermark, which follows the peak: it is read whenever slots are evicted."""

Batches = Iterator[None]
"""Work in batches. The caller acquires the manager lock for each, and may release it in between."""


@dataclass(slots=True, eq=False)
class RecordedSlot:
    """A slot's worth of device blocks that may be stored: `contents` are the keys of what its `block_ids` hold.

    `others` are requests with the same blocks whose policies allow more tiers. If the pool has the slot already,
    request-level tiers receive it once, after which it `is_cascaded`. The device could not find the `hidden` blocks
    when this was recorded, in the `epoch` of the pool at that time. The slot `is_counted` once it was submitted or
    lost, and has a `refusal` while it has no space.
    """

    request: RequestState
    group: Group
    number: int
    key: Key
    block_ids: tuple[int, ...]
    contents: tuple[Key, ...]
    priority_class: int
    epoch: int
    hidden: frozenset[int] = frozenset()
    is_counted: bool = False
    refusal: NotStored | None = None
    others: tuple[RequestState, ...] = ()
    is_cascaded: bool = False

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """All requests whose tiers receive the slot."""
        return (self.request, *self.others)

    @property
    def is_in_use(self) -> bool:
        """Whether its request was running with its blocks in the last step, so that they are not free."""
        state, size = self.request, len(self.block_ids)
        if state.phase is not RequestPhase.RUNNING or not state.block_ids:
            return False
        first = self.number * size
        return tuple(state.block_ids[self.group.index][first : first + size]) == self.block_ids

    def content_of(self, block: int) -> Key:
        """Return the key of what one of its blocks holds."""
        return self.contents[self.block_ids.index(block)]


class LazyPlanner(StorePlanner):
    """Records full slots by device block and submits them before their blocks are reused.

    Thread: engine. Requires: manager lock held.
    """

    def __init__(
        self,
        manager: OffloadManager,
        stores: StoreJobs,
        layout: GroupLayout,
        policies: PolicyResolver,
        device: DeviceView,
        watermark_blocks: int,
    ) -> None:
        """`watermark_blocks` at the head of the free queue are stored ahead of their reuse."""
        super().__init__(manager, stores, layout, policies)
        self._device = device
        self._watermark = watermark_blocks
        self._batch_slots = max(manager.table.batch_slots // 4, 1)
        """Slots processed under one hold of the manager lock, of the many that one step may take or walk."""
        self._max_ahead = max(min(_AHEAD_SLOTS, _AHEAD_BYTES // layout.slot_bytes), 1)
        self._max_ahead_blocks = self._max_ahead * min(group.slot_blocks for group in layout.groups)
        self._most_slot_blocks = max(group.slot_blocks for group in layout.groups)
        self.recorded: dict[int, RecordedSlot] = {}
        """What the recorded device blocks hold, by block."""
        self._by_key: dict[Key, tuple[RecordedSlot, ...]] = {}
        """The same, by the key of the slot. Of equal slots, which requests computed at once, a device may find one."""
        self._unstored: dict[RecordedSlot, None] = {}
        """Recorded slots that were neither offered nor found in the pool, in the order in which they filled.

        Without states: the request that uses one overwrites it.
        """
        self._stored_early: list[RecordedSlot] = []
        """Recorded slots that are in the pool, or on their way, while a running request uses them."""
        self._num_filling = 0
        """Of `_unstored`, at the end, those that the current step fills: the device may not find them yet."""
        self._passed: set[RecordedSlot] = set()
        """Recorded slots that were stored, or found in the pool, by a walk since the last restart.

        Without them `bench.vllm_lazy` finds 1.6% fewer tokens with a pool of 320 blocks: walks use them again.
        """
        self._num_passed = 0
        """Blocks at the head of the free queue, at least, that no walk has to look at."""
        self._num_restarts = 0
        self._peak = 0
        self._refused_version: int | None = None

    # --- recording --------------------------------------------------------------------------------------------------

    def record_lost(self, state: RequestState) -> None:
        """Record why blocks were not stored that a request loses; its full slots stay recorded by device block."""
        self._record_inner_blocks(state)

    def _first_undecided(self, progress: GroupProgress) -> int:
        return min(progress.num_decided, progress.num_recorded)

    def _decide(self, state: RequestState, progress: GroupProgress, limit: int | None) -> None:
        full, group = self._count_full(state, progress), progress.group
        if full > progress.num_recorded:
            wanted = self._wanted(state, group, progress.num_recorded, full)
            first = wanted[0][0] if wanted else full
            progress.num_recorded = full if limit is None else min(full, first + limit)
            for start, end in wanted:
                self._record(
                    state, group, start, self._split_storable(state, group, start, min(end, progress.num_recorded))[0]
                )
        super()._decide(state, progress, limit)

    def _accept(
        self, state: RequestState, progress: GroupProgress, ranges: Sequence[tuple[int, int]], stop: int, is_last: bool
    ) -> bool:
        for first, end in ranges:
            self._pass_over(progress, min(first, stop))
            progress.num_decided = max(progress.num_decided, min(end, stop))
        return True

    def _state_end(self, state: RequestState) -> int:
        # The device confirms what the block holds when it is about to leave.
        return self._longest_hit(state, state.num_computed_tokens)

    def _record(self, state: RequestState, group: Group, first: int, end: int) -> None:
        """Record slots `first` to `end` of a request until they leave the device.

        Where the blocks are recorded for another request with the same contents, the higher priority stays, and the
        tiers of both requests receive them.
        """
        size = group.slot_blocks
        keys = state.keys.by_group[group.index][first:end]
        table = state.block_ids[group.index][first * size : end * size]
        inner = iter(state.keys.of_inner_blocks(group, first * size, end * size))
        blocks_of = zip(*[iter(table)] * size, strict=False)
        contents_of = zip(*[inner] * (size - 1), keys, strict=False)
        priority, hidden = PRIORITY_CLASS[state.policy.policy.priority], self._find_hidden(group, table)
        epoch = self._manager.table.epoch
        overwrites = group.spec.kind is GroupKind.RECURRENT
        replaced: list[RecordedSlot] = []
        # Ends early if the engine has withdrawn the hashes of the request.
        for number, (blocks, contents) in enumerate(zip(blocks_of, contents_of, strict=False), first):
            if self._null_block in blocks:
                continue
            key, old = contents[-1], self.recorded.get(blocks[0])
            if old is not None and (old.key != key or old.block_ids != blocks):
                old = None
            if old is not None and old.priority_class >= priority:
                self._join(old, state)
                continue
            hidden_now = hidden.intersection(blocks) if hidden else hidden
            slot = RecordedSlot(state, group, number, key, blocks, contents, priority, epoch, hidden_now)
            if old is not None:
                for other in old.requests:
                    self._join(slot, other)
            sharing: dict[RecordedSlot, None] = {}
            for block, content in zip(blocks, contents, strict=True):
                before = self.recorded.get(block)
                if before is not None and before.content_of(block) == content:
                    sharing[before] = None
                elif before is not None:
                    self._remove((block,))
                    replaced.append(before)
                self.recorded[block] = slot
            for before in sharing:
                # A slot that parts from this one within it is still found by its key.
                if all(self.recorded.get(block) is not before for block in before.block_ids):
                    self._unlink(before)
            if not overwrites:
                self._unstored[slot] = None
                self._num_filling += 1
            equal = self._by_key.get(key, ())
            if len(equal) < _MAX_EQUAL:
                self._by_key[key] = (*equal, slot)
        self._count_lost(replaced)

    def _join(self, slot: RecordedSlot, state: RequestState) -> None:
        """Add a request with the same blocks if its policy allows tiers that the others' do not."""
        if self._stores.cascades.allows_more(state, slot.requests):
            slot.others += (state,)
            slot.is_cascaded = False

    def _find_hidden(self, group: Group, blocks: Sequence[int]) -> frozenset[int]:
        """Return the blocks of a window that the device cannot find, since it keeps hits at some positions only.

        They hold what was computed until they are reused, which `store_reused` detects. Without them lazy mode finds 7%
        fewer tokens on the 20 workloads of `bench.vllm_oracle --seed 701`.
        """
        if group.spec.kind is not GroupKind.SLIDING:
            return frozenset()
        real = [block for block in blocks if block != self._null_block]
        keys = self._device.contents(real)
        return frozenset(block for block, key in zip(real, keys, strict=True) if key is None)

    # --- submitting -------------------------------------------------------------------------------------------------

    def store_reused(self, reused: Mapping[int, Key | None], now_s: float) -> Batches:
        """Submit recorded blocks that this step has given to other requests, to be copied ahead of the step.

        Must be called first in every step: the records are of earlier steps, and are removed in the step that reuses
        the block, so that no block is stored under a key that it does not hold any more. `reused` has the keys that
        the blocks had before this step took them.
        """
        recorded = map(self.recorded.get, reused)
        slots = list(dict.fromkeys(slot for slot in recorded if slot is not None))
        yield from self._submit(slots, now_s, StoreCause.REUSED, reused, max_slots=self._max_ahead)
        self._remove(reused)
        for start in range(0, len(slots), self._batch_slots):
            self._count_lost(slots[start : start + self._batch_slots])
            yield

    def filter_recorded(self, keys: Sequence[Key]) -> list[Key]:
        """Return the keys of recorded slots among these, whose blocks may have been reused; none while paused."""
        return [] if self._stores.is_paused else [key for key in keys if key in self._by_key]

    def find_recorded(self, keys: Sequence[Key]) -> dict[Key, RecordedSlot]:
        """Return the recorded slots with these keys that can be stored; none while stores are paused."""
        if self._stores.is_paused:
            return {}
        recorded = [slot for key in keys for slot in self._by_key.get(key, ())]
        return {slot.key: slot for slot in self._select(recorded, {}, set())[0]} if recorded else {}

    @property
    def num_demanded(self) -> int:
        """Number of device blocks that stores for waiting requests hold."""
        return self._stores.in_flight[StoreCause.DEMANDED]

    def limit_demanded(self, num_wanted: int) -> int:
        """Return how many of `num_wanted` free blocks stores for waiting requests may hold at once, all together."""
        num_held = self.num_demanded
        # Not counted further: the engine may have very many free blocks.
        num_counted = num_wanted * _DEMAND_SHARE - num_held
        num_free = len(tuple(islice(self._device.free_blocks(), max(num_counted, 0))))
        return (num_free + num_held) // _DEMAND_SHARE

    def store_demanded(self, slots: Sequence[RecordedSlot], keys: frozenset[Key], now_s: float) -> Batches:
        """Submit recorded slots that a waiting request could load, without evicting any of `keys`, its whole hit.

        Must be called after `store_reused`, which has submitted those that the current step reuses.
        """
        yield from self._submit(slots, now_s, StoreCause.DEMANDED, protected=keys)

    def walk(self, num_taken_blocks: int, now_s: float) -> Batches:
        """Submit blocks at the head of the free queue; `num_taken_blocks` were taken from it since the last step.

        Each walk begins at the head, since blocks that are freed to it move all others back, and goes beyond the
        watermark, so that many steps need none. Of a shorter queue a part stays free. Where it is so short that a step
        could not store ahead what it takes beyond it, blocks in use are submitted as well.
        """
        stores, num_restarts = self._stores, self._num_restarts
        num_filling, self._num_filling = self._num_filling, 0
        self._num_passed = max(self._num_passed + stores.num_returned - num_taken_blocks, 0)
        self._peak = max(num_taken_blocks, self._peak - -(-self._peak // _PEAK_STEPS))
        stores.num_returned = 0
        watermark = self._watermark_now()
        num_in_flight = stores.in_flight[StoreCause.REUSED_SOON]
        num_walked = watermark + watermark // _WALK_SHARE - num_in_flight
        is_refused = stores.is_paused or self._refused_version == self._manager.table.space_version
        if not self.recorded or is_refused or self._num_passed + num_in_flight >= watermark or num_walked <= 0:
            return
        walked = list(islice(self._device.free_blocks(), num_walked))
        is_whole, max_slots = len(walked) < num_walked, num_walked
        if is_whole:
            max_held = (len(walked) + num_in_flight) // _FREE_SHARE
            max_slots = max(max_held - num_in_flight, 0) // self._most_slot_blocks
        self._refused_version = None
        recorded = [slot for block in walked if (slot := self.recorded.get(block)) is not None]
        slots = list(dict.fromkeys(one for one in recorded if one not in self._passed))
        valid = yield from self._submit(slots, now_s, StoreCause.REUSED_SOON, max_slots=max_slots)
        if valid is not None and num_restarts == self._num_restarts:
            self._passed.update(valid)
            self._num_passed = 0 if is_whole else sum(block not in stores.storing for block in walked)
        self._stored_early = [slot for slot in self._stored_early if slot.request.phase is RequestPhase.RUNNING]
        num_early = sum(len(slot.block_ids) for slot in self._stored_early)
        num_missing = watermark - len(walked) - num_in_flight - num_early - self._max_ahead_blocks
        if valid is not None and num_missing > 0:
            in_use = self._oldest_in_use(num_missing, num_filling)
            self._stored_early += (yield from self._submit(in_use, now_s, StoreCause.FILLED)) or ()

    def _oldest_in_use(self, num_blocks: int, num_filling: int) -> list[RecordedSlot]:
        """Return slots of `num_blocks` blocks that filled first, after a walk that has submitted the free ones."""
        oldest: list[RecordedSlot] = []
        for slot in islice(self._unstored, max(len(self._unstored) - num_filling, 0)):
            if num_blocks <= 0:
                break
            oldest.append(slot)
            num_blocks -= len(slot.block_ids)
        return oldest

    def residency(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Return which of these keys the device holds and will not lose soon: their host copies are evicted first."""
        resident = self._device.resident(keys)
        if not any(resident):
            return resident
        reused_next = list(islice(self._device.free_blocks(), self._watermark_now()))
        lost_soon = set(self._device.contents(reused_next))
        return [held and key not in lost_soon for held, key in zip(resident, keys, strict=True)]

    def forget_hidden(self) -> None:
        """Forget blocks that the device cannot find, since a step failed and their contents are unknown."""
        self._forget([slot for slot in dict.fromkeys(self.recorded.values()) if slot.hidden])

    def restart(self) -> None:
        """Look at all blocks again: the pool may lack those that walks have passed."""
        self._passed.clear()
        self._num_passed = 0
        self._num_restarts += 1
        self._stores.num_returned = 0

    def _watermark_now(self) -> int:
        """Return how many blocks at the head of the free queue the next steps may take; loads take the most."""
        return max(self._watermark, min(self._peak, _MAX_WATERMARK))

    def _submit(
        self,
        slots: Sequence[RecordedSlot],
        now_s: float,
        cause: StoreCause,
        reused: Mapping[int, Key | None] | None = None,
        protected: frozenset[Key] = frozenset(),
        max_slots: int = sys.maxsize,
    ) -> Generator[None, None, list[RecordedSlot] | None]:
        """Submit those of these slots that are not in the pool, in `Batches`.

        Args:
            slots: The slots.
            now_s: The time.
            cause: Why they are submitted.
            reused: The keys that blocks had before the current step reused them.
            protected: Keys that are not evicted for them.
            max_slots: How many are submitted at most. Of those that the current step reuses, leased ones are first,
                and beginnings of prompts.

        Returns:
            The slots that still hold their contents, but for those beyond `max_slots`; None if the pool had no space
            for all of them.
        """
        ahead, valid, missing, gone = cause is StoreCause.REUSED, [], [], []
        named: set[int] = set()
        present_keys: dict[Key, None] = {}
        for start in range(0, len(slots), self._batch_slots):
            if self._stores.is_paused:
                return None
            chosen, invalid = self._select(slots[start : start + self._batch_slots], reused or {}, named)
            gone += invalid
            places = self._manager.lookup_each([slot.key for slot in chosen])
            valid += chosen
            missing += [chosen[i] for i in np.flatnonzero(places < 0).tolist()]
            present = [chosen[i] for i in np.flatnonzero(places >= 0).tolist()]
            # These leave the device too: evicting their copies would make an idle engine store without end.
            for slot in present:
                self._unstored.pop(slot, None)
            used = dict.fromkeys(slot.key for slot in present)
            self._manager.leave_device(list(used))
            self._cascade_present(present, now_s)
            present_keys.update(used)
            yield
        for start in range(0, 0 if ahead else len(gone), self._batch_slots):
            self._forget(gone[start : start + self._batch_slots])
            yield
        if len(missing) > max_slots:
            if ahead:
                leases = self._manager.leases
                missing.sort(key=lambda slot: (not leases.is_pending(slot.key), slot.number))
            beyond, missing = set(missing[max_slots:]), missing[:max_slots]
            valid = [slot for slot in valid if slot not in beyond]
        by_origin: dict[tuple[int, ...], list[RecordedSlot]] = {}
        for slot in missing:
            origin = (slot.group.index, slot.priority_class, id(slot.request), *map(id, slot.others))
            by_origin.setdefault(origin, []).append(slot)
        has_space, protected = True, protected.union(present_keys)
        for of_origin in by_origin.values():
            of_origin.sort(key=attrgetter("number"))
            refusal = yield from self._submit_in_order(of_origin, protected, now_s, cause)
            # Slots beyond the limit of their tenant are offered again when the device takes their blocks.
            if refusal not in (None, NotStored.TENANT_LIMIT):
                has_space = False
                if not ahead:
                    break
        return valid if has_space else None

    def _submit_in_order(
        self, slots: Sequence[RecordedSlot], protected: frozenset[Key], now_s: float, cause: StoreCause
    ) -> Generator[None, None, NotStored | None]:
        """Submit slots of one origin up to the first without space, in `Batches`; return why it has none."""
        for start in range(0, len(slots), self._batch_slots):
            if self._stores.is_paused:
                return NotStored.PAUSED
            batch, version = slots[start : start + self._batch_slots], self._manager.table.space_version
            first = batch[0]
            num_decided = self._stores.submit(
                StoreCandidate(
                    request=first.request,
                    group=first.group,
                    numbers=np.array([slot.number for slot in batch]),
                    keys=[slot.key for slot in batch],
                    block_ids=[block for slot in batch for block in slot.block_ids],
                    priority_class=first.priority_class,
                    cause=cause,
                    protected=protected,
                    others=first.others,
                ),
                now_s,
            )
            for slot in batch[:num_decided]:
                self._unstored.pop(slot, None)
                slot.refusal = None
                slot.is_counted = slot.is_cascaded = True
            if num_decided < len(batch) and cause is StoreCause.DEMANDED:
                # They are offered again before they leave the device.
                return self._stores.refusal
            if num_decided < len(batch):
                if self._stores.refusal is not NotStored.TENANT_LIMIT:
                    self._refused_version = version
                for slot in slots[start + num_decided :]:
                    slot.refusal = self._stores.refusal
                    if slot.refusal is NotStored.TENANT_LIMIT:
                        self._unstored.pop(slot, None)
                return self._stores.refusal
            yield
        return None

    def _cascade_present(self, present: Sequence[RecordedSlot], now_s: float) -> None:
        """Cascade slots that the pool already has to the request-level tiers of their requests, once."""
        if not self._stores.cascades.has_tiers:
            return
        batches: dict[tuple[int, ...], list[RecordedSlot]] = {}
        for slot in present:
            if not slot.is_cascaded:
                slot.is_cascaded = True
                batches.setdefault(tuple(map(id, slot.requests)), []).append(slot)
        for batch in batches.values():
            self._stores.cascades.submit_present(batch[0].requests, [slot.key for slot in batch], now_s)

    def _select(
        self, slots: Sequence[RecordedSlot], reused: Mapping[int, Key | None], named: set[int]
    ) -> tuple[list[RecordedSlot], list[RecordedSlot]]:
        """Return the slots that can be submitted, and those whose blocks do not hold their contents any more.

        `reused` has the keys that blocks had before this step took them. The blocks of slots that can be submitted are
        added to `named`: slots of requests that part within one have blocks in common, and a job names a block once.
        """
        blocks = [block for slot in slots for block in slot.block_ids]
        device_keys = {block: reused[block] for block in blocks if block in reused}
        others = [block for block in blocks if block not in reused]
        device_keys.update(zip(others, self._device.contents(others), strict=True))
        storing = self._stores.storing.keys()
        valid: list[RecordedSlot] = []
        gone: list[RecordedSlot] = []
        for slot in slots:
            if not self._is_valid(slot, device_keys):
                gone.append(slot)
            elif named.isdisjoint(slot.block_ids) and storing.isdisjoint(slot.block_ids):
                named.update(slot.block_ids)
                valid.append(slot)
        return valid, gone

    def _is_valid(self, slot: RecordedSlot, device_keys: Mapping[int, Key | None]) -> bool:
        """Return whether blocks hold the recorded contents, given the keys by which the device finds them."""
        epoch = self._manager.table.epoch
        for block, content in zip(slot.block_ids, slot.contents, strict=True):
            latest = self.recorded.get(block)
            # A block that was reused in an earlier step has no record, or one of its new contents.
            if latest is None or (latest is not slot and latest.content_of(block) != content):
                return False
            device_key = device_keys[block]
            if device_key == content:
                continue
            # An engine resets the pool when its memory or its weights are lost, which no hash shows of a hidden block.
            if device_key is not None or block not in latest.hidden or latest.epoch != epoch:
                return False
        return True

    def _remove(self, blocks: Iterable[int]) -> None:
        """Remove the records of these blocks, as far as there are any."""
        removed = [slot for block in blocks if (slot := self.recorded.pop(block, None)) is not None]
        for slot in removed:
            self._unlink(slot)

    def _unlink(self, slot: RecordedSlot) -> None:
        """Remove a slot from those found by key: a block does not hold it any more, or all are of others' records."""
        self._passed.discard(slot)
        self._unstored.pop(slot, None)
        equal = self._by_key.pop(slot.key, ())
        if equal not in ((), (slot,)):
            self._by_key[slot.key] = tuple(one for one in equal if one is not slot)

    def _forget(self, gone: Sequence[RecordedSlot]) -> None:
        """Remove the records of all blocks of these slots, and count the slots that are lost."""
        for slot in gone:
            self._remove([block for block in slot.block_ids if self.recorded.get(block) is slot])
        self._count_lost(gone)

    def _count_lost(self, removed: Sequence[RecordedSlot]) -> None:
        """Count slots that left the device without being submitted, and are neither in the pool nor on the device."""
        uncounted = [slot for slot in removed if not slot.is_counted]
        if not uncounted:
            return
        keys = [slot.key for slot in uncounted]
        pool_slots, resident = self._manager.lookup_each(keys).tolist(), self._device.resident(keys)
        lost: dict[tuple[int, int, NotStored], list[RecordedSlot]] = {}
        for slot, in_pool, is_resident in zip(uncounted, pool_slots, resident, strict=True):
            if in_pool < 0 and not is_resident:
                slot.is_counted = True
                reason = slot.refusal or NotStored.LEFT_DEVICE
                reason = NotStored.PAUSED if self._stores.is_paused else reason
                lost.setdefault((id(slot.request), slot.group.index, reason), []).append(slot)
        for (_, _, reason), batch in lost.items():
            lost_keys = [slot.key for slot in batch]
            self._stores.skip(batch[0].request, batch[0].group, reason, lost_keys)
            self._manager.leases.end_pending_with(lost_keys)
