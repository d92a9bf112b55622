"""Pools that several processes of one engine map: ready before others join, theirs alone, and gone when it should."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from kvferry.app.pool.recovery import WarmStart
from kvferry.core.errors import StartError
from kvferry.cuda_ops.persistent.format import PoolShape
from kvferry.cuda_ops.persistent.header_writer import HeaderWriter, recover_slots
from kvferry.cuda_ops.persistent.headers import SlotHeaders
from kvferry.cuda_ops.persistent.inspection import inspect_pool
from kvferry.cuda_ops.persistent.lock import PoolLock, lock_path
from kvferry.cuda_ops.persistent.pool_file import KeptFile, check_pool_file
from kvferry.cuda_ops.persistent.recovery import DropReason, RecoveredSlots
from kvferry.cuda_ops.persistent.transient_file import TransientFile, sweep_names
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from kvferry.cuda_ops.pool.host_pool import HostPool
from tests.harness.commands import running_script
from tests.harness.kept_pools import FINGERPRINT, bytes_of, labels_of, map_pool

SHAPE = PoolShape(num_slots=12, slot_bytes=1000, num_ranks=2, extent_slots=4, max_slots=40)


@dataclass
class Mapped:
    """One process's view of a pool."""

    file: KeptFile
    pool: HostPool

    def store(self, rank: int, numbers: list[int], slots: list[int], num_bytes: int = 2000) -> None:
        """What a rank does with its part of blocks, of so many bytes on all ranks together."""
        headers = SlotHeaders(self.file, self.pool, rank)
        labels = labels_of(self.file, numbers, slots, 1, num_bytes)
        headers.begin(labels)
        for number, slot in zip(numbers, slots, strict=True):
            self.pool.row(slot)[rank, : num_bytes // 2] = bytes_of(number + rank, num_bytes // 2)
        assert headers.seal(labels) == len(slots)

    def verify(self, rank: int, recovered: RecoveredSlots) -> list[int]:
        return SlotHeaders(self.file, self.pool, rank).verify(recovered.slots).tolist()


@contextmanager
def engine(path: Path, shape: PoolShape = SHAPE) -> Iterator[tuple[Mapped, Mapped]]:
    """The first rank's view, and that of a process that has joined it."""
    first = KeptFile(path, shape, FINGERPRINT)
    made = [first]
    try:
        views = [map_all(first, 0)]
        first.downgrade_lock()
        made.append(KeptFile(path, shape, FINGERPRINT, join=True))
        views.append(map_all(made[1], 1))
        yield views[0], views[1]
    finally:
        for file in made:
            file.close()


def map_all(file: KeptFile, rank: int) -> Mapped:
    return Mapped(file, map_pool(file, rank))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "shared.pool"


def test_blocks_sealed_by_all_ranks_are_recovered_when_joining(path: Path) -> None:
    with engine(path) as (first, second):
        first.store(0, [100, 101, 102], [3, 4, 5])
        second.store(1, [100, 101, 102], [3, 4, 5])
        # A group whose blocks are shorter than a slot, and a block that one rank had not sealed.
        first.store(0, [103, 104], [6, 7], num_bytes=600)
        second.store(1, [103], [6], num_bytes=600)
    with engine(path) as (first, second):
        kept = recover_slots(second.file)
        assert kept.slots.tolist() == [3, 4, 5, 6]
        assert kept.sizes.tolist() == [2000, 2000, 2000, 600]
        assert kept.dropped == {DropReason.UNSEALED: 1}
        first.pool.row(4)[1, 999] ^= 1
        assert [second.verify(rank, kept) for rank in range(2)] == [[], [4]]


def test_inspection_verifies_the_bytes_of_all_ranks(path: Path) -> None:
    with engine(path) as (first, second):
        first.store(0, [100, 101], [3, 4])
        second.store(1, [100, 101], [3, 4])
        first.pool.row(4)[1, 0] ^= 1
        seen = inspect_pool(path)
        assert seen.recovered.sizes.tolist() == [2000, 2000]
        assert seen.verify(seen.recovered.slots).tolist() == [4]


def test_truncated_file_is_new_for_all_processes(path: Path) -> None:
    with engine(path) as (first, second):
        first.store(0, list(range(100, 112)), list(range(12)))
        second.store(1, list(range(100, 112)), list(range(12)))
    os.truncate(path, SHAPE.payload_offset + SHAPE.extent_stride + 2 * SHAPE.row_bytes)
    with engine(path) as (first, second):
        assert first.file.num_dropped == {DropReason.TRUNCATED: 12, DropReason.FOREIGN: 0}
        assert recover_slots(second.file).slots.tolist() == []


def test_pool_of_another_size_has_the_same_slots_in_all_processes(path: Path) -> None:
    with engine(path) as (first, second):
        first.store(0, [100, 110], [1, 10])
        second.store(1, [100, 110], [1, 10])
    for num_slots, kept in ((9, [1]), (20, [1])):
        with engine(path, replace(SHAPE, num_slots=num_slots, extent_slots=1)) as (first, second):
            assert first.pool.num_slots == second.pool.num_slots == num_slots // 4 * 4
            assert first.file.num_dropped == ({DropReason.TRUNCATED: 1} if num_slots == 9 else {})
            assert recover_slots(second.file).slots.tolist() == kept


def test_account_of_a_smaller_start_has_the_drops_of_both_processes(path: Path) -> None:
    with engine(path) as (first, second):
        for rank, mapped in enumerate((first, second)):
            mapped.store(rank, list(range(100, 112)), list(range(12)))
        writer = HeaderWriter(first.file)
        writer.invalidate(np.array([1, 2, 3, 9]), np.ones(4, dtype=np.int64))
        writer.start()
        writer.close()
    with engine(path, replace(SHAPE, num_slots=8)) as (first, second):
        kept = recover_slots(second.file)
        found = WarmStart(len(kept.slots), 0, {reason.value: count for reason, count in kept.dropped.items()})
        account = found.opened(first.file.found, first.file.num_dropped)
    assert (account.slots, account.recovered, account.empty) == (12, 5, 0)
    assert account.dropped == {"left": 4, "truncated": 3}


def test_pool_is_locked_until_its_last_process_ends(path: Path) -> None:
    with engine(path) as (first, second):
        for file in (first.file, second.file):
            with pytest.raises(StartError, match=rf"in use by another process \(pid {os.getpid()}\).*ENGINE_NAME"):
                KeptFile(path, SHAPE, FINGERPRINT)
            file.close()
    KeptFile(path, SHAPE, FINGERPRINT).close()


@pytest.mark.parametrize("how", ["renamed", "hard link", "lock file removed"])
def test_pool_file_in_use_under_another_name_is_refused(path: Path, how: str) -> None:
    other = path if how == "lock file removed" else path.with_name("other.pool")
    with engine(path) as (first, second):
        if how == "renamed":
            path.rename(other)
        elif how == "hard link":
            os.link(path, other)
        else:
            lock_path(path).unlink()
        for file in (first.file, second.file):
            with pytest.raises(StartError, match=r"in use by another process, which opened.*ENGINE_NAME"):
                KeptFile(other, SHAPE, FINGERPRINT)
            file.close()
    # The views keep the file mapped.
    KeptFile(other, SHAPE, FINGERPRINT).close()


def test_renamed_pool_file_is_free_once_its_process_is_killed(path: Path) -> None:
    KeptFile(path, SHAPE, FINGERPRINT).close()
    code = (
        "import signal; from pathlib import Path; from kvferry.cuda_ops.persistent.pool_file import KeptFile\n"
        "from tests.harness.kept_pools import FINGERPRINT; from tests.cuda_ops.test_shared_pools import SHAPE\n"
        f"file = KeptFile(Path({str(path)!r}), SHAPE, FINGERPRINT); print('opened', flush=True); signal.pause()"
    )
    with running_script(code) as (owner, out):
        assert out.readline() == "opened\n"
        other = path.rename(path.with_name("other.pool"))
        for use in (lambda: KeptFile(other, SHAPE, FINGERPRINT), lambda: check_pool_file(other)):
            with pytest.raises(StartError, match="in use by another process, which opened"):
                use()
        owner.kill()
        KeptFile(other, SHAPE, FINGERPRINT).close()


def test_join_of_an_unprepared_or_other_pool_is_refused(path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        KeptFile(path, SHAPE, FINGERPRINT, join=True)
    first = KeptFile(path, SHAPE, FINGERPRINT)
    try:
        with pytest.raises(StartError, match="in use by another process"):
            KeptFile(path, SHAPE, FINGERPRINT, join=True)
        map_all(first, 0)
        first.downgrade_lock()
        with pytest.raises(StartError, match="prepared by the first process of this engine: model was 'm'"):
            KeptFile(path, SHAPE, FINGERPRINT | {"model": "other"}, join=True)
    finally:
        first.close()


def test_sweep_removes_names_of_dead_engines_only() -> None:
    name = f"test-{secrets.token_hex(6)}"
    script = (
        "import signal\nfrom kvferry.cuda_ops.pool.host_pool import HostPool\n"
        "from kvferry.cuda_ops.persistent.transient_file import TransientFile\n"
        f"pool = HostPool(4, 4096, backing=TransientFile({name!r}))\nprint('mapped', flush=True)\nsignal.pause()"
    )
    path = SHARED_MEMORY / f"kvferry-{name}.pinned"
    try:
        with running_script(script) as (_, out):
            assert out.readline() == "mapped\n"
            sweep_names()
            assert path.exists()
        assert path.exists()
        sweep_names()
        assert not path.exists()
        assert not lock_path(path).exists()
    finally:
        path.unlink(missing_ok=True)
        lock_path(path).unlink(missing_ok=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_sweep_leaves_names_of_other_users(tmp_path: Path) -> None:
    name = tmp_path / "kvferry-theirs.pinned"
    name.touch()
    os.chown(name, 12345, -1)
    sweep_names(tmp_path)
    assert list(tmp_path.iterdir()) == [name]


def test_unlinked_memory_is_shared_by_its_processes() -> None:
    name = f"test-{secrets.token_hex(6)}"
    first = HostPool(4, 4096, backing=(made := TransientFile(name)))
    second = HostPool(4, 4096, backing=(joined := TransientFile(name, is_ready=True)))
    assert (made.must_touch, joined.must_touch) == (True, False)
    joined.unlink()
    try:
        assert not list(SHARED_MEMORY.glob(f"kvferry-{name}*"))
        first.slot(2)[:] = 7
        assert (second.slot(2) == 7).all()
        with pytest.raises(FileNotFoundError):
            TransientFile(name, is_ready=True)
        assert not list(SHARED_MEMORY.glob(f"kvferry-{name}*"))
    finally:
        first.close()
        second.close()
        for path in SHARED_MEMORY.glob(f"kvferry-{name}*"):
            path.unlink()


def test_kept_pool_in_shared_memory_needs_its_memory_once() -> None:
    path = SHARED_MEMORY / f"kvferry-test-{secrets.token_hex(6)}.pool"
    shape = replace(SHAPE, max_slots=1_000_000)
    try:
        for _ in range(2):
            with engine(path, shape) as views:
                assert [view.file.reserved_bytes() for view in views] == [shape.payload_bytes] * 2
    finally:
        path.unlink(missing_ok=True)
        lock_path(path).unlink(missing_ok=True)


def test_lock_close_when_repeated_is_harmless(path: Path) -> None:
    lock = PoolLock(path)
    lock.close()
    lock.close()
    PoolLock(path, shared=True).close()
