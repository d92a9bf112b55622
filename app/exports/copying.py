"""The work of an export and of an import: batches of bounded size, one after another, on a thread of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from kvferry.app.exports.block_files import ExportedBlocks
from kvferry.app.exports.manifest import (
    HEAD,
    MAX_HEAD_BYTES,
    MAX_PART_BYTES,
    BadExport,
    ExportHead,
    pack_head,
    pack_part,
    part_name,
    part_reader,
    plain_fingerprint,
    unpack_head,
)
from kvferry.app.exports.places import PlaceFiles, PlaceInUse
from kvferry.app.exports.task import Canceled, NoExport, PlaceRefused, Task, TaskConflict, TaskFailed, TaskKind
from kvferry.app.guard import OffloadGuard
from kvferry.app.settings.tiers import ThreadedSettings
from kvferry.app.tiers.block_store import StoreUnavailable
from kvferry.app.tiers.opening import CLOSE_S
from kvferry.app.tiers.shared_state import sharing_problems
from kvferry.app.tiers.threaded import ThreadedTier
from kvferry.app.times import rfc3339
from kvferry.core.keys import Key, RequestFilter, differing_fields
from kvferry.core.scheduler.exchange import Batch, BlockEntry, ChosenBlocks
from kvferry.core.scheduler.scheduler import OffloadScheduler
from kvferry.core.tiers.base import SlotBytes, TierContext
from kvferry.core.transfers import Slots

T = TypeVar("T")

_BATCH_BYTES = 64 << 20
_BATCH_BLOCKS = 256
_TIMEOUT_S = 60.0
"""Time that the store has for a batch."""
_MAX_TRIES = 3
"""Batches in a row of which no block could be copied, and tries to read or write a file of the manifest."""
_POLL_S = 0.1
_PAUSE_S = 0.5
_LIMITED = "blocks beyond the limits of their tenants were left out"


@dataclass(frozen=True, slots=True)
class ExportedEngine:
    """The engine of the pool that is exported, or imported into.

    `slots` are those of the pool. `verify` verifies recovered slots, and drops those that are corrupt.
    """

    name: str
    fingerprint: Mapping[str, object]
    slot_bytes: int
    slots: SlotBytes
    verify: Callable[[Slots], None]


class Copying:
    """The work of one task. Thread: the task's."""

    def __init__(self, task: Task, engine: ExportedEngine, scheduler: OffloadScheduler, guard: OffloadGuard) -> None:
        self._task = task
        self._engine = engine
        self._scheduler = scheduler
        self._exchange = scheduler.tiers.exchange
        self._guard = guard
        self._fingerprint = plain_fingerprint(engine.fingerprint)

    def run(self) -> None:
        """Do it. Raises `Canceled`, `TaskError` and `StoreUnavailable`."""
        is_export = self._task.kind is TaskKind.EXPORT
        if is_export and sharing_problems(self._engine.fingerprint):
            raise TaskConflict(sharing_problems(self._engine.fingerprint)[0])
        if self._fingerprint.get("revision", "none needed") is None:
            raise TaskConflict(
                "the revision of the model is unknown, so that blocks of another one could be imported: set "
                "KVFERRY_EXPORT_PATH at start, with which the files of a local model are read, or name a local folder"
            )
        try:
            files = self._task.place.open(for_writing=is_export)
        except PlaceInUse as error:
            raise TaskConflict(str(error)) from None
        except FileNotFoundError:
            raise NoExport("there is no export in this place: the folder does not exist") from None
        except StoreUnavailable as error:
            raise PlaceRefused(error.text) from None
        with _closing_unless_used(files) as use:
            try:
                head = self._read_head(files)
            except (BadExport, StoreUnavailable) as error:
                raise PlaceRefused(error.text if isinstance(error, StoreUnavailable) else str(error)) from None
            self._check(head)
            store = ExportedBlocks(files, self._engine.fingerprint, may_hold_blocks=is_export and head is not None)
            use()
            with self._opened(store) as tier:
                if is_export:
                    self._export(files, store)
                elif head is not None:
                    self._import(files, store, tier, head)

    def _read_head(self, files: PlaceFiles) -> ExportHead | None:
        found = files.read({HEAD: MAX_HEAD_BYTES})[0]
        return None if found is None else unpack_head(found)

    def _check(self, head: ExportHead | None) -> None:
        """Raise `PlaceRefused` or `TaskConflict` for a place that does not fit."""
        if head is None:
            if self._task.kind is TaskKind.IMPORT:
                raise NoExport("there is no export in this place: it has no export.json")
            return
        differing = differing_fields(head.fingerprint, self._fingerprint)
        if differing is not None:
            raise TaskConflict(f"the export is of an engine with another fingerprint: {differing}")
        if self._task.kind is TaskKind.EXPORT and head.is_whole:
            raise TaskConflict("there is a whole export: name another place, or delete that one")

    @contextmanager
    def _opened(self, store: ExportedBlocks) -> Iterator[ThreadedTier]:
        """Use a store for the pool's blocks, and close it in the end."""
        kind, engine = self._task.kind.value, self._engine
        settings = ThreadedSettings(type=kind, name=kind, max_bytes=1, timeout_s=_TIMEOUT_S, queue_blocks=_BATCH_BLOCKS)
        context = TierContext(
            kind, engine.fingerprint, engine.slot_bytes, engine.slots, self._task.changed.set, engine.name
        )
        tier = ThreadedTier(store, settings, context)
        try:
            with self._guard.guarding(kind):
                self._exchange.open(kind, tier)
            self._task.opened.set_result(None)
            yield tier
        finally:
            with self._guard.guarding(kind):
                self._exchange.close(time.time())
            tier.close(CLOSE_S)
            # A job that could not be canceled, as its copy hung, has ended.
            with self._guard.guarding(kind):
                self._exchange.poll(time.time())

    # --- export -----------------------------------------------------------------------------------------------------

    def _export(self, files: PlaceFiles, store: ExportedBlocks) -> None:
        task, match = self._task, self._task.options.match
        progress = task.progress
        head = ExportHead(self._fingerprint, self._engine.name, rfc3339(task.began_s), asdict(match))
        self._write(files, HEAD, pack_head(head))
        is_all = match == RequestFilter()
        chosen = self._exchange.choose(None if is_all else match, task.options.max_bytes)
        progress.total_blocks, progress.total_bytes = len(chosen.slots), int(chosen.sizes.sum())
        num_parts = num_blocks = num_bytes = 0
        for start, end in _batches(chosen.sizes.tolist(), min(_BATCH_BLOCKS, self._exchange.batch_blocks)):
            stored = self._store(chosen.select(slice(start, end)), store)
            if stored:
                self._write(files, part_name(num_parts), pack_part(stored))
                num_parts += 1
                num_blocks += len(stored)
                num_bytes += sum(one.num_bytes for one in stored)
        whole = replace(head, is_whole=True, num_parts=num_parts, num_blocks=num_blocks, num_bytes=num_bytes)
        self._write(files, HEAD, pack_head(whole))

    def _store(self, blocks: ChosenBlocks, store: ExportedBlocks) -> list[BlockEntry]:
        """Copy a batch to the place, and return the blocks that are there."""
        stored: list[BlockEntry] = []
        wanted, num_tries = len(blocks.slots), 0
        self._verify(blocks)
        while len(blocks.slots):
            self._check_open()
            with self._guard.guarding("export"):
                batch, rest = self._exchange.store(blocks, time.time())
            self._wait(batch)
            done = [one for one, ok in zip(batch.entries, batch.ok.tolist(), strict=True) if ok]
            stored += done
            self._count(done)
            if len(done) < len(batch.entries) or not batch.entries:
                # The store failed, or cascades hold enough of the pool.
                num_tries = 0 if done or not batch.entries else num_tries + 1
                self._check_tries(num_tries, store)
            blocks = rest if batch.blocks is None else batch.blocks.select(~batch.ok).followed_by(rest)
        self._task.progress.left_blocks += wanted - len(stored)
        return stored

    def _verify(self, blocks: ChosenBlocks) -> None:
        """Verify the recovered ones of some blocks; those that cannot be verified are left out."""
        unverified = self._exchange.unverified(blocks)
        if len(unverified):
            with self._guard.guarding("export"):
                self._engine.verify(unverified)

    # --- import -----------------------------------------------------------------------------------------------------

    def _import(self, files: PlaceFiles, store: ExportedBlocks, tier: ThreadedTier, head: ExportHead) -> None:
        task, match = self._task, self._task.options.match
        progress = task.progress
        if head.is_whole and match == RequestFilter():
            progress.total_blocks, progress.total_bytes = head.num_blocks, head.num_bytes
        if not head.is_whole:
            task.add_note("the export was interrupted: it holds the first part of what it was to hold")
        num_slots = self._exchange.max_import_blocks(may_evict=task.options.may_evict)
        imported: list[list[Key]] = []
        try:
            for entries in self._read_parts(files, head):
                wanted = [one for one in entries if match.matches_names(one.origin)]
                sizes = [one.num_bytes for one in wanted]
                for start, end in _batches(sizes, min(_BATCH_BLOCKS, self._exchange.batch_blocks)):
                    imported.append([])
                    if not self._load(wanted[start:end], num_slots, store, tier, imported[-1]):
                        task.add_note("the rest was left out: max_bytes is reached, or the pool has no more space")
                        progress.left_blocks += progress.num_uncounted()
                        return
            self._check_reset()
            # Those of parts that were left out.
            progress.damaged_blocks += progress.num_uncounted()
        finally:
            self._put_in_order(imported)

    def _read_parts(self, files: PlaceFiles, head: ExportHead) -> Iterator[list[BlockEntry]]:
        """Yield the blocks of each part; those of a damaged part are left out."""
        read = part_reader(self._scheduler.layout)
        number = 0
        while not head.is_whole or number < head.num_parts:
            name = part_name(number)
            found = self._repeated(lambda name=name: files.read({name: MAX_PART_BYTES}))[0]  # type: ignore[misc]
            if found is None and not head.is_whole:
                return
            number += 1
            try:
                if found is None:
                    raise BadExport("one of its parts is missing")
                entries = read(found)
            except BadExport as error:
                self._task.add_note(f"{name} is left out: {error}")
                continue
            yield entries

    def _load(
        self,
        entries: Sequence[BlockEntry],
        num_slots: int,
        store: ExportedBlocks,
        tier: ThreadedTier,
        imported: list[Key],
    ) -> bool:
        """Copy a batch into the pool, and append the keys that were published; return whether there was space for all.

        `num_slots` is the limit of the whole import.
        """
        progress, options, num_tries = self._task.progress, self._task.options, 0
        while True:
            self._check_open()
            before = tier.counts()
            max_bytes = None if options.max_bytes is None else options.max_bytes - progress.copied_bytes
            max_blocks = num_slots - progress.copied_blocks
            with self._guard.guarding("import"):
                batch = self._exchange.load(
                    entries, time.time(), may_evict=options.may_evict, max_blocks=max_blocks, max_bytes=max_bytes
                )
            self._wait(batch)
            after, resets = tier.counts(), self._exchange.resets
            done = {one.key: one for one, ok in zip(batch.entries, batch.ok.tolist(), strict=True) if ok}
            imported += done
            self._count(done.values())
            progress.present_blocks += batch.num_present
            progress.left_blocks += batch.num_reset + batch.num_limited + batch.num_refused
            if batch.num_limited and _LIMITED not in self._task.notes:
                self._task.add_note(_LIMITED)
            num_damaged = after.missing + after.corrupt - before.missing - before.corrupt
            num_failed = len(batch.entries) - len(done) - num_damaged
            if num_failed <= 0 or resets.matches or resets.dropped or resets.is_whole:
                progress.damaged_blocks += num_damaged
                progress.left_blocks += max(num_failed, 0)
                return not batch.num_refused
            num_tries = 0 if done else num_tries + 1
            self._check_tries(num_tries, store)
            entries = [one for one in batch.entries if one.key not in done]

    def _put_in_order(self, imported: Sequence[Sequence[Key]]) -> None:
        """Have imported blocks be evicted in the opposite order of the export."""
        for keys in reversed(imported):
            with self._guard.guarding("import"):
                self._exchange.put_in_order(keys)

    # --- both -------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        """Raise `Canceled`, or `TaskFailed` if the pool was reset since the task began."""
        if self._task.stop.is_set():
            raise Canceled
        self._check_reset()

    def _check_reset(self) -> None:
        if self._exchange.resets.is_whole:
            raise TaskFailed(f"the pool was reset during the {self._task.kind.value}")

    def _check_tries(self, num_tries: int, store: ExportedBlocks) -> None:
        """Pause before another try. Raises `TaskFailed` after too many in a row without success."""
        if num_tries >= _MAX_TRIES:
            raise TaskFailed(store.problem or "blocks could not be copied in time; see the log")
        self._task.stop.wait(_PAUSE_S)

    def _wait(self, batch: Batch) -> None:
        """Wait until the store has answered. Raises `Canceled`."""
        while batch.is_open:
            if self._task.stop.is_set():
                raise Canceled
            self._task.changed.wait(_POLL_S)
            self._task.changed.clear()
            with self._guard.guarding(self._task.kind.value):
                self._exchange.poll(time.time())

    def _count(self, done: Collection[BlockEntry]) -> None:
        progress = self._task.progress
        progress.copied_blocks += len(done)
        progress.copied_bytes += sum(one.num_bytes for one in done)

    def _write(self, files: PlaceFiles, name: str, content: bytes) -> None:
        self._repeated(lambda: files.write({name: [content]}))

    def _repeated(self, call: Callable[[], T]) -> T:
        """Call a function of the place, again after a transient failure. Raises `Canceled` and `TaskFailed`."""
        for num_tries in range(1, _MAX_TRIES + 1):
            self._check_open()
            try:
                return call()
            except StoreUnavailable as error:
                if not error.is_transient or num_tries == _MAX_TRIES:
                    raise TaskFailed(error.text) from None
            self._task.stop.wait(_PAUSE_S)
        raise Canceled


@contextmanager
def _closing_unless_used(files: PlaceFiles) -> Iterator[Callable[[], None]]:
    """Close files in the end, unless the function was called: then something else does."""
    is_used = False

    def use() -> None:
        nonlocal is_used
        is_used = True

    try:
        yield use
    finally:
        if not is_used:
            files.close()


def _batches(sizes: Sequence[int], max_blocks: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of batches of bounded size, of at least one block each."""
    start = num_bytes = 0
    for at, size in enumerate(sizes):
        if at > start and (at - start >= max_blocks or num_bytes + size > _BATCH_BYTES):
            yield start, at
            start, num_bytes = at, 0
        num_bytes += size
    if len(sizes) > start:
        yield start, len(sizes)
