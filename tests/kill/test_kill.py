"""Killed at any moment, a hundred times in a row: not one wrong byte, and nothing that was dropped comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROUNDS = 100
SEED = 20


def run(*args: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *args], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_hundred_kills() -> None:
    report = json.loads(run("tests.kill", str(ROUNDS), str(SEED)))
    assert report["wrong"] == 0
    assert report["recovered_share"] > 0.95, report
    assert report["checked"] > 10_000, report
    assert report["hits"] > 1000, report
    assert report["resets"] > 20, report
    assert report["with_row"] > 0, report
    assert 0 < report["deaths_at_start"] < ROUNDS / 2, report
    assert report["corrupt"] == 0, f"nobody touched the file: {report}"
