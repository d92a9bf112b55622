"""A file system tier with odd entries in its folder: each costs its own block, and the tier goes on."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.core.keys import RequestFilter
from tests.harness.mounts import unwritable
from tests.harness.tier_rig import WAIT_S, Rig
from tests.harness.tier_slots import ORIGIN, keys_of
from tests.harness.waiting import wait_until
from tests.tiers.test_files import Reopen, file_of, files_of

OLD_EPOCH = Path("blocks", f"1-{'0' * 16}")
"""Folder of blocks of an epoch that has ended."""


def apart(number: int) -> int:
    """A number whose block lies in a folder of its own."""
    return number + (number << 116)


def make_folder(file: Path) -> None:
    (file / "deep" / "er").mkdir(parents=True)
    (file / "deep" / "note").write_text("mine")


def make_socket(file: Path) -> None:
    # A socket's path may have 108 bytes only.
    here = os.open(file.parent, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(f"/proc/self/fd/{here}/{file.name}")
    os.close(here)


def make_link(file: Path) -> None:
    target = file.with_name("target")
    target.write_text("not a block")
    file.symlink_to(target.name)


def make_device(file: Path) -> None:
    try:
        os.mknod(file, 0o600 | 0o020000, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("device nodes are not possible here")


ODD: dict[str, Callable[[Path], None]] = {
    "folder": make_folder,
    "fifo": os.mkfifo,
    "socket": make_socket,
    "device": make_device,
    "link to itself": lambda file: file.symlink_to(file),
    "link to a folder": lambda file: file.symlink_to("."),
    "link to a file": make_link,
}


def replace(file: Path, kind: str) -> None:
    file.unlink()
    ODD[kind](file)


def check_tier_is_well(rig: Rig, number: int) -> None:
    """No trouble was noted, and a block that was never stored can be."""
    assert not rig.health()
    assert rig.store(keys_of([number])) == [True]
    assert rig.load(keys_of([number])) == [True]


@pytest.mark.parametrize("kind", ODD)
def test_odd_entry_in_place_of_a_file_costs_one_block(path: Path, rig: Rig, kind: str) -> None:
    keys = keys_of(range(4))
    rig.store(keys)
    replace(file_of(path, 1), kind)
    assert rig.load(keys) == [True, False, True, True]
    check_tier_is_well(rig, 10)
    # Again once housekeeping has tried to delete it: all but a folder can be.
    rig.wait_maintained()
    check_tier_is_well(rig, 11)
    assert rig.store(keys_of([1])) == [kind != "folder"]
    check_tier_is_well(rig, 12)
    assert rig.load(keys) == [True, kind != "folder", True, True]
    assert rig.reset().dropped_blocks >= 6
    wait_until(lambda: not files_of(path), "the disk freed", WAIT_S)
    check_tier_is_well(rig, 13)


@pytest.mark.parametrize("kind", ODD)
def test_odd_entry_at_start_is_not_found_and_costs_nothing(reopen: Reopen, path: Path, rig: Rig, kind: str) -> None:
    rig.store(keys_of(range(3)))
    rig.close()
    replace(file_of(path, 1), kind)
    (path / OLD_EPOCH).mkdir()
    ODD[kind](path / "tmp" / "odd")
    ODD[kind](path / OLD_EPOCH / "odd")
    ODD[kind](path / "blocks" / "0123456789abcdef")
    again = reopen()
    assert again.find(keys_of(range(3))) == [True, False, True]
    assert again.load(keys_of(range(3))) == [True, False, True]
    check_tier_is_well(again, 10)


@pytest.mark.parametrize("kind", ["folder", "fifo", "link to itself"])
def test_reset_by_match_with_an_odd_entry_is_carried_out(path: Path, rig: Rig, kind: str) -> None:
    rig.store(keys_of(range(3)), ORIGIN)
    replace(file_of(path, 1), kind)
    assert rig.reset(RequestFilter(tenant=ORIGIN.tenant)).dropped_blocks >= 2
    assert rig.find(keys_of(range(3))) == [False] * 3
    check_tier_is_well(rig, 10)


def test_shard_replaced_by_a_file_costs_its_blocks_only(path: Path, rig: Rig) -> None:
    keys = keys_of([apart(number) for number in range(3)])
    rig.store(keys)
    shard = file_of(path, apart(1)).parent
    shutil.rmtree(shard)
    shard.write_text("a file")
    assert rig.load(keys) == [True, False, True]
    assert rig.store(keys[1:2]) == [False]
    assert rig.load(keys) == [True, False, True]
    check_tier_is_well(rig, 10)


def test_namespace_replaced_by_a_file_is_trouble_until_it_is_gone(path: Path, rig: Rig) -> None:
    rig.store(keys_of([1]))
    namespace = file_of(path, 1).parent.parent
    shutil.rmtree(namespace)
    namespace.write_text("a file")
    assert rig.store(keys_of([2])) == [False]
    rig.wait_for_reason("new blocks are not kept")
    namespace.unlink()
    rig.wait_healthy()
    check_tier_is_well(rig, 10)


def test_file_that_cannot_be_deleted_costs_one_block(path: Path, rig: Rig) -> None:
    if os.geteuid():
        pytest.skip("only root can make a file that its folder's owner cannot delete")
    rig.store(keys_of(range(3)))
    file = file_of(path, 1)
    with unwritable(file):
        rig.drop(keys_of([1]))
        rig.wait_maintained()
        assert rig.load(keys_of(range(3))) == [True, False, True]
        assert rig.store(keys_of([1])) == [False]
        check_tier_is_well(rig, 10)
        assert file.exists()
    wait_until(lambda: not file.exists(), "deleted", WAIT_S)
    wait_until(lambda: rig.store(keys_of([1])) == [True], "stored again", WAIT_S)


def test_old_epoch_that_cannot_be_deleted_does_not_stop_a_start(reopen: Reopen, path: Path, rig: Rig) -> None:
    rig.store(keys_of([1]))
    rig.close()
    stuck = path / OLD_EPOCH / "old" / "file"
    stuck.parent.mkdir(parents=True)
    stuck.write_text("")
    with unwritable(stuck):
        again = reopen()
        assert again.load(keys_of([1])) == [True]
        check_tier_is_well(again, 10)


def test_write_when_advice_is_refused_is_no_error(path: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EINVAL, "not supported by this file system")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    check_tier_is_well(rig, 10)
    rig.wait_maintained()
    assert not rig.health()
