"""`kvferry what-if`: of a trace, and of a running service."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvferry.app.replay.trace import sample_trace
from tests.cli.conftest import Run


@pytest.mark.long
def test_what_if_of_a_trace_prints_curves_and_writes_a_plot(run: Run, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(asdict(one)) + "\n" for one in sample_trace(1)))
    ran = run("what-if", "--trace", str(trace), "--device-blocks", "200", "--svg", "curves.svg", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["prompt_tokens"] == sum(one.input_length for one in sample_trace(1))
    assert len(ran.json["curves"]) == 6
    for curve in ran.json["curves"]:
        rates = [point["hit_rate"] for point in curve["points"]]
        assert rates[0] <= rates[-1] < 1
        assert rates[-1] > 0.5
    assert ran.json["next_gib"]["hit_tokens_per_hour"] >= 0
    assert ran.json["since"] is None
    root = ElementTree.fromstring((tmp_path / "curves.svg").read_text())
    assert len(root.findall("{*}polyline")) == 6
    earlier = '{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [0]}\n'
    later = trace.read_text().replace('"timestamp": ', '"timestamp": 90000')
    trace.write_text(earlier + later)
    ran = run("what-if", "--trace", str(trace), "--pool-blocks", "1", "--device-blocks", "1")
    assert "last 24 hours" in ran.err
    # The bar ends at 0, and is as long above the rate as elsewhere.
    assert "lazy, hazard     0.9 ±2.0" in ran.out


def test_what_if_of_a_file_that_is_no_trace_is_a_usage_error(run: Run, tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text("{}\n")
    ran = run("what-if", "--trace", "bad.jsonl")
    assert ran.code == 2
    assert "line 1" in ran.err
    ran = run("what-if", "--pool-blocks", "20000")
    assert (ran.code, "only with --trace" in ran.err) == (2, True)
