"""The index of a folder against an obvious one: an ordered dictionary, and bytes counted one by one."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.app.tiers.block_store import Outcome
from kvferry.app.tiers.fs.index import FileIndex
from tests.harness.effort import examples

names = st.integers(0, 19).map(lambda number: bytes([number]) * 3)
sizes = st.integers(1, 40)


class IndexMachine(RuleBasedStateMachine):
    """`held` is what can be read, the least recently used first; `disk` what lies there, deleted or not."""

    @initialize(
        max_bytes=st.integers(20, 200),
        smallest=st.sampled_from([1, 5, 20]),
        found=st.lists(st.tuples(names, sizes), max_size=15, unique_by=lambda pair: pair[0]),
    )
    def start(self, max_bytes: int, smallest: int, found: list[tuple[bytes, int]]) -> None:
        self.index = FileIndex(max_bytes, smallest)
        self.max_bytes, self.max_files = max_bytes, max_bytes // smallest
        self.held: OrderedDict[bytes, int] = OrderedDict(found)
        self.writing: dict[bytes, int] = {}
        self.unwanted: set[bytes] = set()
        self.leaving: dict[bytes, int] = {}
        self.debt = 0
        sizes_found = np.array([size for _, size in found], dtype=np.int64)
        self.index.fill([name for name, _ in found], sizes_found, np.arange(len(found), dtype=np.float64))
        while sum(self.held.values()) > max_bytes or len(self.held) > self.max_files:
            self.leaving[self.held.popitem(last=False)[0]] = 0
        assert self.index.has_excess is bool(self.leaving)
        assert self.index.evict_excess() == list(self.leaving)
        assert not self.index.has_excess

    def taken(self) -> int:
        return sum((*self.held.values(), *self.writing.values(), *self.leaving.values(), self.debt))

    @rule(name=names, size=sizes)
    def begin(self, name: bytes, size: int) -> None:
        victims = self.index.begin(name, size)
        if name in self.held:
            assert victims is Outcome.PRESENT
            self.held.move_to_end(name)
            return
        if name in self.writing or name in self.leaving:
            assert victims is Outcome.DROPPED
            return
        excess = self.taken() + size - self.max_bytes
        excess_files = len(self.held) + len(self.writing) + 1 - self.max_files
        if excess > sum(self.held.values()) or excess_files > len(self.held):
            assert victims is Outcome.DROPPED
            return
        expected = []
        while excess > 0 or excess_files > 0:
            victim, freed = self.held.popitem(last=False)
            excess, excess_files = excess - freed, excess_files - 1
            expected.append(victim)
        assert victims == expected
        # The writer deletes them before it writes, so they count no more, but their names are taken.
        self.leaving.update(dict.fromkeys(expected, 0))
        self.writing[name] = size

    @rule(data=st.data(), aborted=st.booleans())
    def end_a_write(self, data: st.DataObject, aborted: bool) -> None:
        if not self.writing:
            return
        name = data.draw(st.sampled_from(sorted(self.writing)))
        size = self.writing.pop(name)
        if aborted:
            self.index.abort(name)
        elif name in self.unwanted:
            assert not self.index.commit(name)
            self.leaving[name] = size
        else:
            assert self.index.commit(name)
            self.held[name] = size
        self.unwanted.discard(name)

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        if self.leaving:
            name = data.draw(st.sampled_from(sorted(self.leaving)))
            del self.leaving[name]
            self.index.deleted([name])

    @rule(some=st.lists(names, max_size=5, unique=True))
    def take(self, some: list[bytes]) -> None:
        taken = self.index.take(some)
        assert taken == [name for name in some if name in self.held]
        self.unwanted.update(name for name in some if name in self.writing)
        self.leaving.update({name: self.held.pop(name) for name in taken})

    @rule(name=names)
    def touch(self, name: bytes) -> None:
        self.index.touch(name)
        if name in self.held:
            self.held.move_to_end(name)

    @rule(size=sizes)
    def evict(self, size: int) -> None:
        victims = self.index.evict(size)
        expected = []
        while size > 0 and self.held:
            name, freed = self.held.popitem(last=False)
            size -= freed
            expected.append(name)
        assert victims == expected
        self.leaving.update(dict.fromkeys(expected, 0))

    @rule(paid=st.one_of(st.none(), sizes))
    def pay(self, paid: int | None) -> None:
        self.index.pay(paid)
        self.debt = 0 if paid is None else max(self.debt - paid, 0)

    @rule()
    def clear(self) -> None:
        assert self.index.clear() == (len(self.held), sum(self.held.values()))
        self.debt += sum(self.held.values()) + sum(self.leaving.values())
        self.unwanted = set(self.writing)
        self.held.clear()
        self.leaving.clear()

    @invariant()
    def agree(self) -> None:
        if not hasattr(self, "index"):
            return
        every = [bytes([number]) * 3 for number in range(20)]
        assert self.index.find(every) == [name in self.held for name in every]
        assert (len(self.index), self.index.num_bytes) == (len(self.held), sum(self.held.values()))
        assert self.index._taken_bytes == self.taken()
        assert sum(self.held.values()) + sum(self.writing.values()) <= self.max_bytes, "the limit is exceeded"


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=examples(150), stateful_step_count=40)


def test_index_when_large_is_divided_evenly() -> None:
    index = FileIndex(10**12, 4096)
    names = [number.to_bytes(40, "big") for number in range(20_000)]
    index.fill(names, np.full(len(names), 4096), np.zeros(len(names)))
    assert len(index) == len(names)
    assert all(index.find(names))
    assert max(map(len, index._shards)) < len(names) / 20, "other threads wait while a part of it grows"


def test_names_of_several_lengths_are_found_whatever_they_come_with() -> None:
    index = FileIndex(10**9, 1)
    names = [b"c" * 41, b"b" * 17, b"a" * 29]
    index.fill(names, np.full(3, 5), np.array([1.0, 2.0, 3.0]))
    assert index.find(names) == [True] * 3
    assert [index.begin(name, 5) for name in names] == [Outcome.PRESENT] * 3
