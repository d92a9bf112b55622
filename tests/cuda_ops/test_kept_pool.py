"""Kept pools: what was sealed comes back, nothing else does, and whatever happens to the file, no wrong byte does."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvferry.core.errors import StartError
from kvferry.core.transfers import Direction
from kvferry.cuda_ops.persistent import pool_file as kept_file
from kvferry.cuda_ops.persistent.format import (
    MAX_KEY_BYTES,
    POOL_HEADER,
    POOL_HEADER_BYTES,
    SLOT_HEADER,
    PoolShape,
    epoch_checksum,
    header_checksums,
    pool_header_checksum,
)
from kvferry.cuda_ops.persistent.lock import take_when_ended
from kvferry.cuda_ops.persistent.pool_file import KeptFile, check_pool_file
from kvferry.cuda_ops.persistent.recovery import DropReason
from kvferry.cuda_ops.persistent.sealing import TierSealer
from kvferry.cuda_ops.pool import backing
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.limits import NotEnoughMemory
from tests.harness.commands import running_script
from tests.harness.copy_jobs import job
from tests.harness.kept_pools import FINGERPRINT, SHAPE, attached, bytes_of
from tests.harness.waiting import wait_until

NUMBERS = list(range(100, 112))
SLOTS = list(range(12))
EXPECTED = dict(zip(SLOTS, NUMBERS, strict=True))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engine.pool"


@pytest.fixture
def full(path: Path) -> Path:
    """A pool with a block in every slot, whose process is gone."""
    with attached(path) as kept:
        assert kept.file.found.is_new
        kept.store(NUMBERS, SLOTS, 1)
    return path


def test_sealed_slots_are_recovered_byte_for_byte(full: Path) -> None:
    for _ in range(2):
        with attached(full) as kept:
            assert not kept.file.found.is_new
            assert kept.file.found.dropped is None
            assert not kept.file.found.other_boot
            assert kept.good() == EXPECTED
            assert kept.found.dropped == {}
            assert kept.found.generations.tolist() == [1] * 12
            assert kept.found.sizes.tolist() == [1000] * 12


def test_a_store_that_was_not_sealed_does_not_come_back(full: Path) -> None:
    with attached(full) as kept:
        kept.headers.begin(kept.label([1, 2], [3, 4], 2))
        kept.pool.slot(3)[:] = 0
    with attached(full) as kept:
        assert kept.good() == {slot: number for slot, number in EXPECTED.items() if slot not in (3, 4)}
        assert kept.found.dropped == {DropReason.UNSEALED: 2}
    with attached(full) as kept:
        assert kept.found.dropped == {}, "what was dropped is counted once"


def test_a_seal_is_abandoned_for_slots_that_were_given_out_again(path: Path) -> None:
    with attached(path) as kept:
        first, second = kept.label([1, 2], [5, 6], 1), kept.label([3], [6], 2)
        kept.headers.begin(first)
        kept.headers.begin(second)
        kept.pool.slot(5)[:] = bytes_of(1)
        assert kept.headers.seal(first) == 1
        kept.pool.slot(6)[:] = bytes_of(3)
        assert kept.headers.seal(second) == 1
        assert kept.headers.seal(second) == 0, "a slot is sealed once"
    with attached(path) as kept:
        assert kept.good() == {5: 1, 6: 3}


def test_invalidated_block_sealed_later_is_not_recovered(full: Path) -> None:
    with attached(full) as kept:
        kept.writer.invalidate(np.array([0, 1]), np.array([1, 1]))
        late = kept.label([50, 51], [2, 3], 7)
        kept.headers.begin(late)
        kept.writer.invalidate(np.array([2]), np.array([7]))
        for number, slot in ((50, 2), (51, 3)):
            kept.pool.slot(slot)[:] = bytes_of(number)
        kept.headers.seal(late)
    with attached(full) as kept:
        assert kept.good() == {3: 51} | {slot: EXPECTED[slot] for slot in range(4, 12)}
        assert kept.found.dropped == {DropReason.LEFT: 3}


def test_a_reset_leaves_nothing_of_the_epochs_before(full: Path) -> None:
    with attached(full) as kept:
        late = kept.label([60], [1], 2)
        kept.headers.begin(late)
        kept.writer.invalidate_before(5)
        kept.write_invalidations()
        kept.pool.slot(1)[:] = bytes_of(60)
        kept.headers.seal(late)
        kept.store([70], [0], 3)
    with attached(full) as kept:
        assert kept.file.min_epoch == 5
        assert kept.good() == {0: 70}
        assert kept.found.dropped == {DropReason.RESET: 11}


def test_of_a_key_that_is_there_twice_the_later_one_comes_back(path: Path) -> None:
    with attached(path) as kept:
        kept.store([1], [9], 4)
        kept.store([1], [2], 5)
        kept.store([1], [7], 3)
    with attached(path) as kept:
        assert kept.good() == {2: 1}
        assert kept.found.dropped == {DropReason.DUPLICATE: 2}


def test_checksum_of_a_short_block_covers_its_length(path: Path) -> None:
    with attached(path) as kept:
        kept.store([1], [0], 1, length=300)
        kept.pool.slot(0)[300:] = 99
    with attached(path) as kept:
        assert kept.good() == {0: 1}
        assert kept.found.sizes.tolist() == [300]


def write_at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip(path: Path, offset: int, bit: int) -> None:
    write_at(path, offset, bytes([path.read_bytes()[offset] ^ 1 << bit]))


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bit_drops_its_slot_at_most(full: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    slot = int(random.integers(12))
    if seed % 2:
        start = POOL_HEADER_BYTES + slot * SLOT_HEADER.itemsize
        offset = start + int(random.integers(SLOT_HEADER.itemsize))
    else:
        start = SHAPE.payload_offset + int(SHAPE.row_offsets(np.array([slot]))[0])
        offset = start + int(random.integers(1000))
    flip(full, offset, int(random.integers(8)))
    with attached(full) as kept:
        good = kept.good()
        others = {each: number for each, number in EXPECTED.items() if each != slot}
        assert good in (others, EXPECTED), f"seed {seed}"
        lost = sum(kept.found.dropped.values()) + len(kept.found.slots) - len(good)
        assert lost == 12 - len(good), "what is lost is counted"
        unused = POOL_HEADER_BYTES + slot * SLOT_HEADER.itemsize + SLOT_HEADER.itemsize - 8
        assert (good == others) or offset >= unused, "only the scheduler's own word may change unnoticed"


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bit_in_the_pool_header_drops_or_verifies_all(full: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    flip(full, int(random.integers(400)), int(random.integers(8)))
    with attached(full) as kept:
        good = kept.good()
        # Of a pool that seems to be shorter than it is the first slots are left.
        shorter = {slot: number for slot, number in EXPECTED.items() if slot < kept.file.found.num_slots}
        assert good in ({}, shorter), f"seed {seed}"
        if not good:
            assert kept.file.found.dropped or kept.found.dropped == {DropReason.RESET: 12} or not shorter
    with attached(full) as kept:
        kept.store([1], [0], 100)
    with attached(full) as kept:
        assert kept.good()[0] == 1, "it works again"


@pytest.mark.parametrize("bit", [0, 1, 29, 31, 63])
def test_flipped_bit_of_the_epoch_revives_no_reset_pool(full: Path, bit: int) -> None:
    with attached(full) as kept:
        kept.writer.invalidate_before(1 << min(bit, 29))
    flip(full, POOL_HEADER.fields["min_epoch"][1] + bit // 8, bit % 8)
    with attached(full) as kept:
        assert "min_epoch=" in str(kept.file.found.dropped)
        assert len(kept.found.slots) == 0


@pytest.mark.parametrize(
    ("extent_slots", "fingerprint"),
    [(0, b"{}"), (1, b"[]"), (1, b"7"), (1, b"\xff"), (1, b"[" * 3000), (1, b"")],
)
def test_pool_header_that_no_version_writes_drops_the_pool(full: Path, extent_slots: int, fingerprint: bytes) -> None:
    header = np.fromfile(full, dtype=POOL_HEADER, count=1)
    header["extent_slots"], header["fingerprint_bytes"] = extent_slots, len(fingerprint)
    header["checksum"] = pool_header_checksum(header, fingerprint)
    header["epoch_checksum"] = epoch_checksum(int(header["min_epoch"][0]), int(header["checksum"][0]))
    write_at(full, 0, header.tobytes() + fingerprint)
    with attached(full) as kept:
        assert kept.file.found.dropped
        assert len(kept.found.slots) == 0


@pytest.mark.parametrize("epoch", [-1, (1 << 30) + 1, 2**31 - 1, 2**63 - 1])
def test_epoch_of_an_earlier_version_is_kept_unless_implausible(full: Path, epoch: int) -> None:
    start = POOL_HEADER.fields["min_epoch"][1]
    write_at(full, POOL_HEADER.fields["epoch_checksum"][1], bytes(8))
    with attached(full) as kept:
        assert kept.good() == EXPECTED
    write_at(full, POOL_HEADER.fields["epoch_checksum"][1], bytes(8))
    write_at(full, start, epoch.to_bytes(8, "little", signed=True))
    with attached(full) as kept:
        assert f"min_epoch={epoch}" in str(kept.file.found.dropped)
        assert kept.file.min_epoch == 0


def test_swapped_headers_bring_no_block_under_anothers_key(full: Path) -> None:
    raw, size = full.read_bytes(), SLOT_HEADER.itemsize
    one, other = (POOL_HEADER_BYTES + slot * size for slot in (2, 9))
    write_at(full, one, raw[other : other + size])
    write_at(full, other, raw[one : one + size])
    with attached(full) as kept:
        assert len(kept.found.slots) == 12
        assert kept.good() == {slot: number for slot, number in EXPECTED.items() if slot not in (2, 9)}


def test_pool_whose_first_start_ended_before_its_slots_is_kept(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    KeptFile(path, SHAPE, FINGERPRINT).close()
    assert path.stat().st_size == SHAPE.payload_offset
    with attached(path) as kept:
        assert kept.file.found.is_kept
        assert kept.good() == {}
    assert not caplog.text


@pytest.mark.parametrize("fingerprint", [FINGERPRINT, {"model": "other"}], ids=["same", "foreign"])
def test_truncated_file_is_dropped_and_named(
    full: Path, fingerprint: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    end = SHAPE.payload_offset + SHAPE.payload_bytes
    os.truncate(full, end - 1)
    with attached(full, fingerprint=fingerprint) as kept:
        assert kept.good() == {}
        assert kept.file.num_dropped == {DropReason.TRUNCATED: 12, DropReason.FOREIGN: 0}
        kept.store([1], [0], 1)
    assert "kept pool dropped, starting empty" in caplog.text
    assert fingerprint != FINGERPRINT or f"file truncated: {end - 1:,} bytes, slots end at {end:,}" in caplog.text
    with attached(full, fingerprint=fingerprint) as kept:
        assert kept.good() == {0: 1}


@pytest.mark.parametrize("size", [1, 200, POOL_HEADER_BYTES, SHAPE.payload_offset - 1])
def test_a_file_without_all_headers_is_dropped(full: Path, size: int, caplog: pytest.LogCaptureFixture) -> None:
    os.truncate(full, size)
    with attached(full) as kept:
        assert kept.found.slots.tolist() == []
        assert kept.file.found.dropped is not None
        assert f"{size:,} bytes" in caplog.text
        kept.store([1], [0], 1)
    with attached(full) as kept:
        assert kept.good() == {0: 1}


def test_a_longer_file_is_cut_and_kept(full: Path) -> None:
    size = full.stat().st_size
    with full.open("ab") as file:
        file.write(b"x" * 100_000)
    with attached(full) as kept:
        assert kept.good() == EXPECTED
    assert full.stat().st_size == size


@pytest.mark.parametrize("num_slots", [4, 8, 16, 40])
def test_pool_of_another_size_keeps_the_common_slots(full: Path, num_slots: int) -> None:
    expected = {slot: number for slot, number in EXPECTED.items() if slot < num_slots}
    with attached(full, replace(SHAPE, num_slots=num_slots)) as kept:
        assert kept.file.found.dropped is None
        assert kept.good() == expected
        assert kept.found.dropped == ({DropReason.TRUNCATED: 12 - num_slots} if num_slots < 12 else {})
        assert kept.file.num_slots == kept.pool.num_slots == num_slots
        kept.store([200], [num_slots - 1], 50)
    assert full.stat().st_size == SHAPE.payload_offset + num_slots // 4 * SHAPE.extent_stride
    with attached(full) as kept:
        assert kept.good() == {
            slot: number for slot, number in (expected | {num_slots - 1: 200}).items() if slot < SHAPE.num_slots
        }


def test_size_is_rounded_to_whole_extents_of_the_file(full: Path) -> None:
    with attached(full, replace(SHAPE, num_slots=15, extent_slots=5)) as kept:
        assert kept.file.shape == SHAPE
        assert kept.good() == EXPECTED


def test_blocks_of_removed_extents_are_not_recovered(full: Path) -> None:
    with attached(full) as kept:
        kept.pool.add_slots(8)
        kept.store([200, 201], [12, 19], 2)
        kept.pool.remove_extents(1)
        assert kept.file.num_slots == 16
        kept.pool.add_slots(4)
        assert kept.good() == EXPECTED
    with attached(full, replace(SHAPE, num_slots=20)) as kept:
        assert kept.good() == kept.numbers() == EXPECTED | {12: 200}, "what an extent held is gone with it"
        assert kept.found.dropped == {}


@pytest.mark.parametrize("grows", [True, False])
def test_a_death_while_the_file_changes_its_size_costs_nothing_else(full: Path, grows: bool) -> None:
    """A file is longer than the pool in it both before a growth is noted and after a shrink is."""
    if grows:
        with full.open("ab") as file:
            file.truncate(SHAPE.payload_offset + SHAPE.payload_bytes + SHAPE.extent_stride)
    else:
        write_at(full, POOL_HEADER.fields["num_slots"][1], (8).to_bytes(8, "little"))
    expected = EXPECTED if grows else {slot: number for slot, number in EXPECTED.items() if slot < 8}
    with attached(full) as kept:
        assert kept.good() == expected
        assert kept.found.dropped == {}
        assert kept.file.num_slots == 12
    assert full.stat().st_size == SHAPE.payload_offset + SHAPE.payload_bytes
    with attached(full, replace(SHAPE, num_slots=20)) as kept:
        assert kept.good() == expected


def test_no_more_slots_are_added_than_there_is_room_for_headers(full: Path) -> None:
    with attached(full) as kept:
        with pytest.raises(NotEnoughMemory, match="room for the headers of 40 slots, and 44 are wanted"):
            kept.pool.add_slots(32)
        assert kept.pool.num_slots == kept.file.num_slots == 12
        kept.pool.add_slots(28)
        assert kept.file.num_slots == 40


def test_pool_on_a_full_disk_is_recovered(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fail)
        with attached(full) as kept:
            assert kept.good() == EXPECTED
            with pytest.raises(StartError, match=r"in use by another process \(pid unknown\)"):
                KeptFile(full, SHAPE, FINGERPRINT)


@pytest.mark.parametrize("in_memory", [False, True])
def test_pool_copied_without_its_zeros_is_allocated_again(
    path: Path, monkeypatch: pytest.MonkeyPatch, in_memory: bool
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if in_memory:
        monkeypatch.setattr(backing, "SHARED_MEMORY", path.parent)
    # Headers have holes, too, and what is allocated of the payload outweighs them.
    shape, stored = replace(SHAPE, num_slots=128, max_slots=128), list(range(96))
    with attached(path, shape) as kept:
        kept.store(stored, stored, 1)
    allocated = path.stat().st_blocks
    subprocess.run(["cp", "--sparse=always", path, path.with_name("copy")], check=True)
    path.with_name("copy").rename(path)
    if path.stat().st_blocks == allocated:
        pytest.skip("the file system stores no holes")
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", fail)
        with pytest.raises(NotEnoughMemory, match="reserving the missing parts"), attached(path, shape):
            pass
    with attached(path, shape) as kept:
        assert path.stat().st_blocks >= allocated
        assert kept.good() == {number: number for number in stored}


def test_blocks_when_a_start_cannot_grow_the_pool_are_kept(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(parts: object, how: object) -> bool:
        raise NotEnoughMemory("no space left")

    with monkeypatch.context() as patched:
        patched.setattr("kvferry.cuda_ops.pool.host_pool.prepare", fail)
        with pytest.raises(NotEnoughMemory), attached(full, replace(SHAPE, num_slots=20)):
            pass
    with attached(full) as kept:
        assert kept.good() == EXPECTED


def test_closed_file_when_freed_does_not_change_the_new_owners(full: Path) -> None:
    with attached(full) as kept:
        left_behind = kept.file
    with attached(full) as kept:
        left_behind.free(0)
        assert kept.file.num_slots == 12
    with attached(full) as kept:
        assert kept.good() == EXPECTED


def test_headers_of_slots_that_are_not_there_take_no_room(path: Path) -> None:
    """Memory and disks have holes, so that a pool may come to be much larger than it is."""
    with attached(path, replace(SHAPE, max_slots=1_000_000)) as kept:
        kept.store(NUMBERS, SLOTS, 1)
    assert path.stat().st_size > 128_000_000
    assert path.stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize(
    ("shape", "fingerprint", "field"),
    [
        (SHAPE, FINGERPRINT | {"model": "other"}, "model was 'm', now 'other'"),
        (SHAPE, FINGERPRINT | {"dtype": "float16"}, "dtype was None"),
        (SHAPE, FINGERPRINT | {"layers": [1, 3]}, "layers was [1, 2]"),
        (replace(SHAPE, num_slots=44), FINGERPRINT, "num_slots=44: the file holds 4 to 40"),
        (replace(SHAPE, num_slots=3, extent_slots=3), FINGERPRINT, "num_slots=3: the file holds 4 to 40"),
        (replace(SHAPE, slot_bytes=1001), FINGERPRINT, "slot_bytes was 1,000"),
        (replace(SHAPE, num_ranks=2), FINGERPRINT, "num_ranks was 1"),
    ],
)
def test_pool_of_another_fingerprint_is_dropped_with_the_field(
    full: Path,
    shape: PoolShape,
    fingerprint: dict[str, object],
    field: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with attached(full, shape, fingerprint) as kept:
        assert kept.found.slots.tolist() == []
        assert field in str(kept.file.found.dropped)
        assert field in caplog.text
    with attached(full, shape, fingerprint) as kept:
        assert kept.file.found.dropped is None


def test_slots_of_another_fingerprint_never_verify(full: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.pool"
    with attached(other, fingerprint=FINGERPRINT | {"model": "other"}) as kept:
        kept.store(NUMBERS, SLOTS, 1)
    with attached(full) as kept:
        write_at(full, POOL_HEADER_BYTES, other.read_bytes()[POOL_HEADER_BYTES:])
        assert kept.headers.verify(kept.found.slots).tolist() == SLOTS


def test_another_format_version_and_foreign_files_are_dropped(full: Path) -> None:
    write_at(full, 8, (0).to_bytes(4, "little"))
    with attached(full) as kept:
        assert "format_version=0" in str(kept.file.found.dropped)
    full.write_bytes(b"PNG" + bytes(range(256)) * 1000)
    with attached(full) as kept:
        assert "magic" in str(kept.file.found.dropped)
        assert kept.found.slots.tolist() == []


def test_other_boot_is_reported_until_noted(full: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boot = tmp_path / "boot_id"
    boot.write_text("00000000-0000-0000-0000-000000000001\n")
    monkeypatch.setattr(kept_file, "BOOT_ID", boot)
    for _ in range(2):
        with attached(full) as kept:
            assert kept.file.found.other_boot
            assert kept.good() == EXPECTED
    with attached(full) as kept:
        kept.file.record_boot()
    with attached(full) as kept:
        assert not kept.file.found.other_boot


def test_a_second_process_is_refused_and_a_dead_ones_lock_is_free(full: Path) -> None:
    code = (
        "import mmap, signal; from pathlib import Path; from kvferry.cuda_ops.persistent.pool_file import KeptFile\n"
        "from tests.harness.kept_pools import *\n"
        "memory = mmap.mmap(-1, 256 << 20, flags=mmap.MAP_PRIVATE | getattr(mmap, 'MAP_POPULATE', 0))\n"
        f"file = KeptFile(Path({str(full)!r}), SHAPE, FINGERPRINT); print('attached', flush=True); signal.pause()"
    )
    with running_script(code) as (owner, out):
        assert out.readline() == "attached\n"
        with (
            pytest.raises(StartError, match=rf"in use by another process \(pid {owner.pid}\).*ENGINE_NAME"),
            attached(full),
        ):
            pass
        owner.kill()
        # The kernel frees its memory before it releases its lock.
        with attached(full) as kept:
            assert kept.good() == EXPECTED


def test_lock_is_waited_for_as_long_as_its_process_is_ending() -> None:
    tries: list[int] = []

    def take() -> bool:
        tries.append(1)
        return len(tries) > 20

    assert not take_when_ended(take, os.getpid, 0.0)
    assert not take_when_ended(take, lambda: None, 0.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        owner.kill()
        # Until it is waited for, its end is not over.
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        assert take_when_ended(take, lambda: owner.pid, 0.0)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
@pytest.mark.parametrize("suffix", ["", ".lock"])
def test_a_file_of_another_user_is_refused(full: Path, suffix: str) -> None:
    os.chown(f"{full}{suffix}", 12345, -1)
    with pytest.raises(StartError, match=f"{full}{suffix} belongs to user 12345"), attached(full):
        pass


@pytest.mark.parametrize("suffix", ["", ".lock"])
def test_a_link_in_the_place_of_a_pool_is_refused_and_its_target_kept(full: Path, tmp_path: Path, suffix: str) -> None:
    file = full.with_name(full.name + suffix)
    target = file.rename(tmp_path / "target")
    content = target.read_bytes()
    for name in (target, tmp_path / "missing"):
        file.symlink_to(name)
        uses = [lambda: KeptFile(full, SHAPE, FINGERPRINT), lambda: check_pool_file(full)]
        # Before a start, a lock is looked at only if there is one.
        for use in uses if name == target or not suffix else uses[:1]:
            with pytest.raises(StartError, match=f"{file} is a symbolic link; remove it, or set KVFERRY_POOL_PATH"):
                use()
        file.unlink()
    assert target.read_bytes() == content
    assert not (tmp_path / "missing").exists()


def test_a_folder_that_is_a_link_keeps_its_pool(full: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(full.parent)
    path = tmp_path / "link" / full.name
    check_pool_file(path)
    with attached(path) as kept:
        assert len(kept.found.slots) > 0


@pytest.mark.parametrize("suffix", ["", ".lock"])
def test_a_pool_that_is_no_regular_file_is_refused(path: Path, suffix: str) -> None:
    os.mkfifo(f"{path}{suffix}")
    with pytest.raises(StartError, match="is not a regular file; remove it"):
        KeptFile(path, SHAPE, FINGERPRINT)


def test_slots_come_back_only_if_all_ranks_agree(path: Path) -> None:
    shape = replace(SHAPE, num_ranks=2)
    with attached(path, shape) as kept:
        pool = HostPool(12, 1000, 4 * 2000, backing=kept.file, num_ranks=2, rank=1)
        other = type(kept.headers)(kept.file, pool)
        for headers, whole in ((kept.headers, kept.pool), (other, pool)):
            labels = kept.label([1, 2, 3], [0, 1, 2], 1)
            headers.begin(labels)
            for number, slot in ((1, 0), (2, 1), (3, 2)):
                whole.slot(slot)[:] = bytes_of(number)
            headers.seal(labels if headers is kept.headers else labels.slice(0, 2))
        header = kept.file.headers(1)
        header["generation"][1] = 9
        header["checksum"][1:2] = header_checksums(header[1:2])
    with attached(path, shape) as kept:
        assert kept.numbers() == {0: 1}
        assert kept.found.dropped == {DropReason.UNSEALED: 1, DropReason.RANKS_DIFFER: 1}


def test_a_key_that_does_not_fit_a_header_is_never_sealed(path: Path) -> None:
    with attached(path) as kept:
        labels = kept.label([1, 2], [0, 1], 1)._replace(keys=[b"k" * (MAX_KEY_BYTES + 1), b"k" * MAX_KEY_BYTES])
        kept.headers.begin(labels)
        assert kept.headers.seal(labels) == 1
    with attached(path) as kept:
        assert kept.found.keys == [b"k" * MAX_KEY_BYTES]


def test_copies_seal_stored_slots_and_verify_recovered_ones(path: Path) -> None:
    blocks = np.stack([bytes_of(number) for number in range(12)])

    with attached(path) as kept:
        copies = kept.copies(blocks, before=kept.headers.before_copy)
        copies.submit(job(1, Direction.STORE, SLOTS[:12], SLOTS[:12], labels=kept.label(list(range(12)), SLOTS, 1)))
        assert copies.wait([1], 30)
        copies.close()
        assert [result.error for result in copies.poll()] == [None]
        assert not copies.num_unsealed
    with attached(path) as kept:
        assert kept.good() == {n: n for n in range(12)}
        kept.pool.slot(3)[17] ^= 1
        kept.pool.slot(5)[0] ^= 1
        blocks[:] = 0
        woken: list[int] = []
        copies = kept.copies(blocks, lambda: woken.append(1))
        copies.submit(job(1, Direction.LOAD, SLOTS[:2], SLOTS[:2], verify=np.array([0, 1])))
        copies.submit(job(2, Direction.LOAD, SLOTS[:12], SLOTS[:12], verify=np.arange(12)))
        assert copies.wait([1, 2], 30)
        wait_until(lambda: len(woken) == 2, "both were told")
        results = {result.job_id: result for result in copies.poll()}
        assert (results[1].error, results[1].corrupt) == (None, ())
        assert results[2].corrupt == (3, 5)
        assert "2 of 12 slots" in str(results[2].error)
        assert np.array_equal(blocks[:2], [bytes_of(0), bytes_of(1)])
        assert not blocks[2:].any(), "nothing of a load with a bad slot is copied"
        copies.close()
        copies.submit(job(3, Direction.LOAD, SLOTS[:1], SLOTS[:1], verify=np.array([0])))
        assert [result.error is None for result in copies.poll()] == [False]


def test_a_dead_sealing_thread_is_replaced_and_later_jobs_end(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with attached(path) as kept:
        kept.store([0], [0], 1)
        copies = kept.copies(np.zeros((12, 1000), dtype=np.uint8))
        monkeypatch.setattr(threading, "excepthook", lambda args: None)
        monkeypatch.setattr(kept.headers, "verify", lambda slots: sys.exit(1))
        copies.submit(job(1, Direction.LOAD, SLOTS[:1], SLOTS[:1], verify=np.array([0])))
        wait_until(lambda: not copies.is_alive(), "the thread is dead", 30)
        monkeypatch.undo()
        assert copies.wait([1], 30)
        (result,) = copies.poll()
        assert "the checksum thread died" in str(result.error)
        assert copies.is_alive()
        copies.submit(job(2, Direction.LOAD, SLOTS[:1], SLOTS[:1], verify=np.array([0])))
        assert copies.wait([2], 30)
        copies.close()
        assert [result.error for result in copies.poll()] == [None]


def test_close_while_the_disk_hangs_ends_without_its_thread(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs = threading.Event()
    with attached(path) as kept:
        copies = kept.copies(np.zeros((12, 1000), dtype=np.uint8), close_s=0.01, before=kept.headers.before_copy)
        monkeypatch.setattr(kept.headers, "seal", lambda labels: hangs.wait())
        copies.submit(job(1, Direction.STORE, SLOTS[:1], SLOTS[:1], labels=kept.label([0], SLOTS[:1], 1)))
        assert copies.wait([1], 30)
        copies.close()
        assert [result.error for result in copies.poll()] == [None]
        tiers = TierSealer([kept.headers], close_s=0.01)
        tiers.end_tier_write(kept.label([1], [1], 1))
        tiers.close()
        for sealer in (copies, tiers):
            sealer.end_tier_write(kept.label([1], [1], 1))
        running = [thread.daemon for thread in threading.enumerate() if thread.name.startswith("kvferry-seal")]
        hangs.set()
        assert running == [True, True], "the process does not wait for them when it ends"
    assert "stores not sealed in time, a restart will not recover them: 1" in caplog.text
    assert caplog.text.count("blocks from a tier are not sealed and lost at a restart: 1: the engine is closing") == 2


def test_pool_format_page_lists_every_reason_of_a_dropped_slot() -> None:
    page = (Path(__file__).parents[2] / "docs/pool-format.md").read_text()
    assert [reason for reason in DropReason if f"| `{reason}` |" not in page] == []
