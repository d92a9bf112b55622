"""The index of keys against a dictionary, also with keys of one mark; and marks against another way to make them."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.core.keys import RequestIdentity
from kvferry.core.pool.index import BlockIndex, hash_keys
from kvferry.core.pool.manager import OffloadManager
from tests.harness.effort import examples

SIZE = 60
SPREAD = 0x9E3779B97F4A7C15
LOW = 2**64 - 1


def mixed(mark: int, word: int) -> int:
    mark = (mark ^ word) * SPREAD & LOW
    return mark ^ mark >> 32


def mark_of(key: bytes) -> int:
    mark = len(key) * SPREAD & LOW
    for start in range(0, len(key), 8):
        mark = mixed(mark, int.from_bytes(key[start : start + 8], "little"))
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        mark = (mark ^ mark >> 33) * factor & LOW
    return mark ^ mark >> 33


def twin_of(key: bytes) -> bytes:
    """Another key of the same mark: its first word differs, and its second makes up for it."""
    first, second = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:16], "little")
    start = len(key) * SPREAD & LOW
    makes_up = mixed(start, first) ^ mixed(start, first ^ 1) ^ second
    return (first ^ 1).to_bytes(8, "little") + makes_up.to_bytes(8, "little") + key[16:]


# All of one length, or of two: what a pool has, and a folder that two engines share.
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=2),
    keys=st.lists(st.binary(min_size=40, max_size=40), max_size=8),
    data=st.data(),
)
@settings(derandomize=True, max_examples=examples(300), deadline=None)
def test_key_hash_depends_on_every_byte_of_its_key_only(lengths: list[int], keys: list[bytes], data) -> None:
    keys = [key[: data.draw(st.sampled_from(lengths))] for key in keys]
    assert hash_keys(keys).tolist() == [mark_of(key) for key in keys]


def test_key_hashes_when_any_one_byte_differs_are_spread() -> None:
    for at in range(33):
        marks = hash_keys([bytes(at) + bytes([value]) + bytes(32 - at) for value in range(256)])
        for bits in (marks >> np.uint64(52), marks & np.uint64(4095)):
            assert len(np.unique(bits)) > 220, f"byte {at}: {len(np.unique(bits))} of 4096 places for 256 keys"


NAMES = [number.to_bytes(16, "big") + bytes([group]) for number in range(10) for group in range(2)]
KEYS = NAMES + [twin_of(name) for name in NAMES[:10]]


class KeyIndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.keys = np.empty(SIZE, dtype=object)
        self.marks = np.zeros(SIZE, dtype=np.uint64)
        self.index = BlockIndex(SIZE, self.keys, self.marks)
        self.held: dict[bytes, int] = {}

    def by_mark(self) -> dict[int, bytes]:
        return {mark_of(key): key for key in self.held}

    @rule(wanted=st.lists(st.sampled_from(KEYS), max_size=20))
    def claim(self, wanted: list[bytes]) -> None:
        free = [number for number in range(SIZE) if number not in self.held.values()][: len(wanted)]
        numbers = np.array(free, dtype=np.int64)
        for number, key in zip(free, wanted, strict=True):
            self.keys[number] = key
        self.marks[numbers] = hash_keys(wanted)
        for key, number, holder in zip(wanted, free, self.index.claim(numbers).tolist(), strict=True):
            there = self.by_mark().get(mark_of(key))
            if there is None:
                self.held[key] = number
            assert holder == self.held[there or key]

    @rule(data=st.data())
    def remove(self, data) -> None:
        if self.held:
            gone = data.draw(st.lists(st.sampled_from(sorted(self.held)), unique=True))
            self.index.remove(np.array([self.held.pop(key) for key in gone], dtype=np.int64))

    @rule(asked=st.lists(st.sampled_from(KEYS), max_size=20), is_list=st.booleans())
    def find(self, asked: list[bytes], is_list: bool) -> None:
        known = [self.held.get(key, -1) for key in asked]
        assert self.index.find(asked if is_list else tuple(asked)).tolist() == known
        leading = [*known, -1].index(-1)
        assert self.index.find_prefix(asked).tolist() == known[:leading]

    @rule()
    def clear(self) -> None:
        self.index.reset()
        self.held.clear()

    @precondition(lambda self: not self.index.is_growing and self.index.size < 10_000)
    @rule()
    def begin_growing(self) -> None:
        self.index.begin_growing(2 * self.index.size)()

    @rule(limit=st.integers(1, 40))
    def move(self, limit: int) -> None:
        was_growing, room = self.index.is_growing, self.index.size
        replaced = self.index.move(SIZE, limit)
        assert (replaced is None) == (self.index.size == room)
        assert self.index.is_growing == (was_growing and replaced is None)

    @invariant()
    def each_is_found_by_itself(self) -> None:
        assert len(self.index) == len(self.held)
        for key in KEYS:
            assert self.index.get(key) == self.held.get(key)


TestKeyIndex = KeyIndexMachine.TestCase
TestKeyIndex.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None, derandomize=True)


def test_a_long_prefix_is_found_up_to_its_end_wherever_that_is() -> None:
    keys = [number.to_bytes(32, "big") + b"\0" for number in range(5000)]
    column = np.array(keys, dtype=object)
    index = BlockIndex(len(keys), column, hash_keys(keys))
    index.claim(np.arange(len(keys)))
    for end in (0, 1, 63, 64, 65, 191, 192, 193, 4032, 4999, 5000):
        asked = keys[:end] + [b"missing".rjust(33)] * (end < 5000) + keys[end + 1 :]
        assert index.find_prefix(asked).tolist() == list(range(end))
    assert index.find_prefix([]).tolist() == []


def test_second_key_of_equal_hash_is_not_indexed() -> None:
    manager = OffloadManager(8, 64)
    key = bytes(range(32)) + b"\0"
    twin = twin_of(key)
    assert hash_keys([twin]) == hash_keys([key])
    first = manager.prepare_store([key], RequestIdentity("first"), np.arange(1), 1, 1.0)
    assert manager.complete_store(first.slots, 1.0) == 1
    second = manager.prepare_store([twin], RequestIdentity("second"), np.arange(1), 2, 2.0)
    assert len(second.slots) == 1, "it is not there, so it may be stored"
    assert manager.complete_store(second.slots, 2.0) == 0
    assert manager.lookup_each([key, twin]).tolist() == [int(first.slots[0]), -1]
    assert manager.counts().free == 7
    assert not manager.drop_key(twin, 3.0)
    assert manager.drop_key(key, 3.0)
    again = manager.prepare_store([twin], RequestIdentity("second"), np.arange(1), 1, 4.0)
    assert manager.complete_store(again.slots, 4.0) == 1
    assert manager.lookup_each([key, twin]).tolist() == [-1, int(again.slots[0])]
