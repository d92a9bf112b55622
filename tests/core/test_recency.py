"""The recency queue against an OrderedDict, through any order of batches."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvferry.core.pool.slots import RecencyQueue
from tests.harness.effort import examples


class QueueMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.sampled_from([1, 7, 300, 3000]))
    def start(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.queue = RecencyQueue(*np.zeros((2, num_slots), dtype=np.int32))
        self.model: OrderedDict[int, None] = OrderedDict()

    def pick(self, data, inside: bool) -> list[int]:
        pool = [slot for slot in range(self.num_slots) if (slot in self.model) == inside]
        if not pool:
            return []
        count = data.draw(st.integers(0, min(len(pool), 500)))
        start = data.draw(st.integers(0, len(pool) - 1))
        step = data.draw(st.sampled_from([1, 1, 3, -1]))
        return (pool[start:] + pool[:start])[::step][:count]

    @rule(data=st.data())
    def append(self, data) -> None:
        slots = self.pick(data, inside=False)
        self.queue.append(np.array(slots[::-1], dtype=np.int64))
        self.model.update(dict.fromkeys(slots))

    @rule(data=st.data(), times=st.integers(1, 12))
    def touch(self, data, times: int) -> None:
        slots = self.pick(data, inside=True)
        for _ in range(times):
            self.queue.touch(np.array(slots[::-1], dtype=np.int64))
        for slot in slots:
            self.model.move_to_end(slot)

    @rule(data=st.data())
    def remove(self, data) -> None:
        slots = self.pick(data, inside=True)
        self.queue.remove(np.array(slots, dtype=np.int64))
        for slot in slots:
            del self.model[slot]

    @rule(count=st.integers(0, 700))
    def take(self, count: int) -> None:
        expected = [self.model.popitem(last=False)[0] for _ in range(min(count, len(self.model)))]
        assert self.queue.peek_oldest(count).tolist() == expected
        assert self.queue.take_oldest(count).tolist() == expected

    @rule(data=st.data())
    def join(self, data) -> None:
        slots = self.pick(data, inside=False)
        other = RecencyQueue(self.queue._older, self.queue._newer)
        other.append(np.array(slots[::-1], dtype=np.int64))
        self.queue.join(other)
        self.model.update(dict.fromkeys(slots))
        assert other.length == 0

    @rule()
    def clear(self) -> None:
        self.queue.reset()
        self.model.clear()

    @invariant()
    def same_length(self) -> None:
        if hasattr(self, "queue"):
            assert self.queue.length == len(self.model)

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            assert self.queue.take_oldest(self.num_slots).tolist() == list(self.model)


TestRecencyQueue = QueueMachine.TestCase
TestRecencyQueue.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None, derandomize=True)


def test_recency_queue_when_used_unevenly_keeps_its_order() -> None:
    rng = np.random.default_rng(5)
    queue = RecencyQueue(*np.zeros((2, 5000), dtype=np.int32))
    model: OrderedDict[int, None] = OrderedDict()
    queue.append(np.arange(5000)[::-1])
    model.update(dict.fromkeys(range(5000)))
    for step in range(3000):
        hot = rng.permutation(200 if step % 7 else 5000)[: rng.integers(1, 400)]
        queue.touch(hot[::-1])
        for slot in hot.tolist():
            model.move_to_end(slot)
        if step % 50 == 49:
            victims = queue.take_oldest(300)
            assert victims.tolist() == [model.popitem(last=False)[0] for _ in range(300)]
            queue.append(victims[::-1])
            model.update(dict.fromkeys(victims.tolist()))
    assert queue.take_oldest(5000).tolist() == list(model)
