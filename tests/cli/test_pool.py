"""`kvferry pool inspect`: what a pool's file holds, read without changing it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from kvferry.app.cli import main
from kvferry.cuda_ops.persistent.format import POOL_HEADER_BYTES, SLOT_HEADER
from kvferry.cuda_ops.persistent.inspection import inspect_pool
from tests.harness.kept_pools import SHAPE, attached


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "engine.pool"
    with attached(path) as kept:
        kept.store(list(range(8)), list(range(8)), 1)
        kept.headers.begin(kept.label([20], [5], 2))
        kept.writer.invalidate(np.array([6]), np.array([1]))
    return path


def test_pool_inspect_of_a_sound_pool_changes_nothing(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = pool.read_bytes()
    assert main(["pool", "inspect", str(pool), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fingerprint"] == {"model": "m", "revision": "r", "layers": [1, 2]}
    assert (told["slots"], told["valid"], told["verified"], told["bad_slots"]) == (12, 6, 6, [])
    assert told["dropped"] == {"unsealed": 1, "left": 1}
    assert main(["pool", "inspect", str(pool)]) == 0
    assert "6 slots recoverable; dropped: 1 left, 1 unsealed" in capsys.readouterr().out
    assert pool.read_bytes() == before


def test_pool_inspect_of_bad_bytes_exits_1(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = bytearray(pool.read_bytes())
    raw[SHAPE.payload_offset + int(SHAPE.row_offsets(np.array([7]))[0]) + 999] ^= 1
    pool.write_bytes(raw)
    assert main(["pool", "inspect", str(pool), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["bad_slots"] == [7]
    assert main(["pool", "inspect", str(pool)]) == 1
    assert "5 verified, 1 bad (slots 7)" in capsys.readouterr().out


def test_pool_inspect_of_damaged_or_cut_pools_exits_1(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = pool.read_bytes()
    raw = bytearray(good)
    raw[POOL_HEADER_BYTES + 2 * SLOT_HEADER.itemsize + 33] ^= 1
    pool.write_bytes(raw)
    assert main(["pool", "inspect", str(pool)]) == 1
    assert "5 slots recoverable; dropped: 1 damaged, 1 left, 1 unsealed" in capsys.readouterr().out
    pool.write_bytes(good[: SHAPE.payload_offset + int(SHAPE.row_offsets(np.array([4]))[0])])
    assert main(["pool", "inspect", str(pool)]) == 1
    assert "0 slots recoverable; dropped: 1 left, 6 truncated, 1 unsealed" in capsys.readouterr().out.replace("\n", " ")


def test_pool_inspect_of_a_pool_in_use_names_its_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "engine.pool"
    with attached(path) as kept:
        kept.store([1], [1], 1)
        assert main(["pool", "inspect", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["used_by"] == [os.getpid()]
        assert main(["pool", "inspect", str(path)]) == 0
        assert f"used by process {os.getpid()} now" in capsys.readouterr().out
    assert main(["pool", "inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["used_by"] == []


def test_pool_inspect_while_the_pool_shrinks_does_not_crash(tmp_path: Path) -> None:
    """To read a mapping behind the end of its file is death without a word."""
    path = tmp_path / "engine.pool"
    with attached(path) as kept:
        kept.store(list(range(12)), list(range(12)), 1)
        seen = inspect_pool(path)
        kept.pool.remove_extents(2)
        assert seen.verify(seen.recovered.slots).tolist() == list(range(4, 12))
        assert inspect_pool(path).recovered.slots.tolist() == list(range(4))


def test_pool_inspect_of_a_folder_names_its_pools(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """POOL_PATH is the folder."""
    assert main(["pool", "inspect", str(pool.parent)]) == 1
    assert "is a folder: name a pool in it, such as engine.pool" in capsys.readouterr().err.replace("\n", " ")


def test_pool_inspect_of_another_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * 100_000)
    assert main(["pool", "inspect", str(other)]) == 1
    assert "is not a pool: magic=" in capsys.readouterr().err.replace("\n", " ")
    os.mkfifo(tmp_path / "pipe")
    assert main(["pool", "inspect", str(tmp_path / "pipe")]) == 1
    assert "pipe: Illegal seek" in capsys.readouterr().err.replace("\n", " ")
    assert main(["pool", "inspect", str(tmp_path / "missing")]) == 1
    assert "No such file" in capsys.readouterr().err
