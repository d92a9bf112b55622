"""The GPU benchmarks run to their end in their reduced mode, which takes no GPU; what they print then are no speeds."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import gpu as bench_gpu
from bench.parts import Parts
from kvferry.core.transfers import Direction
from tests.harness.commands import run_module

pytestmark = pytest.mark.long


def report(module: str, folder: Path, *options: str, code: int = 0) -> tuple[str, dict[str, Any]]:
    """The output of a benchmark that exits with this code, and what it wrote."""
    done = run_module(module, "--reduced", "--json", folder / "found.json", *options)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout, json.loads((folder / "found.json").read_text())


def test_copies_are_measured_by_size_count_direction_and_engine(tmp_path: Path) -> None:
    said, found = report("bench.gpu", tmp_path)
    places = {(cell["size"], cell["count"], cell["direction"], cell["engine"]) for cell in found["cells"]}
    assert len(places) == len(found["cells"]) == 2 * 2 * 3 * 4
    assert all(rate > 0 for cell in found["cells"] for rate in cell["gbps"])
    assert {cell["verdict"] for cell in found["cells"]} == {"-"}
    assert (found["failed"], found["left_out"]) == ({}, [])
    assert set(found["ceiling_gbps"]) == {"store", "load", "both"}
    assert found["calibration"]["below_bytes"]
    assert len(found["calibration"]["of_best"]) == 2 * 2 * 3
    assert [one["engine"] for one in found["slowed"]] == ["dma", "kernel"]
    assert len(found["descriptors_us"]) == 4
    assert "no speeds" in said


def test_bytes_alone_can_be_checked_as_under_a_sanitizer() -> None:
    done = run_module("bench.gpu", "--reduced", "--check")
    assert (done.returncode, "every engine's bytes are right" in done.stdout) == (0, True), done.stderr


@pytest.mark.parametrize("skew", ["two targets are swapped", "the end of each is left out"])
def test_wrong_bytes_are_noticed(skew: str, tmp_path: Path) -> None:
    machine = bench_gpu.no_gpu()
    launch = machine.launch

    def broken(
        targets: int, sources: int, sizes: int, count: int, word_bytes: int, direction: Direction, stream: int
    ) -> None:
        # The table is on its way to the device.
        machine.driver.synchronize_stream(stream)
        if skew == "two targets are swapped":
            column(targets, count)[:2] = column(targets, count)[1::-1].copy()
        else:
            column(sizes, count)[:] -= 16
        launch(targets, sources, sizes, count, word_bytes, direction, stream)

    machine.launch = broken
    found, parts = bench_gpu.Found("here", 1), Parts(dict, None, 100.0)
    bench = bench_gpu.Bench(machine, bench_gpu.REDUCED, found, parts, tmp_path)
    parts.run("cell", lambda: bench.cell(4096, 16))
    assert "copied" in parts.failed["16 segments of 4 KiB, kernel"]
    assert {cell.engine for cell in found.cells} >= {"dma", "one by one"}


def column(address: int, count: int) -> Any:
    return np.ctypeslib.as_array((ctypes.c_int64 * count).from_address(address))


def test_first_tokens_come_from_the_host_pool_and_answers_are_the_same(tmp_path: Path) -> None:
    said, found = report("bench.gpu_e2e", tmp_path)
    assert (found["failed"], found["left_out"]) == ({}, [])
    assert [one["prompt_tokens"] for one in found["first_tokens"]] == [64, 200]
    for one in found["first_tokens"]:
        assert min(one["host_tokens"]) >= one["prompt_tokens"] - 16
        assert all(one["same"])
        assert min(*one["cold_s"], *one["device_s"], *one["host_s"]) > 0
    assert found["throughput"]["same"] == found["throughput"]["conversations"] == 4
    assert "same answers in 4" in said
