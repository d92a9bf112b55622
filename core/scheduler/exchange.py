"""Exports and imports: copies of the pool's blocks to a store that is no tier, and back, beside the engine.

A store is used through a tier and its client, as cascades and promotions are, but no request knows it and no reset
reaches it. Its owner opens it, submits a batch of blocks at a time, polls, and closes it. Whole prefixes are exported,
as a block is of use only with all blocks before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.cost_model import LoadOrCompute
from kvferry.core.groups import GroupLayout
from kvferry.core.keys import Key, RequestFilter, RequestIdentity, group_of
from kvferry.core.pool.index import NO_PARENT
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.native import KeyHashes
from kvferry.core.pool.slots import BATCH_SLOTS
from kvferry.core.scheduler.cascades import Cascades
from kvferry.core.scheduler.promotions import Promotions, ResetsSince
from kvferry.core.tiers.base import Tier, TierJob, TierRequest
from kvferry.core.tiers.client import OpenTierJob, TierClient, TierSession
from kvferry.core.transfers import NO_SLOTS, Slots

_MAX_BATCH_SHARE = 8
"""A batch holds at most an eighth of the slots."""
_MAX_EVICTED_SHARE = 2
"""An import that may evict brings at most half as many blocks as there are slots."""


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """A block outside the pool, with what the pool has to know of it. `parent` is the hash of the key before it."""

    key: Key
    num_bytes: int
    position: int
    parent: int
    priority_class: int
    origin: RequestIdentity


class ChosenBlocks(NamedTuple):
    """Blocks of the pool in the order of their export, as columns of one length. A reused slot has a new generation."""

    slots: Slots
    generations: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def select(self, which: slice | NDArray[np.bool_]) -> ChosenBlocks:
        """Return some of the blocks."""
        return ChosenBlocks(self.slots[which], self.generations[which], self.sizes[which])

    def followed_by(self, others: ChosenBlocks) -> ChosenBlocks:
        """Return these blocks and others."""
        return ChosenBlocks(*map(np.concatenate, zip(self, others, strict=True)))


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks that are being copied. `ok` tells which of them were, once the batch is not open any more.

    Of an export, `blocks` are those of `entries`. Of an import, `num_present` blocks were in the pool already, or are
    on their way, `num_reset` had been dropped by a reset since it began, `num_limited` are beyond the limits of their
    tenants, and there was no space for `num_refused`.
    """

    entries: Sequence[BlockEntry] = ()
    ok: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    is_open: bool = False
    blocks: ChosenBlocks | None = None
    num_present: int = 0
    num_reset: int = 0
    num_limited: int = 0
    num_refused: int = 0


class BlockColumns(NamedTuple):
    """Blocks as columns of one length. `tokens` is where each begins in its prompt, `used_s` when it was used last."""

    hashes: KeyHashes
    parents: KeyHashes
    tokens: NDArray[np.int64]
    sizes: NDArray[np.int64]
    classes: NDArray[np.uint8]
    used_s: NDArray[np.float64]


class Exchange:
    """One export or import at a time. Each method acquires the manager lock. Thread: one, not the engine's."""

    def __init__(
        self,
        manager: OffloadManager,
        layout: GroupLayout,
        cascades: Cascades,
        promotions: Promotions,
        new_number: Callable[[], int],
    ) -> None:
        self.clients: list[TierClient] = []
        """The client of the store that is open, as the last; earlier ones have a job that could not be canceled."""
        self.resets = ResetsSince()
        """Resets and drops of blocks since the store was opened."""
        self._manager = manager
        self._layout = layout
        self._cascades = cascades
        self._promotions = promotions
        self._new_number = new_number
        self._session: TierSession | None = None

    @property
    def batch_blocks(self) -> int:
        """The most blocks in a batch."""
        return max(self._manager.num_slots // _MAX_BATCH_SHARE, 1)

    def open(self, name: str, tier: Tier) -> None:
        """Use a store, the only one. One that fails at the announcement of its use gets no block; all of them fail."""
        manager = self._manager
        with manager.lock:
            client = TierClient(name, tier, LoadOrCompute(), self._new_number, manager.table.max_slots)
            about = TierRequest(f"{name}-{self._new_number()}", 0)
            announced = [] if client.announce(about) is None else [client]
            self._session = TierSession(about.request_id, announced, (), lambda session: None)
            self.clients.append(client)
            self.resets = ResetsSince()
            self._promotions.watched.append(self.resets)

    def close(self, now_s: float) -> None:
        """Cancel what is open; the caller closes the store. May be called again."""
        with self._manager.lock:
            if self._session is not None:
                self._session.end()
                self._promotions.watched.remove(self.resets)
                self._session = None
            for client in self.clients:
                client.close(now_s)
            self._forget_clients()

    def _forget_clients(self) -> None:
        """Forget closed clients, except those with a job that may still touch slots: `poll` ends it."""
        self.clients[:] = [client for client in self.clients if client.has_stuck_jobs()]

    def open_jobs(self) -> list[OpenTierJob]:
        """Return the jobs without a result. Requires: manager lock held."""
        return [job for client in self.clients for job in client.open_jobs]

    def poll(self, now_s: float) -> None:
        """Process results of the store, and cancel jobs that exceeded their time limit."""
        for client in list(self.clients):
            client.fetch()
        with self._manager.lock:
            for client in self.clients:
                client.poll(now_s)
                client.warnings.clear()
            if self._session is None:
                self._forget_clients()

    # --- export -----------------------------------------------------------------------------------------------------

    def choose(self, match: RequestFilter | None, max_bytes: int | None) -> ChosenBlocks:
        """Return the blocks of matching origins in order of export: whole prefixes, those first that were used last.

        Blocks before them that others have stored are included, as far as the pool knows them. Acquires the manager
        lock for each batch of slots.
        """
        parts = [self._read(start, match) for start in range(0, self._manager.table.end_slot, BATCH_SLOTS)]
        slots, generations, is_wanted = (np.concatenate(column) for column in list(zip(*parts, strict=True))[:3])
        columns = BlockColumns(*map(np.concatenate, zip(*(part[3] for part in parts), strict=True)))
        chosen = choose_whole(columns, is_wanted, max_bytes)
        return ChosenBlocks(slots[chosen], generations[chosen], columns.sizes[chosen])

    def _read(
        self, start: int, match: RequestFilter | None
    ) -> tuple[Slots, NDArray[np.int64], NDArray[np.bool_], BlockColumns]:
        manager, table = self._manager, self._manager.table
        with manager.lock:
            end = min(start + BATCH_SLOTS, table.end_slot)
            slots = table.ready_in(start, end)
            rows, hashes, parents = table.rows(slots), table.hashes[slots], table.parents[slots]
        records = rows.records
        is_wanted = np.ones(len(slots), dtype=np.bool_)
        if match is not None:
            wanted = {id(origin): match.matches_names(origin) for origin in rows.origins}
            is_wanted[:] = [wanted[id(origin)] for origin in rows.origins]
        slot_tokens = np.array([group.slot_tokens for group in self._layout.groups], dtype=np.int64)
        tokens = records["position"] * slot_tokens[[group_of(key) for key in rows.keys]] if len(slots) else NO_SLOTS
        used_s = np.maximum(records["stored_s"], records["hit_s"])
        columns = BlockColumns(
            hashes, parents, tokens, records["size"].copy(), records["priority_class"].copy(), used_s
        )
        return slots, records["generation"].copy(), is_wanted, columns

    def unverified(self, blocks: ChosenBlocks) -> Slots:
        """Return those of these blocks' slots that were recovered and not verified since."""
        with self._manager.lock:
            return self._manager.unverified(blocks.select(self._are_here(blocks)).slots)

    def store(self, blocks: ChosenBlocks, now_s: float) -> tuple[Batch, ChosenBlocks]:
        """Copy blocks to the store, at most `batch_blocks`. Blocks that have left the pool or are unverified are not.

        Returns:
            The batch, and the blocks that are still to be copied, as cascades and exports hold enough of the pool.
        """
        manager, table, batch = self._manager, self._manager.table, Batch()

        def end(ok: NDArray[np.bool_] | None) -> None:
            batch.is_open = False
            batch.ok = np.zeros(len(batch.entries), dtype=np.bool_) if ok is None else ok

        with manager.lock:
            blocks = blocks.select(self._are_here(blocks))
            blocks = blocks.select(~np.isin(blocks.slots, manager.unverified(blocks.slots)))
            if not len(blocks.slots) or not self.clients:
                return batch, blocks
            slots = blocks.slots[: self.batch_blocks]
            if self._is_announced():
                batch.is_open = True
                slots = self._cascades.submit(self.clients[-1], self._session, slots, now_s, end)
                batch.is_open &= len(slots) > 0
            columns = zip(
                table.keys[slots].tolist(),
                table.sizes[slots].tolist(),
                table.positions[slots].tolist(),
                table.parents[slots].tolist(),
                table.classes[slots].tolist(),
                table.origins[slots].tolist(),
                strict=True,
            )
            batch.entries = [BlockEntry(*column) for column in columns]
            if not batch.is_open:
                batch.ok = np.zeros(len(slots), dtype=np.bool_)
        is_submitted = np.isin(blocks.slots, slots)
        batch.blocks = blocks.select(is_submitted)
        return batch, blocks.select(~is_submitted)

    def _is_announced(self) -> bool:
        return self._session is not None and self._session.knows(self.clients[-1])

    def _are_here(self, blocks: ChosenBlocks) -> NDArray[np.bool_]:
        table = self._manager.table
        here: NDArray[np.bool_] = table.is_ready(blocks.slots) & (table.generations[blocks.slots] == blocks.generations)
        return here

    # --- import -----------------------------------------------------------------------------------------------------

    def max_import_blocks(self, *, may_evict: bool) -> int:
        """Return the most blocks that an import may bring: free slots, or if it may evict, half of all slots."""
        table = self._manager.table
        with self._manager.lock:
            return max(table.num_free, table.num_slots // _MAX_EVICTED_SHARE if may_evict else 0)

    def load(
        self,
        entries: Sequence[BlockEntry],
        now_s: float,
        *,
        may_evict: bool,
        max_blocks: int | None = None,
        max_bytes: int | None = None,
    ) -> Batch:
        """Copy blocks that the pool lacks from the store, in their order, as far as there is space.

        Blocks that resets concern which came since the store was opened are left out, and those beyond the limits of
        their tenants: with these, other blocks would have to make space for what their limit evicts at once.

        Args:
            entries: Blocks of the store, at most `batch_blocks`.
            now_s: The time.
            may_evict: Whether other blocks may be evicted for them.
            max_blocks: The most blocks to copy.
            max_bytes: The most bytes to copy.
        """
        manager, batch = self._manager, Batch()
        with manager.lock:
            if not self.clients:
                return batch
            allowed = [one for one in entries if not self.resets.concern(one.key, one.origin)]
            found = manager.lookup_each([one.key for one in allowed]).tolist()
            absent = [
                one
                for one, slot in zip(allowed, found, strict=True)
                if slot < 0 and not self._promotions.is_loading(one.key)
            ]
            batch.num_reset = len(entries) - len(allowed)
            batch.num_present = len(allowed) - len(absent)
            within = self._within_limits(absent)
            batch.num_limited = len(absent) - len(within)
            sizes = np.cumsum([one.num_bytes for one in within])
            num_allowed = len(within) if max_bytes is None else int(np.searchsorted(sizes, max_bytes, side="right"))
            wanted = within[:num_allowed][:max_blocks]
            if not self._is_announced():
                batch.entries, batch.ok = wanted, np.zeros(len(wanted), dtype=np.bool_)
                return batch
            reserved, slots = self._reserve(wanted, now_s, may_evict=may_evict)
            batch.num_refused = len(within) - len(reserved)
            batch.entries = reserved
            if reserved:
                batch.is_open = True
                self._begin_load(batch, slots, now_s)
        return batch

    def _within_limits(self, entries: Sequence[BlockEntry]) -> list[BlockEntry]:
        """Return the first of these blocks of each tenant, as many as its limit allows."""
        tenants, found = self._manager.table.tenants, list[BlockEntry]()
        left = {tenant: tenants.num_left(tenant) for tenant in {one.origin.tenant for one in entries}}
        for one in entries:
            tenant = one.origin.tenant
            num_left = left[tenant]
            if num_left is not None:
                left[tenant] = num_left - 1
            if num_left is None or num_left > 0:
                found.append(one)
        return found

    def _reserve(
        self, entries: Sequence[BlockEntry], now_s: float, *, may_evict: bool
    ) -> tuple[list[BlockEntry], Slots]:
        """Reserve slots for the first of these blocks; without eviction only free ones."""
        manager, table = self._manager, self._manager.table
        reserved: list[BlockEntry] = []
        slots: list[Slots] = [NO_SLOTS]
        session = self._session
        # One length and class a call.
        for _, run in groupby(entries, key=lambda one: (one.num_bytes, one.priority_class)):
            wanted = list(run)
            if not may_evict:
                wanted = wanted[: 0 if table.is_shrinking else table.num_free]
            if not wanted or session is None:
                break
            offer = manager.prepare_store(
                [one.key for one in wanted],
                RequestIdentity(session.request_id),
                np.array([one.position for one in wanted], dtype=np.int64),
                wanted[0].priority_class,
                now_s,
                size_bytes=wanted[0].num_bytes,
                needs_admission=False,
                on_engine_thread=False,
            )
            got = [wanted[i] for i in offer.stored_at.tolist()]
            table.parents[offer.slots] = np.array([one.parent for one in got], dtype=np.uint64)
            reserved += got
            slots.append(offer.slots)
            if len(got) < len(wanted):
                break
        return reserved, np.concatenate(slots)

    def _begin_load(self, batch: Batch, slots: Slots, now_s: float) -> None:
        def end(published: NDArray[np.bool_]) -> None:
            batch.is_open, batch.ok = False, published

        sizes = np.array([one.num_bytes for one in batch.entries], dtype=np.int64)
        request_id = "" if self._session is None else self._session.request_id
        job = TierJob(self._new_number(), request_id, [one.key for one in batch.entries], slots, sizes)
        self._promotions.load(self.clients[-1], job, now_s, end, self.resets)

    def put_in_order(self, keys: Sequence[Key]) -> None:
        """Have these blocks, at most `batch_blocks`, be evicted after all others, the last of them first."""
        self._manager.reorder(keys)


def choose_whole(blocks: BlockColumns, is_wanted: NDArray[np.bool_], max_bytes: int | None = None) -> NDArray[np.int64]:
    """Return the wanted blocks and all known ones before them, in an order in which no block precedes its parent.

    Blocks of a higher priority class come first, then those that were used later. A block counts as used whenever one
    behind it was. `blocks` and `is_wanted` are changed.

    Args:
        blocks: All blocks that may be chosen.
        is_wanted: Which of them are wanted.
        max_bytes: The most bytes to choose; the choice ends before the first block that exceeds it.
    """
    _raise_parents(blocks, is_wanted)
    chosen = is_wanted.nonzero()[0]
    # Negative, as the last key is the most significant, and all sort ascending.
    ranks = (blocks.tokens[chosen], -blocks.used_s[chosen], -blocks.classes[chosen].astype(np.int64))
    chosen = chosen[np.lexsort(ranks)]
    if max_bytes is not None:
        chosen = chosen[np.cumsum(blocks.sizes[chosen]) <= max_bytes]
    return chosen


def _raise_parents(blocks: BlockColumns, is_wanted: NDArray[np.bool_]) -> None:
    """Give each parent at least the class and the time of use of its children, from the end of prompts on."""
    order = np.argsort(blocks.hashes)
    at = np.searchsorted(blocks.hashes, blocks.parents, sorter=order)
    at[at == len(order)] = 0
    parents = order[at] if len(order) else at
    has_parent = (blocks.parents != NO_PARENT) & (blocks.hashes[parents] == blocks.parents)
    children = has_parent.nonzero()[0]
    children = children[np.argsort(-blocks.tokens[children], kind="stable")]
    ends = (np.diff(blocks.tokens[children]) != 0).nonzero()[0] + 1
    for level in np.split(children, ends):
        above = parents[level]
        np.maximum.at(blocks.classes, above, blocks.classes[level])
        np.maximum.at(blocks.used_s, above, blocks.used_s[level])
        np.logical_or.at(is_wanted, above, is_wanted[level])
