from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.service_process import ROOT


@pytest.mark.long
def test_tiers_runs_to_its_tables(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "bench.tiers", "--rounds", "1", "--blocks-kib", "64", "--job-mib", "1"]
    words += ["--kinds", "fs", "fs shared", "--serving", "--requests", "2", "--folder", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [line.split("|")[1:4] for line in done.stdout.splitlines() if line.startswith("| fs")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        [kind, "64", what] for kind in ("fs", "fs shared") for what in ("store", "load")
    ]
    blocks, *figures = [cell.strip() for cell in done.stdout.splitlines()[-1].strip("|").split("|")]
    assert int(blocks) > 0
    assert len(figures) == 5
    assert list(tmp_path.iterdir()) == []
