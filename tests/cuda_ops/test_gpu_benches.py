"""The GPU benchmarks run to their end in their reduced mode, which takes no GPU; what they print then are no speeds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(module: str, file: Path) -> tuple[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", module, "--reduced", "--json", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


def test_copies_are_measured_by_size_count_direction_and_engine(tmp_path: Path) -> None:
    said, found = run("bench.gpu", tmp_path / "found.json")
    places = {(cell["size"], cell["count"], cell["direction"], cell["engine"]) for cell in found["cells"]}
    assert len(places) == len(found["cells"]) == 2 * 2 * 3 * 3
    assert all(rate > 0 for cell in found["cells"] for rate in cell["gbps"])
    assert {cell["verdict"] for cell in found["cells"]} == {"-"}
    assert found["left_out"] == []
    assert "no speeds" in said


def test_first_tokens_come_from_the_host_pool_and_answers_are_the_same(tmp_path: Path) -> None:
    said, found = run("bench.gpu_e2e", tmp_path / "found.json")
    for one in found["first_tokens"]:
        assert min(one["host_tokens"]) >= one["prompt_tokens"] - 16
        assert all(one["same"])
        assert min(*one["cold_s"], *one["device_s"], *one["host_s"]) > 0
    assert found["throughput"]["same"] == found["throughput"]["conversations"] == 4
    assert "same answers in 4" in said
