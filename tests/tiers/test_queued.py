"""Tiers of other packages: called on a thread of their own, so that calls that block or raise cost hits only."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import pytest

from kvferry.app.settings import tiers as tier_settings
from kvferry.app.settings.tiers import GROUP, TierSettings, read_tiers
from kvferry.app.tiers import queued
from kvferry.app.tiers.opening import close_tiers, open_tiers
from kvferry.app.tiers.queued import QueuedTier, TierCallFailed
from kvferry.core.policy import Level
from kvferry.core.tiers.base import HOST, TIER_METHODS, Tier, TierContext, TierRequest
from tests.core.test_tiers import keys as keys_of_prompt
from tests.core.test_tiers import request
from tests.harness.reference_tier import ReferenceTier
from tests.harness.tier_rig import FINGERPRINT, WAIT_S, Rig, queued_rig
from tests.harness.tier_slots import ORIGIN, SlotArray, job_of, keys_of
from tests.harness.toy_engine import SLOT_BYTES, ToyEngine, ToyRequest
from tests.harness.toy_tiers import ToyTier
from tests.harness.waiting import wait_until

CALLS = [name for name in TIER_METHODS if name != "close"]


class Gate:
    """Records calls, and holds up those whose method is `shut`."""

    def __init__(self) -> None:
        self.shut: set[str] = set()
        self.raises: dict[str, BaseException] = {}
        self.calls: list[str] = []
        self.entered = threading.Event()
        self.open = threading.Event()
        self.on_engine_thread: list[str] = []
        self.with_lock: list[str] = []
        self.lock: Any = None
        self._engine_thread = threading.get_ident()

    def enter(self, method: str) -> None:
        self.calls.append(method)
        if self.lock is not None and self.lock._is_owned():
            self.with_lock.append(method)
        if self.lock is not None and threading.get_ident() == self._engine_thread:
            # Holding up this thread would hold up the test.
            self.on_engine_thread.append(method)
            self.entered.set()
            self.open.set()
        elif method in self.shut:
            self.entered.set()
            assert self.open.wait(WAIT_S), "the gate stayed shut"
        if method in self.raises:
            raise self.raises[method]


def gated(base: type) -> type:
    """A class of tiers that pass a gate, `gate`, in every call."""

    def through(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            self.gate.enter(name)
            return getattr(base, name)(self, *args)

        return call

    return type(f"Gated{base.__name__}", (base,), {name: through(name) for name in TIER_METHODS})


class GatedToyTier(gated(ToyTier)):  # type: ignore[misc]
    """What another package would install; it works for the engine that is being made."""

    Settings = TierSettings
    nonblocking: ClassVar[bool] = False
    hangs_after_s: ClassVar[float] = WAIT_S
    engine: ClassVar[ToyEngine]
    gate: ClassVar[Gate]
    last: ClassVar[GatedToyTier]

    def __init__(self, settings: TierSettings, context: TierContext) -> None:
        super().__init__(self.engine)
        self.timeout_s = self.hangs_after_s
        GatedToyTier.last = self


class Served:
    """An engine with a tier of a type that is installed."""

    def __init__(self) -> None:
        self.gate = GatedToyTier.gate = Gate()
        self.engine = ToyEngine(64, 64, tiers=["far"], open_tier=self._open)
        self.engine.step_s = 1e-6
        self.gate.lock = self.engine.manager.lock
        self.tier = GatedToyTier.last

    def _open(self, engine: ToyEngine) -> Tier:
        GatedToyTier.engine = engine
        entries = read_tiers([{"type": "far", "max_bytes": 1 << 20}])
        self.tiers = open_tiers(entries, FINGERPRINT, SLOT_BYTES, SlotArray(1), lambda: None, engine="e")
        return self.tiers["far"]

    def serve(self, *requests: ToyRequest) -> None:
        """Answer requests; while the tier is held up, no longer than they wait for it."""
        for each in requests:
            self.engine.add(each)
        wait_until(self._is_served, "served", WAIT_S)

    def settle(self) -> None:
        wait_until(self._is_settled, "the tier is idle", WAIT_S)

    def reset(self, *places: str) -> None:
        self.engine.offload.resets.reset(self.engine.now_s, places=places or None)

    def forget(self) -> None:
        self.engine.device.forget_all()
        self.reset(HOST)

    def drop(self, family: int = 1) -> None:
        self.engine.offload.resets.drop_block(keys_of_prompt(3, family=family)[0], self.engine.now_s)

    def use_all(self) -> None:
        """Have every method of the tier called, as long as it is not held up."""
        self.serve(request("a", 3))
        wait_until(lambda: self.gate.entered.is_set() or self._is_settled(), "the tier is idle or held up", WAIT_S)
        self.forget()
        self.serve(request("b", 3))
        self.drop()
        self.reset()
        self.engine.offload.tiers.fetch_counts()
        self.health()

    def health(self) -> list[str]:
        return self.engine.offload.tiers.health()

    def poll(self) -> bool:
        self.engine.deliver([])
        return True

    def use(self) -> Any:
        return self.engine.offload.snapshot().tiers["far"].use

    def close(self) -> None:
        self.engine.offload.tiers.close(self.engine.now_s)
        close_tiers(self.tiers)

    def _is_served(self) -> bool:
        self.engine.deliver([])
        if self.engine.requests:
            self.engine.step(copy=True)
        has_raised = not self.gate.raises.keys().isdisjoint(self.gate.calls)
        if has_raised or (self.gate.entered.is_set() and not self.gate.open.is_set()):
            self.engine.now_s += 1.0
        return not self.engine.requests

    def _is_settled(self) -> bool:
        self.engine.deliver([])
        self.engine.step(copy=True)
        (link,) = self.engine.offload.tiers.clients
        return not (link.open_jobs or link.open_resets)


@pytest.fixture
def served_nonblocking(monkeypatch: pytest.MonkeyPatch, served_by: Callable[[], Served]) -> Served:
    monkeypatch.setattr(GatedToyTier, "nonblocking", True)
    monkeypatch.setattr(GatedToyTier, "hangs_after_s", 0.05)
    return served_by()


@pytest.fixture
def served(served_by: Callable[[], Served]) -> Served:
    return served_by()


@pytest.fixture
def served_by(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Served]]:
    """Makes an engine with the type of tier installed, which is closed when the test ends."""
    made: list[Served] = []

    def make() -> Served:
        made.append(Served())
        return made[-1]

    point = EntryPoint("far", "tests.tiers.test_queued:GatedToyTier", GROUP)
    monkeypatch.setattr(tier_settings, "entry_points", lambda group: [point])
    yield make
    for one in made:
        one.gate.open.set()
        one.close()


# --- the engine and its tier ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", CALLS)
def test_engine_serves_others_while_a_tier_call_blocks(served: Served, method: str) -> None:
    served.gate.shut = {method}
    if method == "cancel":
        served.gate.raises = {"store": RuntimeError("not now")}
    served.use_all()
    assert served.gate.entered.wait(WAIT_S)
    served.serve(*(request(f"r{number}", 3, family=number) for number in range(4, 8)))
    served.drop(family=4)
    served.reset()
    served.engine.offload.tiers.fetch_counts()
    served.health()
    assert served.gate.on_engine_thread == []


@pytest.mark.parametrize("method", ["on_new_request", "look_up", "store", "poll", "counts", "health"])
def test_tier_that_hangs_though_nonblocking_shows_and_stops_none(served_nonblocking: Served, method: str) -> None:
    served = served_nonblocking
    served.gate.shut = {method}
    served.use_all()
    assert served.gate.entered.wait(WAIT_S)
    hangs = f"its call {method} has not returned"
    wait_until(lambda: any(hangs in reason for reason in served.health()), "shown", WAIT_S)
    served.serve(*(request(f"r{number}", 3, family=number) for number in range(4, 8)))
    assert served.engine.offload.snapshot().tiers["far"].counts.failed == 0
    assert (served.gate.on_engine_thread, served.gate.with_lock) == ([], [])


def test_slots_of_a_job_stay_held_while_its_tier_hangs(served_nonblocking: Served) -> None:
    served = served_nonblocking
    served.gate.shut = {"store"}
    served.serve(request("a", 3))
    wait_until(lambda: served.poll() and served.gate.entered.is_set(), "the tier hangs", WAIT_S)
    served.engine.now_s += 1.0
    served.poll()
    (client,) = served.engine.offload.tiers.clients
    assert client.has_stuck_jobs()
    assert any("slots are blocked" in reason for reason in served.health())
    served.reset()
    assert served.engine.manager.counts().storing > 0
    served.gate.open.set()
    served.settle()
    assert served.engine.manager.counts().storing == 0


def test_level_is_that_of_each_request_if_nonblocking_is_declared(
    served_nonblocking: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queued, "ANSWER_S", WAIT_S)
    served, tier = served_nonblocking, served_nonblocking.tiers["far"]
    for number, level in enumerate([Level.REQUEST, Level.BLOCK, Level.REQUEST] * 3):
        served.tier.level = level
        assert tier.on_new_request(TierRequest(f"r{number}", 1)) is level


def test_no_tier_call_is_made_with_the_manager_lock_held(served: Served) -> None:
    served.use_all()
    served.settle()
    served.close()
    assert set(served.gate.calls) == {*TIER_METHODS} - {"cancel"}
    assert (served.gate.with_lock, served.gate.on_engine_thread) == ([], [])


def test_blocks_come_back_from_a_queued_tier(served: Served) -> None:
    served.serve(request("a", 3))
    served.settle()
    served.forget()
    served.serve(request("b", 3))
    view = served.engine.offload.requests.find("b", served.engine.now_s)
    assert view is not None
    assert view.prompt_tokens.tier_hit["far"] > 0
    assert not served.tier.wrongs


@pytest.mark.parametrize("method", [name for name in CALLS if name != "cancel"])
def test_a_queued_call_that_raises_is_counted_logged_and_shown(
    served: Served, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    served.gate.raises = {method: RuntimeError("disk on fire")}
    for name in ("a", "b"):
        served.serve(request(name, 3))
        if method != "poll":
            served.settle()
        served.forget()
    served.drop()
    served.reset("far")
    failed = f"{method} failed: RuntimeError: disk on fire"
    wait_until(lambda: any(failed in reason for reason in served.health()), "shown", WAIT_S)
    wait_until(lambda: served.poll() and served.use().errors > 0, "counted", WAIT_S)
    assert failed in caplog.text
    served.gate.raises = {}
    served.serve(request("c", 3, family=2))
    assert not served.tier.wrongs


# --- the queue --------------------------------------------------------------------------------------------------------

GatedReferenceTier = gated(ReferenceTier)


class Bench:
    """A queued tier over one that passes a gate. The gate holds up what is `shut`."""

    def __init__(self, hold: str = "", **options: Any) -> None:
        self.gate = Gate()
        self.gate.shut = {hold}
        self.timeout_s = options.pop("timeout_s", WAIT_S)
        self.rig: Rig = queued_rig(self._open, **options)

    def _open(self, context: TierContext) -> Tier:
        tier = GatedReferenceTier(context.slots, lambda: 0.0, timeout_s=self.timeout_s)
        tier.gate = self.gate
        self.inner = tier
        return tier

    @property
    def tier(self) -> QueuedTier:
        assert isinstance(self.rig.tier, QueuedTier)
        return self.rig.tier

    def hold(self, method: str) -> None:
        """Have the next call of a method held up."""
        self.gate.open.clear()
        self.gate.entered.clear()
        self.gate.shut = {method}

    def entered(self) -> None:
        assert self.gate.entered.wait(WAIT_S)

    def jobs(self) -> list[str]:
        """The calls that have been made, without those that only look."""
        looking = ("poll", "counts", "health", "on_new_request")
        return [name for name in self.gate.calls if name not in looking]


@pytest.fixture
def open_bench() -> Iterator[Callable[..., Bench]]:
    """Opens benches, whose gates are opened and tiers closed when the test ends."""
    made: list[Bench] = []

    def open_one(**options: Any) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield open_one
    for bench in made:
        bench.gate.open.set()
        if not bench.tier._is_closed:
            bench.tier.close(WAIT_S)


@pytest.fixture
def bench(open_bench: Callable[..., Bench]) -> Bench:
    return open_bench()


def test_calls_are_passed_on_in_the_order_they_were_made(bench: Bench) -> None:
    bench.hold("look_up")
    bench.tier.look_up(100, keys_of([5]))
    bench.entered()
    stored = bench.rig.submit_store(keys_of([1]))
    bench.tier.look_up(101, keys_of([1]))
    bench.rig.drop(keys_of([1]))
    bench.tier.look_up(102, keys_of([1]))
    bench.tier.on_request_finished("r1")
    bench.gate.open.set()
    assert [bench.rig.wait(number).ok.tolist() for number in (stored, 101, 102)] == [[True], [True], [False]]
    wait_until(lambda: "on_request_finished" in bench.gate.calls, "passed on", WAIT_S)
    assert bench.jobs() == ["look_up", "store", "look_up", "drop", "look_up", "on_request_finished"]


def test_cancel_of_a_waiting_job_keeps_it_from_the_tier(bench: Bench) -> None:
    bench.hold("look_up")
    bench.tier.look_up(100, keys_of([5]))
    bench.entered()
    bench.tier.cancel(bench.rig.submit_store(keys_of([1])))
    bench.rig.slots.wipe()
    bench.gate.open.set()
    assert bench.rig.find(keys_of([1])) == [False]
    assert bench.jobs() == ["look_up", "look_up"]


@pytest.mark.parametrize("held", ["load", "cancel"])
def test_cancel_of_a_job_in_progress_keeps_its_slots_until_it_ends(bench: Bench, held: str) -> None:
    bench.rig.store(keys_of([1]))
    bench.inner.latency_s = 1.0
    bench.hold(held)
    number = bench.rig.submit_load(keys_of([1]))
    wait_until(lambda: "load" in bench.gate.calls, "begun", WAIT_S)
    with pytest.raises(TierCallFailed, match=f"job {number} is in progress"):
        bench.tier.cancel(number)
    bench.entered()
    assert not bench.rig.has(number), "the job ends before the tier has let go of its slots"
    assert bench.inner.touched_slots <= {0}
    bench.gate.open.set()
    assert bench.rig.wait(number).ok.tolist() == [False]
    assert not bench.inner.touched_slots
    assert bench.jobs() == ["store", "load", "cancel"]


def test_calls_beyond_the_bound_are_refused_and_counted(open_bench: Callable[..., Bench]) -> None:
    bench = open_bench(max_waiting_calls=2)
    wait_until(lambda: "on_new_request" in bench.gate.calls, "idle", WAIT_S)
    bench.hold("look_up")
    bench.tier.look_up(100, keys_of([5]))
    bench.entered()
    waiting = [bench.rig.submit_store(keys_of([number]), first_slot=number) for number in range(2)]
    refused = bench.rig.submit_store(keys_of([2, 3]), first_slot=2)
    late = bench.rig.submit_load(keys_of([4]), first_slot=4)
    assert not any(bench.rig.wait(refused).ok)
    assert not any(bench.rig.wait(late).ok)
    for call in (
        lambda: bench.tier.on_new_request(TierRequest("r2", 1)),
        lambda: bench.rig.drop(keys_of([1])),
        lambda: bench.tier.reset(200, None),
    ):
        with pytest.raises(TierCallFailed, match="calls wait for the tier"):
            call()
        bench.tier.on_request_finished("r1")
    bench.gate.open.set()
    wait_until(lambda: bench.jobs().count("on_request_finished") == 3, "passed on", WAIT_S)
    assert (bench.tier.counts().dropped, bench.tier.counts().failed) == (2, 1)
    assert not any(number in bench.rig.results and all(bench.rig.results[number].ok) for number in waiting)


def test_a_reset_that_raises_is_repeated_and_nothing_passes_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.rig.store(keys_of([1]))
    monkeypatch.setattr(queued, "RETRY_RESET_S", 0.0)
    bench.gate.raises = {"reset": ConnectionError("no route")}
    bench.tier.reset(100, None)
    bench.tier.look_up(101, keys_of([1]))
    wait_until(lambda: bench.gate.calls.count("reset") > 2, "repeated", WAIT_S)
    with pytest.raises(TierCallFailed, match="reset failed: ConnectionError: no route"):
        bench.tier.poll()
    assert "look_up" not in bench.jobs()
    bench.gate.raises = {}
    assert not any(bench.rig.wait(101).ok)
    assert bench.rig.results[100].dropped_blocks == 1


@pytest.mark.parametrize("change", [{"seconds": None}, {"ok": [True]}, {"number": None}])
def test_result_of_wrong_type_is_refused_and_the_tier_still_called(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    with monkeypatch.context() as patch:
        poll = bench.inner.poll
        patch.setattr(bench.inner, "poll", lambda: [replace(result, **change) for result in poll()])
        bench.tier.look_up(100, keys_of([1]))
        wait_until(lambda: "poll failed: TypeError: " in " ".join(bench.tier.health()), "shown", WAIT_S)
    with pytest.raises(TierCallFailed, match="poll failed: TypeError"):
        bench.tier.poll()
    # Each poll raises until the tier's thread has polled it without a failure.
    wait_until(lambda: bench.tier.health() == [], "polled", WAIT_S)
    assert bench.rig.serves(keys_of([1]))
    assert not bench.rig.has(100)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_when_dead_is_reported_and_restarted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(bench.tier, "_notify", lambda: sys.exit(1))
        bench.tier.look_up(100, keys_of([1]))
        reason = "the thread kvferry-tier-bench does not run: the tier is not called"
        wait_until(lambda: reason in bench.tier.health(), "shown", WAIT_S)
    with pytest.raises(TierCallFailed, match="its thread died"):
        bench.tier.poll()
    assert bench.rig.serves(keys_of([1]))
    assert [text.partition(" died ")[0] for text in bench.tier.health()] == ["the thread kvferry-tier-bench"]


def test_a_request_whose_announcement_raised_gets_no_jobs(bench: Bench) -> None:
    bench.gate.raises = {"on_new_request": SystemExit("no more")}
    bench.tier.on_new_request(TierRequest("r2", 1))
    wait_until(lambda: "on_new_request failed: SystemExit: no more" in bench.tier.health(), "shown", WAIT_S)
    with pytest.raises(TierCallFailed, match="on_new_request failed"):
        bench.tier.poll()
    bench.tier.store(job_of(100, keys_of([1]), origins=[ORIGIN], request="r2"))
    assert not any(bench.rig.wait(100).ok)
    bench.tier.on_request_finished("r2")
    assert bench.rig.find(keys_of([1])) == [False]
    assert bench.jobs() == ["look_up"]


def test_a_call_that_hangs_shows_and_the_tier_gets_no_jobs(open_bench: Callable[..., Bench]) -> None:
    bench = open_bench(timeout_s=0.01)
    bench.hold("look_up")
    bench.tier.look_up(100, keys_of([5]))
    bench.entered()
    wait_until(lambda: "call look_up has not returned" in " ".join(bench.tier.health()), "shown", WAIT_S)
    assert bench.rig.find(keys_of([1])) == [False]
    bench.gate.open.set()
    assert bench.rig.wait(100).ok.tolist() == [False]
    wait_until(lambda: not bench.tier.health(), "healthy", WAIT_S)
    assert bench.jobs() == ["look_up"]


def test_close_leaves_a_call_that_hangs_behind_without_slots(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.hold("store")
    bench.rig.submit_store(keys_of([1]))
    bench.entered()
    bench.tier.on_request_finished("r1")
    bench.tier.close(0.0)
    assert "thread did not end at shutdown, in or before call: store" in caplog.text
    with pytest.raises(RuntimeError, match="the tier is closed"):
        bench.inner._slots.views(0, 1)
    bench.gate.open.set()
    wait_until(lambda: bench.inner.closed, "closed late", WAIT_S)
    assert bench.jobs() == ["store", "close"]


def test_close_makes_queued_calls_except_jobs_and_raises_tier_errors(bench: Bench) -> None:
    bench.hold("look_up")
    bench.tier.look_up(100, keys_of([5]))
    bench.entered()
    bench.rig.submit_store(keys_of([1]))
    bench.tier.on_request_finished("r1")
    bench.gate.raises = {"close": ConnectionError("gone")}
    with ThreadPoolExecutor(1) as threads:
        closing = threads.submit(bench.tier.close, WAIT_S)
        wait_until(lambda: bench.tier._is_closed, "closing", WAIT_S)
        bench.gate.open.set()
        with pytest.raises(TierCallFailed, match="close failed: ConnectionError: gone"):
            closing.result(WAIT_S)
    assert bench.jobs() == ["look_up", "on_request_finished", "close"]


def test_level_is_that_of_the_settings_until_the_tier_returned_one(open_bench: Callable[..., Bench]) -> None:
    bench = open_bench(hold="on_new_request", level=Level.REQUEST)
    assert bench.tier.on_new_request(TierRequest("r2", 1)) is Level.REQUEST
    bench.gate.open.set()
    wait_until(lambda: bench.tier.on_new_request(TierRequest("r3", 1)) is Level.BLOCK, "returned", WAIT_S)
