"""A folder that several engines use at once: what one stored the others load, resets hold for all, and one evicts."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from kvferry.app.tiers.block_store import Interrupted, TierRefused
from kvferry.app.tiers.breaker import OPEN_AFTER
from kvferry.app.tiers.fs import FileTier, limit
from kvferry.app.tiers.fs.epoch_file import EpochFile
from kvferry.app.tiers.fs.folder import Folder
from kvferry.app.tiers.shared_epoch import Epoch, SharedEpoch
from tests.harness.commands import running_script
from tests.harness.mounts import mounted, tmpfs
from tests.harness.tier_rig import WAIT_S, Rig, file_rig
from tests.harness.tier_slots import LARGE, SLOT_BYTES, key_of, keys_of
from tests.harness.waiting import wait_until

EngineOf = Callable[..., Rig]


@pytest.fixture
def engine_of(path: Path) -> Iterator[EngineOf]:
    """Opens tiers as engines that share the folder do; they are closed with the test."""
    rigs: list[Rig] = []

    def open_rig(**settings: Any) -> Rig:
        rigs.append(file_rig(path, **{"shared": True, "max_bytes": "1GiB"} | settings))
        return rigs[-1]

    yield open_rig
    for rig in rigs:
        rig.close()


def files_of(path: Path) -> list[Path]:
    # Unlike a glob, also while housekeeping deletes folders.
    found = [Path(folder) / name for folder, _, names in os.walk(path / "shared") for name in names]
    return sorted(file for file in found if len(file.parent.name) == 3 and file.is_file())


def bytes_of(path: Path) -> int:
    num_bytes = 0
    for file in files_of(path):
        with suppress(FileNotFoundError):
            num_bytes += file.stat().st_size
    return num_bytes


def epoch_of(path: Path) -> Path:
    """The file of the only epoch."""
    (found,) = [*path.glob("shared/*/epoch"), *path.glob("blocks/epoch")]
    return found


def maintain(rig: Rig, times: int = 1) -> None:
    """Have housekeeping run a number of times."""
    for _ in range(times):
        rig.wait_maintained()


def until(condition: Callable[[], bool], what: str, *rigs: Rig) -> None:
    """Wait for a condition that housekeeping of these engines brings about."""

    def is_so() -> bool:
        for rig in rigs:
            rig._maintain_now()
        return condition()

    wait_until(is_so, what, WAIT_S)


def evicts(rig: Rig) -> bool:
    return rig.tier._store._limit._keeper is not None


# --- blocks ---------------------------------------------------------------------------------------------------------


def test_files_that_vanish_after_the_look_up_are_misses(engine_of: EngineOf, path: Path) -> None:
    keys = keys_of(range(8))
    rig, other = engine_of(), engine_of()
    rig.store(keys)
    assert other.find(keys) == [True] * 8
    for file in files_of(path)[:4]:
        file.unlink()
    assert other.load(keys).count(True) == 4
    counts = other.counts()
    assert (counts.loaded, counts.missing, counts.failed, counts.corrupt) == (4, 4, 0, 0)
    shutil.rmtree(files_of(path)[0].parent)
    assert other.load(keys) == [False] * 8
    assert rig.store(keys) == [True] * 8
    assert not other.health()


@pytest.mark.parametrize("error", [errno.EACCES, errno.EUCLEAN])
def test_look_up_when_one_subfolder_is_unreadable_finds_the_others(
    engine_of: EngineOf, path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    rig, keys = engine_of(), keys_of(range(3))
    rig.store(keys)
    bad, status = keys[1].hex(), os.stat

    def fail(file: Any, **options: Any) -> os.stat_result:
        if str(file).endswith(bad):
            raise OSError(error, os.strerror(error))
        return status(file, **options)

    monkeypatch.setattr(os, "stat", fail)
    for _ in range(OPEN_AFTER):
        assert rig.find(keys) == [True, False, True]
    assert not rig.health()
    monkeypatch.undo()


# --- resets ---------------------------------------------------------------------------------------------------------


def test_blocks_of_earlier_epochs_are_deleted(engine_of: EngineOf, path: Path) -> None:
    first, second = engine_of(), engine_of()
    first.store(keys_of(range(4)))
    late = files_of(path)[0]
    first.reset()
    assert second.store(keys_of(range(4))) == [True] * 4
    until(lambda: len(list(epoch_of(path).parent.glob("*-*"))) == 1, "old blocks are deleted", first)
    # Moved there at once: housekeeping deletes an empty folder.
    epoch = late.parent.parent
    shard = path.parent / epoch.name / late.parent.name
    shard.mkdir(parents=True)
    (shard / late.name).write_bytes(b"of an engine that knew nothing of the reset")
    shard.parent.rename(epoch)
    until(lambda: not late.exists(), "a late block is deleted", first)


def test_mount_of_one_engine_when_it_returns_costs_no_block(tmp_path: Path) -> None:
    keys, path = keys_of(range(4)), tmp_path / "path"
    with tmpfs(tmp_path / "server", 16 << 20) as server, closing(file_rig(server, shared=True)) as other:
        other.store(keys)
        with mounted(path, "--bind", server):
            rig = file_rig(path, shared=True)
            assert rig.find(keys) == [True] * 4
        with closing(rig):
            wait_until(lambda: "unmounted" in str(rig.health()), "unmounted", WAIT_S)
            assert rig.store(keys_of([9])) == [False]
            assert not list(path.iterdir()), "the disk below the mount point is left alone"
            with mounted(path, "--bind", server):
                wait_until(lambda: rig.serves(keys_of([9])) and not rig.health(), "the mount in use", WAIT_S)
                assert rig.load(keys) == other.load(keys) == [True] * 4


@pytest.mark.parametrize("entry", ["epoch", "namespace"])
def test_odd_entry_in_place_of_the_epoch_stops_the_tier(engine_of: EngineOf, path: Path, entry: str) -> None:
    keys, rig = keys_of(range(3)), engine_of()
    rig.store(keys)
    epoch = epoch_of(path)
    if entry == "epoch":
        epoch.unlink()
        epoch.mkdir()
    else:
        shutil.rmtree(epoch.parent)
        epoch.parent.write_text("not a folder")
    assert rig.load(keys) == [False] * 3
    reset = rig.submit_reset()
    rig.wait_for_reason("directory")
    assert not rig.has(reset)
    epoch.rmdir() if entry == "epoch" else epoch.parent.unlink()
    wait_until(lambda: rig.has(reset), "the reset", WAIT_S)
    assert not any(rig.find(keys))
    wait_until(lambda: rig.serves(keys) and not rig.health(), "it serves again", WAIT_S)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"9-../../../../../out", b"x" * 100_000, b"f" * 16 + b"-0123456789abcdef"]
)
def test_epoch_that_no_engine_wrote_costs_blocks_only(path: Path, shared: bool, content: bytes) -> None:
    keys = keys_of(range(3))
    with closing(file_rig(path, shared=shared)) as rig:
        rig.store(keys)
        epoch_of(path).write_bytes(content)
        assert rig.load(keys) == [False] * 3
        for _ in range(3):
            assert rig.serves(keys)
            rig.reset()
            assert not any(rig.find(keys) + rig.load(keys))
        assert rig.serves(keys)
        assert rig.health() == []
    with closing(file_rig(path, shared=shared)) as again:
        assert again.load(keys) == [True] * 3
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_resets_of_several_engines_end_in_one_epoch(path: Path) -> None:
    files = [EpochFile(Folder(path, is_shared=True), "shared/00") for _ in range(4)]
    epochs = [SharedEpoch("disk", lambda: None) for _ in files]
    seen: list[list[int]] = [[] for _ in epochs]

    def reset(engine: int) -> None:
        for _ in range(5):
            epochs[engine].begin(files[engine])
            seen[engine].append(epochs[engine].read(files[engine]).number)

    threads = [threading.Thread(target=reset, args=[engine]) for engine in range(len(epochs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len({epoch.read(file) for epoch, file in zip(epochs, files, strict=True)}) == 1
    assert all(numbers == sorted(set(numbers)) for numbers in seen), "an epoch went back"
    # The first engine began one.
    assert epochs[0].latest.number == 21


# --- other processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, False])
def test_shared_and_unshared_use_of_a_folder_refuse_each_other(path: Path, shared: bool) -> None:
    words = "is used by another process alone: stop that one, or set shared" if not shared else "or set shared to true"
    rig = file_rig(path, shared=shared)
    entry = FileTier.Settings(type="fs", name="disk", path=path, max_bytes="1GiB", shared=not shared)
    with pytest.raises(TierRefused, match=words):
        FileTier.check(entry, None)
    with pytest.raises(TierRefused, match=words):
        file_rig(path, shared=not shared)
    rig.close()
    file_rig(path, shared=not shared).close()


def test_files_of_others_are_left_alone_and_harm_nothing(engine_of: EngineOf, path: Path) -> None:
    keys = keys_of(range(4))
    rig = engine_of()
    rig.store(keys)
    namespace, block = epoch_of(path).parent, files_of(path)[0]
    (namespace / "backup").mkdir()
    foreign = [
        path / "notes",
        path / "shared" / "notes",
        namespace / "notes-x",
        namespace / "backup" / "file",
        block.parent / "notes",
        block.parent / f"{block.parent.name}zz",
    ]
    for file in foreign:
        file.write_text("x")
    assert rig.load(keys) == [True] * 4
    other = engine_of()
    assert other.load(keys) == [True] * 4
    maintain(rig, 2)
    maintain(other)
    assert all(file.read_text() == "x" for file in foreign)
    assert not rig.health()


_WRITER = """
import sys
from pathlib import Path
from tests.harness.tier_rig import file_rig
from tests.harness.tier_slots import keys_of
rig = file_rig(Path(sys.argv[1]), shared=True, max_bytes=sys.argv[2])
print(rig.tier._store._limit._keeper is not None, flush=True)
number = 1000
while True:
    rig.store(keys_of(range(number, number + 16)))
    number += 16
"""


@pytest.mark.long
def test_engines_killed_while_they_write_leave_whole_blocks_only(path: Path, engine_of: EngineOf) -> None:
    rig = engine_of(max_bytes="4GiB")
    for _ in range(3):
        with running_script(_WRITER, path, "4GiB"), running_script(_WRITER, path, "4GiB"):
            before = len(files_of(path))
            wait_until(lambda before=before: len(files_of(path)) > before + 40, "many blocks", WAIT_S)
        keys = [bytes.fromhex(file.name) for file in files_of(path)]
        for start in range(0, len(keys), 16):
            assert all(rig.load(keys[start : start + 16]))
        assert rig.counts().corrupt == 0
    rig.reset()
    assert rig.find(keys) == [False] * len(keys)


def test_unfinished_files_of_dead_engines_are_deleted_once_they_are_old(engine_of: EngineOf, path: Path) -> None:
    (path / "tmp").mkdir(parents=True)
    (path / "lock").touch()
    old, new = path / "tmp" / "1-a-0", path / "tmp" / "2-b-0"
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (1, 1))
    rig = engine_of()
    wait_until(lambda: not old.exists(), "deleted", WAIT_S)
    assert new.exists(), "an engine may be writing it"
    rig.close()


# --- the limit ------------------------------------------------------------------------------------------------------


def test_limit_holds_for_all_engines_together(engine_of: EngineOf, path: Path) -> None:
    max_bytes = 12_000_000
    rigs = [engine_of(max_bytes=max_bytes) for _ in range(3)]
    assert [evicts(rig) for rig in rigs].count(True) == 1
    keys = keys_of(LARGE[:36])
    for index, key in enumerate(keys):
        rig = rigs[index % 3]
        # An engine that does not evict stores nothing while the folder is full.
        until(lambda rig=rig, key=key: rig.store([key]) == [True], "room", *rigs)
        for one in rigs:
            until(lambda one=one: abs(one.counts().bytes - bytes_of(path)) < SLOT_BYTES, "known to all", *rigs)
        assert bytes_of(path) <= max_bytes
    keeper = next(rig for rig in rigs if evicts(rig))
    assert keeper.counts().evicted > 0
    assert all(rig.counts().evicted == 0 for rig in rigs if rig is not keeper)
    assert keeper.find(keys[-6:]) == [True] * 6, "the oldest blocks are evicted first"


def test_size_contains_no_epochs_whose_blocks_are_deleted(engine_of: EngineOf, path: Path) -> None:
    rigs = [engine_of() for _ in range(2)]
    for number in range(4):
        for rig in rigs:
            assert rig.store(keys_of([number, 10 + number])) == [True] * 2
        rigs[0].reset()
    rigs[1].store(keys_of([7]))
    until(lambda: all(rig.counts().blocks == len(files_of(path)) == 1 for rig in rigs), "measured", *rigs)
    until(lambda: len(json.loads((path / "shared" / "size").read_text())) == 1, "published", *rigs)


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"a": [1]}', b'{"a": [1, "2"]}', b"[" * 100_000, b"\xff"])
def test_size_that_no_engine_wrote_is_replaced(engine_of: EngineOf, path: Path, content: bytes) -> None:
    keeper, other = engine_of(), engine_of()
    (path / "shared" / "size").write_bytes(content)
    maintain(other)
    assert other.serves(keys_of([1]))
    until(lambda: keeper.counts().blocks == other.counts().blocks == 1, "measured", keeper, other)
    assert not other.health()


def test_published_size_is_used_during_the_first_pass(engine_of: EngineOf, path: Path) -> None:
    rig = engine_of()
    rig.store(keys_of(range(4)))
    epoch = Epoch(rig.tier.shared_epoch())
    until(lambda: f'"{epoch.name.decode()}": [4, ' in (path / "shared" / "size").read_text(), "published", rig)
    rig.close()
    with closing(Folder(path, is_shared=True)) as folder:
        published = limit.FolderLimit("disk", folder, 1 << 30, SLOT_BYTES, lambda error: None)
        with pytest.raises(Interrupted):
            published.maintain(lambda: True)
        assert published.is_known
        assert published.size_of(epoch)[0] == 4
        assert published.reserve(SLOT_BYTES)


def test_folder_whose_files_cannot_be_locked_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a network file system without locks."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(TierRefused, match="cannot be used: No locks available"):
        file_rig(path, shared=True)


def test_eviction_in_several_passes_deletes_the_oldest(engine_of: EngineOf, path: Path) -> None:
    keys = keys_of(LARGE[:12])
    rig = engine_of()
    assert rig.store(keys) == [True] * 12
    rig.close()
    (path / "shared" / "size").unlink()
    files = sorted(files_of(path), key=lambda file: keys.index(bytes.fromhex(file.name)))
    for number, file in enumerate(files):
        os.utime(file, (1000 + number, 1000 + number))
    with closing(Folder(path, is_shared=True)) as folder:
        eviction = limit.FolderLimit("disk", folder, bytes_of(path) // 3, SLOT_BYTES, lambda error: None)
        eviction.min_candidates = 3
        for _ in range(4):
            eviction.maintain(lambda: False)
    assert set(files_of(path)) == set(files[-3:])


def test_eviction_of_much_is_interrupted_for_a_reset(engine_of: EngineOf, path: Path) -> None:
    rig = engine_of()
    rig.store(keys_of(range(4)))
    epoch = Epoch(rig.tier.shared_epoch())
    rig.close()
    (path / "shared" / "size").unlink()
    with closing(Folder(path, is_shared=True)) as folder:
        eviction = limit.FolderLimit("disk", folder, 1, SLOT_BYTES, lambda error: None)
        with pytest.raises(Interrupted):
            eviction.maintain(lambda: eviction.size_of(epoch)[0] > 0)
    assert len(files_of(path)) == 4


def test_eviction_passes_to_another_engine_when_its_engine_closes(engine_of: EngineOf) -> None:
    first, second = engine_of(max_bytes=4_000_000), engine_of(max_bytes=4_000_000)
    assert (evicts(first), evicts(second)) == (True, False)
    first.close()
    until(lambda: evicts(second), "the lock", second)
    for key in keys_of(LARGE[:12]):
        assert second.store([key]) == [True]
    assert second.counts().evicted > 0


def test_engine_that_evicts_when_killed_costs_no_block_and_another_goes_on(engine_of: EngineOf, path: Path) -> None:
    max_bytes = 30_000_000
    with running_script(_WRITER, path, max_bytes) as (_, out):
        assert out.readline() == "True\n"
        rig = engine_of(max_bytes=max_bytes)
        wait_until(lambda: len(files_of(path)) > 20, "many blocks", WAIT_S)
        assert not evicts(rig)
    wait_until(lambda: evicts(rig), "the lock", WAIT_S)
    for number in LARGE[:80]:
        wait_until(lambda number=number: rig.store([key_of(number)]) == [True], "room", WAIT_S)
        assert bytes_of(path) <= max_bytes
    assert rig.counts().evicted > 0
    assert rig.counts().corrupt == 0
