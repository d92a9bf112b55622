"""KV events of the embedded engine, received over ZMQ: a router's index equals what pool and device hold."""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from kvferry.app.engines.embedded import kv_changes
from kvferry.app.engines.embedded.block_pool import BlockPool, hash_prompt
from kvferry.app.engines.embedded.kv_changes import ChangeQueue
from kvferry.app.engines.embedded.kv_events import KVEventPublisher, external_hash
from kvferry.app.engines.embedded.kv_sockets import EventBatch, KVEventSockets
from kvferry.app.engines.embedded.request import ClientOptions, Request, Sampling
from kvferry.app.engines.embedded.tokenizer import ByteStream
from kvferry.app.engines.kv_reports import CONTENTS_PER_BLOCK, SlotContent
from kvferry.app.settings import Settings
from kvferry.core.errors import StartError
from kvferry.core.groups import GroupLayout, GroupSpec
from kvferry.core.keys import Key, RequestIdentity, hash_of, make_keys
from kvferry.core.pool.inventory import Inventory
from kvferry.core.pool.manager import OffloadManager
from tests.harness.kv_router import END_OF_REPLAY, Router
from tests.harness.waiting import wait_until

BLOCK = 4
ORIGIN = RequestIdentity("r")


class Engine:
    """A pool, a device's prefix cache and their publisher, which change as an engine would change them."""

    def __init__(self, num_slots: int, num_blocks: int, blocks_per_slot: int, **settings: object) -> None:
        endpoints = {"kv_events_endpoint": "tcp://127.0.0.1:*", "kv_events_replay_endpoint": "tcp://127.0.0.1:*"}
        self.changes = ChangeQueue()
        self.manager = OffloadManager(num_slots, 64, sink=self.changes.receive)
        self.device = BlockPool(num_blocks, self.changes.record_removed)
        self.slot_blocks = blocks_per_slot
        layout = GroupLayout([GroupSpec(BLOCK, 64)], blocks_per_slot)
        given = Settings(_env_file=None, **endpoints, **settings)
        self.publisher = KVEventPublisher(self.changes, self.manager, self.device, layout, given)
        self.endpoints = self.publisher.endpoints

    def compute(self, tokens: Sequence[int], cache_salt: str | None = None) -> Request:
        """Compute a prompt, whose blocks stay in the device's cache."""
        request = Request("r", tokens, Sampling(), ByteStream(), BLOCK, options=ClientOptions(cache_salt))
        hashes = request.block_hashes
        found = self.device.find_prefix(hashes)
        table = self.device.allocate(found, len(hashes) - len(found))
        assert table is not None
        are_new = [self.device.register(*both) for both in zip(table, hashes, strict=True)]
        if hashes:
            self.changes.record_filled(request, 0, are_new)
        self.device.free(table)
        return request

    def keys(self, request: Request) -> list[Key]:
        return make_keys(request.block_hashes[self.slot_blocks - 1 :: self.slot_blocks], 0)

    def store(self, keys: Sequence[Key]) -> None:
        offer = self.manager.prepare_store(keys, ORIGIN, np.arange(len(keys)), 1, 0.0)
        if len(offer.slots):
            self.manager.complete_store(offer.slots, 0.0)

    def pool_keys(self) -> list[Key]:
        return list(Inventory(self.manager).list_blocks(0, 1 << 20).keys)

    def is_known_to(self, router: Router) -> bool:
        """Whether a router knows exactly what there is, once it has received what was sent."""
        drain(router)
        pool = {external_hash(hash_of(key)) for key in self.pool_keys()}
        device = {external_hash(block_hash) for block_hash in self.device.registered_hashes()}
        return (router.held("CPU"), router.held("GPU")) == (pool, device)


def drain(router: Router) -> Router:
    """A router that has applied all batches that have arrived."""
    while router.receive(0):
        pass
    return router


def check_counts(events: Sequence[Any]) -> None:
    """No block is stored twice without a removal between, as routers may count both."""
    held: set[tuple[str, int]] = set()
    for event in events:
        if type(event).__name__ == "AllBlocksCleared":
            held.clear()
            continue
        blocks = {(event.medium, block_hash) for block_hash in event.block_hashes}
        assert len(blocks) == len(event.block_hashes)
        if type(event).__name__ == "BlockStored":
            assert held.isdisjoint(blocks)
            held |= blocks
        else:
            assert blocks <= held
            held -= blocks


@contextmanager
def engine(num_slots: int = 24, num_blocks: int = 24, blocks_per_slot: int = 1, **settings: object) -> Iterator[Engine]:
    one = Engine(num_slots, num_blocks, blocks_per_slot, **settings)
    one.publisher.start()
    try:
        yield one
    finally:
        one.publisher.close()


@contextmanager
def routed(one: Engine) -> Iterator[Router]:
    router = Router(*one.endpoints, EventBatch)
    try:
        router.replay()
        yield router
    finally:
        router.close()


def tokens_of(rng: random.Random, num_blocks: int) -> list[int]:
    return [rng.randrange(1, 250) for _ in range(num_blocks * BLOCK)]


@pytest.mark.parametrize("store_later", [False, True])
def test_router_index_when_blocks_come_and_go_equals_both_places(store_later: bool) -> None:
    rng = random.Random(7)
    starts = [tokens_of(rng, 5) for _ in range(3)]
    with engine() as one, routed(one) as router:
        waiting: list[Request] = []
        for step in range(24):
            tokens = rng.choice(starts)[: rng.randrange(1, 6) * BLOCK] + tokens_of(rng, rng.randrange(5))
            waiting.append(one.compute(tokens))
            if not store_later or len(waiting) > 3:
                one.store(one.keys(waiting.pop(0)))
            if step % 5 == 4:
                one.manager.drop_key(rng.choice(one.pool_keys() or [b"none"]), 0.0)
            if step % 11 == 10:
                one.manager.reset(np.array([], dtype=np.int64), 0.0)
            wait_until(lambda: one.is_known_to(router), f"the router knows all after step {step}")
        assert one.manager.evictions.total
        assert router.num_rebuilds == 1, "the first batch"
        check_counts(router.events)


@pytest.mark.parametrize("blocks_per_slot", [1, 2])
def test_events_of_a_prompt_have_its_tokens_and_the_chain_of_hashes(blocks_per_slot: int) -> None:
    rng = random.Random(8)
    tokens = tokens_of(rng, 6)
    longer = tokens + tokens_of(rng, 2)
    with engine(blocks_per_slot=blocks_per_slot) as one, routed(one) as router:
        for number, prompt in enumerate((tokens, longer), 1):
            one.store(one.keys(one.compute(prompt)))
            wait_until(lambda number=number: len(drain(router).stored("CPU")) == number, "it is stored")  # type: ignore[misc]
        hashes = [external_hash(block_hash) for block_hash in hash_prompt(BLOCK, longer, None, None)]
        for medium in ("GPU", "CPU"):
            first, second = router.stored(medium)
            size = blocks_per_slot if medium == "CPU" else 1
            ends = hashes[size - 1 :: size]
            assert (first.parent_block_hash, first.token_ids) == (None, tokens)
            assert (second.parent_block_hash, second.token_ids) == (hashes[5], longer[6 * BLOCK :])
            assert first.block_hashes + second.block_hashes == ends
            assert (first.block_size, first.group_idx, first.kv_cache_spec_kind) == (size * BLOCK, 0, "full_attention")
            assert first.extra_keys == [None] * (6 // size)
            assert router.held(medium) == set(ends)
        one.manager.reset(np.array([], dtype=np.int64), 0.0)
        wait_until(lambda: not drain(router).held("CPU"), "the pool is empty")
        assert router.held("GPU") == set(hashes), "the device was not cleared"


def test_events_of_a_salted_prompt_have_a_digest_instead_of_the_salt() -> None:
    with engine() as one, routed(one) as router:
        request = one.compute(tokens_of(random.Random(9), 2), cache_salt="a secret")
        wait_until(lambda: bool(drain(router).stored("GPU")), "it is stored")
        (event,) = router.stored("GPU")
        assert event.extra_keys == [(request.tenant,), None]


def test_recovered_blocks_are_reported_at_start_and_with_tokens_once_known() -> None:
    tokens = tokens_of(random.Random(10), 4)
    one = Engine(24, 24, 1)
    # As after a restart: the pool has blocks that no request of this process has brought.
    one.store(make_keys(hash_prompt(BLOCK, tokens, None, None), 0))
    one.publisher.start()
    try:
        with routed(one) as router:
            wait_until(lambda: one.is_known_to(router), "the router knows the recovered blocks")
            assert [event.token_ids for event in router.stored()] == [[]]
            one.compute(tokens)
            wait_until(lambda: len(drain(router).stored()) > 1, "they are reported again")
            assert router.stored()[-1].token_ids == tokens
            check_counts(router.events)
    finally:
        one.publisher.close()


@pytest.mark.parametrize("how", ["reset", "eviction"])
@pytest.mark.parametrize("in_one_turn", [False, True])
def test_blocks_that_come_back_to_the_pool_have_their_tokens(
    how: str, in_one_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = tokens_of(random.Random(18), 3)
    with engine() as one, routed(one) as router:
        request = one.compute(tokens)
        one.store(one.keys(request))
        wait_until(lambda: one.is_known_to(router), "the router knows all")
        with monkeypatch.context() as patch:
            if in_one_turn:
                patch.setattr(one.changes, "take", lambda max_changes: [])
            if how == "reset":
                one.manager.reset(np.array([], dtype=np.int64), 0.0)
            for key in one.pool_keys():
                one.manager.drop_key(key, 0.0)
            wait_until(lambda: in_one_turn or one.is_known_to(router), "the router knows that they left")
            if in_one_turn:
                one.compute(tokens)
            # Otherwise the device has them still, and they are not computed again.
            one.store(one.keys(request))
        wait_until(lambda: one.is_known_to(router) and len(router.stored()) > 1, "the router knows all again")
        assert [event.token_ids for event in router.stored()] == [tokens, tokens]
        check_counts(router.events)


def test_tokens_of_blocks_that_left_are_kept_up_to_a_limit() -> None:
    rng = random.Random(19)
    with engine(num_slots=600, num_blocks=8) as one, routed(one) as router:
        for _ in range(60):
            one.store(one.keys(one.compute(tokens_of(rng, 8))))
        one.manager.reset(np.array([], dtype=np.int64), 0.0)
        wait_until(lambda: one.is_known_to(router) and not router.held("CPU"), "the router knows that all left")
        gc.collect()
        num_contents = sum(isinstance(one, SlotContent) for one in gc.get_objects())
        assert num_contents <= 8 + 2 * 8 * CONTENTS_PER_BLOCK


def test_changes_beyond_the_queue_are_reported_anew_and_end_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_changes, "MAX_QUEUED_KEYS", 500)
    rng = random.Random(11)
    with engine(num_slots=900) as one, routed(one) as router:
        tokens = tokens_of(rng, 3)
        request = one.compute(tokens)
        one.store(one.keys(request))
        wait_until(lambda: one.is_known_to(router), "the router knows the first blocks")
        one.store(make_keys((number.to_bytes(32, "big") for number in range(600)), 0))
        one.manager.drop_key(one.keys(request)[2], 0.0)
        wait_until(lambda: one.is_known_to(router), "the router knows all of a large change")
        assert sum(type(event).__name__ == "AllBlocksCleared" for event in router.events) == 2
        # The tokens of the first blocks were not lost.
        (event,) = [one for one in router.stored()[-2:] if one.token_ids]
        assert event.token_ids == tokens[: 2 * BLOCK]
        check_counts(router.events)
        counts = one.publisher.counts()
        assert (counts.reports, counts.dropped >= 600) == (2, True)


def test_router_that_comes_late_rebuilds_from_kept_batches() -> None:
    rng = random.Random(12)
    with engine() as one:
        for _ in range(6):
            one.store(one.keys(one.compute(tokens_of(rng, 3))))
        with routed(one) as router:
            wait_until(lambda: one.is_known_to(router), "a late router knows all")
            counts = one.publisher.counts()
            assert counts.replayed > 0
            assert (counts.published, counts.dropped, counts.full_answers) == (len(router.events), 0, 0)


def test_router_that_missed_more_than_is_kept_has_all_reported_again() -> None:
    rng = random.Random(13)
    with engine(kv_events_buffer=2) as one, routed(one) as early:
        for _ in range(6):
            one.store(one.keys(one.compute(tokens_of(rng, 3))))
            wait_until(lambda: one.is_known_to(early), "the early router knows all")
        # In slots before those of the blocks that it follows.
        request = one.compute(tokens_of(rng, 6))
        for part in (slice(4, 6), slice(2, 4), slice(0, 2)):
            one.store(one.keys(request)[part])
            wait_until(lambda: one.is_known_to(early), "the early router knows all")
        with routed(one) as late:
            wait_until(lambda: one.is_known_to(late), "a late router knows all")
            assert late.num_rebuilds == 1
            assert one.publisher.counts().full_answers >= 1
            assert type(late.events[0]).__name__ == "AllBlocksCleared"
            check_counts(late.events)
            known: set[int | None] = {None}
            for event in late.stored():
                assert event.parent_block_hash in known, "no block comes before its prefix"
                known.update(event.block_hashes)
        wait_until(lambda: one.is_known_to(early), "so does the early one")


def test_routers_that_come_late_together_each_have_all_reported() -> None:
    rng = random.Random(17)
    with engine(kv_events_buffer=2) as one:
        one.store(one.keys(one.compute(tokens_of(rng, 3))))
        for _ in range(6):
            one.compute(tokens_of(rng, 2))
            before = one.publisher.counts().published
            one.store(one.keys(one.compute(tokens_of(rng, 2))))
            wait_until(lambda before=before: one.publisher.counts().published > before, "it is published")  # type: ignore[misc]
        with routed(one) as first, routed(one) as second:
            for router in (first, second):
                wait_until(lambda router=router: one.is_known_to(router), "a late router knows all")  # type: ignore[misc]


@pytest.mark.long
def test_slow_subscriber_loses_batches_and_delays_nothing() -> None:
    rng = random.Random(14)
    with engine(num_slots=60_000, kv_events_buffer=8) as one:
        slow = Router(*one.endpoints, EventBatch, hwm=1)
        wait_until(lambda: bool(one.compute(tokens_of(rng, 1))) and slow.receive(), "it listens")
        with routed(one) as fast:
            # More than the buffers of both sockets hold.
            for first in range(0, 40_000, 500):
                one.store(make_keys((number.to_bytes(32, "big") for number in range(first, first + 500)), 0))
                wait_until(lambda: fast.receive(0), "a router that keeps up receives it")
            wait_until(lambda: one.is_known_to(fast), "a router that keeps up knows all")
            drain(slow)
            one.compute(tokens_of(rng, 1))
            wait_until(lambda: one.is_known_to(slow), "the slow router knows all with the next batch")
            assert slow.num_rebuilds > 1
        slow.close()


def test_subscriber_that_requests_and_does_not_read_gets_little() -> None:
    with engine(num_slots=12_000) as one, routed(one) as router, zmq.Context() as context:
        for first in range(0, 10_000, 500):
            one.store(make_keys((number.to_bytes(32, "big") for number in range(first, first + 500)), 0))
            wait_until(lambda: router.receive(0), "it is published")
        wait_until(lambda: one.is_known_to(router), "the router knows all")
        before = one.publisher.counts().replayed
        with context.socket(zmq.DEALER) as idle, context.socket(zmq.DEALER) as other:
            idle.linger = other.linger = 0
            for option, value in ((zmq.RCVHWM, 1), (zmq.RCVBUF, 4096)):
                idle.setsockopt(option, value)
            for socket in (idle, other):
                socket.connect(one.endpoints[1])
            for _ in range(100):
                idle.send_multipart([b"", bytes(8)])
            for _ in range(40):
                other.send_multipart([b"", b"\xff" * 8])
                assert other.recv_multipart()[2] == END_OF_REPLAY, "others are answered meanwhile"
            # What the queue and the buffers of the network take, of 100 answers with at least 20 batches each.
            assert one.publisher.counts().replayed - before < 1000
            for socket in (other, idle):
                socket.send_multipart([b"", bytes(8)])
            whole = list(iter(lambda: other.recv_multipart()[2], END_OF_REPLAY))
            assert len(whole) >= 20
            received: list[bytes] = []
            while received[-len(whole) - 1 :] != [*whole, END_OF_REPLAY]:
                assert idle.poll(10_000), "it gets the whole of its last answer"
                received.append(idle.recv_multipart()[2])


def test_malformed_request_for_missed_batches_is_ignored() -> None:
    with engine() as one, zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(one.endpoints[1])
        socket.send_multipart([b"", b"\xff" * 8])
        assert socket.recv_multipart()[2] == END_OF_REPLAY, "nothing is kept from the highest number on"
        for frames in ([b""], [b"", b"1"], [b"", bytes(9)], [b"x", bytes(8)], [b"", bytes(8), b""], [b"", bytes(8)]):
            socket.send_multipart(frames)
        assert socket.poll(10_000)
        _, topic, _, payload = socket.recv_multipart()
        batch = msgspec.msgpack.decode(payload)
        assert (topic, batch[1][0], batch[2]) == (b"", {"type": "AllBlocksCleared"}, 0)
        assert socket.recv_multipart()[2] == END_OF_REPLAY
        assert not socket.poll(100)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_dead_thread_once_restarted_reports_all_that_it_has_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(16)
    with engine() as one, routed(one) as router:
        one.store(one.keys(one.compute(tokens_of(rng, 3))))
        wait_until(lambda: one.is_known_to(router), "the router knows all")
        thread = one.publisher.thread
        assert thread.degraded() == []
        with monkeypatch.context() as patch:
            patch.setattr(one.changes, "take", lambda max_changes: sys.exit(1))
            wait_until(lambda: thread.is_dead, "it is dead")
        assert thread.degraded() == [
            "the thread kvferry-kv-events does not run: routers have an outdated view of this engine"
        ]
        one.manager.drop_key(one.pool_keys()[0], 0.0)
        one.store(one.keys(one.compute(tokens_of(rng, 2))))
        # As its supervisor does.
        thread.start()
        wait_until(lambda: one.is_known_to(router), "the router knows all again")
        assert [text.partition(" died ")[0] for text in thread.degraded()] == ["the thread kvferry-kv-events"]
        assert one.publisher.counts().reports == 2


def test_stop_clears_the_index_of_routers() -> None:
    rng = random.Random(15)
    one = Engine(24, 24, 1)
    one.publisher.start()
    with routed(one) as router:
        one.store(one.keys(one.compute(tokens_of(rng, 3))))
        wait_until(lambda: one.is_known_to(router), "the router knows all")
        one.publisher.close()
        wait_until(lambda: not drain(router).held("CPU"), "the router knows nothing")


def test_start_when_the_address_is_taken_is_refused_by_name() -> None:
    with engine() as one, pytest.raises(StartError, match=r"KVFERRY_KV_EVENTS_ENDPOINT=tcp://127\.0\.0\.1:\d+: cannot"):
        KVEventSockets(one.endpoints[0], None, "", 8)
