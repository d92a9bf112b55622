"""Flushes: copies of the pool's blocks to a tier for an operator, beside the engine.

A flush submits blocks as cascades, those at the beginning of prompts first, so that a tier that is too small for all
keeps what most prompts share. Its driver takes a batch, has recovered blocks of it verified, and submits it, until
all blocks were submitted, or the flush was ended. Slots are pinned in batches only, and compared by generation.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
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
"""Tries of a block, and jobs in a row without a stored block after which a flush fails."""
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
class FlushBatch:
    """Blocks that are submitted together, and how often they were tried before."""

    blocks: FlushBlocks
    num_tries: int = 0


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
    blocks: FlushBlocks = FlushBlocks()  # noqa: RUF009 - immutable
    """What it copies, in this order."""
    num_stored: int = 0
    """Blocks that the tier has, those included that it had already."""
    num_left: int = 0
    """Blocks that are not copied: they have left the pool, are corrupt, were not stored, or do not fit."""
    num_taken: int = 0
    """Blocks of `blocks` that were in a batch."""
    repeated: list[FlushBatch] = field(default_factory=list)
    """What was not stored, and is tried again."""
    num_jobs: int = 0
    num_held: int = 0
    """Slots of batches that were taken and have not ended."""
    num_failing: int = 0
    """Jobs in a row without a stored block."""

    @property
    def is_running(self) -> bool:
        """Whether blocks are to be submitted, or are under way."""
        return self.state is FlushState.RUNNING

    @property
    def num_blocks(self) -> int:
        """Number of blocks that it was to copy."""
        return len(self.blocks.slots)


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
        allowed: dict[RequestIdentity, bool] = {}

        def may_copy(origin: RequestIdentity) -> bool:
            if origin not in allowed:
                names = names_of(origin) if flush.match.matches_names(origin) else ()
                allowed[origin] = names is None or flush.client.name in names
            return allowed[origin]

        table = self._manager.table
        parts = [self._read(start, flush, may_copy) for start in range(0, table.end_slot, table.batch_slots)]
        blocks = FlushBlocks(*map(np.concatenate, zip(*parts, strict=True)))
        order = np.lexsort((-blocks.used_s, blocks.tokens))
        with self._manager.lock:
            max_bytes = flush.client.counts()[0].max_bytes
            if max_bytes:
                order = order[: int(np.searchsorted(np.cumsum(blocks.sizes[order]), max_bytes, side="right"))]
            if flush.is_running:
                flush.blocks = blocks.select(order)
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

    def take(self, flush: Flush, now_s: float) -> FlushBatch | None:
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
                flush.num_left += flush.num_blocks - flush.num_stored - flush.num_left
                self._end(flush, FlushState.DONE, now_s, flush.reason)
                return None
            max_blocks = min(_BATCH_BLOCKS, self.max_held - self.num_held, num_fitting)
            if num_open >= _MAX_JOBS or max_blocks <= 0:
                return None
            batch = self._next_batch(flush, max_blocks)
            if batch is not None:
                flush.num_held += len(batch.blocks.slots)
            elif not num_open:
                self._end(flush, FlushState.DONE, now_s, None)
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

    def _next_batch(self, flush: Flush, max_blocks: int) -> FlushBatch | None:
        if flush.repeated:
            batch = flush.repeated.pop(0)
            rest = batch.blocks.select(slice(max_blocks, None))
            if len(rest.slots):
                flush.repeated.insert(0, FlushBatch(rest, batch.num_tries))
            return FlushBatch(batch.blocks.select(slice(max_blocks)), batch.num_tries)
        start = flush.num_taken
        ends = np.cumsum(flush.blocks.sizes[start : start + max_blocks])
        count = max(int(np.searchsorted(ends, _BATCH_BYTES, side="right")), min(1, len(ends)))
        flush.num_taken += count
        return FlushBatch(flush.blocks.select(slice(start, start + count))) if count else None

    def unverified(self, batch: FlushBatch) -> Slots:
        """Return those of a batch's slots that were recovered and not verified since."""
        with self._manager.lock:
            return self._manager.unverified(batch.blocks.select(self._are_here(batch.blocks)).slots)

    def submit(self, flush: Flush, batch: FlushBatch, now_s: float) -> None:
        """Submit a batch to the tier. Blocks that have left the pool or are unverified are left out."""
        manager, cascades, blocks = self._manager, self._cascades, batch.blocks
        with manager.lock:
            flush.num_held -= len(blocks.slots)
            if not flush.is_running:
                self._forget_ended(flush)
                return
            here = blocks.select(self._are_here(blocks))
            here = here.select(~np.isin(here.slots, manager.unverified(here.slots)))
            flush.num_left += len(blocks.slots) - len(here.slots)
            blocks = here.select(slice(cascades.num_allowed))
            rest = here.select(slice(cascades.num_allowed, None))
            if len(rest.slots):
                # Other cascades hold enough of the pool.
                flush.repeated.insert(0, FlushBatch(rest, batch.num_tries))
            if not len(blocks.slots):
                return
            flush.num_jobs += 1
            flush.num_held += len(blocks.slots)

            def end(stored: NDArray[np.bool_] | None) -> None:
                self._end_job(flush, FlushBatch(blocks, batch.num_tries + 1), stored)

            if not len(cascades.submit(flush.client, blocks.slots, now_s, end, AfterPin.UNCHANGED)):
                end(None)

    def _end_job(self, flush: Flush, batch: FlushBatch, ok: NDArray[np.bool_] | None) -> None:
        """Count the blocks of a job that has ended, and have those tried again that were not stored."""
        count = len(batch.blocks.slots)
        flush.num_jobs -= 1
        flush.num_held -= count
        if ok is None or len(ok) != count:
            ok = np.zeros(count, dtype=np.bool_)
        num_stored = int(np.count_nonzero(ok))
        flush.num_stored += num_stored
        flush.num_failing = 0 if num_stored else flush.num_failing + 1
        failed = batch.blocks.select(~ok)
        if flush.is_running and len(failed.slots):
            if batch.num_tries < _MAX_TRIES:
                flush.repeated.append(FlushBatch(failed, batch.num_tries))
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
            flush.repeated.clear()
            self._forget_ended(flush)

    def _forget_ended(self, flush: Flush) -> None:
        if not flush.is_running and not flush.num_held and flush in self._holding:
            self._holding.remove(flush)
