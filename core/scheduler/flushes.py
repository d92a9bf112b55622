"""Flushes: copies of the pool's blocks to a tier for an operator, beside the engine.

A flush submits blocks as cascades, those at the beginning of prompts first, so that a tier that is too small for all
keeps what most prompts share. Its driver takes a batch, has recovered blocks of it verified, and submits it, until
all blocks were submitted, or the flush was ended. Slots are pinned in batches only, and compared by generation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.groups import GroupLayout
from kvferry.core.keys import RequestFilter, RequestIdentity, group_of
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import AfterPin
from kvferry.core.scheduler.cascades import Cascades
from kvferry.core.tiers.client import TierClient
from kvferry.core.transfers import NO_SLOTS, Slots

_MAX_HELD_SHARE = 8
"""Flushes hold at most an eighth of the slots."""
_BATCH_BLOCKS = 128
_BATCH_BYTES = 64 << 20
_MAX_JOBS = 2
"""Open jobs of a flush: the tier has work while the next batch is chosen."""
_MAX_TRIES = 3
"""Passes over what was not stored, and jobs in a row without a stored block after which a flush fails."""
_FIRST_SHARE = 8
"""A tier with a limit and no block, so that the space of one is not known, is given this part of its limit at first."""

_NO_TIMES = np.zeros(0)

AllowedNames = Callable[[RequestIdentity], Collection[str] | None]
"""Returns the names of the tiers that the policy of a request allows now; None: all."""


class FlushState(StrEnum):
    """State of a flush."""

    RUNNING = "running"
    DONE = "done"
    CANCELED = "canceled"
    RESET = "reset"
    FAILED = "failed"


class FlushRefused(Exception):
    """A flush cannot begin. The message names the tier, the problem and what to do."""


class FlushBlocks(NamedTuple):
    """Blocks of the pool as columns of one length. A slot that was reused since has a higher generation.

    `tokens` is where each begins in its prompt, `used_s` when it was used last.
    """

    slots: Slots = NO_SLOTS
    generations: NDArray[np.int64] = NO_SLOTS
    sizes: NDArray[np.int64] = NO_SLOTS
    tokens: NDArray[np.int64] = NO_SLOTS
    used_s: NDArray[np.float64] = _NO_TIMES

    def select(self, which: slice | NDArray[np.bool_] | NDArray[np.int64]) -> FlushBlocks:
        """Return some of the blocks."""
        slots, generations, sizes, tokens, used_s = self
        return FlushBlocks(slots[which], generations[which], sizes[which], tokens[which], used_s[which])


@dataclass(slots=True, eq=False)
class Flush:
    """One flush of one tier. It changes under the manager lock."""

    client: TierClient
    match: RequestFilter
    began_s: float
    state: FlushState = FlushState.RUNNING
    reason: str | None = None
    """Why it failed, or why it left blocks out."""
    ended_s: float | None = None
    num_blocks: int = 0
    """Blocks that it was to copy."""
    blocks: FlushBlocks = FlushBlocks()  # noqa: RUF009 - immutable
    """Those of them that are still to be taken in this pass, in this order."""
    not_stored: list[FlushBlocks] = field(default_factory=list)
    """What was taken in this pass and was not stored."""
    num_passes: int = 1
    num_stored: int = 0
    """Blocks that the tier has, those included that it had already."""
    num_left: int = 0
    """Blocks that are not copied: they have left the pool, are corrupt, were not stored, or do not fit."""
    num_jobs: int = 0
    num_held: int = 0
    """Slots of batches that were taken and have not ended."""
    num_failing: int = 0
    """Jobs in a row without a stored block."""

    @property
    def is_running(self) -> bool:
        """Whether blocks are to be submitted, or are under way."""
        return self.state is FlushState.RUNNING


class Flushes:
    """Flushes of the tiers, at most one at a time of each. Methods acquire the manager lock. Thread: not the engine's.

    `end_by_reset`, `forget` and `abandon` require the manager lock to be held.
    """

    def __init__(
        self,
        manager: OffloadManager,
        layout: GroupLayout,
        cascades: Cascades,
        clients: Sequence[TierClient],
    ) -> None:
        self._manager = manager
        self._layout = layout
        self._cascades = cascades
        self._clients = clients
        self._latest: dict[str, Flush] = {}
        self._holding: list[Flush] = []
        """Flushes that are running, or hold slots."""

    @property
    def num_held(self) -> int:
        """Number of slots that flushes hold."""
        return sum(flush.num_held for flush in self._holding)

    @property
    def max_held(self) -> int:
        """The most slots that flushes hold."""
        return max(self._manager.num_slots // _MAX_HELD_SHARE, 1)

    def latest(self, name: str) -> Flush | None:
        """Return the flush of a tier that is running or was the latest, None without one."""
        with self._manager.lock:
            return self._latest.get(name)

    # --- begin ------------------------------------------------------------------------------------------------------

    def begin(self, name: str, match: RequestFilter, now_s: float) -> Flush:
        """Register a flush, for which `choose` and the driver's calls follow.

        Raises:
            ValueError: There is no such tier.
            FlushRefused: The tier is being flushed, or cannot be used.
        """
        with self._manager.lock:
            client = next((client for client in self._clients if client.name == name), None)
            if client is None:
                raise ValueError(f"there is no tier called {name}")
            latest = self._latest.get(name)
            if latest is not None and latest.is_running:
                raise FlushRefused(f"tier {name} is being flushed: wait for its end, or end it with DELETE")
            problem = self._problem_of(client)
            if problem is not None:
                raise FlushRefused(problem)
            flush = self._latest[name] = Flush(client, match, now_s)
            self._holding.append(flush)
            return flush

    def _problem_of(self, client: TierClient) -> str | None:
        """Return why a tier cannot be flushed now, with what to do."""
        if not client.is_enabled:
            return f"tier {client.name} is disabled: enable it first"
        if not client.is_usable or client.counts()[0].unavailable:
            texts = "; ".join(client.health()) or f"tier {client.name} is not used"
            return f"{texts}: flush it once it works"
        return None

    def choose(self, flush: Flush, names_of: AllowedNames) -> int:
        """Choose the blocks of a flush, in their order, as many as the tier's limit allows; return their number.

        Acquires the manager lock for each batch of slots.
        """

        @cache
        def may_copy(origin: RequestIdentity) -> bool:
            names = names_of(origin) if flush.match.matches_names(origin) else ()
            return names is None or flush.client.name in names

        table = self._manager.table
        parts = [self._read(start, flush, may_copy) for start in range(0, table.end_slot, table.batch_slots)]
        blocks = _join(parts)
        order = np.lexsort((-blocks.used_s, blocks.tokens))
        with self._manager.lock:
            max_bytes = flush.client.counts()[0].max_bytes
            if max_bytes:
                order = order[: int(np.searchsorted(np.cumsum(blocks.sizes[order]), max_bytes, side="right"))]
            if flush.is_running:
                flush.blocks, flush.num_blocks = blocks.select(order), len(order)
            return flush.num_blocks

    def _read(self, start: int, flush: Flush, may_copy: Callable[[RequestIdentity], bool]) -> FlushBlocks:
        """Return the blocks to copy of a batch of slots."""
        table = self._manager.table
        with self._manager.lock:
            slots = table.ready_in(start, min(start + table.batch_slots, table.end_slot))
            slots = slots[self._cascades.allowed.allow(flush.client.name, slots)]
            rows = table.rows(slots)
        is_wanted = np.array([may_copy(origin) for origin in rows.origins], dtype=np.bool_)
        records = rows.records[is_wanted]
        slot_tokens = np.array([group.slot_tokens for group in self._layout.groups], dtype=np.int64)
        groups = np.array([group_of(key) for key in rows.keys], dtype=np.int64)[is_wanted]
        return FlushBlocks(
            slots[is_wanted],
            records["generation"],
            records["size"],
            records["position"] * slot_tokens[groups],
            np.maximum(records["stored_s"], records["hit_s"]),
        )

    # --- work of the driver -----------------------------------------------------------------------------------------

    def take(self, flush: Flush, now_s: float) -> FlushBlocks | None:
        """Return the next batch, which `submit` must be called with; None if there is none now.

        Ends the flush if the tier cannot be used any more, and if nothing is left to submit or under way.
        """
        with self._manager.lock:
            if not flush.is_running:
                return None
            problem = self._problem_of(flush.client)
            if problem is None and flush.num_failing >= _MAX_TRIES:
                texts = "; ".join(flush.client.health()) or f"tier {flush.client.name} did not store them"
                problem = f"no block of {_MAX_TRIES} jobs in a row was stored: {texts}"
            if problem is not None:
                self._end(flush, FlushState.FAILED, now_s, problem)
                return None
            num_open = flush.num_jobs
            num_fitting = self._num_fitting(flush)
            if num_fitting <= 0 and not num_open:
                flush.reason = f"tier {flush.client.name} is full: its max_bytes is reached"
                flush.num_left = flush.num_blocks - flush.num_stored
                self._end(flush, FlushState.DONE, now_s, flush.reason)
                return None
            if not len(flush.blocks.slots) and not num_open:
                if not flush.not_stored:
                    self._end(flush, FlushState.DONE, now_s, None)
                    return None
                flush.blocks = _join(flush.not_stored)
                flush.not_stored.clear()
                flush.num_passes += 1
            max_blocks = min(_BATCH_BLOCKS, self.max_held - self.num_held, self._cascades.num_allowed, num_fitting)
            ends = np.cumsum(flush.blocks.sizes[: max(max_blocks, 0)])
            if num_open >= _MAX_JOBS or not len(ends):
                return None
            count = max(int(np.searchsorted(ends, _BATCH_BYTES, side="right")), 1)
            batch, flush.blocks = flush.blocks.select(slice(count)), flush.blocks.select(slice(count, None))
            flush.num_held += count
            return batch

    def _num_fitting(self, flush: Flush) -> int:
        """Return how many further blocks a tier can hold beside those that the flush has given to it."""
        counts = flush.client.counts()[0]
        if not counts.max_bytes:
            return _BATCH_BLOCKS
        if not counts.blocks:
            share = counts.max_bytes // (_FIRST_SHARE * self._manager.slot_bytes)
            return 0 if flush.num_jobs else max(share, 1)
        return int(counts.max_bytes * counts.blocks / max(counts.bytes, 1)) - flush.num_stored - flush.num_held

    def unverified(self, batch: FlushBlocks) -> Slots:
        """Return those of a batch's slots that were recovered and not verified since."""
        with self._manager.lock:
            return self._manager.unverified(batch.select(self._are_here(batch)).slots)

    def submit(self, flush: Flush, batch: FlushBlocks, now_s: float) -> None:
        """Submit a batch to the tier. Blocks that have left the pool or are unverified are left out."""
        manager = self._manager
        with manager.lock:
            flush.num_held -= len(batch.slots)
            if not flush.is_running:
                self._forget_ended(flush)
                return
            here = batch.select(self._are_here(batch))
            blocks = here.select(~np.isin(here.slots, manager.unverified(here.slots)))
            flush.num_left += len(batch.slots) - len(blocks.slots)
            if not len(blocks.slots):
                return
            flush.num_jobs += 1
            flush.num_held += len(blocks.slots)

            def end(stored: NDArray[np.bool_] | None) -> None:
                self._end_job(flush, blocks, NO_SLOTS if stored is None else submitted[stored])

            submitted = self._cascades.submit(flush.client, blocks.slots, now_s, end, AfterPin.UNCHANGED)
            if not len(submitted):
                end(None)

    def _end_job(self, flush: Flush, blocks: FlushBlocks, stored: Slots) -> None:
        """Count the blocks of a job that has ended, and have those tried again that were not stored."""
        flush.num_jobs -= 1
        flush.num_held -= len(blocks.slots)
        flush.num_stored += len(stored)
        flush.num_failing = 0 if len(stored) else flush.num_failing + 1
        failed = blocks.select(~np.isin(blocks.slots, stored))
        if flush.is_running and len(failed.slots):
            if flush.num_passes < _MAX_TRIES:
                flush.not_stored.append(failed)
            else:
                flush.num_left += len(failed.slots)
        self._forget_ended(flush)

    def _are_here(self, blocks: FlushBlocks) -> NDArray[np.bool_]:
        table = self._manager.table
        here: NDArray[np.bool_] = table.is_ready(blocks.slots) & (table.generations[blocks.slots] == blocks.generations)
        return here

    # --- end --------------------------------------------------------------------------------------------------------

    def cancel(self, flush: Flush, now_s: float) -> bool:
        """End a flush; jobs under way end as others. Returns False if it has ended before."""
        with self._manager.lock:
            was_running = flush.is_running
            self._end(flush, FlushState.CANCELED, now_s, None)
            return was_running

    def fail(self, flush: Flush, reason: str, now_s: float) -> None:
        """End a flush after an error of its driver."""
        with self._manager.lock:
            self._end(flush, FlushState.FAILED, now_s, reason)

    def end_by_reset(self, clients: Sequence[TierClient] | None, now_s: float) -> None:
        """End the flushes of some tiers, None for all: the pool or these tiers are reset.

        Requires: manager lock held.
        """
        for flush in list(self._holding):
            if clients is None or flush.client in clients:
                self._end(flush, FlushState.RESET, now_s, None)

    def forget(self, name: str, now_s: float) -> None:
        """End and forget the flush of a tier that was detached. Requires: manager lock held."""
        flush = self._latest.pop(name, None)
        if flush is not None:
            self._end(flush, FlushState.FAILED, now_s, f"tier {name} was detached")

    def abandon(self, now_s: float) -> None:
        """End all flushes, after an exception that may have lost results of their jobs. Requires: manager lock held."""
        for flush in list(self._holding):
            self._end(flush, FlushState.FAILED, now_s, "an unexpected error ended it: see the log, then repeat it")
        self._holding.clear()

    def _end(self, flush: Flush, state: FlushState, now_s: float, reason: str | None) -> None:
        if flush.is_running:
            flush.state, flush.ended_s, flush.reason = state, now_s, reason
            flush.not_stored.clear()
            self._forget_ended(flush)

    def _forget_ended(self, flush: Flush) -> None:
        if not flush.is_running and not flush.num_held and flush in self._holding:
            self._holding.remove(flush)


def _join(parts: Sequence[FlushBlocks]) -> FlushBlocks:
    return FlushBlocks(*map(np.concatenate, zip(*parts, strict=True)))
