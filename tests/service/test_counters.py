"""Every counter of `/metrics` is raised by a scenario, or listed with the reason why none can raise it."""

from __future__ import annotations

import importlib
import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvferry.app.api.metrics import PREFIX, declared
from kvferry.app.tiers.block_store import StoreUnavailable
from kvferry.app.tiers.breaker import OPEN_AFTER
from kvferry.core.cost_model import MIN_SAMPLES
from kvferry.core.counters import metric_of
from kvferry.core.keys import RequestIdentity
from kvferry.core.policy import Override, PolicyResolver, TierWait
from kvferry.core.transfers import Direction
from tests.core.test_prefetch import prefetch
from tests.core.test_tiers import engine_with, engine_with_stored, forget, request, serve_on, settle
from tests.harness.collector import collecting
from tests.harness.commands import ROOT
from tests.harness.dictionary_tier import DictionaryStore
from tests.harness.faults import Faults
from tests.harness.loop_engine import BLOCK_TOKENS, LoopRequest
from tests.harness.loop_service import Service, start_service
from tests.harness.stores import eviction
from tests.harness.tier_rig import threaded_rig
from tests.harness.tier_slots import keys_of
from tests.harness.toy_engine import ToyEngine
from tests.harness.toy_tiers import TIMEOUT_S
from tests.harness.waiting import DEADLINE_S, wait_until
from tests.service import test_faults
from tests.service.test_faults import serving
from tests.service.test_traces import set_variables

NOT_RAISED = {
    "kvferry_kv_events_published": "the events go to vLLM's publisher; tests/vllm/test_kv_events.py raises it",
}
"""Counters that no scenario raises, and why."""


class Series(NamedTuple):
    """The series of one field: its family without `_total`, and the beginning of the value of its own label."""

    family: str
    value: str = ""

    def __str__(self) -> str:
        return f"{self.family} {self.value}".rstrip()


def declared_series() -> Iterator[Series]:
    """Yield the series of all fields that are declared as counters."""
    for path in sorted(path for folder in ("app", "core") for path in (ROOT / folder).rglob("*.py")):
        if "from kvferry.core.counters import" not in path.read_text():
            continue
        module = importlib.import_module(".".join(["kvferry", *path.relative_to(ROOT).with_suffix("").parts]))
        for cls in vars(module).values():
            if inspect.isclass(cls) and is_dataclass(cls) and cls.__module__ == module.__name__:
                for one in fields(cls):
                    metric = metric_of(one)
                    if metric is not None and not metric.is_gauge:
                        yield Series(PREFIX + metric.name, metric.label[1] if metric.label else "")


class Raised:
    """Series that were above 0 when they were read, and all families that are not gauges."""

    def __init__(self, series: set[Series]) -> None:
        self.known = series
        self.raised: set[Series] = set()

    def read(self, families: Iterator[Metric]) -> None:
        for family in families:
            if family.type not in ("counter", "histogram") or "_process_" in family.name:
                continue
            own = {one for one in self.known if one.family == family.name}
            if not own:
                own = {Series(family.name)}
                self.known |= own
            for sample in family.samples:
                values = [value for label, value in sample.labels.items() if label not in ("tier", "le")] or [""]
                found = max((one for one in own if values[0].startswith(one.value)), key=lambda one: len(one.value))
                if sample.value > 0 and not sample.name.endswith("_created"):
                    self.raised.add(found)

    def scrape(self, client: httpx.Client) -> None:
        self.read(text_string_to_metric_families(client.get("/metrics").text))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_each_counter_is_raised_or_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Raised(set(declared_series()))
    for number, scenario in enumerate((of_requests, of_tiers, of_stores, of_service)):
        folder = tmp_path / str(number)
        folder.mkdir()
        with monkeypatch.context() as patch:
            scenario(found, folder, patch)
    missing = {one for one in found.known - found.raised if one.family not in NOT_RAISED}
    assert not missing, "\n".join(["raise them in a scenario, or list them:", *sorted(map(str, missing))])
    families = {one.family for one in found.known}
    assert NOT_RAISED.keys() <= families - {one.family for one in found.raised}


def ask(service: Service, name: str, num_blocks: int = 10, **more: Any) -> LoopRequest:
    request = service.engine.answer(LoopRequest(name, num_blocks * BLOCK_TOKENS + 1, **more))
    service.settle()
    return request


def of_requests(found: Raised, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A pool that is too small, failing copies, sessions with leases, and a preemption."""
    with start_service(folder, num_slots=24) as service:
        engine, client = service.engine, service.shared_client
        service.context.prompts.start()
        first = ask(service, "first", session="s")
        client.put("/admin/v1/sessions/s", json={"retain_s": 60}).raise_for_status()
        ask(service, "again", session="s")
        ask(service, "long", session="x" * 257)
        ask(service, "hints", kv_hint_types=["retain"])
        ask(service, "parted", head=[*first.tokens[: 2 * BLOCK_TOKENS + 3], 0])
        wait_until(lambda: "prompt_tokens_parted_total 0" not in client.get("/metrics").text, "the prompts are read")
        ask(service, "other", num_blocks=22, seed=5)
        ask(service, "regretted")
        for direction in (Direction.LOAD, Direction.STORE):
            engine.failing = direction
            ask(service, f"failing-{direction.value}", seed=0 if direction is Direction.LOAD else 9)
        engine.failing = None
        ask(service, "not-stored-before", seed=9)
        ask(service, "stored")
        hold = threading.Event()
        preempted = engine.enqueue(LoopRequest("preempted", 2 * BLOCK_TOKENS, seed=12, hold=hold))
        wait_until(lambda: preempted.state == "running", "it has its blocks")
        engine.preempt(preempted)
        hold.set()
        engine.wake()
        assert preempted.done.wait(DEADLINE_S)
        for _ in range(MIN_SAMPLES):
            engine.offload.cost_model.bytes_rate.observe(1, 1.0)
            engine.offload.cost_model.tokens_rate.observe(1_000_000, 1.0)
        ask(service, "declined")
        batch = eviction(range(3))
        batch.rows.origins[1] = RequestIdentity(7)  # type: ignore[arg-type, index]
        service.store.journal.append(batch)
        service.settle_history()
        found.scrape(client)


def of_tiers(found: Raised, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Tiers that are slow, lossy or dead, and waits for them, by the clock of an engine without a service."""

    def read(engine: ToyEngine) -> None:
        now = engine.offload.snapshot()
        tiers = [(part, {"tier": name}) for name, tier in now.tiers.items() for part in (tier.counts, tier.use)]
        found.read(declared([*tiers, (now.prompt_tokens, {}), (now.tier_waits, {})]))

    engine = engine_with_stored()
    serve_on(engine, request("promoted", 5))
    assert prefetch(engine, 6) == 0
    forget(engine)
    assert prefetch(engine, 5) == 5
    settle(engine)
    forget(engine)
    engine.set_override(Override("late", {"tier_wait": TierWait.parse("best_effort")}, 1e9))
    serve_on(engine, request("late", 5))
    engine.set_runtime({"offload_prompt_only": True, "max_offload_tokens": 0})
    for name in ("missing", "known-missing"):
        serve_on(engine, request(name, 3, family=2))
        engine.device.forget_all()
    read(engine)

    engine = engine_with_stored()
    for _ in range(MIN_SAMPLES):
        engine.offload.cost_model.tokens_rate.observe(1000, 50.0)
    engine.tiers["disk"].loses = lambda key: True
    serve_on(engine, request("lost", 5))
    forget(engine)
    engine.tiers["disk"].dead = True
    serve_on(engine, request("given-up", 5))
    engine.now_s += TIMEOUT_S + 1
    settle(engine)
    engine.tiers["disk"].raises = {"poll"}
    settle(engine)
    read(engine)

    engine = engine_with(num_slots=16)
    engine.tiers["disk"].latency_s = 5.0
    serve_on(engine, request("too-many", 10))
    read(engine)

    engine = engine_with_stored()
    (link,) = engine.offload.tiers.clients
    for _ in range(MIN_SAMPLES):
        link.cost_model.bytes_rate.observe(1, 1.0)
        link.cost_model.tokens_rate.observe(1_000_000, 1.0)
        engine.offload.cost_model.tokens_rate.observe(1_000_000, 1.0)
    serve_on(engine, request("declined", 5))
    read(engine)


def of_stores(found: Raised, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A store below a tier that fails now and then, and at last altogether."""
    store = DictionaryStore(max_bytes=1)
    with closing(threaded_rig(store)) as rig:
        rig.store(keys_of([0, 1, 2]))
        rig.store(keys_of([2]))
        rig.load(keys_of([1, 2]))
        found.read(declared([(rig.counts(), {"tier": "bench"})]))
        for name, (value, origin) in store.blocks.items():
            store.blocks[name] = (bytes([*value[:-1], value[-1] ^ 1]), origin)
        rig.load(keys_of([2]))
        store.errors = [StoreUnavailable("no answer")]
        rig.load(keys_of([2]))
        store.error = StoreUnavailable("no answer")
        for _ in range(OPEN_AFTER):
            rig.find(keys_of([1]))
        rig.load(keys_of([2]))
        rig.store(keys_of([4]))
        found.read(declared([(rig.counts(), {"tier": "bench"})]))


def of_service(found: Raised, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """A whole service with an exception of its own and a dead thread, whose kept pool is damaged before a restart."""
    given = {"pool_kind": "file", "pool_path": folder / "pool", "store_mode": "eager", "traces": "otlp"}
    prompt = [5 + number % 200 for number in range(test_faults.BLOCK * 12)]
    with collecting() as collector:
        set_variables(patch, collector)
        with serving(folder, **given) as service:
            for _ in range(4):
                service.tokens(prompt)
                service.settle()
            collector.status = 401
            service.tokens(prompt)
            service.settle()
            faults = Faults(patch, seed=1, probability=1.0, most=1)
            faults.patch(PolicyResolver, ["resolve"], after=False)
            with faults.on():
                service.tokens(prompt)
            patch.setattr(service.process.service.what_if, "read", lambda requests: sys.exit(1))
            service.tokens(prompt)
            wait_until(lambda: "died" in service.http.get("/readyz").text, "the thread is found dead")
            found.scrape(service.http)
        (pool,) = (folder / "pool").glob("*.pool")
        raw = bytearray(pool.read_bytes())
        for at in range(len(raw) - test_faults.NUM_SLOTS * test_faults.SLOT_BYTES + 100, len(raw), 1 << 12):
            raw[at] ^= 0xFF
        pool.write_bytes(raw)
        with serving(folder, **given) as service:
            service.tokens(prompt)
            service.settle()
            found.scrape(service.http)
