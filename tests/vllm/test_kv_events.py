"""KV events of the host pool, received over ZMQ: a router's index equals the pool's content after every step."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from kvferry.app.engines.vllm.kv_events import MAX_BLOCKS_PER_TAKE, KVEventSink
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.keys import RequestIdentity, group_of, hash_of, make_keys
from kvferry.core.pool.events import ResetEvent, StoreBatch
from kvferry.core.pool.inventory import Inventory
from tests.harness.kv_router import Router
from tests.harness.waiting import DEADLINE_S
from tests.vllm.engines import InProcess, in_process, transfer_config
from tests.vllm.workload import BLOCK, Prompt, random_tokens, shared_prefixes
from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

PROMPTS = shared_prefixes(24, prefixes=6, seed=91)
SMALL_POOL = "3MiB"
"""24 slots: less than the prompts take beyond the device's cache."""
ANY_PORT = "tcp://127.0.0.1:*"
"""A free port, which ZMQ chooses when it binds."""


class Routed(InProcess):
    """An engine whose router is looked at after every step."""

    router: Router

    def step(self) -> Any:
        ended = super().step()
        self.check()
        return ended

    def ask(self, prompt: Prompt, **extra: object) -> None:
        """Answer one prompt, step by step."""
        sampling = self.sampling(4)
        sampling.extra_args = dict(extra) or None
        self.engine.add_request(f"r{time.monotonic_ns()}", {"prompt_token_ids": prompt}, sampling)
        while self.engine.has_unfinished_requests():
            self.step()
        self.settle()

    def catch_up(self) -> None:
        publisher = self.vllm_scheduler.kv_event_publisher
        publisher._event_queue.join()
        if publisher._buffer:
            self.router.catch_up(publisher._buffer[-1][0])

    def check(self) -> None:
        """The router knows what there is, whatever it takes a cleared device for."""
        self.catch_up()
        pool = {
            (group_of(key), maybe_convert_block_hash(hash_of(key)))
            for key in Inventory(self.core.manager).list_blocks(0, 1 << 20).keys
        }
        for index in (self.router.index, self.router.patient):
            assert set(index.get("CPU", ())) == pool


@contextmanager
def routed(model: Path, *, replay_endpoint: str = ANY_PORT, **extra: object) -> Iterator[Routed]:
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": ANY_PORT,
        "replay_endpoint": replay_endpoint,
    }
    options = {"kv_events_config": events, "max_model_len": 640}
    with in_process(model, transfer_config(load_decision="always", **extra), **options) as engine:
        engine = Routed(engine.llm)
        publisher = engine.vllm_scheduler.kv_event_publisher
        bound = [socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (publisher._pub, publisher._replay)]
        engine.router = Router(*bound, KVEventBatch)
        try:
            yield engine
        finally:
            engine.router.close()


def test_engine_after_one_whose_port_was_taken_starts(
    llama: Path, gemma: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as other:
        other.bind(ANY_PORT)
        taken = other.getsockopt_string(zmq.LAST_ENDPOINT)
        with pytest.raises(zmq.ZMQError, match="in use"), routed(gemma, replay_endpoint=taken):
            pytest.fail("the engine has started")
    capfd.readouterr()
    with routed(llama) as engine:
        engine.ask(random_tokens(random.Random(98), 2 * BLOCK))
        assert len(engine.router.index["CPU"]) == 2
    assert "admin API on http://" in capfd.readouterr().err


def test_recovered_blocks_after_warm_start_are_reported(llama: Path, tmp_path: Path) -> None:
    kept = {"pool_kind": "file", "pool_path": str(tmp_path / "pool"), "engine_name": "routed"}
    prompt, other = random_tokens(random.Random(94), 5 * BLOCK + 5), random_tokens(random.Random(95), BLOCK + 5)
    with routed(llama, **kept) as engine:
        engine.ask(prompt)
        wanted = set(engine.router.index["CPU"])
    with routed(llama, **kept) as engine:
        engine.ask(other)
        known = engine.router.index["CPU"]
        assert wanted < set(known)
        # Their tokens are not known until a request brings them. All are in one event.
        assert {id(known[block]) for block in wanted} == {id(known[next(iter(wanted))])}
        assert all((known[block].token_ids, known[block].parent_block_hash) == ([], None) for block in wanted)
        engine.ask(prompt)
        assert {len(known[block].token_ids) for block in wanted} == {5 * BLOCK}


@pytest.mark.parametrize(
    ("model", "mode", "blocks_per_slot"),
    [("llama", "eager", 1), ("llama", "eager", 4), ("llama", "lazy", 1), ("gemma", "eager", 1)],
)
def test_router_index_when_blocks_come_and_go_equals_pool(
    model: str, mode: str, blocks_per_slot: int, request: pytest.FixtureRequest
) -> None:
    options = {"pool_bytes": SMALL_POOL, "store_mode": mode, "blocks_per_slot": blocks_per_slot}
    with routed(request.getfixturevalue(model), **options) as engine:
        for prompt in PROMPTS:
            engine.ask(prompt)
        assert engine.snapshot().evictions.total > 0
        # vLLM drops its own cache only, which its event does not say.
        engine.forget_device()
        engine.ask(PROMPTS[0])
        # The pool only.
        device = set(engine.router.index["GPU"])
        engine.core.resets.reset(time.time())
        engine.ask(random_tokens(random.Random(90), 5))
        assert device <= set(engine.router.index["GPU"])
        engine.ask(PROMPTS[1])
        assert engine.vllm_scheduler.reset_prefix_cache(reset_connector=True)
        for prompt in PROMPTS:
            engine.ask(prompt)
        (key, *_) = Inventory(engine.core.manager).list_blocks(0, 1).keys
        assert engine.core.resets.drop_block(key, time.time()).dropped_blocks == 1
        engine.ask(PROMPTS[5])


def test_stored_event_when_blocks_form_a_prefix_is_one_event(llama: Path) -> None:
    rng = random.Random(92)
    with routed(llama) as engine:
        prompts = [random_tokens(rng, 9 * BLOCK + 5) for _ in range(6)]
        for prompt in prompts:
            engine.ask(prompt)
        found = engine.router.stored()
        assert [(len(event.block_hashes), event.token_ids) for event in found] == [
            (9, prompt[: 9 * BLOCK]) for prompt in prompts
        ]
        assert all(event.parent_block_hash is None and len(event.extra_keys) == 9 for event in found)
        # What a longer prompt adds continues the run that is known.
        longer = prompts[0][: 9 * BLOCK] + random_tokens(rng, 2 * BLOCK + 5)
        engine.ask(longer)
        last = engine.router.stored()[-1]
        assert last.parent_block_hash == found[0].block_hashes[-1]
        assert last.token_ids == longer[9 * BLOCK : 11 * BLOCK]


def test_hit_with_full_reports_requested_is_reported(llama: Path) -> None:
    rng = random.Random(93)
    with routed(llama) as engine:
        prompt = random_tokens(rng, 5 * BLOCK + 5)
        engine.ask(prompt)
        engine.router.events.clear()
        engine.ask(prompt)
        assert engine.router.stored() == []
        engine.ask(prompt, kv_cache_report_mode="full")
        # The device had the blocks, and the pool as well.
        (event,) = engine.router.stored()
        assert event.token_ids == prompt[: 5 * BLOCK]
        assert event.parent_block_hash is None
        for other in PROMPTS:
            engine.ask(other)
        engine.router.events.clear()
        hits = engine.snapshot().prompt_tokens.host_hit
        engine.ask(prompt, kv_cache_report_mode="full")
        assert engine.snapshot().prompt_tokens.host_hit == hits + 5 * BLOCK
        (event,) = engine.router.stored()
        assert event.token_ids == prompt[: 5 * BLOCK]


def test_what_events_announce_of_several_blocks_a_slot_can_be_loaded(llama: Path) -> None:
    """Each announced prefix, and no other one: a slot is found by its last block only (vllm#57159)."""
    rng = random.Random(96)
    with routed(llama, blocks_per_slot=4) as engine:
        prompt = random_tokens(rng, 9 * BLOCK + 5)
        engine.ask(prompt)
        (event,) = engine.router.stored()
        ends = [(number + 1) * event.block_size for number in range(len(event.block_hashes))]
        assert ends == [4 * BLOCK, 8 * BLOCK]
        assert (event.token_ids, event.parent_block_hash, len(event.extra_keys)) == (prompt[: 8 * BLOCK], None, 2)
        for end in ends:
            engine.forget_device()
            hits = engine.snapshot().prompt_tokens.host_hit
            engine.ask(prompt[:end] + random_tokens(rng, 3))
            assert engine.snapshot().prompt_tokens.host_hit == hits + end
        # Another prompt parts from it within the second slot, and has no slot in common but the first.
        engine.forget_device()
        other = prompt[: 6 * BLOCK] + random_tokens(rng, 3 * BLOCK)
        engine.ask(other)
        last = engine.router.stored()[-1]
        assert (last.parent_block_hash, last.token_ids) == (event.block_hashes[0], other[4 * BLOCK : 8 * BLOCK])
        engine.core.resets.reset(time.time())
        engine.ask(random_tokens(rng, 5))
        assert not engine.router.index["CPU"]


@pytest.mark.parametrize("by_vllm", [True, False])
def test_idle_engine_after_a_reset_has_a_step_to_take_with_its_events(llama: Path, by_vllm: bool) -> None:
    """vLLM looks whether there is one after each call of its engine, such as its own reset."""
    with routed(llama) as engine:
        engine.ask(random_tokens(random.Random(99), 5 * BLOCK + 5))
        assert len(engine.router.index["CPU"]) == 5
        assert not engine.vllm_scheduler.has_requests()
        if by_vllm:
            assert engine.vllm_scheduler.reset_prefix_cache(reset_connector=True)
        else:
            engine.core.resets.reset(time.time())
        assert engine.vllm_scheduler.has_requests()
        engine.step()
        assert not engine.router.index.get("CPU")
        assert not engine.vllm_scheduler.has_requests()


def test_reset_of_a_large_pool_is_reported_over_several_steps() -> None:
    spec = GroupSpec(block_size=16, block_bytes=64)
    sink = KVEventSink(GroupLayout([spec]), num_blocks=8, hash_bytes=32)
    count = 2 * MAX_BLOCKS_PER_TAKE + 10
    keys = make_keys((number.to_bytes(32, "big") for number in range(count)), 0)
    sink.receive(StoreBatch(0.0, RequestIdentity("r"), keys))
    sink.receive(ResetEvent(0.0, 1, count))
    sink.receive(StoreBatch(0.0, RequestIdentity("r"), keys[:1]))
    known: set[Any] = set()
    num_takes = 0
    while num_takes == 0 or sink.has_events:
        num_takes += 1
        events = sink.take()
        assert sum(len(event.block_hashes) for event in events) <= MAX_BLOCKS_PER_TAKE
        for event in events:
            (known.update if type(event).__name__ == "BlockStored" else known.difference_update)(event.block_hashes)
    assert known == {0}
    assert num_takes == -(-(2 * count + 1) // MAX_BLOCKS_PER_TAKE)
    assert sink.take() == []


def test_stats_with_events_count_those_that_the_publisher_received(llama: Path) -> None:
    with routed(llama) as engine:
        engine.ask(random_tokens(random.Random(97), 5 * BLOCK + 5))
        of_pool = [event for event in engine.router.events if getattr(event, "medium", None) == "CPU"]
        stats = httpx.get(f"{engine.connector._the_core().admin_url}/admin/v1/stats", timeout=DEADLINE_S).json()
        assert stats["kv_events"] == {"published": len(of_pool)}
        assert of_pool
