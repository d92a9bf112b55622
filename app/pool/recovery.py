"""Recovery of a kept pool after a restart: headers define its blocks, the database adds their history.

All blocks are recovered in bulk before requests are served. Without the database they are recovered without history.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from kvferry.app.common.threads import WatchedThread
from kvferry.app.settings import Settings
from kvferry.app.settings.fields import PoolKind
from kvferry.app.store import DatabaseUnavailable, MetadataStore
from kvferry.app.store.slot_rows import SlotColumns
from kvferry.core.counters import gauge
from kvferry.core.errors import StartError
from kvferry.core.keys import RequestIdentity
from kvferry.core.policy import PRIORITY_CLASS, Priority
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.pins import Pin
from kvferry.core.pool.records import RecoveredBlocks
from kvferry.core.pool.recovery import begin_verification, begin_verification_of, end_verification, import_blocks
from kvferry.core.transfers import Slots
from kvferry.cuda_ops.persistent.format import PoolShape
from kvferry.cuda_ops.persistent.header_writer import recover_slots
from kvferry.cuda_ops.persistent.headers import SlotHeaders
from kvferry.cuda_ops.persistent.pool_file import FoundPool, KeptFile, check_pool_file
from kvferry.cuda_ops.persistent.pool_files import find_pools, pool_path
from kvferry.cuda_ops.persistent.recovery import DropReason, RecoveredSlots
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from kvferry.cuda_ops.pool.extents import PoolPlan
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.limits import largest_file_bytes, largest_memory_bytes

_log = logging.getLogger(__name__)

_UNKNOWN = RequestIdentity("")


@dataclass(frozen=True, slots=True)
class WarmStart:
    """Account of a kept pool's slots as a start found them: `slots` are `recovered`, `dropped` or `empty`.

    `known` of the `recovered` slots had a row in the database.
    """

    recovered: int = gauge("Slots of an earlier process recovered at start", "recovered_slots")
    known: int = gauge("Recovered slots with history; the others are the first to be evicted")
    dropped: dict[str, int] = gauge(
        "Slots of an earlier process not recovered at start",
        "recovery_dropped_slots",
        label=("reason", ""),
        factory=dict,
    )
    foreign: str | None = field(
        default=None,
        metadata={
            "description": "field in which a pool that was dropped as a whole differs from the one wanted; null if it "
            "was kept"
        },
    )
    seconds: float = gauge("Time that the recovery took at start", "recovery_seconds", default=0.0)
    slots: int = gauge("Slots that the pool's file had at start", "recovery_found_slots")
    empty: int = gauge("Slots without a block in the pool's file at start", "recovery_empty_slots")
    is_new: bool = field(
        default=False, metadata={"description": "whether the pool was created at this start: no file had its name"}
    )

    def __str__(self) -> str:
        """Describe the account."""
        if self.is_new:
            return "new pool: there was no file of an earlier process with this name"
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.dropped.items()) if count) or "none"
        return (
            f"{self.recovered:,} slots of an earlier process recovered in {self.seconds:.2f} s, {self.known:,} of them "
            f"with their history; dropped: {dropped}; empty: {self.empty:,}; in all: {self.slots:,}"
            + ("" if self.foreign is None else "; the pool was dropped as a whole")
        )

    def opened(self, found: FoundPool, others: Mapping[DropReason, int]) -> WarmStart:
        """Return this account for all slots of the file as it was found, with `others` dropped when it was opened."""
        dropped = Counter(self.dropped) + Counter({reason.value: count for reason, count in others.items()})
        empty = found.num_slots - self.recovered - sum(dropped.values())
        return replace(
            self, dropped=dict(dropped), foreign=found.dropped, slots=found.num_slots, empty=empty, is_new=found.is_new
        )


def largest_pool_bytes(settings: Settings) -> int:
    """Return the size of the memory or disk that a pool of this kind is in."""
    path = pool_file(settings, "any")
    if path is None:
        return largest_memory_bytes()
    of_file = largest_file_bytes(path.parent)
    return of_file if settings.pool_kind is PoolKind.FILE else min(of_file, largest_memory_bytes())


def open_kept_file(
    settings: Settings,
    name: str,
    fingerprint: Mapping[str, object],
    plan: PoolPlan,
    slot_bytes: int,
    num_ranks: int = 1,
    *,
    join: bool = False,
) -> KeptFile | None:
    """Open the file of a kept pool; None for a pool that does not outlive this process.

    Args:
        slot_bytes: One rank's part of a slot.
        join: For all processes of an engine but the first: see `KeptFile`.

    Raises:
        StartError: The pool cannot be used.
        FileNotFoundError: There is no file to `join`.
    """
    path = pool_file(settings, name)
    if not join:
        _log_other_pools(SHARED_MEMORY, path)
    if path is None:
        return None
    if fingerprint.get("revision", "none needed") is None:
        raise StartError(
            f"KVFERRY_POOL_KIND={settings.pool_kind.value}: the revision of the model {fingerprint.get('model')} is "
            "unknown, so a kept pool could serve blocks of another revision; set KVFERRY_POOL_KIND=pinned, or the "
            "model to a local folder"
        )
    shape = PoolShape(plan.num_slots, slot_bytes, num_ranks, plan.extent_slots, plan.max_slots)
    try:
        return KeptFile(path, shape, fingerprint, join=join)
    except OSError as error:
        if join and isinstance(error, FileNotFoundError):
            raise
        raise _cannot_open(settings, path, error) from error


def check_kept_file(settings: Settings, name: str) -> None:
    """Raise `StartError` for a kept pool of this engine that another process or user has; create nothing."""
    path = pool_file(settings, name)
    if path is not None and os.path.lexists(path):
        try:
            check_pool_file(path)
        except OSError as error:
            raise _cannot_open(settings, path, error) from error


def _log_other_pools(folder: Path, own: Path | None) -> None:
    """Log the space that pools of other engine names take in a folder, but for those in use."""
    others = [pool for pool in find_pools(folder) if pool.path != own and not pool.holders]
    if others:
        taken_bytes = sum(pool.num_bytes for pool in others)
        _log.info(
            "other pools, not in use: %d take %s bytes in %s: kvferry pools", len(others), f"{taken_bytes:,}", folder
        )


def _cannot_open(settings: Settings, path: Path, error: OSError) -> StartError:
    return StartError(
        f"KVFERRY_POOL_KIND={settings.pool_kind.value}: the pool {path} cannot be opened: "
        f"{error.strerror or error}; make its folder writable, or set KVFERRY_POOL_PATH to another"
    )


def pool_file(settings: Settings, name: str) -> Path | None:
    """Return the path of an engine's kept pool; None for a pool that is not kept."""
    if settings.pool_kind is PoolKind.SHM:
        return pool_path(SHARED_MEMORY, name)
    if settings.pool_kind is PoolKind.FILE and settings.pool_path is not None:
        return pool_path(settings.pool_path, name)
    return None


def recover_pool(
    file: KeptFile,
    pool: HostPool,
    store: MetadataStore,
    manager: OffloadManager,
    stopping: threading.Event,
    on_stage: Callable[[str], object],
) -> tuple[WarmStart, BootVerification]:
    """Recover a kept pool; after a reboot, verify its blocks on a thread until `stopping` is set.

    `on_stage` is called with a description of each stage.
    """
    started = warm_start(file, store, manager, on_stage)
    _log.info("%s: %s", file.path, started)
    headers = [SlotHeaders(file, pool, rank) for rank in range(pool.num_ranks)]
    verification = BootVerification(file, headers, manager, stopping)
    if file.found.other_boot:
        verification.thread.start()
    return started, verification


def warm_start(
    file: KeptFile, store: MetadataStore, manager: OffloadManager, on_stage: Callable[[str], object] = lambda _: None
) -> WarmStart:
    """Recover the blocks of an earlier process into an empty manager. Invalid slots are dropped and counted.

    `on_stage` is called with a description of each stage.
    """
    started_s = time.monotonic()
    on_stage(f"recovering the pool: reading {file.shape.num_slots:,} headers and their rows")
    with ThreadPoolExecutor(1, "kvferry-rows") as threads:
        # In parallel with the headers.
        reading = threads.submit(_read_rows, file, store)
        recovered = recover_slots(file)
        rows = reading.result()
    blocks, stale, num_known = _join(recovered, rows, file.shape.num_slots, time.time())
    on_stage(f"recovering the pool: adding {len(recovered.slots):,} slots, {num_known:,} of them with history")
    import_blocks(manager, blocks, stale)
    foreign_keys = file.take_foreign_keys()
    if foreign_keys:
        manager.history.record_foreign(foreign_keys)
    dropped = {reason.value: count for reason, count in recovered.dropped.items()}
    started = WarmStart(len(recovered.slots), num_known, dropped, seconds=time.monotonic() - started_s)
    return started.opened(file.found, file.num_dropped)


def _read_rows(file: KeptFile, store: MetadataStore) -> SlotColumns:
    """Read the rows of the pool's slots; none if they cannot be read, which is logged."""
    try:
        return store.read_slots() if file.found.is_kept else SlotColumns.none()
    except (DatabaseUnavailable, ValueError) as error:
        _log.warning("pool: recovered without history, which cannot be read: %s", error)
        return SlotColumns.none()


def _join(
    recovered: RecoveredSlots, rows: SlotColumns, num_slots: int, now_s: float
) -> tuple[RecoveredBlocks, Slots, int]:
    """Join blocks with their rows of the same slot, key and generation.

    Returns:
        The blocks, most recently used first; the slots whose row is to be written or deleted; the number of rows used.
    """
    count = len(recovered.slots)
    place = np.full(num_slots, -1)
    place[recovered.slots] = np.arange(count)
    inside = (rows.slots >= 0) & (rows.slots < num_slots)
    places = np.full(len(rows.slots), -1)
    places[inside] = place[rows.slots[inside]]
    fits = places >= 0
    fits[fits] = recovered.generations[places[fits]] == rows.generations[fits]
    candidates = fits.nonzero()[0]
    keys = np.fromiter(recovered.keys, dtype=object, count=count)
    fits[candidates] = rows.keys[candidates] == keys[places[candidates]]
    at = places[fits]
    positions, hits = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    stored_s, hit_s = np.zeros(count), np.zeros(count)
    positions[at], hits[at] = rows.positions[fits], rows.hits[fits]
    # The clock may have been set back, or the rows changed by hand.
    stored_s[at], hit_s[at] = np.minimum(rows.stored_s[fits], now_s), np.clip(rows.hit_s[fits], 0.0, now_s)
    origins = np.fromiter([_UNKNOWN, *rows.origins], dtype=object)
    origin_numbers = np.zeros(count, dtype=np.int64)
    origin_numbers[at] = rows.origin_numbers[fits] + 1
    classes = np.full(count, PRIORITY_CLASS[Priority.NORMAL], dtype=np.uint8)
    classes[at] = rows.classes[fits]
    is_known = np.zeros(count, dtype=np.bool_)
    is_known[at] = True
    is_stale = np.zeros(num_slots, dtype=np.bool_)
    is_stale[rows.slots[inside & ~fits]] = True
    is_stale[recovered.slots[~is_known]] = True
    # Of blocks used at the same time the first of a prefix sorts first, so that the end of a prefix is evicted first.
    order = np.lexsort((recovered.slots, -recovered.generations, positions, -np.maximum(stored_s, hit_s)))
    # A block of unknown age is at least as old as this process.
    stored_s[stored_s <= 0] = now_s
    blocks = RecoveredBlocks(
        slots=recovered.slots[order],
        keys=keys[order].tolist(),
        generations=recovered.generations[order],
        sizes=recovered.sizes[order],
        positions=positions[order],
        origins=origins[origin_numbers[order]].tolist(),
        stored_s=stored_s[order],
        hit_s=hit_s[order],
        hits=hits[order],
        classes=classes[order],
    )
    return blocks, is_stale.nonzero()[0], len(at)


class BootVerification:
    """Verification of recovered slots: of every one after a reboot, on a thread of its own, and of some when asked."""

    def __init__(
        self, file: KeptFile, headers: Sequence[SlotHeaders], manager: OffloadManager, stopping: threading.Event
    ) -> None:
        """`headers` has one entry per rank. The thread ends when all slots are verified, or `stopping` is set."""
        self.thread = WatchedThread("kvferry-verify", self._run, "recovered blocks are not verified")
        self._stopping = stopping
        self._file = file
        self._headers = headers
        self._manager = manager
        self._total = manager.counts().unverified
        self._done = not file.found.other_boot

    def reasons(self) -> list[str]:
        """Return why the process is not ready while slots are verified; empty afterwards."""
        if self._done:
            return []
        verified = self._total - self._manager.counts().unverified
        return [f"verifying the pool after a reboot: {verified:,} of {self._total:,} slots"]

    def _run(self) -> None:
        """Verify all slots, until the process stops."""
        start = 0
        num_bad = 0
        while not self._done and not self._stopping.is_set():
            pin = begin_verification(self._manager, start)
            if not len(pin):
                self._file.record_boot()
                self._done = True
                _log.info(
                    "pool: verified %s slots, dropped %s with a wrong checksum", f"{self._total:,}", f"{num_bad:,}"
                )
                return
            num_bad += self._verify(pin)
            start = int(pin.slots[-1]) + 1

    def verify(self, slots: Slots) -> None:
        """Verify some of the recovered slots ahead of all others, and drop those that are corrupt. Thread: any."""
        pin = begin_verification_of(self._manager, slots)
        if len(pin):
            self._verify(pin)

    def _verify(self, pin: Pin) -> int:
        """Verify pinned slots, drop those that are corrupt, and return their number."""
        try:
            bad = np.unique(np.concatenate([headers.verify(pin.slots) for headers in self._headers]))
        except Exception:  # noqa: BLE001 - these slots are dropped, and the rest is verified
            _log.exception("pool: dropped %d slots that cannot be verified", len(pin))
            bad = pin.slots
        end_verification(self._manager, pin, bad, time.time())
        return len(bad)
