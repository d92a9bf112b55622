"""ARC against two plain models: the paper's algorithm key by key, and the same for offers of many keys and classes."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.pool.eviction.arc import ArcGhosts, ArcPolicy
from kvferry.core.pool.index import HashTable
from kvferry.core.pool.manager import OffloadManager
from tests.harness.pool_blocks import HIGH, LOW, NORMAL, key, load, store


class PaperArc:
    """Megiddo and Modha, Figure 4, in their words. The oldest of a list comes first."""

    def __init__(self, size: int) -> None:
        self.c, self.p = size, 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict() for _ in range(4))

    def request(self, x: int) -> None:
        t1, t2, b1, b2, c = self.t1, self.t2, self.b1, self.b2, self.c
        if x in t1 or x in t2:
            t1.pop(x, None)
            t2.pop(x, None)
            t2[x] = None
        elif x in b1:
            self.p = min(c, self.p + max(len(b2) / len(b1), 1))
            self.replace(x)
            del b1[x]
            t2[x] = None
        elif x in b2:
            self.p = max(0, self.p - max(len(b1) / len(b2), 1))
            self.replace(x)
            del b2[x]
            t2[x] = None
        else:
            if len(t1) + len(b1) == c:
                if len(t1) < c:
                    b1.popitem(last=False)
                    self.replace(x)
                else:
                    t1.popitem(last=False)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= c:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * c:
                    b2.popitem(last=False)
                self.replace(x)
            t1[x] = None

    def replace(self, x: int) -> None:
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None

    def state(self) -> tuple:
        return list(self.t1), list(self.t2), list(self.b1), list(self.b2), self.p


class BatchArc:
    """The same for keys that are offered together, with classes, drops and new orders; see the notes of ARC."""

    def __init__(self, size: int) -> None:
        self.c, self.p = size, 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict() for _ in range(4))
        self.classes: dict[int, int] = {}

    def use(self, keys: list[int]) -> None:
        for x in reversed(keys):
            self.t1.pop(x, None)
            self.t2.pop(x, None)
            self.t2[x] = None

    def reorder(self, keys: list[int]) -> None:
        for x in reversed(keys):
            for t in (self.t1, self.t2):
                if x in t:
                    t.move_to_end(x)

    def drop(self, x: int) -> None:
        self.t1.pop(x, None)
        self.t2.pop(x, None)

    def offer(self, keys: list[int], priority: int) -> None:
        present = [x for x in keys if x in self.t1 or x in self.t2]
        raised = [x for x in present if self.classes[x] < priority]
        self.classes.update(dict.fromkeys(raised, priority))
        self.use(raised)
        self.use(present)
        absent = [x for x in keys if x not in self.t1 and x not in self.t2]
        self.own = set(present)
        free = self.c - len(self.t1) - len(self.t2)
        room = free + sum(len(self.victims(t, one)) for t in (self.t1, self.t2) for one in (LOW, NORMAL, HIGH))
        now = absent[:room]
        self.awaited = {x for x in now if x in self.b1 or x in self.b2}
        self.new1: list[int] = []
        for number, x in enumerate(now):
            self.awaited.discard(x)
            self.bring(x, number >= free)
        for x in reversed(now):
            self.classes[x] = priority
            (self.t1 if x in self.new1 else self.t2)[x] = None

    def bring(self, x: int, replaces: bool) -> None:
        if x in self.b1 or x in self.b2:
            here, other = (self.b1, self.b2) if x in self.b1 else (self.b2, self.b1)
            step = max(len(other) / len(here), 1)
            self.p = min(self.c, self.p + step) if here is self.b1 else max(0, self.p - step)
            if replaces:
                self.replace(x in self.b2)
            del here[x]
        else:
            if replaces:
                self.replace(False)
            self.new1.append(x)
        while len(self.t1) + len(self.new1) + len(self.b1) > self.c and self.forget(self.b1):
            pass
        while len(self.b1) + len(self.b2) > self.c and self.forget(self.b2):
            pass

    def replace(self, in_b2: bool) -> None:
        length = len(self.t1) + len(self.new1)
        for one in (LOW, NORMAL, HIGH):
            recent, frequent = self.victims(self.t1, one), self.victims(self.t2, one)
            if recent and (length > self.p or (in_b2 and length == self.p) or not frequent):
                del self.t1[recent[0]]
                self.b1[recent[0]] = None
                return
            if frequent:
                del self.t2[frequent[0]]
                self.b2[frequent[0]] = None
                return

    def victims(self, t: OrderedDict, one: int) -> list[int]:
        return [x for x in t if self.classes[x] == one and x not in self.own]

    def forget(self, b: OrderedDict) -> bool:
        gone = next((x for x in b if x not in self.awaited), None)
        if gone is not None:
            del b[gone]
        return gone is not None

    def state(self) -> tuple:
        by_class = [[x for x in t if self.classes[x] == one] for t in (self.t1, self.t2) for one in (LOW, NORMAL, HIGH)]
        return *by_class, list(self.b1), list(self.b2), self.p


class Ours:
    """The manager with its ARC, read out the way the models are."""

    def __init__(self, size: int) -> None:
        self.manager = OffloadManager(size, 64, eviction_policy="arc")
        policy = self.manager.evictor.policy
        assert isinstance(policy, ArcPolicy)
        self.policy = policy

    def offer(self, numbers: list[int], priority: int = NORMAL) -> None:
        store(self.manager, [key(number) for number in numbers], priority)

    def load(self, numbers: list[int]) -> int:
        return load(self.manager, [key(number) for number in numbers])

    def segments(self) -> list[list[list[int]]]:
        return [
            [[self.number(slot) for slot in queue.peek_oldest(queue.length).tolist()] for queue in segment.queues]
            for segment in (self.policy._recent, self.policy._frequent)
        ]

    def number(self, slot: int) -> int:
        return int.from_bytes(self.manager.table.keys[slot][:-1], "big")

    def ghosts(self, names: dict[int, int]) -> list[list[int]]:
        ghosts = self.policy._ghosts
        found = []
        for queue in ghosts._lists:
            entries = queue.peek_oldest(10**6).tolist()
            assert len(entries) == queue.length
            found.append([names[int(ghosts._hashes[entry])] for entry in entries])
        return found

    def state(self, names: dict[int, int]) -> tuple:
        recent, frequent = self.segments()
        return *recent, *frequent, *self.ghosts(names), self.policy.target


def names_up_to(count: int) -> dict[int, int]:
    from kvferry.core.pool.index import hash_keys

    return dict(zip(hash_keys([key(number) for number in range(count)]).tolist(), range(count), strict=True))


@given(size=st.integers(1, 12), requests=st.lists(st.integers(0, 30), max_size=200))
def test_arc_with_single_keys_equals_the_paper(size: int, requests: list[int]) -> None:
    paper, batch, ours, names = PaperArc(size), BatchArc(size), Ours(size), names_up_to(31)
    for number in requests:
        paper.request(number)
        batch.offer([number], NORMAL)
        ours.offer([number])
        t1, t2, b1, b2, p = paper.state()
        assert ours.state(names) == ([], t1, [], [], t2, [], b1, b2, p) == batch.state()


def test_arc_over_many_steps_equals_the_paper() -> None:
    rng = np.random.default_rng(0)
    size = 60
    paper, ours, names = PaperArc(size), Ours(size), names_up_to(400)
    for step in range(6000):
        hot = rng.integers(0, 40) + step // 1500 * 40
        number = int(rng.integers(200, 400) if step % 3 == 0 else hot)
        paper.request(number)
        ours.offer([number])
        if step % 50 == 0:
            t1, t2, b1, b2, p = paper.state()
            assert ours.state(names) == ([], t1, [], [], t2, [], b1, b2, p)
    assert 0 < paper.p < size


NUMBERS = st.lists(st.integers(0, 40), min_size=1, max_size=14, unique=True)
STEPS = st.one_of(
    st.tuples(st.just("offer"), NUMBERS, st.sampled_from([NORMAL, NORMAL, LOW, HIGH])),
    st.tuples(st.just("load"), NUMBERS, st.none()),
    st.tuples(st.just("drop"), NUMBERS, st.none()),
    st.tuples(st.just("reorder"), NUMBERS, st.none()),
)


@given(size=st.integers(1, 40), steps=st.lists(STEPS, max_size=60), classes=st.booleans())
def test_arc_with_batches_and_classes_equals_the_model(size, steps, classes: bool) -> None:
    model, ours, names = BatchArc(size), Ours(size), names_up_to(41)
    for what, numbers, priority in steps:
        if what == "offer":
            model.offer(numbers, priority if classes else NORMAL)
            ours.offer(numbers, priority if classes else NORMAL)
        elif what == "load":
            model.use(numbers[: ours.load(numbers)])
        elif what == "drop":
            for number in numbers:
                ours.manager.drop_key(key(number), 1.0)
                model.drop(number)
        else:
            ours.manager.reorder([key(number) for number in numbers])
            model.reorder(numbers)
        assert ours.state(names) == model.state(), (what, numbers)


@pytest.mark.parametrize("seed", range(20))
def test_arc_ghosts_when_all_return_stay_within_their_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(3, 12))
    model, ours, names = BatchArc(size), Ours(size), names_up_to(2000)
    fresh = iter(range(100, 2000))
    for _ in range(60):
        warm_up = [int(number) for number in rng.permutation(2 * size)[: rng.integers(1, 4)]]
        back = [list(ghosts)[: int(rng.integers(1, 20))] for ghosts in (model.b2, model.b1)]
        for numbers in (warm_up, [next(fresh), next(fresh), *back[0]], [next(fresh), *back[1], *back[0]]):
            numbers = list(dict.fromkeys(numbers))
            model.offer(numbers, NORMAL)
            ours.offer(numbers)
            assert ours.state(names) == model.state()
            assert len(model.b1) + len(model.b2) <= size


def test_ghosts_when_an_exception_lost_some_are_all_there_after_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    ghosts = ArcGhosts(8)
    hashes = np.arange(1, 9, dtype=np.uint64) << np.uint64(40)
    with monkeypatch.context() as patch:
        patch.setattr(HashTable, "claim", None)
        with pytest.raises(TypeError):
            ghosts.add([hashes[:5], hashes[:0]], [8, 8])
    ghosts.reset()
    ghosts.add([hashes[:4], hashes[4:]], [8, 8])
    assert (ghosts.count(0), ghosts.count(1)) == (4, 4)
    assert sorted(ghosts.find(hashes).tolist()) == list(range(8))
