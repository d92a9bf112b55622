"""Blocks in files: what is found again after a restart, what is not served, and how the limit is kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.app.tiers.fs import FileTier
from kvferry.app.tiers.opening import close_tiers, open_tiers
from kvferry.core.keys import RequestFilter, RequestIdentity
from kvferry.core.tiers.base import TierRefused
from tests.harness.tier_rig import FINGERPRINT, WAIT_S, Rig, file_rig
from tests.harness.tier_slots import ORIGIN, SLOT_BYTES, SlotArray, key_of, keys_of, length_of
from tests.harness.waiting import wait_until

OTHER = RequestIdentity("r2", "fedcba9876543210", None)


def files_of(path: Path) -> list[Path]:
    return sorted(found for found in (path / "blocks").rglob("*") if not found.is_dir())


def file_of(path: Path, number: int) -> Path:
    (found,) = (path / "blocks").rglob(key_of(number).hex())
    return found


def restarted(rig: Rig, path: Path, **settings: object) -> Rig:
    rig.close()
    return file_rig(path, **settings)  # type: ignore[arg-type]


def test_blocks_outlive_their_process(rig: Rig, path: Path) -> None:
    keys = keys_of(range(8))
    rig.store(keys)
    again = restarted(rig, path)
    assert again.tier.counts().blocks == 8
    assert again.tier.counts().bytes == rig.tier.counts().bytes
    assert again.load(keys) == [True] * 8
    assert list(again.wait(again.submit_load(keys)).origins) == [ORIGIN] * 8
    again.close()


@pytest.mark.parametrize("changed", [{"model": "other"}, {"dtype": "float16"}, {"block_size": 32}, {"hash_seed": "1"}])
def test_another_fingerprint_finds_nothing_and_spoils_nothing(rig: Rig, path: Path, changed: dict[str, object]) -> None:
    """LMCache#4492, vllm#49261, vllm#42125."""
    keys = keys_of(range(4))
    rig.store(keys)
    fingerprint = {"model": "tiny", "dtype": "float32", "block_size": 16} | changed
    other = restarted(rig, path, fingerprint=fingerprint)
    assert other.find(keys) == [False] * 4
    assert other.load(keys) == [False] * 4
    other.store(keys[:2])
    again = restarted(other, path)
    assert again.load(keys) == [True] * 4
    again.close()


def test_blocks_of_another_model_count_and_are_evicted_first(rig: Rig, path: Path) -> None:
    numbers = [number for number in range(200) if length_of(key_of(number)) > 400_000][:4]
    rig.store(keys_of(numbers))
    limit = rig.tier.counts().bytes
    other = restarted(rig, path, max_bytes=limit, fingerprint={"model": "other"})
    assert other.tier.counts().bytes == limit
    other.store(keys_of(numbers[:2]))
    assert other.load(keys_of(numbers[:2])) == [True] * 2
    assert other.tier.counts().bytes <= limit
    assert other.tier.counts().evicted >= 2
    again = restarted(other, path, max_bytes=limit)
    assert again.find(keys_of(numbers)).count(True) == 2
    again.close()


def overwrite(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(max(file.stat().st_size // 2 - 2048, 40))
        opened.write(b"\x5a" * 4096)


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


def empty(file: Path) -> None:
    os.truncate(file, 0)


def lengthen(file: Path) -> None:
    with file.open("ab") as opened:
        opened.write(b"\0")


def zero_tail(file: Path) -> None:
    """What a power cut leaves of a file that was never flushed: its length, and nothing in it."""
    size = file.stat().st_size
    os.truncate(file, 0)
    os.truncate(file, size)


def flip_checksum(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(24)
        byte = opened.read(1)
        opened.seek(24)
        opened.write(bytes([byte[0] ^ 1]))


def flip_origin(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(-3, os.SEEK_END)
        opened.write(b"#")


def become_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


SPOILERS = [overwrite, cut, empty, lengthen, zero_tail, flip_checksum, flip_origin, become_pipe]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_changed_files_are_detected_before_they_are_served(path: Path, spoil, rig: Rig) -> None:
    """LMCache 0.5.6: overwritten bytes in a disk block came back as a hit."""
    numbers = [number for number in range(200) if length_of(key_of(number)) > 8192][:3]
    rig.store(keys_of(numbers))
    bad = file_of(path, numbers[1])
    spoil(bad)
    assert rig.load(keys_of(numbers)) == [True, False, True]
    counts = rig.tier.counts()
    assert (counts.corrupt, counts.loaded, counts.blocks) == (1, 2, 2)
    assert rig.find(keys_of(numbers)) == [True, False, True]
    wait_until(lambda: not os.path.lexists(bad), "the bad file deleted", WAIT_S)
    wait_until(lambda: rig.store(keys_of(numbers)) == [True] * 3, "stored again", WAIT_S)
    assert rig.load(keys_of(numbers)) == [True] * 3
    assert not rig.tier.health()


def test_link_in_place_of_a_file_is_not_followed(path: Path, rig: Rig) -> None:
    rig.store(keys_of(range(3)))
    file = file_of(path, 1)
    elsewhere = file.rename(file.parent.parent / "elsewhere")
    file.symlink_to(elsewhere)
    assert rig.load(keys_of(range(3))) == [True, False, True]
    assert rig.load(keys_of(range(3))) == [True, False, True]


def test_a_file_under_anothers_name_is_not_its_block(path: Path, rig: Rig) -> None:
    same_length = [number for number in range(5000) if length_of(key_of(number)) == length_of(key_of(3))][:2]
    rig.store(keys_of([3]))
    other = key_of(3, group=1)
    file = file_of(path, 3)
    shutil.copy(file, file.with_name(other.hex()))
    again = restarted(rig, path)
    assert again.find([other]) == [True], "found in the folder"
    result = again.wait(again.submit_load([other]))
    assert not result.ok.any()
    assert again.tier.counts().corrupt == 1
    assert same_length
    again.close()


def test_a_file_of_another_models_folder_is_not_its_block(path: Path, rig: Rig) -> None:
    rig.store(keys_of([3]))
    file = file_of(path, 3)
    other = restarted(rig, path, fingerprint={"model": "other"})
    other.store(keys_of([4]))
    target = file_of(path, 4).parent.parent / file.parent.name / file.name
    target.parent.mkdir(exist_ok=True)
    shutil.copy(file, target)
    again = restarted(other, path, fingerprint={"model": "other"})
    assert again.find(keys_of([3])) == [True], "found in the folder"
    assert again.load(keys_of([3, 4])) == [False, True]
    again.close()


def test_deleted_file_is_a_miss(path: Path, rig: Rig) -> None:
    rig.store(keys_of(range(3)))
    file_of(path, 1).unlink()
    assert rig.load(keys_of(range(3))) == [True, False, True]
    assert rig.find(keys_of(range(3))) == [True, False, True]
    assert (rig.tier.counts().missing, rig.tier.counts().blocks) == (1, 2)
    assert rig.store(keys_of([1])) == [True]


def test_every_tier_has_a_byte_limit_and_the_least_recently_used_go(path: Path) -> None:
    """vllm#52784: a disk tier without a limit filled the disk."""
    numbers = [number for number in range(300) if length_of(key_of(number)) > 500_000][:6]
    limit = 4 * (SLOT_BYTES + 8192)
    rig = file_rig(path, limit)
    for number in numbers[:4]:
        assert rig.store(keys_of([number])) == [True]
    rig.load(keys_of([numbers[0]]))
    for number in numbers[4:]:
        assert rig.store(keys_of([number])) == [True]
        on_disk = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())
        assert on_disk <= limit
    found = rig.find(keys_of(numbers))
    assert found[0], "it was used last"
    assert found[4:] == [True, True]
    assert not found[1], "it was used first"
    assert rig.tier.counts().evicted == found.count(False)
    assert rig.tier.counts().bytes <= limit
    assert len(files_of(path)) == found.count(True)
    rig.close()


def test_recency_outlives_the_process(path: Path) -> None:
    numbers = [number for number in range(300) if length_of(key_of(number)) > 600_000][:4]
    rig = file_rig(path, 3 * (SLOT_BYTES + 8192))
    for age, number in enumerate(numbers[:3]):
        rig.store(keys_of([number]))
        os.utime(file_of(path, number), (1000.0 + age, 1000.0 + age))
    rig.load(keys_of([numbers[0]]))
    again = restarted(rig, path, max_bytes=3 * (SLOT_BYTES + 8192))
    again.store(keys_of([numbers[3]]))
    assert again.find(keys_of(numbers)) == [True, False, True, True]
    again.close()


def test_a_lower_limit_holds_from_the_next_start(path: Path, rig: Rig) -> None:
    keys = keys_of(range(8))
    rig.store(keys)
    half = rig.tier.counts().bytes // 2 + SLOT_BYTES
    again = restarted(rig, path, max_bytes=half)
    assert 0 < again.tier.counts().bytes <= half
    wait_until(lambda: len(files_of(path)) == again.tier.counts().blocks, "files deleted", WAIT_S)
    found = again.find(keys)
    assert again.load(keys) == found
    again.close()


def test_orphaned_temporary_files_are_swept_at_start(path: Path, rig: Rig) -> None:
    """vllm#52784: a disk tier without a limit filled the disk."""
    rig.store(keys_of([1]))
    for number in range(5):
        (path / "tmp" / f"dead-{number}").write_bytes(b"half a block")
    again = restarted(rig, path)
    assert list((path / "tmp").iterdir()) == []
    assert again.load(keys_of([1])) == [True]
    again.close()


def test_files_of_others_in_the_folder_are_left_alone(path: Path, rig: Rig) -> None:
    rig.store(keys_of([1]))
    shard = file_of(path, 1).parent
    strangers = [path / "notes.txt", path / "blocks" / "README", shard / "notes.txt", shard / "abc"]
    for stranger in strangers:
        stranger.write_text("mine")
    again = restarted(rig, path)
    assert again.tier.counts().blocks == 1
    assert all(stranger.read_text() == "mine" for stranger in strangers)
    again.close()


def test_files_are_for_their_owner_alone(path: Path, rig: Rig) -> None:
    rig.store(keys_of(range(3)))
    assert path.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in files_of(path)} == {0o600}


def test_a_reset_is_durable_and_frees_the_disk(path: Path, rig: Rig) -> None:
    keys = keys_of(range(6))
    rig.store(keys)
    rig.reset()
    assert files_of(path) == [], "gone before the result"
    wait_until(lambda: list((path / "trash").iterdir()) == [], "the disk freed", WAIT_S)
    again = restarted(rig, path)
    assert again.find(keys) == [False] * 6
    assert again.store(keys) == [True] * 6
    again.close()


def test_trash_of_an_earlier_process_is_deleted(path: Path, rig: Rig) -> None:
    rig.store(keys_of(range(3)))
    rig.close()
    (path / "blocks").rename(path / "trash" / "old")
    again = file_rig(path)
    assert again.tier.counts().blocks == 0
    assert list((path / "trash").iterdir()) == []
    again.close()


def test_reset_by_match_after_a_restart_is_durable(path: Path, rig: Rig) -> None:
    rig.store(keys_of([0, 1]), ORIGIN)
    rig.store(keys_of([2, 3]), OTHER)
    again = restarted(rig, path)
    assert again.reset(RequestFilter(tenant=OTHER.tenant)).dropped_blocks == 2
    third = restarted(again, path)
    assert third.find(keys_of(range(4))) == [True, True, False, False]
    third.close()


def test_reset_by_match_drops_blocks_without_an_origin(path: Path, rig: Rig) -> None:
    rig.store(keys_of([0, 1, 2]), ORIGIN)
    rig.store(keys_of([3]), RequestIdentity("x" * 100_000))
    empty(file_of(path, 1))
    assert rig.reset(RequestFilter(tenant="nobody")).dropped_blocks == 2
    assert rig.find(keys_of(range(4))) == [True, False, True, False]


def test_strange_names_of_requests_are_kept(rig: Rig) -> None:
    origin = RequestIdentity('"\n\x00\ud800é', "ü", "", ("", "a", "]"))
    rig.store(keys_of([0]), origin)
    assert list(rig.wait(rig.submit_load(keys_of([0]))).origins) == [origin]


def test_dropped_blocks_do_not_come_back_after_a_restart(path: Path, rig: Rig) -> None:
    rig.store(keys_of(range(3)))
    rig.tier.drop(keys_of([1]))
    wait_until(lambda: len(files_of(path)) == 2, "the file deleted", WAIT_S)
    again = restarted(rig, path)
    assert again.find(keys_of(range(3))) == [True, False, True]
    again.close()


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
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", _HOLDER, str(path)], stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "[True, True, True]\n"
            with pytest.raises(TierRefused, match="is used by another process"):
                file_rig(path)
            wait_until(lambda: len(files_of(path)) > 40, "many blocks", WAIT_S)
        finally:
            process.kill()
            process.wait(WAIT_S)
        rig = file_rig(path)
        assert list((path / "tmp").iterdir()) == []
        keys = [bytes.fromhex(file.name) for file in files_of(path)]
        for start in range(0, len(keys), 16):
            assert all(rig.load(keys[start : start + 16]))
        assert rig.tier.counts().corrupt == 0
        rig.reset()
        rig.close()


def test_names_are_spread_over_folders(path: Path, rig: Rig) -> None:
    rig.store(keys_of(range(8)))
    for file in files_of(path):
        assert file.parent.name == file.name[:3]
        assert file.parent.parent.parent == path / "blocks"


@pytest.mark.parametrize(
    ("max_bytes", "words"),
    [(SLOT_BYTES, "max_bytes=700000 holds no block: a file of one takes up to 70[0-9],[0-9]{3} bytes; make it larger")],
)
def test_a_limit_below_one_block_refuses_to_start(path: Path, max_bytes: int, words: str) -> None:
    with pytest.raises(TierRefused, match=words):
        file_rig(path, max_bytes)
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
