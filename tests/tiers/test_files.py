"""Blocks in files: what is found again after a restart, what is not served, and how the limit is kept."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.app.tiers.block_store import TierRefused
from kvferry.app.tiers.fs import FileTier
from kvferry.app.tiers.opening import close_tiers, open_tiers
from kvferry.core.keys import RequestFilter, RequestIdentity
from tests.harness.commands import running_script
from tests.harness.tier_rig import FINGERPRINT, WAIT_S, Rig, file_rig
from tests.harness.tier_slots import ORIGIN, OTHER, SLOT_BYTES, SlotArray, key_of, keys_of, length_of
from tests.harness.waiting import wait_until

Reopen = Callable[..., Rig]


def files_of(path: Path) -> list[Path]:
    # Unlike a glob, also while housekeeping deletes folders.
    found = [Path(folder) / name for folder, _, names in os.walk(path / "blocks") for name in names]
    return sorted(file for file in found if len(file.parent.name) == 3)


def file_of(path: Path, number: int) -> Path:
    (found,) = (path / "blocks").rglob(key_of(number).hex())
    return found


def test_blocks_of_another_model_count_and_are_evicted_first(reopen: Reopen, rig: Rig, path: Path) -> None:
    numbers = [number for number in range(200) if length_of(key_of(number)) > 400_000][:4]
    rig.store(keys_of(numbers))
    limit = rig.counts().bytes
    other = reopen(max_bytes=limit, fingerprint={"model": "other"})
    assert other.counts().bytes == limit
    other.store(keys_of(numbers[:2]))
    assert other.load(keys_of(numbers[:2])) == [True] * 2
    assert other.counts().bytes <= limit
    assert other.counts().evicted >= 2
    again = reopen(max_bytes=limit)
    assert again.find(keys_of(numbers)).count(True) == 2


def test_a_file_of_another_models_folder_is_not_its_block(reopen: Reopen, path: Path, rig: Rig) -> None:
    rig.store(keys_of([3]))
    file = file_of(path, 3)
    other = reopen(fingerprint={"model": "other"})
    other.store(keys_of([4]))
    target = file_of(path, 4).parent.parent / file.parent.name / file.name
    target.parent.mkdir(exist_ok=True)
    shutil.copy(file, target)
    again = reopen(fingerprint={"model": "other"})
    assert again.find(keys_of([3])) == [True], "found in the folder"
    assert again.load(keys_of([3, 4])) == [False, True]


def test_every_tier_has_a_byte_limit_and_the_least_recently_used_go(path: Path) -> None:
    """vllm#52784: a disk tier without a limit filled the disk."""
    numbers = [number for number in range(300) if length_of(key_of(number)) > 500_000][:6]
    limit = 4 * (SLOT_BYTES + 8192)
    rig = file_rig(path, limit)
    for age, number in enumerate(numbers[:4]):
        assert rig.store(keys_of([number])) == [True]
        os.utime(file_of(path, number), (1000.0 + age, 1000.0 + age))
    rig.load(keys_of([numbers[0]]))
    for number in numbers[4:]:
        assert rig.store(keys_of([number])) == [True]
        on_disk = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
        assert on_disk <= limit
    found = rig.find(keys_of(numbers))
    assert found[0], "it was used last"
    assert found[4:] == [True, True]
    assert not found[1], "it was used first"
    assert rig.counts().evicted == found.count(False)
    assert rig.counts().bytes <= limit
    assert len(files_of(path)) == found.count(True)
    rig.close()


def test_recency_outlives_the_process(reopen: Reopen, path: Path) -> None:
    numbers = [number for number in range(300) if length_of(key_of(number)) > 600_000][:4]
    rig = reopen(max_bytes=3 * (SLOT_BYTES + 8192))
    for age, number in enumerate(numbers[:3]):
        rig.store(keys_of([number]))
        os.utime(file_of(path, number), (1000.0 + age, 1000.0 + age))
    rig.load(keys_of([numbers[0]]))
    again = reopen(max_bytes=3 * (SLOT_BYTES + 8192))
    again.store(keys_of([numbers[3]]))
    assert again.find(keys_of(numbers)) == [True, False, True, True]


def test_a_lower_limit_holds_from_the_next_start(reopen: Reopen, path: Path, rig: Rig) -> None:
    keys = keys_of(range(8))
    rig.store(keys)
    half = rig.counts().bytes // 2 + SLOT_BYTES
    again = reopen(max_bytes=half)
    assert 0 < again.counts().bytes <= half
    assert len(files_of(path)) == again.counts().blocks
    found = again.find(keys)
    assert again.load(keys) == found


def test_files_of_others_in_the_folder_are_left_alone(reopen: Reopen, path: Path, rig: Rig) -> None:
    rig.store(keys_of([1]))
    shard = file_of(path, 1).parent
    strangers = [path / "notes.txt", path / "blocks" / "README", shard / "notes.txt", shard / "abc"]
    for stranger in strangers:
        stranger.write_text("mine")
    again = reopen()
    assert again.counts().blocks == 1
    assert all(stranger.read_text() == "mine" for stranger in strangers)


def test_files_are_for_their_owner_alone(path: Path, rig: Rig) -> None:
    rig.store(keys_of(range(3)))
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in files_of(path)} == {0o600}


def test_a_reset_is_durable_and_frees_the_disk(reopen: Reopen, path: Path, rig: Rig) -> None:
    keys = keys_of(range(6))
    rig.store(keys)
    rig.reset()
    again = reopen()
    wait_until(lambda: files_of(path) == [], "the disk freed", WAIT_S)
    assert again.find(keys) == [False] * 6
    assert again.store(keys) == [True] * 6


def test_reset_by_match_after_a_restart_is_durable(reopen: Reopen, path: Path, rig: Rig) -> None:
    rig.store(keys_of([0, 1]), ORIGIN)
    rig.store(keys_of([2, 3]), OTHER)
    again = reopen()
    assert again.reset(RequestFilter(tenant=OTHER.tenant)).dropped_blocks == 2
    third = reopen()
    assert third.find(keys_of(range(4))) == [True, True, False, False]


def test_reset_by_match_drops_blocks_without_an_origin(path: Path, rig: Rig) -> None:
    rig.store(keys_of([0, 1, 2]), ORIGIN)
    rig.store(keys_of([3]), RequestIdentity("x" * 100_000))
    os.truncate(file_of(path, 1), 0)
    assert rig.reset(RequestFilter(tenant="nobody")).dropped_blocks == 2
    assert rig.find(keys_of(range(4))) == [True, False, True, False]


def test_strange_names_of_requests_are_kept(rig: Rig) -> None:
    origin = RequestIdentity('"\n\x00é', None, "", ("", "ü", "]"))
    rig.store(keys_of([0]), origin)
    assert list(rig.wait(rig.submit_load(keys_of([0]))).origins) == [origin]


def test_dropped_blocks_do_not_come_back_after_a_restart(reopen: Reopen, path: Path, rig: Rig) -> None:
    rig.store(keys_of(range(3)))
    rig.drop(keys_of([1]))
    wait_until(lambda: len(files_of(path)) == 2, "the file deleted", WAIT_S)
    again = reopen()
    assert again.find(keys_of(range(3))) == [True, False, True]
    again.drop(keys_of([0, 7]))
    wait_until(lambda: len(files_of(path)) == 1, "the file of the earlier process deleted", WAIT_S)


def test_two_tiers_in_one_folder_refuse_to_start(path: Path, rig: Rig) -> None:
    with pytest.raises(TierRefused, match=r"path=.*tier is used by another process: .* path=.*tier/\{engine\} does"):
        file_rig(path)
    rig.close()
    file_rig(path).close()


def test_engines_that_share_a_configuration_have_folders_of_their_own(path: Path) -> None:
    """Data-parallel engines do, and each of them would be refused the folder of another."""
    entry = FileTier.Settings(type="fs", name="disk", path=str(path / "{engine}"), max_bytes="1GiB")
    opened = [
        open_tiers([entry], FINGERPRINT, SLOT_BYTES, SlotArray(1), lambda: None, engine=name) for name in ("a", "b")
    ]
    assert sorted(folder.name for folder in path.iterdir()) == ["a", "b"]
    with pytest.raises(TierRefused, match=r"path=.*/tier/a is used by another process: .*path=.*/tier/\{engine\} does"):
        open_tiers([entry], FINGERPRINT, SLOT_BYTES, SlotArray(1), lambda: None, engine="a")
    for tiers in opened:
        close_tiers(tiers)


_HOLDER = """
import sys
from collections.abc import Callable
from pathlib import Path
from tests.harness.tier_rig import file_rig
from tests.harness.tier_slots import keys_of
rig = file_rig(Path(sys.argv[1]))
print(rig.store(keys_of(range(3))), flush=True)
number = 100
while True:
    rig.store(keys_of(range(number, number + 16)))
    number += 16
"""


def test_a_process_killed_while_it_writes_leaves_whole_blocks_only(path: Path) -> None:
    """vllm#52784: a disk tier without a limit filled the disk."""
    for _ in range(3):
        with running_script(_HOLDER, path) as (_, out):
            assert out.readline() == "[True, True, True]\n"
            with pytest.raises(TierRefused, match="is used by another process"):
                file_rig(path)
            wait_until(lambda: len(files_of(path)) > 40, "many blocks", WAIT_S)
        rig = file_rig(path)
        wait_until(lambda: not list((path / "tmp").iterdir()), "what was half-written is deleted", WAIT_S)
        keys = [bytes.fromhex(file.name) for file in files_of(path)]
        for start in range(0, len(keys), 16):
            assert all(rig.load(keys[start : start + 16]))
        assert rig.counts().corrupt == 0
        rig.reset()
        wait_until(lambda: not files_of(path), "the blocks deleted", WAIT_S)
        rig.close()


@pytest.mark.parametrize("name", ["tmp", "blocks"])
def test_folder_of_another_program_is_refused_and_unchanged(tmp_path: Path, name: str) -> None:
    (tmp_path / name / "inner").mkdir(parents=True)
    files = [tmp_path / name / "notes", tmp_path / name / "inner" / "notes"]
    for file in files:
        file.write_text("not a block")
    with pytest.raises(TierRefused, match=f"path=.* cannot be used: it has {name}, but not the file lock .*; name "):
        file_rig(tmp_path)
    entry = FileTier.Settings(type="fs", name="disk", path=str(tmp_path), max_bytes="1GiB")
    with pytest.raises(TierRefused, match=f"it has {name}, but .* create an empty file {tmp_path}/lock$"):
        FileTier.check(entry, None)
    assert [file.read_text() for file in files] == ["not a block"] * 2


def test_empty_folder_and_new_mount_are_used(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    file_rig(tmp_path).close()
    file_rig(tmp_path).close()


def test_a_limit_below_one_block_refuses_to_start(path: Path) -> None:
    words = "max_bytes=700000 holds no block: a file of one takes up to 70[0-9],[0-9]{3} bytes; make it larger"
    with pytest.raises(TierRefused, match=words):
        file_rig(path, SLOT_BYTES)
    file_rig(path).close()


@pytest.mark.parametrize("kind", ["file", "below a file"])
def test_a_path_that_cannot_be_a_folder_refuses_to_start(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / ("sub" if kind == "below a file" else "")
    with pytest.raises(TierRefused, match=r"KVFERRY_TIERS: tier disk: path=.*cannot be used: .*; name a folder that"):
        file_rig(path)


def test_open_files_are_few_and_none_is_left(path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    file_rig(path).close()
    before = count()
    rig = file_rig(path)
    for start in range(0, 64, 8):
        rig.store(keys_of(range(start, start + 8)))
        rig.load(keys_of(range(start, start + 8)))
    assert count() <= before + 24
    rig.reset()
    rig.close()
    del rig
    wait_until(lambda: count() <= before, "all files closed", WAIT_S)
