"""Dropped keys while blocks are stored and removed: no dropped block stays, or appears later, where it can be found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.app.tiers.dropped_keys import DroppedKeys
from kvferry.core.keys import Key
from tests.harness.effort import examples
from tests.harness.tier_slots import key_of

NUM_KEYS = 2
LIMIT = 1
keys = st.integers(0, NUM_KEYS - 1).map(key_of)


@dataclass(eq=False)
class Store:
    """A store under way. `may_write` is what it read from the dropped keys; a dead one was dropped after it began."""

    key: Key
    may_write: bool
    stack: ExitStack
    is_dead: bool = False


class DroppedKeysMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.dropped = DroppedKeys()
        self.medium: dict[Key, bool] = {}
        """Blocks by key, with whether they were dropped."""
        self.stores: list[Store] = []
        self.removals: Iterator[list[Key]] = iter(())
        self.removing: list[Key] = []

    @rule(key=keys)
    def begin_store(self, key: Key) -> None:
        stack = ExitStack()
        stack.enter_context(self.dropped.storing([key]))
        self.stores.append(Store(key, key not in self.dropped, stack))

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        ready = [one for one in self.stores if one.may_write]
        if ready:
            store = data.draw(st.sampled_from(ready))
            self.medium[store.key] = store.is_dead

    @rule(key=keys)
    def store_by_another_engine(self, key: Key) -> None:
        self.medium[key] = False

    @rule(data=st.data())
    def end_store(self, data: st.DataObject) -> None:
        if self.stores:
            store = self.stores.pop(data.draw(st.integers(0, len(self.stores) - 1)))
            store.stack.close()

    @rule(some=st.lists(keys, max_size=3))
    def drop(self, some: list[Key]) -> None:
        self.dropped.add(some)
        for store in self.stores:
            store.is_dead |= store.key in some
        for key in some:
            if key in self.medium:
                self.medium[key] = True

    @rule()
    def begin_removals(self) -> None:
        self.removals, self.removing = self.dropped.removals(LIMIT), []
        self.request_next()

    @rule()
    def remove(self) -> None:
        for key in self.removing:
            self.medium.pop(key, None)
        self.removing = []

    @precondition(lambda self: not self.removing)
    @rule()
    def request_next(self) -> None:
        self.removing = next(self.removals, [])
        storing = {store.key for store in self.stores}
        assert storing.isdisjoint(self.removing)
        if self.removing:
            free = [key for key in map(key_of, range(NUM_KEYS)) if key in self.dropped and key not in storing]
            assert len(self.removing) == min(len(free), LIMIT)

    @invariant()
    def no_dropped_block_can_be_found(self) -> None:
        for key in map(key_of, range(NUM_KEYS)):
            assert self.dropped.has_any([key]) == (key in self.dropped)
            if key not in self.dropped:
                assert not self.medium.get(key, False)
                assert not any(one.key == key and one.is_dead and one.may_write for one in self.stores)

    def teardown(self) -> None:
        for store in getattr(self, "stores", ()):
            store.stack.close()


TestDroppedKeys = DroppedKeysMachine.TestCase
TestDroppedKeys.settings = settings(max_examples=examples(200), stateful_step_count=50, deadline=None)


def test_key_dropped_again_during_its_removal_is_removed_again() -> None:
    dropped = DroppedKeys()
    dropped.add([key_of(0), key_of(1)])
    removals = dropped.removals(LIMIT)
    assert next(removals) == [key_of(0)]
    # Another engine has stored it again meanwhile.
    dropped.add([key_of(0)])
    assert list(removals) == [[key_of(0)], [key_of(1)]]
    assert not dropped.has_any([key_of(0), key_of(1)])


def test_key_used_by_a_call_during_its_removal_stays_dropped() -> None:
    dropped = DroppedKeys()
    dropped.add([key_of(0)])
    removals = dropped.removals(LIMIT)
    assert next(removals) == [key_of(0)]
    with dropped.storing([key_of(0)]):
        # What the call has read of the medium may be from before the removal.
        assert next(removals, None) is None
        assert key_of(0) in dropped
    assert list(dropped.removals(LIMIT)) == [[key_of(0)]]
    assert not dropped.has_any([key_of(0)])
