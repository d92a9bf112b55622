"""The host pool: slots lie where they should, for every rank and process, and memory is checked, touched and pinned."""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.errors import StartError
from kvferry.cuda_ops.cuda.driver import CudaDriver
from kvferry.cuda_ops.cuda.registrar import CudaRegistrar
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY, SharedFile
from kvferry.cuda_ops.pool.host_pool import HostPool
from kvferry.cuda_ops.pool.limits import NotEnoughMemory
from kvferry.cuda_ops.pool.prepare import PoolPhase, Preparation, prepare
from tests.harness.commands import run_script, running_script
from tests.harness.fake_cuda import FakeCuda
from tests.harness.resident import resident_bytes
from tests.harness.waiting import DEADLINE_S

PAGE = mmap.PAGESIZE


@given(
    per_extent=st.integers(1, 5),
    additions=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    num_ranks=st.integers(1, 3),
    removed=st.integers(0, 2),
)
def test_every_slot_has_bytes_of_its_own_in_every_rank(
    per_extent: int, additions: list[int], num_ranks: int, removed: int
) -> None:
    slot_bytes = 24
    pool = HostPool(additions[0], slot_bytes, per_extent * num_ranks * slot_bytes, num_ranks=num_ranks)
    for count in additions[1:]:
        pool.add_slots(count)
    assert pool.num_slots == sum(additions) == sum(pool.extent_slots)
    assert max(pool.extent_slots) <= per_extent
    gone = min(removed, len(pool.extent_slots))
    kept = sum(pool.extent_slots[: len(pool.extent_slots) - gone])
    pool.remove_extents(gone)
    assert pool.num_slots == kept
    assert pool.num_bytes == kept * num_ranks * slot_bytes
    for slot in range(kept):
        for rank in range(num_ranks):
            pool.row(slot)[rank] = (slot * num_ranks + rank) % 251
    for slot in range(kept):
        assert pool.row(slot).tolist() == [[(slot * num_ranks + rank) % 251] * slot_bytes for rank in range(num_ranks)]
        assert pool.slot(slot).ctypes.data == pool.row(slot).ctypes.data


def test_a_rank_reaches_its_own_column_of_each_row() -> None:
    pool = HostPool(3, 64, num_ranks=4, rank=2)
    pool.slot(1)[:] = 7
    assert [row.any() for row in pool.row(1)] == [False, False, True, False]
    assert pool.slot(1).ctypes.data == pool.row(1)[2].ctypes.data
    with pytest.raises(ValueError, match="rank=4: must be in 0"):
        HostPool(3, 64, num_ranks=4, rank=4)


def test_extents_and_rows_of_whole_pages_are_page_aligned() -> None:
    pool = HostPool(9, PAGE, extent_bytes=4 * PAGE)
    assert pool.extent_slots == [4, 4, 1]
    assert not any(pool.slot(slot).ctypes.data % PAGE for slot in range(9))
    odd = HostPool(9, 100, extent_bytes=400)
    assert not any(odd.slot(slot).ctypes.data % PAGE for slot in (0, 4, 8))


def test_views_outlive_the_pool() -> None:
    pool = HostPool(2, 64)
    view = pool.slot(1)
    pool.close()
    view[:] = 3
    assert view.sum() == 3 * 64
    assert pool.num_slots == 0


def test_no_more_extents_are_removed_than_there_are() -> None:
    with pytest.raises(ValueError, match="count=3: the pool has 2 extents"):
        HostPool(4, 64, extent_bytes=128).remove_extents(3)


# ---- limits ---------------------------------------------------------------------------------------------------------


def test_a_pool_larger_than_memory_is_refused_with_both_numbers() -> None:
    with pytest.raises(NotEnoughMemory, match=r"POOL_BYTES asks for 1,125,899,906,842,624 bytes .* bytes"):
        HostPool(1 << 30, 1 << 20)


def test_add_slots_when_memory_is_short_changes_nothing() -> None:
    pool = HostPool(4, 64)
    with pytest.raises(NotEnoughMemory, match=r"POOL_BYTES asks for"):
        pool.add_slots(1 << 45)
    assert pool.num_slots == 4


def test_shared_memory_of_a_killed_start_counts_once_it_is_touched(shared_path: Path) -> None:
    pool = HostPool(4, PAGE, backing=SharedFile(shared_path))
    os.truncate(shared_path, 1 << 44)
    with pytest.raises(NotEnoughMemory, match="KVFERRY_POOL_BYTES asks for"):
        pool.check_room((1 << 44) // PAGE)
    pool.close()


def test_pool_larger_than_shared_memory_is_refused_with_a_hint(shared_path: Path) -> None:
    """vllm#52496, kserve#1842: 64 MB of `/dev/shm` in containers."""
    with pytest.raises(NotEnoughMemory, match=r"space left in /dev/shm .*--shm-size|memory available"):
        HostPool(1 << 30, 1 << 20, backing=SharedFile(shared_path))
    assert shared_path.stat().st_size == 0


def test_a_pool_larger_than_its_disk_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(NotEnoughMemory, match=r"space left on the disk of .* bytes"):
        HostPool(1 << 40, 1 << 20, backing=SharedFile(tmp_path / "pool"))


@pytest.mark.parametrize("kind", ["shm", "file"])
def test_failed_reservation_leaves_the_pool_file_unchanged(kind: str, shared_path: Path, tmp_path: Path) -> None:
    path = shared_path if kind == "shm" else tmp_path / "pool"
    program = (
        "import resource, sys; from pathlib import Path\n"
        "from kvferry.cuda_ops.pool.backing import SharedFile; from kvferry.cuda_ops.pool.host_pool import HostPool\n"
        "pool = HostPool(4, 65536, backing=SharedFile(Path(sys.argv[1])))\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n    pool.add_slots(64)\n"
        "except Exception as error:\n    print(type(error).__name__, error, pool.num_slots)\n"
    )
    run = run_script(program, path)
    assert run.stdout.startswith("NotEnoughMemory KVFERRY_POOL_BYTES: reserving 4,456,448 bytes for the pool failed"), (
        run
    )
    assert run.stdout.endswith(" 4\n")
    assert path.stat().st_size == 4 * 65536


# ---- shared by several processes ------------------------------------------------------------------------------------


@pytest.fixture
def shared_path() -> Iterator[Path]:
    path = SHARED_MEMORY / f"kvferry-test-{secrets.token_hex(8)}"
    yield path
    path.unlink(missing_ok=True)


@pytest.mark.parametrize("kind", ["shm", "file"])
def test_ranks_in_several_processes_share_one_mapping(kind: str, shared_path: Path, tmp_path: Path) -> None:
    path = shared_path if kind == "shm" else tmp_path / "pool"
    program = (
        "import sys; from pathlib import Path\n"
        "from kvferry.cuda_ops.pool.backing import SharedFile; from kvferry.cuda_ops.pool.host_pool import HostPool\n"
        "rank = int(sys.argv[2])\n"
        "pool = HostPool(10, 4096, 5 * 3 * 4096, backing=SharedFile(Path(sys.argv[1])), num_ranks=3, rank=rank)\n"
        "for slot in range(10):\n    pool.slot(slot)[:] = 10 * slot + rank\n"
    )
    with ExitStack() as stack:
        ranks = [stack.enter_context(running_script(program, path, rank)) for rank in range(3)]
        assert [process.wait(DEADLINE_S) for process, _ in ranks] == [0, 0, 0]
    pool = HostPool(10, 4096, 5 * 3 * 4096, backing=SharedFile(path), num_ranks=3)
    for slot in range(10):
        assert (pool.row(slot) == [[10 * slot + rank] for rank in range(3)]).all()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.stat().st_size == pool.num_bytes


def test_extent_keeps_no_file_open_and_is_freed_with_its_views(shared_path: Path) -> None:
    """A thousand extents, each with a file of its own, meet the usual limit of open files."""
    file = SharedFile(shared_path)
    before = len(os.listdir("/proc/self/fd"))
    pool = HostPool(64, PAGE, PAGE, backing=file)
    assert len(pool.extent_slots) == 64
    assert len(os.listdir("/proc/self/fd")) == before
    assert Path("/proc/self/maps").read_text().count(str(shared_path)) >= 1
    view = pool.slot(63)
    view[:] = 7
    pool.close()
    assert (view == 7).all()
    assert Path("/proc/self/maps").read_text().count(str(shared_path)) == 1
    del view
    assert str(shared_path) not in Path("/proc/self/maps").read_text()


def test_link_in_the_place_of_shared_memory_is_refused(shared_path: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"of the user")
    shared_path.symlink_to(tmp_path / "file")
    for is_ready in (False, True):
        with pytest.raises(StartError, match="is a symbolic link"):
            SharedFile(shared_path, is_ready=is_ready)
    assert (tmp_path / "file").read_bytes() == b"of the user"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_shared_memory_of_another_user_is_refused(shared_path: Path) -> None:
    shared_path.touch()
    os.chown(shared_path, 12345, -1)
    with pytest.raises(StartError, match="belongs to user 12345"):
        SharedFile(shared_path)


def test_extents_are_shared_and_removed_by_the_last_process(shared_path: Path) -> None:
    first = HostPool(4, 4096, 2 * 4096, backing=SharedFile(shared_path))
    second = HostPool(4, 4096, 2 * 4096, backing=SharedFile(shared_path))
    first.add_slots(3)
    first.slot(6)[:] = 5
    second.add_slots(3)
    assert second.slot(6).min() == 5
    first.remove_extents(2, free=False)
    assert shared_path.stat().st_size == 7 * 4096
    second.remove_extents(2)
    assert shared_path.stat().st_size == 4 * 4096
    assert first.num_slots == second.num_slots == 4


# ---- made ready -----------------------------------------------------------------------------------------------------


def test_pinned_pool_is_registered_by_extent_with_progress() -> None:
    """vllm#42632, vllm#54792: pinning 500 GB took 55 s before the engine was up."""
    cuda, told = FakeCuda(), list[tuple[PoolPhase, int, int]]()
    registrar = CudaRegistrar(CudaDriver(cuda.resolve), 0)
    preparation = Preparation(registrar=registrar, progress=lambda *progress: told.append(progress), num_threads=3)
    pool = HostPool(10, PAGE, 4 * PAGE, preparation=preparation)
    assert pool.is_page_locked
    assert sorted(cuda.registered.values()) == [2 * PAGE, 4 * PAGE, 4 * PAGE]
    assert set(cuda.registered) == {pool.slot(slot).ctypes.data for slot in (0, 4, 8)}
    for phase in PoolPhase:
        done = [step[1:] for step in told if step[0] is phase]
        assert done == sorted(done)
        assert done[-1] == (10 * PAGE, 10 * PAGE)
    pool.add_slots(3)
    pool.remove_extents(2)
    assert sorted(cuda.registered.values()) == [4 * PAGE, 4 * PAGE]
    pool.close()
    registrar.close()
    assert (cuda.registered, cuda.retained) == ({}, 0)


@pytest.mark.parametrize("new_kernel", [True, False])
def test_touched_memory_is_there_at_once_and_unchanged(
    new_kernel: bool, shared_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not new_kernel:
        monkeypatch.setattr("kvferry.cuda_ops.pool.prepare.can_populate", lambda: False)
        monkeypatch.setattr("kvferry.cuda_ops.pool.backing.can_populate", lambda: False)
    lazy = HostPool(256, PAGE)
    assert resident_bytes(lazy, 0) == 0
    eager = HostPool(256, PAGE, preparation=Preparation(touch=True))
    assert resident_bytes(eager, 0) == 256 * PAGE
    shared = HostPool(256, PAGE, backing=SharedFile(shared_path))
    assert resident_bytes(shared, 0) == 256 * PAGE
    shared.slot(200)[:] = 9
    again = HostPool(256, PAGE, backing=SharedFile(shared_path))
    assert again.slot(200).min() == 9


def test_shared_memory_that_is_not_there_is_an_error_and_no_bus_error(shared_path: Path) -> None:
    shared_path.write_bytes(bytes(2 * PAGE))
    with shared_path.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 2 * PAGE), dtype=np.uint8)
        os.ftruncate(file.fileno(), PAGE)
        with pytest.raises(NotEnoughMemory, match=r"allocating 8,192 bytes of the pool failed.*no space left"):
            prepare([memory], Preparation(touch=True))


def test_progress_callback_that_raises_does_not_stop_preparation(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise OSError("nobody home")

    cuda = FakeCuda()
    registrar = CudaRegistrar(CudaDriver(cuda.resolve), 0)
    assert HostPool(8, PAGE, PAGE, preparation=Preparation(registrar=registrar, progress=fail)).is_page_locked
    assert len(cuda.registered) == 8
    assert "nobody home" in caplog.text


def test_missing_huge_pages_or_numa_node_are_no_error(caplog: pytest.LogCaptureFixture) -> None:
    here = os.sched_getaffinity(0)
    pool = HostPool(4, 4 << 20, preparation=Preparation(touch=True, huge_pages=True, numa_node=4095))
    pool.slot(3)[:] = 1
    assert "host pool not bound to NUMA node 4095" in caplog.text
    HostPool(4, PAGE, preparation=Preparation(touch=True, numa_node=0)).slot(3)[:] = 1
    assert os.sched_getaffinity(0) == here
