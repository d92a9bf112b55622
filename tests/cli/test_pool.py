"""`kvferry pool inspect`: what a pool's file holds, read without changing it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest

from kvferry.app.cli import main
from kvferry.cuda_ops.persistent.format import POOL_HEADER_BYTES, SLOT_HEADER
from kvferry.cuda_ops.persistent.inspection import inspect_pool
from kvferry.cuda_ops.persistent.lock import lock_path
from kvferry.cuda_ops.persistent.pool_files import pool_path
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from tests.cli.conftest import Run
from tests.harness.commands import running_script
from tests.harness.kept_pools import SHAPE, attached
from tests.harness.service_process import serving


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of temporary folders on one line."""
    monkeypatch.setattr("kvferry.app.cli.console.out.width", 200)


@pytest.fixture
def pool(tmp_path: Path) -> Path:
    path = tmp_path / "engine.pool"
    with attached(path) as kept:
        kept.store(list(range(8)), list(range(8)), 1)
        kept.headers.begin(kept.label([20], [5], 2))
        kept.writer.invalidate(np.array([6]), np.array([1]))
    return path


def listed(shown: str) -> dict[str, str]:
    """The values of a listing by their names."""
    return dict(re.split(r" {2,}", line.strip()) for line in shown.splitlines())


def test_pool_inspect_of_a_sound_pool_changes_nothing(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = pool.read_bytes()
    assert main(["pool", "inspect", str(pool), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fingerprint"] == {"model": "m", "revision": "r", "layers": [1, 2]}
    assert (told["slots"], told["valid"], told["verified"], told["bad_slots"]) == (12, 6, 6, [])
    assert told["dropped"] == {"unsealed": 1, "left": 1}
    assert main(["pool", "inspect", str(pool)]) == 0
    shown = listed(capsys.readouterr().out)
    assert (shown["valid"], shown["dropped left"], shown["dropped unsealed"]) == ("6", "1", "1")
    assert pool.read_bytes() == before


def test_pool_inspect_of_bad_bytes_exits_1(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = bytearray(pool.read_bytes())
    raw[SHAPE.payload_offset + int(SHAPE.row_offsets(np.array([7]))[0]) + 999] ^= 1
    pool.write_bytes(raw)
    assert main(["pool", "inspect", str(pool), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["bad_slots"] == [7]
    assert main(["pool", "inspect", str(pool)]) == 1
    shown = listed(capsys.readouterr().out)
    assert (shown["verified"], shown["bad"], shown["bad slots"]) == ("5", "1", "7")


def test_pool_inspect_of_damaged_or_cut_pools_exits_1(pool: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = pool.read_bytes()
    raw = bytearray(good)
    raw[POOL_HEADER_BYTES + 2 * SLOT_HEADER.itemsize + 33] ^= 1
    pool.write_bytes(raw)
    assert main(["pool", "inspect", str(pool)]) == 1
    shown = listed(capsys.readouterr().out)
    assert [shown[name] for name in ("valid", "dropped damaged", "dropped left")] == ["5", "1", "1"]
    pool.write_bytes(good[: SHAPE.payload_offset + int(SHAPE.row_offsets(np.array([4]))[0])])
    assert main(["pool", "inspect", str(pool)]) == 1
    shown = listed(capsys.readouterr().out)
    assert [shown[name] for name in ("valid", "dropped left", "dropped truncated")] == ["0", "1", "6"]


def test_pool_inspect_of_a_pool_in_use_names_its_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "engine.pool"
    with attached(path) as kept:
        kept.store([1], [1], 1)
        assert main(["pool", "inspect", str(path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["used_by"] == [os.getpid()]
        assert main(["pool", "inspect", str(path)]) == 0
        assert listed(capsys.readouterr().out)["used by"] == str(os.getpid())
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


def test_start_names_what_pools_of_other_engines_take(tmp_path: Path, run: Run) -> None:
    name = f"left-{os.getpid()}"
    path = pool_path(SHARED_MEMORY, name)
    try:
        with attached(path) as kept:
            kept.store([1], [1], 1)
        with serving(tmp_path, engine="none", pool_bytes="16MiB") as served:
            assert re.search(r"other pools, not in use: \d+ take [\d,]+ bytes in /dev/shm: kvferry pools", served.log())
        assert run("pools", "remove", name, "--yes").code == 0
        assert not path.exists()
    finally:
        path.unlink(missing_ok=True)
        lock_path(path).unlink(missing_ok=True)


HOLDER = """
import signal, sys
from pathlib import Path
from kvferry.cuda_ops.persistent.pool_file import KeptFile
from tests.harness.kept_pools import FINGERPRINT, SHAPE
file = KeptFile(Path(sys.argv[1]), SHAPE, FINGERPRINT)
print("open", flush=True)
signal.pause()
"""


def in_folder(folder: Path) -> dict[str, str]:
    return {"POOL_KIND": "file", "POOL_PATH": str(folder)}


def test_pools_lists_and_removes_what_no_engine_uses(pool: Path, run: Run) -> None:
    """A pool that no engine will open again takes memory until an operator sees it (syv-ai#33)."""
    foreign, link = pool.with_name("foreign.pool"), pool.with_name("link.pool")
    foreign.write_bytes(b"something else")
    link.symlink_to(pool)
    settings = in_folder(pool.parent)
    (item,) = [item for item in run("pools", "--json", **settings).json["items"] if item["path"] == str(pool)]
    assert (item["name"], item["used_by"], item["age_s"] >= 0) == ("engine", [], True)
    assert 0 < item["bytes"] <= pool.stat().st_size + 4096
    assert "engine" in run("pools", **settings).out
    asked = run("pools", "remove", "engine", **settings)
    assert (asked.code, "--yes" in asked.err, pool.exists()) == (2, True, True)
    for name in ("foreign", "link", str(link), "other"):
        assert run("pools", "remove", name, "--yes", **settings).code == 1
    assert run("pools", "remove", "engine", "--yes", "--json", **settings).json["removed"] == str(pool)
    assert not pool.exists()
    assert foreign.read_bytes() == b"something else"
    assert link.is_symlink()


def test_pools_remove_of_a_pool_in_use_is_refused(pool: Path, run: Run) -> None:
    with running_script(HOLDER, pool) as (process, out):
        assert out.readline() == "open\n"
        refused = run("pools", "remove", "engine", "--yes", **in_folder(pool.parent))
        items = run("pools", "--json", **in_folder(pool.parent)).json["items"]
    assert (refused.code, f"pid {process.pid}" in refused.err, pool.exists()) == (1, True, True)
    assert [item["used_by"] for item in items if item["path"] == str(pool)] == [[process.pid]]
    assert run("pools", "remove", str(pool), "--yes", **in_folder(pool.parent)).code == 0
    assert not pool.exists()
