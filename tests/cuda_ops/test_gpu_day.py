"""The script of GPU measurements, with a program in place of Python, and the packing of what it needs."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest

from bench import gpu_pack
from tests.harness.waiting import DEADLINE_S

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_day.sh"
STEPS = ["imports", "tests", "none", "offloading", "kvferry eager", "kvferry lazy", "none again", "copies"]


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program that fails where `WRONG` is among its arguments, and waits where `SLOW` is."""
    file = tmp_path / "program"
    file.write_text('#!/bin/sh\ncase "$*" in *"$WRONG"*) exit 1 ;; *"$SLOW"*) exec sleep 60 ;; esac\necho "$*"\n')
    file.chmod(0o755)
    return file


def run(program: Path, *options: str, wrong: str = "no such", slow: str = "no such") -> tuple[int, list[list[str]]]:
    """Return the exit status and the table of steps: names, and how they ended."""
    results = program.parent / "results"
    command = [SCRIPT, "--python", program, "--peer", "offloading", *options, results]
    done = subprocess.run(command, env=os.environ | {"WRONG": wrong, "SLOW": slow}, timeout=DEADLINE_S, check=False)
    lines = (results / "steps").read_text().splitlines()
    return done.returncode, [line.split("\t")[:2] for line in lines if not line.startswith("bfloat16")]


def test_second_call_repeats_failed_steps_only(program: Path) -> None:
    code, steps = run(program, wrong="test_gpu.py")
    assert (code, [name for name, _ in steps]) == (1, STEPS)
    assert [name for name, ended in steps if ended != "done"] == ["tests"]
    assert run(program) == (0, [*steps[1:], ["imports", "done"], ["tests", "done"]])


@pytest.mark.long
def test_step_ends_at_the_limit_and_later_ones_are_left_out(program: Path) -> None:
    code, steps = run(program, "--seconds", "21", slow="test_gpu.py")
    assert (code, steps) == (1, [["imports", "done"], ["tests", "timeout"]])


def test_nothing_is_run_when_imports_fail(program: Path) -> None:
    assert run(program, wrong="check.py") == (1, [["imports", "failed"]])


def test_code_of_other_architectures_is_cleared() -> None:
    codes = {(2, 80): b"a" * 24, (1, 90): b"b" * 40, (2, 90): b"c" * 16}
    entries = [
        struct.pack("<HHIQ12xI32x", kind, 0x101, 64, len(code), built_for) + code
        for (kind, built_for), code in codes.items()
    ]
    content = b"".join(entries)
    fatbin = struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(content)) + content
    names = b"\0.nv_fatbin\0.text\0"
    # Two containers with padding between them; the same bytes in another section stay.
    section = fatbin + bytes(8) + fatbin
    body = bytes(64) + names + section + fatbin
    starts = [(0, 64, len(names)), (1, 64 + len(names), len(section)), (12, 64 + len(names + section), len(fatbin))]
    headers = b"".join(struct.pack("<IIQQQQ24x", name, 0, 0, 0, start, length) for name, start, length in starts)
    library = bytearray(body + headers)
    struct.pack_into("<Q", library, 0x28, len(body))
    struct.pack_into("<HHH", library, 0x3A, 64, len(starts), 0)
    before = bytes(library)
    gpu_pack.clear_others(library, 90)
    assert [library.count(code) for code in codes.values()] == [1, 1, 3]
    cleared = before.replace(codes[2, 80], bytes(24), 2).replace(codes[1, 90], bytes(40), 2)
    assert library == cleared
