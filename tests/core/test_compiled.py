"""Machine code is kept between processes where it can be, and does not keep anybody from working where it cannot."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
SCRIPT = """
import kvferry.cuda_ops.copy.segment_copier
from kvferry.core.pool.index import hash_keys
print(hash_keys([b'k' * 33])[0])
"""
"""Compiles a function of each package."""

LEARNING = """
from kvferry.core.pool.manager import OffloadManager
print(OffloadManager(64, 4096, "hazard").table.target_slots)
"""


def run(cache: Path, script: str = SCRIPT) -> str:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert not done.stderr, done.stderr
    return done.stdout


def kept(folder: Path, ending: str) -> list[Path]:
    return sorted(folder.rglob(f"*{ending}"))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with what a first process compiled, and the output of that process."""
    folder = tmp_path_factory.mktemp("compiled")
    return folder, run(folder)


def test_second_process_uses_the_stored_code_of_the_first(first: tuple[Path, str]) -> None:
    folder, output = first
    before = {path: path.stat().st_mtime_ns for path in kept(folder, ".nbc")}
    assert len(before) == 2
    assert run(folder) == output
    assert {path: path.stat().st_mtime_ns for path in kept(folder, ".nbc")} == before


@pytest.mark.long
def test_stored_code_is_used_where_functions_call_another(tmp_path: Path) -> None:
    assert run(tmp_path, LEARNING) == "64\n"
    before = {path: path.stat().st_mtime_ns for path in kept(tmp_path, ".nbc")}
    assert any("candidate_functions" in path.name for path in before)
    assert run(tmp_path, LEARNING) == "64\n"
    assert {path: path.stat().st_mtime_ns for path in kept(tmp_path, ".nbc")} == before


def test_damaged_compilation_cache_is_compiled_again(first: tuple[Path, str], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(first[0], tmp_path / "copy"))
    # The index of one function, and the code of the other.
    for path in (kept(folder, ".nbi")[0], kept(folder, ".nbc")[1]):
        path.write_bytes(path.read_bytes()[:20])
    assert run(folder) == first[1]


def test_compilation_without_a_cache_folder_works(first: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert run(tmp_path / "file") == first[1]


FROM_THE_FIRST_CALL_ON = """
import sys
import numpy as np
from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.manager import OffloadManager

managers = [OffloadManager(64, 4096, policy) for policy in ("lru", "arc")]

import numba

def refuse(*arguments, **options):
    raise RuntimeError("compiled while the engine waits")

numba.njit = refuse
for manager in managers:
    for first in range(0, 256, 32):
        keys = [number.to_bytes(32, "big") for number in range(first, first + 32)]
        manager.history.explain(keys, 1.0)
        offer = manager.prepare_store(keys, RequestIdentity("r"), np.arange(32), 1, 1.0)
        assert manager.complete_store(offer.slots, 1.0) == 32
        pin = manager.pin(manager.lookup(keys))
        assert manager.prepare_load(pin, 1.0) and manager.complete_load(pin)
        manager.drop_key(keys[0], 1.0)
    manager.reset(np.empty(0, dtype=np.int64), 1.0)
    print(manager.counts().free)
"""


def test_nothing_is_compiled_once_a_pool_is_in_use() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    command = [sys.executable, "-c", FROM_THE_FIRST_CALL_ON]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout == "64\n64\n", done.stderr
