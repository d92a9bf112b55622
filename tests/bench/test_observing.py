from __future__ import annotations

import pytest

from bench.observing import ARMS, NOTHING, Round, table
from tests.harness.commands import run_module


def test_table_divides_by_the_speed_and_compares_with_the_goal() -> None:
    taken = {arm: [Round(10.0, 5.0, 0.1 if arm == NOTHING else 0.4)] * 6 for arm in ARMS}
    *_, last = table(taken, 10.0)
    cells = [cell.strip() for cell in last.strip("|").split("|")]
    assert cells[0] == "both"
    assert cells[1].startswith("0.300 ")
    assert cells[3] == "met"
    assert cells[4].startswith("1.0000 ")


@pytest.mark.long
def test_observing_runs_to_its_table() -> None:
    done = run_module("bench.observing", "--rounds", "1", "--requests", "2")
    assert done.returncode == 0, done.stderr
    assert [line.split("|")[1].strip() for line in done.stdout.splitlines()[-3:]] == list(ARMS[1:])
