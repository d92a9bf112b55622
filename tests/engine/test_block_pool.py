"""The block pool against an obvious model of it: sets, and a list that is searched."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.app.engines.embedded.block_pool import BlockPool
from tests.harness.effort import examples

NUM_BLOCKS = 12


class PoolMachine(RuleBasedStateMachine):
    """Tables are what requests hold, `held` what transfers do, `queue` the free blocks, the next to go first."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[int]] = []
        self.holds: list[list[int]] = []
        self.queue = list(range(NUM_BLOCKS))
        self.places: set[int] = set()
        self.content: dict[int, bytes] = {}
        self.taken: dict[int, bytes | None] = {}

    @initialize()
    def start(self) -> None:
        self.pool = BlockPool(NUM_BLOCKS)

    def key_of(self, block: int) -> bytes | None:
        return self.content[block] + b"\0" if block in self.content else None

    def in_use(self, block: int) -> bool:
        return any(block in blocks for blocks in (*self.tables, *self.holds))

    def let_go(self, blocks: list[int], *, reuse_first: bool = False) -> None:
        for block in reversed(blocks):
            if not self.in_use(block) and block not in self.queue:
                if block in self.content and not (reuse_first and block in self.places):
                    self.queue.append(block)
                else:
                    self.queue.insert(0, block)
                self.places.discard(block)

    @rule(names=st.lists(st.integers(0, 9), max_size=5), num_new=st.integers(0, 6))
    def allocate(self, names: list[int], num_new: int) -> None:
        shared = self.pool.find_prefix(bytes([name]) for name in names)
        expected = []
        for name in names:
            found = [block for block, content in self.content.items() if content == bytes([name])]
            if not found:
                break
            expected += found
        assert shared == expected
        shared = list(dict.fromkeys(shared))
        table = self.pool.allocate(shared, num_new)
        room = [block for block in self.queue if block not in shared]
        if len(room) < num_new:
            assert table is None
            return
        assert table == [*shared, *room[:num_new]]
        for block in room[:num_new]:
            self.taken.setdefault(block, self.key_of(block))
            self.content.pop(block, None)
        self.queue = room[num_new:]
        self.places.difference_update(shared)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)
        self.let_go(table)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data(), name=st.integers(0, 9))
    def register(self, data: st.DataObject, name: int) -> None:
        block = data.draw(st.sampled_from([block for table in self.tables for block in table]))
        self.pool.register(block, bytes([name]))
        if block not in self.content and bytes([name]) not in self.content.values():
            self.content[block] = bytes([name])

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from([table for table in self.tables if table]))
        self.pool.hold(blocks)
        self.holds.append(blocks)

    @rule(blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True, max_size=3))
    def hold_any(self, blocks: list[int]) -> None:
        self.pool.hold(blocks)
        self.places.update(block for block in blocks if block in self.queue)
        self.queue = [block for block in self.queue if block not in blocks]
        self.holds.append(blocks)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), reuse_first=st.booleans())
    def release(self, data: st.DataObject, reuse_first: bool) -> None:
        blocks = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.pool.release(blocks, reuse_first=reuse_first)
        self.let_go(blocks, reuse_first=reuse_first)

    @rule(among=st.sets(st.integers(0, NUM_BLOCKS - 1)))
    def take_allocated(self, among: set[int]) -> None:
        expected = {block: key for block, key in self.taken.items() if block in among}
        assert self.pool.take_allocated(among) == expected
        self.taken.clear()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.num_free == len(self.queue)
            assert list(self.pool.free_blocks()) == self.queue
            keys = [self.taken.get(block, self.key_of(block)) for block in range(NUM_BLOCKS)]
            assert self.pool.contents(range(NUM_BLOCKS)) == keys
            held = [bytes([name]) in self.content.values() for name in range(10)]
            assert self.pool.resident([bytes([name, 0]) for name in range(10)]) == held
            assert self.pool.num_held == len({block for blocks in self.holds for block in blocks})
            for name in range(10):
                found = self.pool.find_prefix([bytes([name])])
                assert found == [block for block, content in self.content.items() if content == bytes([name])]

    def teardown(self) -> None:
        for blocks in self.holds:
            self.pool.release(blocks)
        for table in self.tables:
            self.pool.free(table)
        assert self.pool.num_free == NUM_BLOCKS
        assert self.pool.allocate((), NUM_BLOCKS) is not None


PoolMachine.TestCase.settings = settings(max_examples=examples(80), stateful_step_count=40)
TestPool = PoolMachine.TestCase


@pytest.mark.parametrize("was_free", [False, True])
def test_blocks_used_by_a_request_while_stored_are_allocated_last(was_free: bool) -> None:
    pool = BlockPool(4)
    used = pool.allocate((), 2)
    assert used is not None
    for block in used:
        pool.register(block, bytes([block]))
    if was_free:
        pool.free(used)
    pool.hold(used)
    if was_free:
        assert pool.allocate(used, 0) == used
    pool.free(used)
    pool.release(used, reuse_first=True)
    assert list(pool.free_blocks())[-2:] == used[::-1]
