"""Lazy mode: a block is offered when it is about to leave the device, not when it fills.

What filled a device block is kept as a verdict by the block's number, since the request may be over by then. Each step
walks the device's free queue from a cursor on, so that as many blocks as a step can take are stored, or need not be,
before they are given out again. What is given out all the same is stored by the step that takes it, ahead of all that
the step writes. Host copies of what the device still holds are the first to be evicted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from kvferry.core.cascades import CascadeSide
from kvferry.core.engine_api import DeviceView
from kvferry.core.groups import Group, GroupKind, GroupLayout
from kvferry.core.keys import Key, make_keys
from kvferry.core.policy import PRIORITY_CLASS
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.requests import GroupProgress, RequestState
from kvferry.core.stats import NotStored
from kvferry.core.stores import Offering, StoreSide

_AHEAD_SLOTS = 1000
"""Slots stored ahead of one step: as many as may be worked on under one hold of the lock."""
_AHEAD_BYTES = 256 << 20
"""Bytes stored ahead of one step, which waits for them: about 10 ms over PCIe 4.0 and 30 ms in host memory."""

_PEAK_STEPS = 64
"""The most that a step took recently is forgotten by so small a part a step."""
_MOST_WATERMARK = 1000
"""The watermark follows what steps take up to this: it is looked at whenever room is made in the pool."""


@dataclass(slots=True, eq=False)
class Verdict:
    """A slot's worth of device blocks that may be stored: `contents` are what its `block_ids` hold while it stands.

    `others` are requests that have the same blocks and let more tiers have them. Tiers that want every block are `told`
    once of one that the pool has already. The device could not find `hidden` blocks when this was recorded. It is
    `answered` once it was counted, and `refused` while there is no room.
    """

    request: RequestState
    groups: tuple[GroupProgress, ...]
    group: Group
    number: int
    key: Key
    block_ids: tuple[int, ...]
    contents: tuple[Key, ...]
    priority_class: int
    hidden: frozenset[int] = frozenset()
    answered: bool = False
    refused: bool = False
    others: list[RequestState] = field(default_factory=list)
    told: bool = False

    @property
    def requests(self) -> tuple[RequestState, ...]:
        """All whose tiers are to have it."""
        return (self.request, *self.others)

    def content_of(self, block: int) -> Key:
        """The hash and group of one of its blocks."""
        return self.contents[self.block_ids.index(block)]

    def agrees(self, block: int, found: Key | None) -> bool:
        """Whether one of its blocks still holds its contents, given what the device finds in that."""
        return found == self.content_of(block) or (found is None and block in self.hidden)


class LazySide:
    """Called under the manager's lock, on the engine's thread."""

    def __init__(
        self,
        manager: OffloadManager,
        device: DeviceView,
        stores: StoreSide,
        layout: GroupLayout,
        null_block: int,
        watermark_blocks: int,
    ) -> None:
        """`watermark_blocks` is how many blocks at the head of the free queue shall be stored ahead of their reuse."""
        self._manager = manager
        self._device = device
        self._stores = stores
        self._layout = layout
        self._null_block = null_block
        self._watermark = watermark_blocks
        self._max_ahead = max(min(_AHEAD_SLOTS, _AHEAD_BYTES // layout.slot_bytes), 1)
        self._verdicts: dict[int, Verdict] = {}
        self._cursor: int | None = None
        self._ahead = 0
        self._peak = 0
        self._refused_at: int | None = None

    def record(self, state: RequestState, progress: GroupProgress, first: int, end: int) -> None:
        """Slots `first` to `end` of a request are whole and may be stored: remember it until they leave the device.

        Where a block carries another request's verdict for the same contents, the more permissive one stands, and the
        tiers of both get it.
        """
        group, table = progress.group, state.block_ids[progress.group.index]
        priority = PRIORITY_CLASS[state.policy.policy.priority]
        for number, key in enumerate(progress.keys[first:end], first):
            blocks = tuple(table[number * group.slot_blocks : (number + 1) * group.slot_blocks])
            if self._null_block in blocks:
                continue
            old = self._verdicts.get(blocks[0])
            if old is not None and (old.key != key or old.block_ids != blocks):
                old = None
            if old is not None and old.priority_class >= priority:
                self._join(old, state)
                continue
            contents = self._contents_of(state, group, number, key)
            verdict = Verdict(
                state, state.groups, group, number, key, blocks, contents, priority, self._hidden(group, blocks)
            )
            for other in () if old is None else old.requests:
                self._join(verdict, other)
            gone: list[Verdict] = []
            for block, content in zip(blocks, contents, strict=True):
                for request in verdict.requests:
                    if request.session is not None:
                        request.session.hold()
                before = self._drop(block)
                if before is not None and before.content_of(block) != content:
                    gone.append(before)
                self._verdicts[block] = verdict
            self._count_lost(gone)

    def store_given_out(self, now_s: float) -> None:
        """Offer what blocks held that this step has given to other requests, to be copied ahead of the step.

        Called first in every step: what a block holds was recorded by an earlier step, and the record is dropped in
        the step that gives the block out, so that no block is stored under a key that it does not hold any more.
        """
        given_out = self._device.take_given_out(self._verdicts)
        if not given_out:
            return
        leaving = list(dict.fromkeys(self._verdicts[block] for block in given_out))
        self._offer(self._intact(leaving, given_out), now_s, ahead=True)
        for block in given_out:
            self._drop(block)
        self._count_lost(leaving)

    def forget_hidden(self) -> None:
        """A step failed: what its blocks hold cannot be known of those that the device does not find."""
        failed = [verdict for verdict in dict.fromkeys(self._verdicts.values()) if verdict.hidden]
        for verdict in failed:
            self._drop_whole(verdict)
        self._count_lost(failed)

    def walk(self, num_taken_blocks: int, now_s: float) -> None:
        """Offer what comes next in the free queue; `num_taken_blocks` were given out since the last step."""
        self._ahead = max(self._ahead + self._stores.num_returned - num_taken_blocks, 0)
        self._peak = max(num_taken_blocks, self._peak - -(-self._peak // _PEAK_STEPS))
        self._stores.num_returned = 0
        if not self._verdicts or self._refused_at == self._manager.evictor.version:
            return
        blocks = None if self._cursor is None else self._device.free_blocks(self._cursor)
        if blocks is None:
            self._cursor = None
            self._ahead = 0
            blocks = self._device.free_blocks(None) or iter(())
        wanted = self._num_leaving_soon() - self._ahead - self._stores.num_leaving
        walked = list(islice(blocks, max(wanted, 0)))
        self._refused_at = None
        if walked and self._offer(self._standing(walked), now_s):
            left = [block for block in walked if not self._stores.is_storing(block)]
            self._ahead += len(left)
            if left:
                self._cursor = left[-1]

    def residency(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Which of these keys the device holds and is not about to lose: their host copies can go first."""
        leaving = list(islice(self._device.free_blocks(None) or (), self._num_leaving_soon()))
        lost_soon = set(self._device.contents(leaving))
        resident = self._device.resident(keys)
        return [held and key not in lost_soon for held, key in zip(resident, keys, strict=True)]

    def look_again(self) -> None:
        """The pool was emptied: what the cursor has passed is not stored any more."""
        self._cursor = None
        self._ahead = 0

    def abandon(self) -> None:
        """Forget what device blocks hold: none of them is offered any more for what it holds now."""
        self._verdicts.clear()
        self._refused_at = None
        self.look_again()

    def _num_leaving_soon(self) -> int:
        """How many blocks at the head of the free queue the next steps may take: loads take more than computing."""
        return max(self._watermark, min(self._peak, _MOST_WATERMARK))

    def _offer(self, standing: Sequence[Verdict], now_s: float, *, ahead: bool = False) -> bool:
        """Offer what these blocks hold, as far as it is not in the pool; False where the pool had no room.

        `ahead` of the step only a bounded number is offered, beginnings of prompts first.
        """
        found = self._manager.lookup_each([verdict.key for verdict in standing])
        missing = [standing[i] for i in np.flatnonzero(found < 0).tolist()]
        # Copies of what is leaving too are worth as much: evicting them would have an idle engine store for ever.
        present = list(dict.fromkeys(standing[i].key for i in np.flatnonzero(found >= 0).tolist()))
        self._manager.touch(present)
        if self._stores.cascades is not None:
            self._tell(self._stores.cascades, [standing[i] for i in np.flatnonzero(found >= 0).tolist()], now_s)
        spared = frozenset(present)
        if ahead and len(missing) > self._max_ahead:
            missing = sorted(missing, key=lambda verdict: verdict.number)[: self._max_ahead]
        has_room = True
        by_origin: dict[tuple[int, ...], list[Verdict]] = {}
        for verdict in missing:
            place = (verdict.group.index, verdict.priority_class, *map(id, verdict.requests))
            by_origin.setdefault(place, []).append(verdict)
        for verdicts in by_origin.values():
            verdicts.sort(key=lambda verdict: verdict.number)
            if not self._offer_batch(verdicts, spared, now_s, ahead):
                has_room = False
                if not ahead:
                    break
        return has_room

    def _intact(self, verdicts: Sequence[Verdict], given_out: Mapping[int, Key | None]) -> list[Verdict]:
        """The verdicts whose blocks hold all of their contents until this step writes to them."""
        blocks = [block for verdict in verdicts for block in verdict.block_ids]
        present = {**dict(zip(blocks, self._device.contents(blocks), strict=True)), **given_out}
        named: set[int] = set()
        intact: list[Verdict] = []
        for verdict in verdicts:
            if named.isdisjoint(verdict.block_ids) and self._holds(verdict, present):
                # Slots of requests that part within one have blocks in common, and a job names a block once.
                named.update(verdict.block_ids)
                intact.append(verdict)
        return intact

    def _standing(self, walked: Sequence[int]) -> list[Verdict]:
        """The verdicts on these blocks that still hold, each once; the others are forgotten."""
        verdicts = list(dict.fromkeys(found for block in walked if (found := self._verdicts.get(block)) is not None))
        named: set[int] = set()
        blocks = [block for verdict in verdicts for block in verdict.block_ids]
        present = dict(zip(blocks, self._device.contents(blocks), strict=True))
        standing: list[Verdict] = []
        gone: list[Verdict] = []
        for verdict in verdicts:
            if not self._holds(verdict, present):
                self._drop_whole(verdict)
                gone.append(verdict)
            elif not any(block in named or self._stores.is_storing(block) for block in verdict.block_ids):
                # Slots of requests that part within one have blocks in common, and a plan names a block once.
                named.update(verdict.block_ids)
                standing.append(verdict)
        self._count_lost(gone)
        return standing

    def _holds(self, verdict: Verdict, present: Mapping[int, Key | None]) -> bool:
        """Whether blocks hold what a verdict says, given what the device finds in them."""
        return all(
            # A block that was given out in an earlier step has no verdict, or that on what it came to hold.
            (latest := self._verdicts.get(block)) is not None
            and latest.content_of(block) == verdict.content_of(block)
            and latest.agrees(block, present[block])
            for block in verdict.block_ids
        )

    def _offer_batch(self, verdicts: Sequence[Verdict], spared: frozenset[Key], now_s: float, ahead: bool) -> bool:
        first = verdicts[0]
        version = self._manager.evictor.version
        answered = self._stores.offer_slots(
            Offering(
                request=first.request,
                groups=first.groups,
                group=first.group,
                numbers=np.array([verdict.number for verdict in verdicts]),
                keys=[verdict.key for verdict in verdicts],
                block_ids=[block for verdict in verdicts for block in verdict.block_ids],
                priority_class=first.priority_class,
                leaving=not ahead,
                ahead=ahead,
                spared=spared,
                others=tuple(first.others),
            ),
            now_s,
        )
        for verdict in verdicts[:answered]:
            verdict.refused = False
            verdict.answered = True
            verdict.told = True
        if answered == len(verdicts):
            return True
        self._refused_at = version
        for verdict in verdicts[answered:]:
            verdict.refused = True
        return False

    def _drop(self, block: int) -> Verdict | None:
        """Forget what a block held, and return that."""
        verdict = self._verdicts.pop(block, None)
        if verdict is not None:
            for request in verdict.requests:
                if request.session is not None:
                    request.session.let_go()
        return verdict

    def _drop_whole(self, verdict: Verdict) -> None:
        for block in verdict.block_ids:
            if self._verdicts.get(block) is verdict:
                self._drop(block)

    def _count_lost(self, verdicts: Sequence[Verdict]) -> None:
        """Count those that have left the device, without an answer so far, and are neither in the pool nor on it."""
        unanswered = [verdict for verdict in verdicts if not verdict.answered]
        if not unanswered:
            return
        keys = [verdict.key for verdict in unanswered]
        found, resident = self._manager.lookup_each(keys).tolist(), self._device.resident(keys)
        for verdict, slot, is_resident in zip(unanswered, found, resident, strict=True):
            if slot < 0 and not is_resident:
                verdict.answered = True
                reason = NotStored.NO_SPACE if verdict.refused else NotStored.LEFT_DEVICE
                self._stores.count_lost(verdict.request, reason, verdict.key, verdict.group.slot_blocks)

    def _join(self, verdict: Verdict, state: RequestState) -> None:
        """A request has the same blocks as a verdict: if it lets more tiers have them, they shall."""
        cascades = self._stores.cascades
        if cascades is None or not cascades.adds(state, verdict.requests):
            return
        verdict.others.append(state)
        verdict.told = False
        for block in verdict.block_ids:
            if self._verdicts.get(block) is verdict and state.session is not None:
                state.session.hold()

    def _tell(self, cascades: CascadeSide, present: Sequence[Verdict], now_s: float) -> None:
        """The pool has these already: tiers that want every block of their requests get them, once."""
        untold: dict[tuple[int, ...], list[Verdict]] = {}
        for verdict in present:
            if not verdict.told:
                verdict.told = True
                untold.setdefault(tuple(map(id, verdict.requests)), []).append(verdict)
        for verdicts in untold.values():
            cascades.found(verdicts[0].requests, [verdict.key for verdict in verdicts], now_s)

    def _hidden(self, group: Group, blocks: Sequence[int]) -> frozenset[int]:
        """Those of a windowed group's blocks that the device cannot find, since it keeps hits at some places only.

        They hold what was computed until they are given out, which `store_given_out` learns of.
        """
        if group.spec.kind is not GroupKind.SLIDING:
            return frozenset()
        found = self._device.contents(blocks)
        return frozenset(block for block, key in zip(blocks, found, strict=True) if key is None)

    def _contents_of(self, state: RequestState, group: Group, number: int, key: Key) -> tuple[Key, ...]:
        if group.slot_blocks == 1:
            return (key,)
        step = group.spec.block_size // self._layout.hash_block_size
        first = (number * group.slot_blocks + 1) * step - 1
        hashes = state.request.block_hashes[first : (number + 1) * group.slot_blocks * step : step]
        return tuple(make_keys(hashes, group.index))
