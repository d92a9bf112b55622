"""A warm start: the headers of a kept pool say which blocks there are, the database how recent they are and whose.

Everything is done in bulk, before anything is served. With the database lost the pool is recovered all the same.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvferry.app.settings import Settings
from kvferry.app.settings.kinds import PoolKind
from kvferry.app.store import MetadataStore, StoreUnavailable
from kvferry.app.store.slot_rows import SlotColumns
from kvferry.core.keys import RequestIdentity
from kvferry.core.policy import PRIORITY_CLASS, Priority
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.pool.records import KeptBlocks
from kvferry.core.pool.recovery import begin_verification, end_verification, import_blocks
from kvferry.core.transfers import Slots
from kvferry.cuda_ops.persistent.format import PoolShape
from kvferry.cuda_ops.persistent.headers import SlotHeaders
from kvferry.cuda_ops.persistent.lock import PoolRefused
from kvferry.cuda_ops.persistent.pool_file import KeptFile
from kvferry.cuda_ops.persistent.record import recover_slots
from kvferry.cuda_ops.persistent.recovery import DropReason, KeptSlots
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from kvferry.cuda_ops.pool.extents import PoolPlan
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.limits import largest_file_bytes, largest_memory_bytes

_log = logging.getLogger(__name__)

_NOBODY = RequestIdentity("")


def nobody_is_told(stage: str) -> None:
    """Nobody asks how far a start is."""


@dataclass(frozen=True, slots=True)
class WarmStart:
    """What a restart began with. `known` of the `recovered` slots had a row; the others enter coldest.

    `foreign` says in which field a pool that was dropped as a whole was not the one wanted, and None if it was.
    """

    recovered: int
    known: int
    dropped: dict[str, int]
    foreign: str | None
    seconds: float

    def __str__(self) -> str:
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.dropped.items())) or "none"
        return (
            f"{self.recovered:,} slots of an earlier process recovered in {self.seconds:.2f} s, {self.known:,} of them "
            f"with their history; dropped: {dropped}"
        )


def largest_pool_bytes(settings: Settings) -> int:
    """What the memory, or the disk, that a pool of this kind lives in could hold at most."""
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
    """The file of the pool that outlives this process, None for one that does not. Raises `ValueError`.

    `slot_bytes` is one rank's part of a slot. To `join` is for processes of an engine but the first: see `KeptFile`.
    Then raises `FileNotFoundError`, too.
    """
    path = pool_file(settings, name)
    if path is None:
        return None
    if fingerprint.get("revision", "none needed") is None:
        raise PoolRefused(
            f"KVFERRY_POOL_KIND={settings.pool_kind.value}: nothing says which weights the model "
            f"{fingerprint.get('model')} "
            "has, so a kept pool could serve another revision's blocks; set KVFERRY_POOL_KIND=pinned, or the model "
            "to a local "
            "folder"
        )
    shape = PoolShape(plan.num_slots, slot_bytes, num_ranks, plan.extent_slots, plan.max_slots)
    try:
        return KeptFile(path, shape, fingerprint, join=join)
    except OSError as error:
        if join and isinstance(error, FileNotFoundError):
            raise
        raise PoolRefused(
            f"KVFERRY_POOL_KIND={settings.pool_kind.value}: the pool {path} cannot be opened: "
            f"{error.strerror or error}; make "
            "its folder writable, or set KVFERRY_POOL_PATH to another"
        ) from error


def pool_file(settings: Settings, name: str) -> Path | None:
    """Where the pool of an engine is kept."""
    if settings.pool_kind is PoolKind.SHM:
        return SHARED_MEMORY / f"kvferry-{name}.pool"
    if settings.pool_kind is PoolKind.FILE and settings.pool_path is not None:
        return settings.pool_path / f"{name}.pool"
    return None


def begin_warm(
    file: KeptFile,
    pool: HostPool,
    store: MetadataStore,
    manager: OffloadManager,
    stopping: threading.Event,
    note: Callable[[str], object],
) -> tuple[WarmStart, BootVerification]:
    """A warm start as an engine begins; after another boot, what came back is verified beside it, until `stopping`.

    `note` is told what is being done.
    """
    started = warm_start(file, store, manager, note)
    _log.info("%s: %s", file.path, started)
    headers = [SlotHeaders(file, pool, rank) for rank in range(pool.num_ranks)]
    verification = BootVerification(file, headers, manager)
    if file.found.other_boot:
        threading.Thread(target=verification.run, args=(stopping,), name="kvferry-verify", daemon=True).start()
    return started, verification


def warm_start(
    file: KeptFile, store: MetadataStore, manager: OffloadManager, note: Callable[[str], object] = nobody_is_told
) -> WarmStart:
    """Give an empty manager what an earlier process left. What holds no more is dropped, counted, and emptied.

    `note` is told what is being done.
    """
    started_s = time.monotonic()
    note(f"recovering the pool: reading {file.shape.num_slots:,} headers and their rows")
    with ThreadPoolExecutor(1, "kvferry-rows") as threads:
        # The database works while the headers are looked at, and a little longer.
        reading = threads.submit(_read_rows, file, store)
        kept = recover_slots(file)
        rows = reading.result()
    blocks, stale, num_known = _join(kept, rows, file.shape.num_slots, time.time())
    note(f"recovering the pool: taking over {len(kept.slots):,} slots, {num_known:,} of them with their history")
    import_blocks(manager, blocks, stale)
    dropped = {reason.value: count for reason, count in kept.dropped.items()}
    foreign_keys = file.take_foreign_keys()
    if foreign_keys:
        manager.history.record_foreign(foreign_keys)
        dropped[DropReason.FOREIGN.value] = len(foreign_keys)
    return WarmStart(len(kept.slots), num_known, dropped, file.found.dropped, time.monotonic() - started_s)


def _read_rows(file: KeptFile, store: MetadataStore) -> SlotColumns:
    """What history has of the pool's slots: nothing if it cannot be read, which is logged."""
    try:
        return store.read_slots() if file.found.is_kept else SlotColumns.none()
    except (StoreUnavailable, ValueError) as error:
        _log.warning("the pool is recovered without its history, which cannot be read: %s", error)
        return SlotColumns.none()


def _join(kept: KeptSlots, rows: SlotColumns, num_slots: int, now_s: float) -> tuple[KeptBlocks, Slots, int]:
    """Blocks with what their rows add, the latest used first; the slots whose row is to be written or deleted; and how
    many had a row: one of the same slot, key and generation."""
    count = len(kept.slots)
    place = np.full(num_slots, -1)
    place[kept.slots] = np.arange(count)
    inside = (rows.slots >= 0) & (rows.slots < num_slots)
    places = np.full(len(rows.slots), -1)
    places[inside] = place[rows.slots[inside]]
    fits = places >= 0
    fits[fits] = kept.generations[places[fits]] == rows.generations[fits]
    candidates = fits.nonzero()[0]
    keys = np.fromiter(kept.keys, dtype=object, count=count)
    fits[candidates] = rows.keys[candidates] == keys[places[candidates]]
    at = places[fits]
    positions, hits = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    stored_s, hit_s = np.zeros(count), np.zeros(count)
    positions[at], hits[at] = rows.positions[fits], rows.hits[fits]
    stored_s[at], hit_s[at] = rows.stored_s[fits], rows.hit_s[fits]
    origins = np.fromiter([_NOBODY, *rows.origins], dtype=object)
    origin_numbers = np.zeros(count, dtype=np.int64)
    origin_numbers[at] = rows.origin_numbers[fits] + 1
    classes = np.full(count, PRIORITY_CLASS[Priority.NORMAL], dtype=np.uint8)
    classes[at] = rows.classes[fits]
    is_known = np.zeros(count, dtype=np.bool_)
    is_known[at] = True
    is_stale = np.zeros(num_slots, dtype=np.bool_)
    is_stale[rows.slots[inside & ~fits]] = True
    is_stale[kept.slots[~is_known]] = True
    # Of blocks that were used together the first of a prefix counts as the latest, so that its end goes first.
    order = np.lexsort((kept.slots, -kept.generations, positions, -np.maximum(stored_s, hit_s)))
    # What nobody knows the age of is at least as old as this process, and that is what history will say.
    stored_s[stored_s <= 0] = now_s
    blocks = KeptBlocks(
        slots=kept.slots[order],
        keys=keys[order].tolist(),
        generations=kept.generations[order],
        sizes=kept.sizes[order],
        positions=positions[order],
        origins=origins[origin_numbers[order]].tolist(),
        stored_s=stored_s[order],
        hit_s=hit_s[order],
        hits=hits[order],
        classes=classes[order],
    )
    return blocks, is_stale.nonzero()[0], len(at)


class BootVerification:
    """After another boot, a look at every recovered slot, beside the engine; `reason` says how far it is."""

    def __init__(self, file: KeptFile, headers: Sequence[SlotHeaders], manager: OffloadManager) -> None:
        """`headers` are those of each rank."""
        self._file = file
        self._headers = headers
        self._manager = manager
        self._total = manager.counts().unverified
        self._done = not file.found.other_boot

    def reason(self) -> str | None:
        """Why this process is not ready yet, as far as it is this."""
        if self._done:
            return None
        left = self._manager.counts().unverified
        return f"verifying the pool after the machine was started anew: {self._total - left:,} of {self._total:,} slots"

    def run(self, stopping: threading.Event) -> None:
        """Verify until there is nothing left, or `stopping`. On a thread of its own."""
        start = 0
        num_bad = 0
        while not self._done and not stopping.is_set():
            pin = begin_verification(self._manager, start)
            if not len(pin):
                self._file.note_boot()
                self._done = True
                _log.info("all %s slots are verified; %s were bad and are dropped", f"{self._total:,}", f"{num_bad:,}")
                return
            try:
                bad = np.unique(np.concatenate([headers.verify(pin.slots) for headers in self._headers]))
            except Exception:  # noqa: BLE001 - what cannot be looked at goes, and the rest is looked at
                _log.exception("%d slots cannot be verified, and are dropped", len(pin))
                bad = pin.slots
            end_verification(self._manager, pin, bad, time.time())
            num_bad += len(bad)
            start = int(pin.slots[-1]) + 1
