"""Memory of finished requests, however long they were and whatever ids they had."""

from __future__ import annotations

import gc
import sys
from types import FunctionType, ModuleType
from typing import Any

import pytest

from kvferry.core.engine_api import StoreMode
from kvferry.core.keys import MAX_NAME_CHARS, MAX_SESSION_CHARS
from kvferry.core.policy import RequestPolicy
from kvferry.core.pool.inventory import Inventory
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine, ToyRequest
from tests.harness.toy_ledger import NoLedger
from tests.harness.toy_requests import request

LONG = 1100
"""Blocks of a request; more than a step offers, and than a request may remember."""
MAX_BYTES = 5120


def make_engine(mode: StoreMode = StoreMode.EAGER, **options: Any) -> ToyEngine:
    engine = ToyEngine(3 * LONG, 3 * LONG, store_mode=mode, watermark_blocks=3 * LONG, tiers=("disk",), **options)
    engine.ledger = NoLedger(engine)
    engine.step_s = 0.01
    return engine


def answer(engine: ToyEngine, one: ToyRequest) -> None:
    """Run a request to its end, which the device then forgets."""
    engine.add(one)
    engine.run()
    for _ in range(5):
        engine.deliver([])
        engine.step(10**6, copy=True)
    engine.device.forget_all()


def remembered_bytes(engine: ToyEngine) -> float:
    """Bytes for each finished request."""
    recent = list(engine.offload.requests._recent.values())
    return size_of(recent, [engine.policies, RequestPolicy]) / len(recent)


def size_of(roots: list[Any], shared: list[Any]) -> int:
    """Bytes of all that is reachable from the roots and not from what is shared."""
    seen = {id(each) for each in shared}

    def walk(found: list[Any]) -> int:
        total = 0
        while found:
            each = found.pop()
            if id(each) in seen or isinstance(each, (type, ModuleType, FunctionType)):
                continue
            seen.add(id(each))
            total += sys.getsizeof(each)
            found += gc.get_referents(each)
        return total

    walk(list(shared))
    seen.difference_update(map(id, roots))
    return walk(list(roots))


@pytest.mark.parametrize("mode", list(StoreMode))
def test_long_finished_request_when_remembered_takes_few_bytes(mode: StoreMode) -> None:
    engine = make_engine(mode)
    for name, first in (("stored", 0), ("stored again", 0), ("misses", 10**6)):
        answer(engine, request(name, LONG, first=first))
    engine.reset(places=["host"])
    answer(engine, request("tier", LONG))
    views = {name: engine.offload.requests.find(name, engine.now_s) for name in ("stored", "misses", "tier")}
    assert views["tier"].prompt_tokens.tier_hit["disk"] >= LONG * BLOCK_SIZE // 2
    assert views["misses"].missed_tokens.causes["new"]
    assert views["stored"].store.stored == LONG
    assert remembered_bytes(engine) <= MAX_BYTES


def test_long_ids_when_remembered_take_few_bytes_and_are_found() -> None:
    engine = make_engine()
    ids = ["x" * 100_000 + str(i) for i in range(5)]
    for name in ids:
        aliases = tuple(f"{name}-{i}" for i in range(50))
        answer(engine, request(name, 3, aliases=aliases, lora="y" * 100_000 + name))
    assert remembered_bytes(engine) <= MAX_BYTES
    views = [engine.offload.requests.find(name, engine.now_s) for name in ids]
    assert len({view.sequence for view in views}) == len(ids)
    for name, view in zip(ids, views, strict=True):
        for other in (f"{name}-49", view.request_id):
            assert engine.offload.requests.find(other, engine.now_s).sequence == view.sequence


def test_longest_session_when_remembered_takes_few_bytes_and_stays_whole() -> None:
    engine = make_engine()
    session = "\U0001f980" * MAX_SESSION_CHARS
    for i in range(5):
        aliases = tuple(f"{'x' * 1000}-{i}-{j}" for j in range(50))
        answer(engine, request(f"r{i}", 3, session=session, aliases=aliases, lora="y" * 1000))
    assert remembered_bytes(engine) <= MAX_BYTES
    assert engine.offload.requests.find("r4", engine.now_s).session == session


def test_long_id_when_its_blocks_are_in_the_pool_is_cut() -> None:
    engine = make_engine()
    answer(engine, request("x" * 100_000, 3))
    held = Inventory(engine.manager).list_blocks(0, 100)
    assert [origin.request_id for origin in held.origins] == ["x" * MAX_NAME_CHARS] * 3


def test_many_tier_names_of_client_when_remembered_take_few_bytes() -> None:
    engine = make_engine(request_fields=("tiers",))
    for i in range(3):
        answer(engine, request(f"r{i}", 3, kv_transfer_params={"tiers": [f"tier-{i}-{j}" for j in range(10_000)]}))
    assert remembered_bytes(engine) <= MAX_BYTES
