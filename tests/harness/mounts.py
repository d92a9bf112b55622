"""Real file systems that are small, unwritable or frozen, on machines where tests may make them; else skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness.waiting import DEADLINE_S


def _run(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in words], capture_output=True, text=True, check=False, timeout=DEADLINE_S
    )


def _must(*words: object) -> None:
    if shutil.which(str(words[0])) is None:
        pytest.skip(f"there is no {words[0]}")
    done = _run(*words)
    if done.returncode:
        pytest.skip(f"{words[0]} is not possible here: {done.stderr.strip()}")


@contextmanager
def mounted(folder: Path, *options: object) -> Iterator[Path]:
    """Something mounted on a folder; skips the test where that is not possible."""
    folder.mkdir(exist_ok=True)
    _must("mount", *options, folder)
    try:
        yield folder
    finally:
        _run("umount", "-l", folder)


def tmpfs(folder: Path, num_bytes: int) -> object:
    """A file system in memory of so many bytes."""
    return mounted(folder, "-t", "tmpfs", "-o", f"size={num_bytes}", "none")


@contextmanager
def unwritable(*folders: Path) -> Iterator[None]:
    """Folders in which nothing can be made or deleted. Permissions are nothing to root, which needs stronger means."""
    if os.geteuid() == 0:
        _must("chattr", "+i", *folders)
    else:
        for folder in folders:
            folder.chmod(0o500)
    try:
        yield
    finally:
        if os.geteuid() == 0:
            _run("chattr", "-i", *folders)
        else:
            for folder in folders:
                folder.chmod(0o700)


@contextmanager
def disk(folder: Path) -> Iterator[Path]:
    """A file system on a disk of its own that can be frozen."""
    image = folder.with_suffix(".img")
    with image.open("wb") as file:
        file.truncate(64 << 20)
    _must("mkfs.ext4", "-q", image)
    with mounted(folder, "-o", "loop", image):
        yield folder


@contextmanager
def frozen(folder: Path) -> Iterator[None]:
    """Every write to this file system hangs."""
    _must("fsfreeze", "-f", folder)
    try:
        yield
    finally:
        _run("fsfreeze", "-u", folder)
