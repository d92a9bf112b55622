"""A simulated fleet: engines that share a namespace in a Redis server, store, load, drop, and reset it for each other.

The stores are the real ones, on a real server. Their calls run on threads of which one runs at a time, from one round
trip to the next, so that a seed decides every interleaving. Requests and replies are lost, or carried out late or
twice, and the server is dead for a time, or returns to an earlier state. Each store of a block has an origin of its
own, so that a loaded block names the store that it comes from; see `Fleet.check_load` for what must hold.
"""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvferry.app.tiers.block_store import Outcome, StoreUnavailable, TierContext
from kvferry.app.tiers.redis import RedisTier
from kvferry.app.tiers.redis import store as redis_store
from kvferry.app.tiers.redis.store import RedisStore
from kvferry.core.keys import Key, RequestIdentity
from tests.harness.redis_server import shared_server
from tests.harness.tier_slots import key_of
from tests.sim.picks import Picks

NUM_ENGINES = 2
NUM_KEYS = 6
MAX_CALLS = 2
"""Calls of one engine at the same time."""
BLOCK_BYTES = 64
STEP_S = 60.0
TENANTS = ("a" * 16, "b" * 16)
FAULTS = ("request lost", "reply lost", "late", "twice")


@dataclass(eq=False)
class Reset:
    """Times of a reset: `began`, and `ended` once it has answered."""

    began: int
    ended: int | None = None


@dataclass(eq=False)
class Engine:
    """A store, its running calls, and the answered resets that it cannot have missed."""

    number: int
    store: RedisStore
    calls: list[Call] = field(default_factory=list)
    seen: set[Reset] = field(default_factory=set)


class Call:
    """A call of a store on a thread, which waits before each round trip until it is granted."""

    def __init__(self, engine: Engine, kind: str, run: Callable[[], None]) -> None:
        self.engine = engine
        self.kind = kind
        self.error: BaseException | None = None
        self.is_over = False
        self.unread: list[str] = []
        """Origins of a store that has not read the epoch."""
        self._run = run
        self._fault: str | None = None
        self._granted = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()
        self._wait()

    def step(self, fault: str | None) -> None:
        """Let it carry out one round trip, with a fault, and whatever follows up to the next one."""
        self._fault = fault
        self._granted.release()
        self._wait()

    def pause(self) -> str | None:
        """Wait for the grant of a round trip; return its fault. Thread: the call's."""
        self._stopped.release()
        assert self._granted.acquire(timeout=STEP_S), "the fleet has stopped"
        return self._fault

    def _wait(self) -> None:
        assert self._stopped.acquire(timeout=STEP_S), f"{self.kind} hangs"

    def _work(self) -> None:
        _current.call = self
        try:
            self._run()
        except StoreUnavailable:
            pass
        except BaseException as error:
            # Raised again by the fleet.
            self.error = error
        self.is_over = True
        self._stopped.release()


_current = threading.local()


class Fleet:
    """Engines, a server in trouble, and the book of what was stored and reset when. Times are numbers of steps."""

    def __init__(self, picks: Picks, prefix: str) -> None:
        self.picks = picks
        self.events: Counter[str] = Counter()
        self.now = 0
        self.keys = [key_of(number) for number in range(NUM_KEYS)]
        self.stores: dict[str, tuple[int, Key, RequestIdentity]] = {}
        """Begin, key and origin of each store of a block, by the origin's request id.

        A store begins when it reads the epoch in the server, not when it is called.
        """
        self.resets: list[Reset] = []
        self.late: list[tuple[Any, list[Any]]] = []
        """Pipelines that the network still has."""
        self._lost: set[Reset] = set()
        """Resets that had answered when the server went back."""
        self.is_dead = False
        self.fault_rate = picks.choice((0.0, 0.05, 0.2))
        self.prefix = prefix
        self.engines = [Engine(number, self._open()) for number in range(NUM_ENGINES)]
        self.client = shared_server().client
        self._snapshot: tuple[dict[bytes, bytes], bytes] | None = None

    def _open(self) -> RedisStore:
        settings = RedisTier.Settings(type="redis", name="redis", url=shared_server().url, prefix=self.prefix)
        store = RedisStore(settings, TierContext("redis", {"model": "m"}, BLOCK_BYTES))
        store.probe()
        return store

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Begin a call, let one go on, or have something happen to the server."""
        self.now += 1
        picks = self.picks
        if picks.chance(0.02):
            self._trouble_server()
        if self.late and picks.chance(0.2):
            self._carry_out(self.late.pop(picks.integer(0, len(self.late) - 1)))
        engine = picks.choice(self.engines)
        if len(engine.calls) < MAX_CALLS and picks.chance(0.4):
            self._begin(engine)
        elif engine.calls:
            self._go_on(picks.choice(engine.calls))

    def settle(self) -> None:
        """End all calls without faults; then each engine must load what the other stores."""
        self.fault_rate, self.is_dead = 0.0, False
        for engine in self.engines:
            while engine.calls:
                self._go_on(engine.calls[0])
        for pipeline in self.late:
            self._carry_out(pipeline)
        for first in self.engines:
            for _ in range(4):
                for engine in self.engines:
                    engine.store.maintain(lambda: False)
            self._put(first, self.keys)
            for engine in self.engines:
                engine.store.find_many(self.keys)
                into = [memoryview(bytearray(BLOCK_BYTES)) for _ in self.keys]
                outcomes = [result.outcome for result in engine.store.get_many(self.keys, into)]
                assert outcomes == [Outcome.LOADED] * NUM_KEYS, f"engine {engine.number}: {outcomes}"

    def close(self) -> None:
        for engine in self.engines:
            engine.store.close()
        names = list(self.client.scan_iter(self.prefix + ":*", count=10_000))
        if names:
            self.client.unlink(*names)

    def _begin(self, engine: Engine) -> None:
        kinds = {call.kind for call in engine.calls}
        if "reset" in kinds:
            return
        kind = self.picks.choice(("put", "put", "put", "get", "get", "get", "find", "drop", "maintain", "reset"))
        keys = [key for key in self.keys if self.picks.chance(0.5)] or self.keys[:1]
        if kind == "drop":
            self._start(engine, kind, lambda: engine.store.drop(keys))
        elif kind == "reset" and not kinds:
            self._start(engine, kind, lambda: self._reset(engine))
        elif kind == "maintain" and kind not in kinds:
            self._start(engine, kind, lambda: engine.store.maintain(lambda: False))
        elif kind == "find":
            self._start(engine, kind, lambda: self._see(engine, lambda: engine.store.find_many(keys)))
        elif kind == "get":
            self._start(engine, kind, lambda: self._get(engine, keys))
        elif kind == "put":
            self._start(engine, kind, lambda: self._put(engine, keys))

    def _start(self, engine: Engine, kind: str, run: Callable[[], None]) -> None:
        self.events[kind] += 1
        call = Call(engine, kind, run)
        engine.calls.append(call)
        self._end(call)

    def _go_on(self, call: Call) -> None:
        fault = self.picks.choice(FAULTS) if self.picks.chance(self.fault_rate) else None
        call.step("request lost" if self.is_dead else fault)
        if fault is not None:
            self.events[fault] += 1
        self._end(call)

    def _end(self, call: Call) -> None:
        if call.is_over:
            call.engine.calls.remove(call)
            if call.error is not None:
                raise call.error

    # --- calls; on their own threads, one of which runs at a time ----------------------------------------------------

    def _put(self, engine: Engine, keys: list[Key]) -> None:
        origins = []
        for key in keys:
            origin = RequestIdentity(f"put-{len(self.stores)}", TENANTS[len(self.stores) % 2], None)
            self.stores[origin.request_id] = (self.now, key, origin)
            origins.append(origin)
        call: Call | None = getattr(_current, "call", None)
        if call is not None:
            call.unread = [origin.request_id for origin in origins]
        data = [memoryview(content_of(key)) for key in keys]
        outcomes = self._see(engine, lambda: self._put_missing(engine.store, keys, data, origins))
        self.events.update(f"put: {outcome}" for outcome in outcomes)

    def _put_missing(
        self, store: RedisStore, keys: list[Key], data: list[memoryview], origins: list[RequestIdentity]
    ) -> list[Outcome]:
        """Store blocks as a tier does: those that the store does not have."""
        outcomes = [Outcome.PRESENT if one else Outcome.MISSING for one in store.find_many(keys)]
        todo = [i for i, one in enumerate(outcomes) if one is Outcome.MISSING]
        put = store.put_many([keys[i] for i in todo], [data[i] for i in todo], [origins[i] for i in todo])
        for i, outcome in zip(todo, put, strict=True):
            outcomes[i] = outcome
        return outcomes

    def _get(self, engine: Engine, keys: list[Key]) -> None:
        began, known = self.now, set(engine.seen)
        into = [memoryview(bytearray(BLOCK_BYTES)) for _ in keys]
        results = self._see(engine, lambda: engine.store.get_many(keys, into))
        for key, (outcome, origin, data) in zip(keys, results, strict=True):
            self.events[f"get: {outcome}"] += 1
            assert outcome is not Outcome.CORRUPT, "a block is corrupt"
            if outcome is Outcome.LOADED:
                assert origin is not None
                assert data == content_of(key), "a loaded block has other bytes"
                self.check_load(key, origin, began, known)

    def check_load(self, key: Key, origin: RequestIdentity, began: int, known: set[Reset]) -> None:
        """Check that no reset concerns a loaded block that began after its store and had answered before the load.

        `known` are those of the resets that the engine had not to learn from a server that has lost them.
        """
        stored, stored_key, stored_origin = self.stores[origin.request_id]
        assert (stored_key, stored_origin) == (key, origin)
        for reset in self.resets:
            if reset.ended is None or reset.ended >= began or reset.began <= stored:
                continue
            what = f"loaded at {began} what was stored at {stored}, and reset from {reset.began} to {reset.ended}"
            assert reset in self._lost, what
            assert reset not in known, f"{what}, which the engine had seen"

    def _reset(self, engine: Engine) -> None:
        reset = Reset(self.now)
        self.resets.append(reset)
        while True:
            # A tier repeats a reset until it succeeds.
            try:
                self._see(engine, lambda: engine.store.reset(lambda: False))
                break
            except StoreUnavailable:
                self.events["reset repeated"] += 1
        reset.ended = self.now
        engine.seen.add(reset)

    def _see(self, engine: Engine, call: Callable[[], Any]) -> Any:
        """Make a call; afterwards the engine has seen the resets that had answered before."""
        before = [reset for reset in self.resets if reset.ended is not None]
        result = call()
        engine.seen.update(reset for reset in before if reset not in self._lost)
        return result

    # --- the server -------------------------------------------------------------------------------------------------

    def run_pipeline(self, client: Any, commands: list[Any]) -> Any:
        """Carry out a round trip of a call when it is granted."""
        call: Call | None = getattr(_current, "call", None)
        # While the epoch is read again, other calls of the engine wait for this one; during a reset there is none.
        if call is None or (call.kind != "reset" and call.engine.store._epoch.changing.locked()):
            return _run_pipeline(client, commands)
        fault = call.pause()
        if fault == "request lost" or fault == "late":
            if fault == "late":
                self.late.append((client, commands))
            raise StoreUnavailable("lost")
        results = _run_pipeline(client, commands)
        for name in call.unread:
            self.stores[name] = (self.now, *self.stores[name][1:])
        call.unread = []
        if fault == "twice":
            self.late.append((client, commands))
        if fault == "reply lost":
            raise StoreUnavailable("lost")
        return results

    def _carry_out(self, pipeline: tuple[Any, list[Any]]) -> None:
        self.events["carried out late"] += 1
        _run_pipeline(*pipeline)

    def _trouble_server(self) -> None:
        epoch = self.engines[0].store._epoch_key
        match self.picks.integer(0, 4):
            case 0:
                self.is_dead = True
            case 1 | 2:
                self.is_dead = False
            case 3:
                names = list(self.client.scan_iter(self.prefix + ":*:b:*", count=10_000))
                values = {name: value for name in names if (value := self.client.get(name)) is not None}
                self._snapshot = values, self.client.get(epoch) or b""
            case _ if self._snapshot is not None:
                values, name = self._snapshot
                names = list(self.client.scan_iter(self.prefix + ":*", count=10_000))
                if names:
                    self.client.delete(*names)
                if values and name:
                    self.client.mset({**values, epoch: name})
                self._lost = {reset for reset in self.resets if reset.ended is not None} | self._lost
                self.events["the server went back"] += 1
            case _:
                pass


_run_pipeline = redis_store.run_pipeline


def content_of(key: Key) -> bytes:
    return (key * (BLOCK_BYTES // len(key) + 1))[:BLOCK_BYTES]


@contextmanager
def fleet(seed: int) -> Iterator[Fleet]:
    """A fleet of its own on the shared server."""
    made = Fleet(Picks(seed), f"fleet-{uuid.uuid4().hex}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(redis_store, "run_pipeline", made.run_pipeline)
        try:
            yield made
        finally:
            made.close()


def simulate_fleet(seed: int, num_steps: int) -> Counter[str]:
    """Run a seed's fleet; return what happened. An `AssertionError` names the seed and the step."""
    with fleet(seed) as made:
        try:
            for _ in range(num_steps):
                made.step()
            made.settle()
        except Exception as error:
            raise AssertionError(f"simulate_fleet({seed}, {num_steps}) failed at step {made.now}: {error}") from error
        return made.events
