"""Lazy mode compared with eager mode beside the oracle: requests for which lazy mode found less are reported."""

from __future__ import annotations

import pytest

from bench.vllm_judge import Result, compare


def test_compare_modes_when_lazy_lost_a_hit_names_the_request() -> None:
    eager = Result(served={"r0": 544, "r1": 1_024, "r2": 6_336})
    lazy = Result(served={"r0": 544, "r1": 544, "r2": 6_304})
    found = compare(eager, lazy)
    assert found.is_finding
    assert found.behind == (("r1", 1_024, 544), ("r2", 6_336, 6_304))
    assert str(found) == (
        "lazy/eager 0.935: 7,392 of 7,904, 3 requests in both; less than 0.98: r1 544 of 1,024, r2 6,304 of 6,336"
    )


def test_compare_modes_when_each_aborted_others_counts_common_ones() -> None:
    eager = Result(served={"r0": 960, "only eager": 960})
    lazy = Result(served={"only lazy": 32, "r0": 960})
    assert str(compare(eager, lazy)) == "lazy/eager 1.000: 960 of 960, 1 requests in both"


@pytest.mark.parametrize(
    ("eager", "lazy", "is_finding"), [(3_200, 3_136, False), (3_200, 3_104, True), (0, 0, False), (32, 64, False)]
)
def test_compare_modes_when_lazy_finds_98_percent_reports_nothing(eager: int, lazy: int, is_finding: bool) -> None:
    assert compare(Result(served={"r0": eager}), Result(served={"r0": lazy})).is_finding is is_finding
