"""Columns of the comparison of answers in bfloat16."""

from __future__ import annotations

from bench.vllm_bfloat16 import ARMS, COMPARED, compare

SURE = ([5, 6, 7], [0.5, 0.25, 1.0])


def test_compare_answers_when_equal_counts_no_difference() -> None:
    assert compare([SURE, SURE], [SURE, SURE]) == ["2", "0", "", "", "0.00", "0.0000"]


def test_compare_answers_when_one_parts_reads_the_reference_gap() -> None:
    other = ([5, 9, 7], [0.375, 0.125, 2.0])
    assert compare([SURE, SURE], [SURE, other]) == ["2", "1", "0.2500", "0.2500", "0.25", "0.1250"]


def test_compared_ways_when_listed_are_answered_by_an_arm() -> None:
    ways = [way for arm in ARMS.values() for way in arm]
    assert len(ways) == len(set(ways))
    assert {way for pair in COMPARED.values() for way in pair} <= set(ways)
