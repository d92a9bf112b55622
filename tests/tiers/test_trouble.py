"""A file system tier on disks that fill, go, come back, refuse and hang: it degrades, says so once, and recovers."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from kvferry.app.tiers.block_store import TierRefused
from kvferry.app.tiers.fs import FileTier
from kvferry.app.tiers.fs.folder import Folder
from kvferry.app.tiers.opening import open_tiers
from kvferry.core.keys import RequestFilter
from tests.harness.commands import run_script
from tests.harness.mounts import disk, frozen, mounted, tmpfs, unwritable
from tests.harness.tier_rig import FINGERPRINT, WAIT_S, Rig, file_rig
from tests.harness.tier_slots import LARGE, ORIGIN, SLOT_BYTES, SlotArray, key_of, keys_of
from tests.harness.waiting import wait_until


def fill(folder: Path) -> Path:
    """Take all space that is left."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\x01" * 65536)
        except OSError:
            return ballast


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_disk_when_full_below_the_limit_evicts_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, shared: bool
) -> None:
    with tmpfs(tmp_path / "disk", 12 << 20) as mount, closing(file_rig(mount / "tier", "1GiB", shared=shared)) as rig:
        wait_until(lambda: "max_bytes=1,073,741,824 is more than its disk can hold" in caplog.text, "a warning", WAIT_S)
        assert rig.store(keys_of(LARGE[:6])) == [True] * 6
        assert not rig.health()
        ballast = fill(mount)
        wait_until(lambda: rig.store(keys_of(LARGE[6:8])) == [True] * 2, "room", WAIT_S)
        assert rig.load(keys_of(LARGE[6:8])) == [True] * 2
        assert rig.counts().evicted >= 2
        rig.wait_for_reason("of max_bytes=1,073,741,824 bytes")
        assert caplog.text.count("is full at") == 1
        fill(mount)
        rig.reset()
        assert rig.find(keys_of(LARGE[:8])) == [False] * 8
        ballast.unlink()
        rig.wait_healthy()


def test_quota_below_the_limit_evicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full for this tier and says that it has space."""
    monkeypatch.setattr(Folder, "free_bytes", lambda folder: 1 << 40)
    with tmpfs(tmp_path / "disk", 12 << 20) as mount, closing(file_rig(mount / "tier", "1GiB")) as rig:
        for number in LARGE[:40]:
            wait_until(lambda number=number: rig.store(keys_of([number])) == [True], "room", WAIT_S)
        assert rig.counts().evicted > 0
        assert rig.load(keys_of(LARGE[39:40])) == [True]


def test_full_disk_without_blocks_is_logged_once_and_recovers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with tmpfs(tmp_path / "disk", 8 << 20) as mount, closing(file_rig(mount / "tier", "1GiB")) as rig:
        rig.store(keys_of([1]))
        rig.drop(keys_of([1]))
        wait_until(lambda: not list((mount / "tier" / "blocks").rglob("*.*")), "dropped", WAIT_S)
        ballast = fill(mount)
        caplog.clear()
        num_open = len(os.listdir("/proc/self/fd"))
        for start in range(0, 20, 5):
            assert not any(rig.store(keys_of(LARGE[start : start + 5])))
        # As a block that could not be written, or one that was not tried, showed it.
        wait_until(lambda: any("full at" in one or "No space" in one for one in rig.health()), "the reason", WAIT_S)
        assert rig.counts().stored == 1, "once it is known, blocks are not even copied"
        assert rig.counts().dropped > 0
        assert len({record.getMessage() for record in caplog.records}) == len(caplog.records) <= 2
        assert list((mount / "tier" / "tmp").iterdir()) == [], "nothing half-written is left"
        assert len(os.listdir("/proc/self/fd")) <= num_open
        ballast.unlink()
        rig.wait_healthy()
        assert rig.store(keys_of(LARGE[:5])) == [True] * 5


def test_a_full_disk_is_no_reason_not_to_start(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", 16 << 20) as mount:
        with closing(file_rig(mount / "tier", "1GiB")) as rig:
            rig.store(keys_of(LARGE[:8]))
        ballast = fill(mount)
        settings = FileTier.Settings(type="fs", name="disk", path=mount / "tier", max_bytes="1GiB")
        slots = SlotArray(4)
        tier = open_tiers([settings], FINGERPRINT, SLOT_BYTES, slots, lambda: None, engine="e")["disk"]
        wait_until(lambda: tier.counts().evicted > 0, "space on the disk", WAIT_S)
        assert tier.counts().blocks > 0
        wait_until(lambda: "is full at" in "".join(tier.health()), "the reason", WAIT_S)
        ballast.unlink()
        wait_until(lambda: not tier.health(), "healthy", WAIT_S)
        tier.close(WAIT_S)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_folder_when_it_becomes_unwritable_still_serves_its_blocks(
    path: Path, caplog: pytest.LogCaptureFixture, shared: bool
) -> None:
    keys = keys_of(range(6))
    with closing(file_rig(path, shared=shared)) as rig:
        rig.store(keys)
        with unwritable(path / "tmp"):
            assert rig.store(keys_of([100])) == [False]
            rig.wait_for_reason("new blocks are not kept")
            rig._maintain_now()
            assert rig.load(keys) == [True] * 6
            assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
        rig.wait_healthy()
        assert rig.serves(keys_of([100]))


def test_a_folder_that_cannot_be_written_refuses_to_start(tmp_path: Path) -> None:
    path = tmp_path / "tier"
    file_rig(path).close()
    shutil.rmtree(path / "blocks")
    with unwritable(path), pytest.raises(TierRefused, match=r"tier disk: path=.*tier cannot be "):
        file_rig(path)
    with unwritable(path / "tmp"), pytest.raises(TierRefused, match=r"tier disk: path=.*tier cannot be used: "):
        file_rig(path)


def test_folder_when_deleted_is_not_made_again(path: Path, rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    keys = keys_of(range(6))
    rig.store(keys)
    # Moved first, since housekeeping makes a lock file again.
    shutil.rmtree(path.rename(path.with_name("deleted")))
    rig.wait_for_reason("the folder was moved, deleted or unmounted; bring it back, or detach the tier and attach it")
    assert rig.find(keys) == [False] * 6
    assert rig.store(keys_of([50])) == [False]
    assert not path.exists(), "it may be a mount that is gone"
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(errors) == len(set(errors)) > 0


def test_folder_when_its_contents_are_deleted_still_works(path: Path, rig: Rig) -> None:
    keys = keys_of(range(6))
    rig.store(keys)
    for folder in ("blocks", "tmp"):
        # Housekeeping deletes folders, too.
        shutil.rmtree(path / folder, ignore_errors=True)
    assert rig.load(keys) == [False] * 6
    wait_until(lambda: not rig.health() and rig.serves(keys_of([60])), "it goes on", WAIT_S)
    assert rig.reset().dropped_blocks == 1
    name = key_of(60).hex()
    # Unlike `rglob`, `walk` passes over folders that go meanwhile.
    wait_until(
        lambda: not any(file.startswith(name) for *_, files in os.walk(path) for file in files), "deleted", WAIT_S
    )
    assert rig.serves(keys_of([61]))


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_folder_when_emptied_in_use_is_locked_and_opens_again(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "tier"
    with closing(file_rig(path, shared=shared)) as rig:
        rig.store(keys_of([0]))
        for entry in path.iterdir():
            entry.unlink() if entry.is_file() else shutil.rmtree(entry, ignore_errors=True)
        wait_until((path / "lock").is_file, "the lock is made again", WAIT_S)
        wait_until(lambda: not rig.health() and rig.serves(keys_of([1])), "it goes on", WAIT_S)
        # It is locked a moment after it is made.
        rig.wait_maintained()
        with pytest.raises(TierRefused, match="is used by another process"):
            file_rig(path, shared=not shared)
    with closing(file_rig(path, shared=shared)) as again:
        assert again.serves(keys_of([2]))


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_folder_when_moved_is_used_once_it_is_back(tmp_path: Path, is_replaced: bool, shared: bool) -> None:
    path, away = tmp_path / "tier", tmp_path / "away"
    keys = keys_of(range(6))
    with closing(file_rig(path, shared=shared)) as rig:
        rig.store(keys)
        path.rename(away)
        if is_replaced:
            path.mkdir()
        rig.wait_for_reason("the folder was moved, deleted or unmounted")
        files = sorted(away.rglob("*"))
        assert rig.store(keys_of([50])) == rig.find(keys_of([0])) == [False]
        assert sorted(away.rglob("*")) == files
        assert not path.exists() or not list(path.iterdir())
        if is_replaced:
            path.rmdir()
        away.rename(path)
        rig.wait_healthy()
        assert rig.load(keys) == [True] * 6


def test_mount_over_the_folder_is_not_written(path: Path, rig: Rig) -> None:
    keys = keys_of(range(3))
    rig.store(keys)
    with mounted(path, "-t", "tmpfs", "-o", "size=16m", "none"):
        rig.wait_for_reason("the folder was moved, deleted or unmounted")
        assert rig.store(keys_of([70])) == rig.find(keys_of([0])) == [False]
        assert not list(path.iterdir())
    rig.wait_healthy()
    assert rig.load(keys) == [True] * 3


def test_reset_while_unmounted_holds_after_the_mount_returns(tmp_path: Path) -> None:
    keys, path = keys_of(range(3)), tmp_path / "path"
    with tmpfs(tmp_path / "disk", 16 << 20) as folder:
        with mounted(path, "--bind", folder):
            rig = file_rig(path)
            rig.store(keys)
        with closing(rig):
            rig.wait_for_reason("unmounted")
            assert rig.store(keys_of([70])) == [False]
            assert not list(path.iterdir()), "the disk below the mount point is left alone"
            number = rig.submit_reset()
            assert rig.find(keys) == [False] * 3
            assert not rig.has(number)
            with mounted(path, "--bind", folder):
                wait_until(lambda: rig.has(number), "the reset", WAIT_S)
                rig.wait_healthy()
                assert rig.find(keys) == [False] * 3
                assert rig.serves(keys_of([70]))


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("what", ["reset by match", "drop"])
def test_dropped_blocks_when_the_power_is_cut_stay_away(tmp_path: Path, what: str, shared: bool) -> None:
    keys = keys_of(range(3))
    with disk(tmp_path / "disk") as mount, closing(file_rig(mount / "tier", "32MiB", shared=shared)) as rig:
        rig.store(keys)
        subprocess.run(["sync", "-f", str(mount)], check=True)
        if what == "drop":
            number = rig.drop(keys)
            wait_until(lambda: rig.has(number), "the drop", WAIT_S)
        else:
            rig.reset(RequestFilter(tenant=ORIGIN.tenant))
        # The disk as the loss of power would leave it now.
        shutil.copyfile(tmp_path / "disk.img", tmp_path / "cut.img")
    with (
        mounted(tmp_path / "cut", "-o", "loop", tmp_path / "cut.img") as mount,
        closing(file_rig(mount / "tier", "32MiB", shared=shared)) as rig,
    ):
        assert rig.load(keys) == [False] * 3


_LIMITED = """
import resource, sys
from pathlib import Path
from tests.harness.tier_rig import file_rig
from tests.harness.tier_slots import SLOT_BYTES, keys_of
from tests.tiers.test_trouble import LARGE, WAIT_S
rig = file_rig(Path(sys.argv[1]))
rig.store(keys_of(LARGE[:3]))
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))
assert rig.store(keys_of(LARGE[3:6])) == [False] * 3
rig.wait_for_reason("File too large; new blocks are not kept")
assert rig.load(keys_of(LARGE[:3])) == [True] * 3
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
rig.wait_healthy()
assert rig.store(keys_of(LARGE[3:6])) == [True] * 3
assert rig.load(keys_of(LARGE[:6])) == [True] * 6
rig.close()
print("good")
"""


def test_a_limit_on_the_size_of_files(path: Path) -> None:
    done = run_script(_LIMITED, path)
    assert done.stdout == "good\n", done.stderr


def can_open(path: Path) -> bool:
    try:
        file_rig(path, "32MiB").close()
    except TierRefused:
        return False
    return True


def test_a_tier_is_probed_at_start_and_one_that_hangs_refuses(tmp_path: Path) -> None:
    """dynamo#5012: storage hung on an overlay file system."""
    with disk(tmp_path / "disk") as mount:
        file_rig(mount / "tier", "32MiB").close()
        settings = FileTier.Settings(type="fs", name="slow", path=mount / "tier", max_bytes="32MiB", timeout_s=0.3)
        with frozen(mount), pytest.raises(TierRefused, match=r"tier slow did not open within timeout_s=0.3 s"):
            open_tiers([settings], FINGERPRINT, SLOT_BYTES, SlotArray(1), lambda: None, engine="e")
        wait_until(lambda: can_open(mount / "tier"), "the one that was late closed itself", WAIT_S)
