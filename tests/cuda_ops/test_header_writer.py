"""Invalidations of a pool in a file: no page of it is touched by the calling thread, and none is lost or too late."""

from __future__ import annotations

import mmap
import os
import resource
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.manager import OffloadManager
from kvferry.core.transfers import BlockRun, Direction, SlotLabels, TransferJob
from kvferry.cuda_ops.persistent.format import SLOT_HEADER, HeaderState, PoolShape
from kvferry.cuda_ops.persistent.header_writer import ROUND_SLOTS, HeaderWriter
from kvferry.cuda_ops.pool.pages import advise
from tests.harness.commands import run_script
from tests.harness.kept_pools import SHAPE as SMALL
from tests.harness.kept_pools import Kept, attached, bytes_of, key_of
from tests.harness.resident import dirty_bytes
from tests.harness.waiting import DEADLINE_S, wait_until

VICTIMS = 64
SLOTS_PER_PAGE = mmap.PAGESIZE // SLOT_HEADER.itemsize
SHAPE = PoolShape(num_slots=VICTIMS * SLOTS_PER_PAGE, slot_bytes=8, num_ranks=1, extent_slots=VICTIMS * SLOTS_PER_PAGE)
DONTNEED = 4
"""`MADV_DONTNEED`: unmap the pages, so that each touch of one is a page fault again."""


def faults() -> int:
    """Page faults of the calling thread so far."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def full_manager(writer: HeaderWriter) -> OffloadManager:
    """A full pool whose next victims have their headers on different pages."""
    manager = OffloadManager(SHAPE.num_slots, SHAPE.slot_bytes, header_queue=writer)
    keys = [key_of(number) for number in range(SHAPE.num_slots)]
    answer = manager.prepare_store(keys, RequestIdentity("first"), np.arange(len(keys)), 1, 1.0)
    manager.complete_store(answer.slots, 1.0)
    others = [key for key, slot in zip(keys, answer.slots.tolist(), strict=True) if slot % SLOTS_PER_PAGE]
    manager.prepare_store(others, RequestIdentity("second"), np.arange(len(others)), 1, 2.0)
    return manager


def faults_on_headers(kept: Kept, call: Callable[[], object]) -> int:
    """Page faults of this thread in a call that begins with no header page in its page table."""
    headers = kept.file.headers(0)
    advise(headers.ctypes.data, headers.nbytes, DONTNEED)
    before = faults()
    call()
    return faults() - before


def on_other_pages(generation: int) -> SlotLabels:
    """Labels of slots whose headers lie on different pages."""
    slots = np.arange(VICTIMS) * SLOTS_PER_PAGE
    keys = [key_of(slot) for slot in slots.tolist()]
    return SlotLabels(slots, keys, np.full(VICTIMS, generation), np.zeros(VICTIMS, np.int64), np.full(VICTIMS, 8))


def test_an_offer_that_evicts_touches_no_page_of_the_file(tmp_path: Path) -> None:
    with attached(tmp_path / "engine.pool", SHAPE) as kept:
        manager = full_manager(kept.writer)
        keys = [key_of(1_000_000 + number) for number in range(VICTIMS)]
        taken = faults_on_headers(
            kept, lambda: manager.prepare_store(keys, RequestIdentity("third"), np.arange(VICTIMS), 1, 3.0)
        )
        slots = manager.lookup([key_of(number) for number in range(SHAPE.num_slots)])
        assert taken < VICTIMS / 2
        assert len(slots) < SHAPE.num_slots
        kept.write_invalidations()
        dropped = kept.file.headers(0)["dropped_generation"].nonzero()[0]
        assert dropped.tolist() == on_other_pages(1).slots.tolist()


def test_a_submitted_store_touches_no_page_of_the_file(tmp_path: Path) -> None:
    with attached(tmp_path / "engine.pool", SHAPE) as kept:
        blocks, labels = np.zeros((VICTIMS, 8), dtype=np.uint8), on_other_pages(1)
        gate = threading.Event()

        def before(job: TransferJob) -> None:
            gate.wait(DEADLINE_S)
            kept.headers.before_copy(job)

        copies = kept.copies(blocks, before=before)
        run = BlockRun(0, np.arange(VICTIMS), labels.slots, np.zeros(VICTIMS, np.int64))
        taken = faults_on_headers(kept, lambda: copies.submit(TransferJob(1, Direction.STORE, (run,), labels=labels)))
        gate.set()
        assert copies.wait([1], 30)
        copies.close()
        assert taken < VICTIMS / 2
        assert (kept.file.headers(0)["state"][labels.slots] == HeaderState.VALID).all()


def test_a_tiers_fill_is_marked_by_the_thread_that_fills_it(tmp_path: Path) -> None:
    with attached(tmp_path / "engine.pool", SHAPE) as kept:
        copies = kept.copies(np.zeros((1, 8), dtype=np.uint8))
        kept.writer.seal_with(copies)
        labels = on_other_pages(1)
        states = kept.file.headers(0)["state"]
        assert faults_on_headers(kept, lambda: kept.writer.begin_tier_write(labels)) < VICTIMS / 2
        assert not states.any()
        slots = labels.slots.tolist()
        kept.writer.before_tier_write(slots[0])
        assert states.nonzero()[0].tolist() == slots[:1]
        kept.writer.invalidate(labels.slots[1:], labels.generations[1:])
        kept.writer.before_tier_write(slots[1])
        assert states.nonzero()[0].tolist() == slots[:1], "a fill that was given up marks nothing"
        kept.writer.end_tier_write(labels.slice(0, 1))
        copies.close()
        assert states[slots[0]] == HeaderState.VALID


def test_a_late_invalidation_leaves_the_next_block_of_the_slot_alone(tmp_path: Path) -> None:
    path = tmp_path / "engine.pool"
    with attached(path) as kept:
        kept.store([1, 2], [0, 1], 1)
    with attached(path, is_started=False) as kept:
        kept.writer.invalidate(np.array([0, 1]), np.array([1, 1]))
        kept.store([3], [0], 2)
        kept.writer.start()
    with attached(path) as kept:
        assert kept.good() == {0: 3}


def test_a_death_before_an_invalidation_brings_back_right_bytes_or_none(tmp_path: Path) -> None:
    path = tmp_path / "engine.pool"
    with attached(path) as kept:
        kept.store([1, 2, 3], [0, 1, 2], 1)
    with attached(path, is_started=False) as kept:
        kept.writer.invalidate(np.array([0, 1, 2]), np.array([1, 1, 1]))
        # The first is stored again elsewhere, its slot is overwritten by a store that ends, the next one's by none.
        kept.store([1], [5], 4)
        kept.store([9], [0], 2)
        kept.headers.begin(kept.label([8], [1], 2))
        kept.pool.slot(1)[:500] = 0
    with attached(path) as kept:
        assert kept.good() == {0: 9, 2: 3, 5: 1}


def test_queued_invalidations_take_one_entry_a_slot(tmp_path: Path) -> None:
    slots = np.arange(0, SHAPE.num_slots, 7)
    with attached(tmp_path / "engine.pool", SHAPE, is_started=False) as kept:
        kept.writer.invalidate(slots, np.full(len(slots), 1))
        tracemalloc.start()
        try:
            for generation in range(2, 5000):
                kept.writer.invalidate(slots[:9], np.full(9, generation))
                kept.writer.invalidate_before(generation)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 50_000
        assert not kept.writer.are_flushed(1)
        kept.writer.start()
        kept.write_invalidations()
        dropped = kept.file.headers(0)["dropped_generation"]
        assert dropped[slots[:9]].tolist() == [4999] * 9
        assert set(dropped[slots[9:]].tolist()) == {1}
        assert kept.file.min_epoch == 4999


@pytest.mark.parametrize("what", ["reset", "drop"])
def test_invalidation_that_is_waited_for_is_on_the_disk(tmp_path: Path, what: str) -> None:
    path = tmp_path / "engine.pool"
    with attached(path) as kept:
        kept.store([1, 2, 3], [0, 1, 2], 1)
        kept.file.flush_invalidations()
        if dirty_bytes(kept.file.headers(0)):
            pytest.skip("this folder is in memory")
        if what == "reset":
            kept.writer.invalidate_before(1)
        else:
            kept.writer.invalidate(np.array([1]), np.array([1]))
        kept.write_invalidations()
        assert dirty_bytes(kept.file.headers(0)) == 0


def test_invalidations_are_written_in_queue_order(tmp_path: Path) -> None:
    count = 3 * ROUND_SLOTS
    shape = PoolShape(num_slots=count, slot_bytes=8, num_ranks=1, extent_slots=count)
    with attached(tmp_path / "engine.pool", shape, is_started=False) as kept:
        for start in range(0, count, 64):
            kept.writer.invalidate(np.arange(start, start + 64), np.full(64, 1))
        ticket = kept.writer.num_invalidations()
        dropped = kept.file.headers(0)["dropped_generation"]
        kept.writer.start()
        wait_until(lambda: kept.writer.are_flushed(ticket), "written", 30)
        assert (dropped == 1).all()
        kept.writer.invalidate(np.arange(count), np.full(count, 2))
        kept.write_invalidations()
        assert (dropped == 2).all()


def test_dead_invalidation_thread_is_a_problem_until_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with attached(tmp_path / "engine.pool") as kept:
        assert kept.writer.problem() is None
        monkeypatch.setattr(threading, "excepthook", lambda args: None)
        monkeypatch.setattr(kept.file, "write_min_epoch", lambda epoch: sys.exit(1))
        kept.writer.invalidate(np.array([3]), np.array([1]))
        kept.writer.invalidate_before(7)
        wait_until(lambda: kept.writer.problem() is not None, "the thread is dead", 30)
        assert not kept.writer.are_flushed(2)
        monkeypatch.undo()
        kept.writer.start()
        kept.write_invalidations()
        assert kept.writer.problem() is None
        assert kept.file.min_epoch == 7
        assert kept.file.headers(0)["dropped_generation"][3] == 1
        assert "invalidation thread died" in caplog.text


def test_invalidation_when_collecting_it_fails_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "engine.pool"
    with attached(path) as kept:
        kept.store([1, 2, 3], [0, 1, 2], 1)
        monkeypatch.setattr(threading, "excepthook", lambda args: None)
        with monkeypatch.context() as patched:
            patched.setattr(np, "concatenate", lambda *args, **options: sys.exit("stands for a MemoryError"))
            kept.writer.invalidate(np.array([0, 1]), np.array([1, 1]))
            wait_until(lambda: kept.writer.problem() is not None, "the thread is dead", 30)
        kept.writer.start()
        kept.write_invalidations()
        kept.store([7], [1], 2)
        kept.writer.invalidate(np.array([1]), np.array([2]))
        kept.write_invalidations()
    with attached(path) as kept:
        assert kept.good() == {2: 3}


def test_a_file_that_was_cut_fails_jobs_instead_of_the_process(tmp_path: Path) -> None:
    path = tmp_path / "engine.pool"
    with attached(path) as kept:
        kept.store([1], [0], 1)
        copies = kept.copies(np.stack([bytes_of(7), bytes_of(8)]), before=kept.headers.before_copy)
        os.truncate(path, 75_000)
        for number, direction in enumerate(Direction):
            run = BlockRun(0, np.array([0]), np.array([0]), np.array([0]))
            labels = kept.label([7], [0], 2) if direction is Direction.STORE else None
            copies.submit(TransferJob(number, direction, (run,), labels=labels))
        assert copies.wait([0, 1], 30)
        errors = [result.error for result in copies.poll()]
        assert len(errors) == 2
        assert all("was truncated to 75,000 bytes" in str(error) for error in errors)
        kept.writer.invalidate(np.array([0]), np.array([1]))
        copies.close()
        kept.writer.close()
        assert kept.writer.are_flushed(1), "the next start drops the pool"


@pytest.mark.parametrize("left_bytes", [0, SMALL.payload_offset + SMALL.extent_stride])
def test_use_of_a_truncated_pool_is_refused_without_a_crash(tmp_path: Path, left_bytes: int) -> None:
    code = (
        "import os, sys; from pathlib import Path; from tests.harness.kept_pools import attached\n"
        "from kvferry.cuda_ops.persistent.pool_file import PoolTruncated\n"
        "path = Path(sys.argv[1])\n"
        "with attached(path) as kept:\n"
        "    kept.store([1, 2], [0, 11], 1); os.truncate(path, int(sys.argv[2])); refused = 0\n"
        "    for use in (lambda: kept.pool.add_slots(4), lambda: kept.writer.before_tier_write(11)):\n"
        "        try: use()\n"
        "        except PoolTruncated: refused += 1\n"
        "    kept.pool.remove_extents(1); kept.file.record_boot(); print(refused, os.stat(path).st_size)"
    )
    ended = run_script(code, tmp_path / "engine.pool", left_bytes)
    assert (ended.returncode, ended.stdout.split()) == (0, ["2", str(left_bytes)]), ended.stderr
