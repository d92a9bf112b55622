"""Content digests of model files: identity of weights, the cache of digests, and changes while loading."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.app.engines.identity import (
    MAX_ENTRIES,
    ContentDigest,
    DigestCache,
    FileUnknown,
    digest_of_files,
    name_in_fingerprint,
    revision_of,
)
from tests.harness.commands import running_script

SIZE = 4 << 20
UNCACHED = DigestCache(None)


def write_weights(folder: Path, flipped: int | None = None) -> Path:
    """A folder with one weights file of a fixed time, with one byte flipped if given."""
    folder.mkdir(exist_ok=True, parents=True)
    data = bytearray(range(256)) * (SIZE // 256)
    if flipped is not None:
        data[flipped] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text("{}")
    for file in folder.iterdir():
        os.utime(file, (1000, 1000))
    return folder


def bytes_read() -> int:
    """Bytes that this process has read from files so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def digest_and_bytes(folder: Path, state: Path) -> tuple[str | None, int]:
    before = bytes_read()
    return digest_of_files(folder, DigestCache(state)), bytes_read() - before


@pytest.mark.parametrize("name", ["config.json", "modeling_own.py", "tokenizer.json", "model-00002.safetensors"])
def test_digest_when_a_file_is_added_is_another(tmp_path: Path, name: str) -> None:
    first, other = write_weights(tmp_path / "a"), write_weights(tmp_path / "b")
    (other / name).write_text("{} ")
    (other / "README.md").write_text("not part of the model")
    assert digest_of_files(first, UNCACHED) != digest_of_files(other, UNCACHED)
    (other / name).unlink()
    if name == "config.json":
        (other / name).write_text("{}")
    assert digest_of_files(first, UNCACHED) == digest_of_files(other, UNCACHED)


def test_digest_when_an_index_names_shards_in_a_folder_reads_them(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "a")
    shard = write_weights(folder / "shards") / "model.safetensors"
    before = digest_of_files(folder, UNCACHED)
    index = '{"weight_map": {"a": "shards/model.safetensors", "b": "shards/not-downloaded.safetensors"}}'
    (folder / "model.safetensors.index.json").write_text(index)
    with_index = digest_of_files(folder, UNCACHED)
    write_weights(folder / "shards", flipped=SIZE // 2)
    assert len({before, with_index, digest_of_files(folder, UNCACHED)}) == 3
    shard.unlink()
    assert digest_of_files(folder, UNCACHED) not in (before, with_index)


def test_digest_when_cached_reads_no_file_again(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "a")
    first, num_bytes = digest_and_bytes(folder, tmp_path / "state")
    assert num_bytes >= SIZE
    again, num_bytes = digest_and_bytes(folder, tmp_path / "state")
    assert again == first
    assert num_bytes < SIZE // 10


def test_digest_of_a_link_to_a_cached_file_reads_nothing(tmp_path: Path) -> None:
    """As in the snapshots of a hub cache, which link to the same blobs."""
    blobs = write_weights(tmp_path / "blobs")
    snapshots = [tmp_path / name for name in ("one", "two")]
    for folder in snapshots:
        folder.mkdir()
        for blob in blobs.iterdir():
            (folder / blob.name).symlink_to(blob)
    first, _ = digest_and_bytes(snapshots[0], tmp_path / "state")
    again, num_bytes = digest_and_bytes(snapshots[1], tmp_path / "state")
    assert again == first == digest_of_files(blobs, UNCACHED)
    assert num_bytes < SIZE // 10


@pytest.mark.parametrize("how", ["in place", "replaced"])
def test_digest_when_the_file_changed_with_its_time_kept_is_new(tmp_path: Path, how: str) -> None:
    folder, state = write_weights(tmp_path / "a"), tmp_path / "state"
    first, _ = digest_and_bytes(folder, state)
    if how == "in place":
        write_weights(folder, flipped=SIZE // 2)
    else:
        other = write_weights(tmp_path / "b", flipped=SIZE // 2)
        os.replace(other / "model.safetensors", folder / "model.safetensors")
    after, num_bytes = digest_and_bytes(folder, state)
    assert after == digest_of_files(folder, UNCACHED) != first
    assert num_bytes >= SIZE


@pytest.mark.parametrize("damage", ["empty", "cut", "list", "digit", "folder"])
def test_digest_when_its_entry_is_damaged_is_computed(tmp_path: Path, damage: str) -> None:
    folder, state = write_weights(tmp_path / "a"), tmp_path / "state"
    first, _ = digest_and_bytes(folder, state)
    for entry in [found for found in (state / "digests").iterdir() if not found.suffix]:
        text = entry.read_text()
        entry.unlink()
        if damage == "folder":
            entry.mkdir()
            continue
        at = text.index('"digest": "') + len('"digest": "')
        digit = "1" if text[at] == "0" else "0"
        entry.write_text(
            {"empty": "", "cut": text[:20], "list": "[]", "digit": text[:at] + digit + text[at + 1 :]}[damage]
        )
    assert digest_and_bytes(folder, state)[0] == first


def test_cache_is_private_and_names_no_path(tmp_path: Path) -> None:
    digest_and_bytes(write_weights(tmp_path / "secret-model"), tmp_path / "state")
    folder = tmp_path / "state" / "digests"
    assert folder.stat().st_mode & 0o777 == 0o700
    for entry in folder.iterdir():
        assert entry.stat().st_mode & 0o777 == 0o600
        assert "secret" not in entry.name + entry.read_text()


def test_cache_when_full_drops_the_oldest(tmp_path: Path) -> None:
    state = tmp_path / "state"
    digest_and_bytes(write_weights(tmp_path / "old"), state)
    for file in (state / "digests").iterdir():
        os.utime(file, (1000, 1000))
    for number in range(MAX_ENTRIES - 1):
        (state / "digests" / f"{number}.json").touch()
        (state / "digests" / f"{number}.lock").touch()
    digest_and_bytes(write_weights(tmp_path / "new"), state)
    # Another thread may have listed a file twice that was renamed meanwhile.
    assert len(list((state / "digests").iterdir())) <= 2 * MAX_ENTRIES
    assert digest_and_bytes(tmp_path / "new", state)[1] < SIZE // 10
    assert digest_and_bytes(tmp_path / "old", state)[1] >= SIZE


def test_digest_when_the_cache_cannot_be_written_is_right(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_weights(tmp_path / "a")
    (tmp_path / "state").write_text("a file")
    assert digest_and_bytes(folder, tmp_path / "state")[0] == digest_of_files(folder, UNCACHED)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].getMessage().startswith(f"STATE_DIR={tmp_path / 'state'}: ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of other users")
def test_digest_when_its_entry_is_of_another_user_is_computed(tmp_path: Path) -> None:
    folder, state = write_weights(tmp_path / "a"), tmp_path / "state"
    expected, _ = digest_and_bytes(folder, state)
    assert digest_and_bytes(folder, state)[1] < SIZE
    for entry in (state / "digests").iterdir():
        os.chown(entry, 12345, -1)
    found, num_bytes = digest_and_bytes(folder, state)
    assert (found, num_bytes >= SIZE) == (expected, True)


def test_digest_when_its_lock_is_a_link_leaves_the_target(tmp_path: Path) -> None:
    folder, state = write_weights(tmp_path / "a"), tmp_path / "state"
    expected, _ = digest_and_bytes(folder, state)
    for entry in (state / "digests").iterdir():
        entry.unlink()
        entry.symlink_to(tmp_path / "target")
    assert digest_and_bytes(folder, state)[0] == expected
    assert not (tmp_path / "target").exists()


_READER = """
import sys
from pathlib import Path
from kvferry.app.engines.identity import DigestCache
digest = DigestCache(Path(sys.argv[2])).digest(Path(sys.argv[1]))
print(digest, Path("/proc/self/io").read_text().split()[1])
"""


def test_digest_in_processes_at_once_is_computed_by_one(tmp_path: Path) -> None:
    file, state = tmp_path / "model.safetensors", tmp_path / "state"
    size = 64 << 20
    with file.open("wb") as opened:
        opened.truncate(size)
    with ExitStack() as stack:
        outputs = [stack.enter_context(running_script(_READER, file, state))[1] for _ in range(3)]
        answers = [out.read().split() for out in outputs]
    assert {digest for digest, _ in answers} == {UNCACHED.digest(file)}
    assert sum(int(num_bytes) >= size for _, num_bytes in answers) == 1


def test_digest_when_a_file_changes_while_read_is_unknown(tmp_path: Path) -> None:
    folder, state = write_weights(tmp_path / "a"), tmp_path / "state"

    def change() -> bool:
        write_weights(folder, flipped=SIZE - 1)
        return False

    with pytest.raises(FileUnknown, match=r"model.safetensors changed while it was read"):
        DigestCache(state).digest(folder / "model.safetensors", change)
    assert digest_and_bytes(folder, state)[0] == digest_of_files(folder, UNCACHED)


@pytest.mark.parametrize("change", ["in place", "added", "removed", "another folder"])
def test_revision_when_files_change_while_loading_is_of_this_start(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_weights(tmp_path / "a")
    link = tmp_path / "model"
    link.symlink_to(folder)
    with ContentDigest(link, DigestCache(tmp_path / "state")) as content:
        if change == "in place":
            write_weights(folder, flipped=SIZE // 2)
        elif change == "added":
            (folder / "model-2.safetensors").write_text("")
        elif change == "removed":
            (folder / "config.json").unlink()
        else:
            link.unlink()
            link.symlink_to(write_weights(tmp_path / "b"))
        assert revision_of(str(link), content, None, "7") == "start-7"
    assert "weights unknown, " in caplog.text


def test_digest_of_a_link_that_vanishes_while_it_is_followed_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_weights(tmp_path / "a")
    link = tmp_path / "model.safetensors"
    link.symlink_to(folder / "model.safetensors")

    def vanish(path: str) -> str:
        link.unlink()
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)

    monkeypatch.setattr(os, "readlink", vanish)
    with pytest.raises(FileUnknown, match=r"model\.safetensors cannot be read: No such file"):
        UNCACHED.digest(link)


@pytest.mark.parametrize("kind", ["fifo", "folder that loops"])
def test_revision_when_a_file_cannot_be_read_is_of_this_start(tmp_path: Path, kind: str) -> None:
    folder = write_weights(tmp_path / "a")
    strange = folder / "other.safetensors"
    if kind == "fifo":
        os.mkfifo(strange)
    else:
        strange.symlink_to(strange)
    with ContentDigest(folder, UNCACHED) as content:
        assert revision_of(str(folder), content, None, "7") == "start-7"


def test_name_in_fingerprint_of_local_files_is_left_out(tmp_path: Path) -> None:
    folder = write_weights(tmp_path / "a")
    copy = Path(shutil.copytree(folder, tmp_path / "b"))
    found = [(name, digest_of_files(name, UNCACHED)) for name in (folder, copy)]
    assert len({name_in_fingerprint(str(name), f"files-{digest}") for name, digest in found}) == 1
    assert name_in_fingerprint("org/model", "0123456789abcdef") == "org/model"
    assert name_in_fingerprint(str(folder), None) == str(folder)
