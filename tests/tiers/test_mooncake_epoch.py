"""The epoch of a namespace in Mooncake Store, while engines change it at once, pause, die, and it is lost.

The engines run the code of the tier on a model of the master, whose calls are the points at which another engine runs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import greenlet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.app.tiers import shared_epoch
from kvferry.app.tiers.block_store import StoreUnavailable
from kvferry.app.tiers.mooncake import epoch as module
from kvferry.app.tiers.mooncake.client import NO_SPACE, NOT_FOUND, SCRATCH_BYTES
from kvferry.app.tiers.mooncake.epoch import EpochObject
from kvferry.app.tiers.shared_epoch import SharedEpoch
from tests.harness.effort import examples

NOT_READY = -703
NUM_ENGINES = 3


@dataclass(eq=False)
class Stored:
    value: bytes
    is_complete: bool = False


class Master:
    """Objects as Mooncake's master has them: seen by all once they are complete, and removable only then."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.objects: dict[str, Stored] = {}
        self.now_s = 0.0
        self.is_calm = False

    def pause(self, seconds: float = 0.0) -> None:
        """Let other engines run."""
        self.now_s += seconds
        greenlet.getcurrent().parent.switch()

    def may_fail(self) -> None:
        """The answer to a call is lost, or the call itself."""
        if not self.is_calm and self.draw.random() < 0.02:
            raise StoreUnavailable("the master did not answer in time")


class ModelLane:
    """A lane of an engine, on the model."""

    def __init__(self, master: Master) -> None:
        self.master = master
        self.view = memoryview(bytearray(SCRATCH_BYTES))

    def exists(self, names: Sequence[str]) -> list[bool]:
        self._step()
        found = [name in self.master.objects and self.master.objects[name].is_complete for name in names]
        self.master.may_fail()
        return found

    def remove(self, names: Sequence[str]) -> list[int]:
        codes = []
        for name in names:
            self._step()
            found = self.master.objects.get(name)
            if found is not None and found.is_complete:
                del self.master.objects[name]
            codes.append(NOT_FOUND if found is None else 0 if found.is_complete else NOT_READY)
        self.master.may_fail()
        return codes

    def put(self, names: Sequence[str], spans: Sequence[tuple[int, int]], replicas: int, *, pinned: bool) -> list[int]:
        assert pinned
        (name,), ((start, length),) = names, spans
        value = bytes(self.view[start : start + length])
        self._step()
        if not self.master.is_calm and self.master.draw.random() < 0.05:
            return [NO_SPACE]
        if name in self.master.objects:
            return [0]
        own = self.master.objects[name] = Stored(value)
        self._step()
        # The master may have discarded it meanwhile.
        if self.master.objects.get(name) is not own:
            return [NOT_FOUND]
        own.is_complete = True
        self.master.may_fail()
        return [0]

    def get(self, names: Sequence[str], spans: Sequence[tuple[int, int]]) -> list[int]:
        ((name,), ((start, _),)) = names, spans
        self._step()
        found = self.master.objects.get(name)
        self.master.may_fail()
        if found is None or not found.is_complete:
            return [NOT_FOUND if found is None else NOT_READY]
        self.view[start : start + len(found.value)] = found.value
        return [len(found.value)]

    def _step(self) -> None:
        self.master.pause(0.001)
        self.master.may_fail()


@dataclass
class Reset:
    """A reset that was answered: what it may not be followed by."""

    answered: int
    seen: frozenset[bytes]
    """Epochs that were known to an engine before it began."""


@dataclass
class Engine:
    epoch: SharedEpoch
    stored: EpochObject
    call: greenlet.greenlet | None = None


@dataclass
class World:
    draw: random.Random
    master: Master
    engines: list[Engine] = field(default_factory=list)
    seen: set[bytes] = field(default_factory=set)
    resets: list[Reset] = field(default_factory=list)
    num_events: int = 0

    def new_engine(self) -> Engine:
        return Engine(SharedEpoch("t", lambda: None), EpochObject(ModelLane(self.master), "p/n"))

    def read(self, engine: Engine) -> None:
        begun = self.num_events
        name = engine.epoch.confirm(engine.stored.read_epoch()[0], engine.stored).name
        self.seen.add(name)
        for reset in self.resets:
            assert reset.answered > begun or name not in reset.seen, "a reset that was answered does not hold"

    def reset(self, engine: Engine) -> None:
        seen = frozenset(self.seen)
        engine.epoch.begin(engine.stored)
        self.resets.append(Reset(self.num_events, seen))

    def begin(self, engine: Engine, call: Callable[[Engine], None]) -> None:
        def run() -> None:
            try:
                call(engine)
            except StoreUnavailable:
                # It was not answered.
                return

        engine.call = greenlet.greenlet(run)

    def step(self, engine: Engine) -> None:
        assert engine.call is not None
        self.num_events += 1
        engine.call.switch()
        if engine.call.dead:
            engine.call = None

    def kill(self, number: int) -> None:
        """An engine dies, and another one starts that knows nothing."""
        call = self.engines[number].call
        if call is not None:
            call.throw(greenlet.GreenletExit)
        self.engines[number] = self.new_engine()

    def lose(self, is_complete: bool) -> None:
        """A host dies with an object, or the master discards one that was not completed."""
        names = [name for name, one in self.master.objects.items() if one.is_complete is is_complete]
        if names:
            del self.master.objects[self.draw.choice(sorted(names))]

    def act(self, losses: float) -> None:
        number = self.draw.randrange(NUM_ENGINES)
        engine = self.engines[number]
        event = self.draw.random()
        if event < losses:
            self.lose(is_complete=self.draw.random() < 0.7)
        elif event < losses + 0.01:
            self.kill(number)
        elif event < losses + 0.02:
            self.master.now_s += 3.0
        elif engine.call is None:
            self.begin(engine, self.draw.choice([self.read, self.read, self.read, self.reset]))
        else:
            # Others are paused for a while.
            for _ in range(self.draw.choice([1, 1, 3, 20])):
                if engine.call is not None:
                    self.step(engine)

    def settle(self) -> None:
        """End all calls, and then read the epoch in each engine, without further failures."""
        self.master.is_calm = True
        for engine in self.engines:
            while engine.call is not None:
                self.step(engine)
        for _ in range(2):
            # What was not completed is discarded.
            self.master.objects = {name: one for name, one in self.master.objects.items() if one.is_complete}
            for engine in self.engines:
                self.begin(engine, self.read)
                while engine.call is not None:
                    self.step(engine)


@pytest.mark.sampled
@pytest.mark.parametrize("losses", [0.0, 0.03])
def test_resets_that_were_answered_hold_whatever_happens(monkeypatch: pytest.MonkeyPatch, losses: float) -> None:
    @settings(max_examples=examples(240), deadline=None)
    @given(draw=st.randoms(use_true_random=False))
    def run(draw: random.Random) -> None:
        master = Master(draw)
        clock = SimpleNamespace(monotonic=lambda: master.now_s, sleep=master.pause)
        with monkeypatch.context() as patch:
            patch.setattr(module, "time", clock)
            # Ids that are unique and the same in each run.
            numbers = itertools.count()
            patch.setattr(shared_epoch.secrets, "token_hex", lambda size: f"{next(numbers):0{2 * size}x}")
            world = World(draw, master)
            world.engines = [world.new_engine() for _ in range(NUM_ENGINES)]
            for _ in range(150):
                world.act(losses)
            world.settle()
        assert len({engine.epoch.latest for engine in world.engines}) == 1

    run()
