"""Buckets against a dictionary, with few enough buckets that they overflow, and marks that are alike."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from core.buckets import Buckets


def marks_of(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64)


# Equal in the bucket, in the check, or in both, so that one place is wanted by many.
MARKS = st.builds(
    lambda bucket, check, rest: bucket << 60 | rest << 20 | check,
    st.sampled_from([0, 0, 0, 7, 15]),
    st.sampled_from([0, 0, 0xFFFF0000 >> 12, 1 << 19]),
    st.integers(0, 40),
)


class BucketsMachine(RuleBasedStateMachine):
    @initialize(size=st.sampled_from([1, 30, 200]), generation=st.sampled_from([1, 65_533]))
    def start(self, size: int, generation: int) -> None:
        self.size = size
        self.marks = np.zeros(size, dtype=np.uint64)
        self.buckets = Buckets(size, self.marks, np.zeros(size, dtype=np.uint32))
        self.buckets._generation = generation
        self.held: dict[int, int] = {}

    @rule(wanted=st.lists(MARKS, max_size=40))
    def claim(self, wanted: list[int]) -> None:
        free = [number for number in range(self.size) if number not in self.held.values()]
        wanted = wanted[: len(free)]
        numbers = np.array(free[: len(wanted)], dtype=np.int64)
        self.marks[numbers] = marks_of(wanted)
        won = self.buckets.claim(marks_of(wanted), numbers).tolist()
        for mark, number, one in zip(wanted, numbers.tolist(), won, strict=True):
            assert one == (mark not in self.held), "the first of equal marks counts, and who is there stays"
            self.held.setdefault(mark, number)

    @rule(data=st.data())
    def remove(self, data) -> None:
        if self.held:
            gone = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
            self.buckets.remove(np.array([self.held.pop(mark) for mark in gone], dtype=np.int64))

    @rule(asked=st.lists(MARKS, max_size=40))
    def find(self, asked: list[int]) -> None:
        assert self.buckets.find(marks_of(asked)).tolist() == [self.held.get(mark, -1) for mark in asked]

    @rule()
    def clear(self) -> None:
        self.buckets.clear()
        self.held.clear()

    @invariant()
    def all_is_found(self) -> None:
        if hasattr(self, "buckets"):
            assert len(self.buckets) == len(self.held)
            assert self.buckets.find(marks_of(list(self.held))).tolist() == list(self.held.values())


TestBuckets = BucketsMachine.TestCase
TestBuckets.settings = settings(max_examples=150, stateful_step_count=30, deadline=None, derandomize=True)


def test_what_an_old_generation_left_is_gone_when_its_number_comes_again() -> None:
    marks = np.arange(1, 301, dtype=np.uint64) << np.uint64(55)
    buckets = Buckets(300, marks, np.zeros(300, dtype=np.uint32))
    assert buckets.claim(marks, np.arange(300)).all()
    for _ in range(65_535):
        buckets.clear()
    assert buckets._generation == 1
    assert (buckets.find(marks) == -1).all()
    assert not buckets._cells.any()


def test_random_marks_hardly_ever_spill() -> None:
    marks = np.random.default_rng(3).integers(0, 2**63, 100_000, dtype=np.uint64) * np.uint64(2)
    buckets = Buckets(len(marks), marks, np.zeros(len(marks), dtype=np.uint32))
    for start in range(0, len(marks), 100):
        assert buckets.claim(marks[start : start + 100], np.arange(start, start + 100)).all()
    assert len(buckets._spilled) < len(marks) // 500
    assert (buckets.find(marks) == np.arange(len(marks))).all()
