"""The small process that is killed: an OffloadService, a kept pool and the CPU copy engine, around a toy engine.

It says what happens to it in a few numbers of shared memory, which outlive it, and checks every byte that comes back.
"""

from __future__ import annotations

import mmap
import os
import random
import threading
import time
from dataclasses import replace
from enum import IntEnum
from pathlib import Path

import numpy as np

from kvferry.app.api.context import EngineInfo
from kvferry.app.service.service import EngineBinding, OffloadService, PoolBinding
from kvferry.app.settings import Settings
from kvferry.core.engine_api import StepProgress
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.keys import RequestFilter
from kvferry.core.pool.inventory import Inventory
from kvferry.core.scheduler.loads import Hit, Later
from kvferry.cuda_ops.copy.cpu_copy import CpuCopyEngine
from kvferry.cuda_ops.copy.layout import DeviceLayout
from kvferry.cuda_ops.persistent.format import PoolShape
from kvferry.cuda_ops.persistent.header_writer import HeaderWriter
from kvferry.cuda_ops.persistent.headers import SlotHeaders
from kvferry.cuda_ops.persistent.pool_file import KeptFile
from kvferry.cuda_ops.persistent.recovery import DropReason
from kvferry.cuda_ops.persistent.sealing import KeptCopies
from kvferry.cuda_ops.pool.host_pool import HostPool
from tests.kill.device import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    NUM_TENANTS,
    Device,
    ToyRequest,
    content_of,
    family_of,
    hash_of,
    number_of,
    number_of_family,
    tenant_and_era,
)

NUM_SLOTS = 256
EXTENT_SLOTS = 32
MAX_SLOTS = 384
DEVICE_BLOCKS = 96
NUM_FAMILIES = 40
CALM_FAMILIES = 14
"""So few that the pool holds them all."""
MOST_BLOCKS = 16
MOST_RUNNING = 4
STEP_BLOCKS = 6
RESET_CHANCE = 0.004
RESIZE_CHANCE = 0.03
DELETE_CHANCE = 0.05
WRITE_S = 30.0
"""How long a reset or a deletion may take to be written."""
OTHER_SIZE_CHANCE = 0.3
"""How often a life begins with a pool of another size than the one before it left."""
FINGERPRINT: dict[str, object] = {"model": "toy", "revision": "1"}
ENGINE_NAME = "killed"
SHAPE = PoolShape(NUM_SLOTS, BLOCK_BYTES, 1, EXTENT_SLOTS, MAX_SLOTS)


class Note(IntEnum):
    """The numbers that outlive a process."""

    WRONG = 0
    READY = 1
    RECOVERED = 2
    KNOWN = 3
    DROPPED = 4
    CORRUPT = 5
    CHECKED = 6
    HITS = 7
    RESETS = 8
    STEPS = 9
    RESIZES = 10
    SLOTS = 11
    CUT = 12
    RESIZING = 13
    UNSEALED = 14
    DELETED = 15
    """The number of the block that was deleted last, since when none of its family was asked for; else 0."""
    DELETIONS = 16
    ERAS = 17


class Notes:
    """Shared memory, one number a `Note`; from `ERAS` on one a tenant."""

    def __init__(self, path: Path) -> None:
        with path.open("a+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._numbers = np.frombuffer(mmap.mmap(file.fileno(), mmap.PAGESIZE), dtype=np.int64)

    def __getitem__(self, note: int) -> int:
        return int(self._numbers[note])

    def __setitem__(self, note: int, number: int) -> None:
        self._numbers[note] = number


class Small:
    """The process. `step` for as long as it lives. In a `calm` one nothing is evicted, reset or resized."""

    def __init__(self, folder: Path, seed: int, calm: bool) -> None:
        self.notes = Notes(folder / "notes")
        self._random = random.Random(seed)
        self._num_families = CALM_FAMILIES if calm else NUM_FAMILIES
        self._reset_chance = 0.0 if calm else RESET_CHANCE
        self._resize_chance = 0.0 if calm else RESIZE_CHANCE
        self._delete_chance = 0.0 if calm else DELETE_CHANCE
        shape = replace(SHAPE, num_slots=NUM_SLOTS if calm else self._first_slots())
        self._file = KeptFile(folder / "killed.pool", shape, FINGERPRINT)
        shape = self._file.shape
        pool = HostPool(shape.num_slots, BLOCK_BYTES, EXTENT_SLOTS * BLOCK_BYTES, backing=self._file)
        self._pool = pool
        self._headers = SlotHeaders(self._file, pool)
        self._device = Device(DEVICE_BLOCKS)
        engine = EngineBinding(
            name=ENGINE_NAME,
            info=EngineInfo("toy", "toy", "cpu", BLOCK_TOKENS, groups=1, workers=1),
            layout=GroupLayout([GroupSpec(BLOCK_TOKENS, BLOCK_BYTES)]),
            fingerprint=FINGERPRINT,
            device=self._device,
            watermark_blocks=1,
        )
        kept = HeaderWriter(self._file)
        settings = Settings(
            _env_file=None,
            state_dir=folder,
            pool_kind="file",
            pool_path=folder,
            pool_bytes=shape.num_slots * BLOCK_BYTES,
            load_decision="always",
        )
        side = PoolBinding(shape.plan, pool, pool, kept)
        self._service = OffloadService(settings, engine, side, lambda settings: None, threading.Event())
        self._scheduler, self._manager = self._service.scheduler, self._service.manager
        layout, before = DeviceLayout.of_arrays([self._device.blocks]), self._headers.before_copy
        copies = CpuCopyEngine(layout, pool, lambda: None, num_threads=2, before=before)
        self._copies = KeptCopies(copies, self._headers, lambda: None)
        kept.seal_with(self._copies)
        self._running: list[ToyRequest] = []
        self._storing: dict[int, set[int]] = {}
        self._number = 0
        self._service.start()
        started = self._service.warm_start
        if started is None:
            raise RuntimeError("a kept pool was not recovered")
        self.notes[Note.RECOVERED] = started.recovered
        self.notes[Note.KNOWN] = started.known
        self.notes[Note.DROPPED] = sum(started.dropped.values())
        self.notes[Note.CUT] = started.dropped.get(DropReason.TRUNCATED.value, 0)
        self.notes[Note.UNSEALED] = started.dropped.get(DropReason.UNSEALED.value, 0)
        self.notes[Note.CORRUPT] = 0
        self.notes[Note.HITS] = 0
        self._check_recovered()
        self.notes[Note.READY] = self._manager.counts().ready

    def step(self) -> None:
        """One step of the engine, and now and then a reset, a resize or a deletion."""
        now_s = time.time()
        self._end_transfers(now_s)
        self._admit(now_s)
        progress: list[StepProgress] = []
        computing: list[tuple[ToyRequest, int]] = []
        for request in self._running:
            if not request.is_loading:
                end = min(request.num_computed + STEP_BLOCKS, len(request.block_hashes))
                computing.append((request, end))
                tokens = end * BLOCK_TOKENS + (end == len(request.block_hashes))
                progress.append(StepProgress(request.request_id, [request.table], tokens))
        plan = self._scheduler.plan_step(progress, now_s)
        for job in plan.loads:
            self._copies.submit(job)
        for request, end in computing:
            for i in range(request.num_computed, end):
                self._device.blocks[request.table[i]] = content_of(request.block_hashes[i])
            request.num_computed = end
        for job in plan.stores:
            self._storing[job.job_id] = {family_of(key) for key in job.labels.keys} if job.labels else set()
            self._copies.submit(job)
        # Here, where all that is to be stored is in a job.
        if self._random.random() < self._delete_chance:
            self._delete(now_s)
        for request, end in computing:
            if end == len(request.block_hashes):
                self._finish(request, now_s)
        if self._random.random() < self._reset_chance:
            self._reset(now_s)
        if self._random.random() < self._resize_chance:
            num_extents = self._random.randint(1, MAX_SLOTS // EXTENT_SLOTS)
            self._service.settings.change({"pool_bytes": num_extents * EXTENT_SLOTS * BLOCK_BYTES})
            self.notes[Note.RESIZES] += 1
        snapshot = self._scheduler.snapshot()
        self.notes[Note.SLOTS] = self._manager.num_slots
        self.notes[Note.RESIZING] = snapshot.pool.slots != snapshot.pool.wanted_slots
        self.notes[Note.READY] = snapshot.pool.ready
        self.notes[Note.CORRUPT] = snapshot.load.corrupt
        self.notes[Note.STEPS] += 1

    def _end_transfers(self, now_s: float) -> None:
        results = self._copies.poll()
        for result in results:
            self._storing.pop(result.job_id, None)
        for outcome in self._scheduler.on_transfers_finished(results, now_s):
            request = next(each for each in self._running if each.request_id == outcome.request_id)
            request.is_loading = False
            if outcome.ok:
                first = outcome.first_token // BLOCK_TOKENS
                request.num_computed = first + outcome.num_tokens // BLOCK_TOKENS
                for i in range(first, request.num_computed):
                    self._check(self._device.blocks[request.table[i]], request.block_hashes[i])
                self.notes[Note.HITS] += request.num_computed - first

    def _admit(self, now_s: float) -> None:
        while len(self._running) < MOST_RUNNING:
            num_blocks = self._random.randint(1, MOST_BLOCKS)
            table = self._device.take(num_blocks)
            if table is None:
                return
            self._number += 1
            family = self._random.randrange(self._num_families)
            if family == number_of_family(self.notes[Note.DELETED]):
                self.notes[Note.DELETED] = 0
            tenant = family % NUM_TENANTS
            era = self.notes[Note.ERAS + tenant]
            hashes = [hash_of(tenant, era, family, i) for i in range(num_blocks)]
            request = ToyRequest(f"{os.getpid()}-{self._number}", tenant, hashes, table)
            self._scheduler.on_new_request(request, now_s)
            found = self._scheduler.match(request.request_id, 0, now_s)
            if isinstance(found, Later):
                self._running.append(request)
                self._finish(request, now_s)
                continue
            num_tokens = found.num_tokens if isinstance(found, Hit) else 0
            self._scheduler.commit(request.request_id, [table], num_tokens, now_s)
            request.is_loading = num_tokens > 0
            self._running.append(request)

    def _finish(self, request: ToyRequest, now_s: float) -> None:
        self._scheduler.on_request_finished(request.request_id, now_s)
        self._running.remove(request)
        self._device.release(request.table)

    def _reset(self, now_s: float) -> None:
        """Forget all, or a tenant. From then on nothing of its era may come back, and none of it is stored any more."""
        tenant = None if self._random.random() < 0.3 else self._random.randrange(NUM_TENANTS)
        for request in [each for each in self._running if tenant in (None, each.tenant_index)]:
            self._finish(request, now_s)
        self._scheduler.resets.reset(now_s, None if tenant is None else RequestFilter(tenant=f"tenant{tenant}"))
        self._wait_until_written()
        self.notes[Note.READY] = self._manager.counts().ready
        for each in range(NUM_TENANTS) if tenant is None else [tenant]:
            self.notes[Note.ERAS + each] += 1
        self.notes[Note.RESETS] += 1

    def _delete(self, now_s: float) -> None:
        """Delete a block, of which an earlier copy may have been evicted just now; it may be asked for later."""
        rows = Inventory(self._manager).list_blocks(self._random.randrange(self._manager.num_slots), 1)
        # A store under way may be of the same block, and would be published after the deletion.
        families = {family_of(request.block_hashes[0]) for request in self._running}.union(*self._storing.values())
        if not rows.keys or family_of(rows.keys[0]) in families:
            return
        self._scheduler.resets.drop_block(rows.keys[0], now_s)
        self._wait_until_written()
        self.notes[Note.DELETED] = number_of(rows.keys[0])
        self.notes[Note.DELETIONS] += 1

    def _wait_until_written(self) -> None:
        count = self._manager.num_invalidations()
        deadline_s = time.monotonic() + WRITE_S
        while not self._manager.are_flushed(count):
            if time.monotonic() > deadline_s:
                raise TimeoutError("invalidations were not written in time")
            time.sleep(0.0002)

    def _first_slots(self) -> int:
        """What the life before had when it was last looked at, or something else."""
        if self._random.random() < OTHER_SIZE_CHANCE:
            return self._random.randint(1, MAX_SLOTS // EXTENT_SLOTS) * EXTENT_SLOTS
        return self.notes[Note.SLOTS] // EXTENT_SLOTS * EXTENT_SLOTS or NUM_SLOTS

    def _check_recovered(self) -> None:
        """Nothing that a reset dropped is there, and whatever verifies has the bytes of its key."""
        rows = Inventory(self._manager).list_blocks(0, MAX_SLOTS)
        bad = set(self._headers.verify(rows.slots).tolist())
        for slot, key in zip(rows.slots.tolist(), rows.keys, strict=True):
            tenant, era = tenant_and_era(key)
            self.notes[Note.WRONG] += era != self.notes[Note.ERAS + tenant]
            self.notes[Note.WRONG] += number_of(key) == self.notes[Note.DELETED]
            if slot not in bad:
                self._check(self._pool.slot(slot), key)

    def _check(self, block: np.ndarray, key: bytes) -> None:
        self.notes[Note.CHECKED] += 1
        self.notes[Note.WRONG] += not np.array_equal(block, content_of(key))
