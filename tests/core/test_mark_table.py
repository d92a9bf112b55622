"""The table of marks against a dictionary, with marks that want one cell, and a table that is as full as it may be."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.core.pool.index import HashTable
from tests.harness.effort import examples


def marks(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, dtype=np.uint64)


# Few first cells, the last of the table among them, so that they are pushed on and round the end.
MARKS = st.builds(
    lambda cell, rest: cell << 60 | rest,
    st.sampled_from([0, 0, 1, 7, 14, 15, 15]),
    st.integers(0, 12),
)


class MarkTableMachine(RuleBasedStateMachine):
    @initialize(size=st.sampled_from([1, 10, 20, 40]), generation=st.sampled_from([1, 2**32 - 2]))
    def start(self, size: int, generation: int) -> None:
        self.marks = np.zeros(200, dtype=np.uint64)
        self.table = HashTable(size, self.marks)
        self.size = self.table.size
        assert self.size >= size
        self.table._epoch = generation
        self.held: dict[int, int] = {}

    def found(self, asked: list[int]) -> list[int]:
        numbers = self.table.find_hashes(marks(asked))
        return numbers.tolist()

    @rule(wanted=st.lists(MARKS, max_size=50))
    def claim(self, wanted: list[int]) -> None:
        numbers = [number for number in range(200) if number not in self.held.values()][: len(wanted)]
        self.marks[numbers] = marks(wanted)
        holders = self.table.claim(np.array(numbers, dtype=np.int64)).tolist()
        for mark, number, holder in zip(wanted, numbers, holders, strict=True):
            if len(self.held) < self.size:
                self.held.setdefault(mark, number)
            assert holder == self.held.get(mark, -1), "the first of equal marks counts, and who is there stays"

    @rule(data=st.data())
    def remove(self, data) -> None:
        if self.held:
            gone = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
            self.table.remove(np.array([self.held.pop(mark) for mark in gone], dtype=np.int64))

    @rule(asked=st.lists(MARKS, max_size=10))
    def remove_what_is_not_there(self, asked: list[int]) -> None:
        """Not claimed at all, or marks that others have."""
        numbers = [number for number in range(200) if number not in self.held.values()][: len(asked)]
        self.marks[numbers] = marks(asked)
        self.table.remove(np.array(numbers, dtype=np.int64))

    @rule(asked=st.lists(MARKS, max_size=40))
    def find(self, asked: list[int]) -> None:
        assert self.found(asked) == [self.held.get(mark, -1) for mark in asked]

    @rule()
    def clear(self) -> None:
        self.table.reset()
        self.held.clear()

    @invariant()
    def all_is_found(self) -> None:
        if hasattr(self, "table"):
            assert len(self.table) == len(self.held)
            assert self.found(list(self.held)) == list(self.held.values())


TestMarkTable = MarkTableMachine.TestCase
TestMarkTable.settings = settings(max_examples=examples(200), stateful_step_count=30, deadline=None, derandomize=True)


def test_old_generation_when_its_slot_is_reused_is_forgotten() -> None:
    wanted = np.arange(1, 301, dtype=np.uint64) << np.uint64(55)
    table = HashTable(300, wanted)
    assert (table.claim(np.arange(300)) == np.arange(300)).all()
    table._epoch = 2**32 - 1
    table.reset()
    assert table._epoch == 1
    assert (table.find_hashes(wanted) < 0).all()
