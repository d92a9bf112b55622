"""Exports and imports: whole prefixes in the order of their use, and imports that resets, pins and a full pool bound.

The toy engine compares every block that it reads with what it has to hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.core.groups import GroupKind, GroupSpec
from kvferry.core.keys import RequestFilter
from kvferry.core.scheduler.exchange import Batch, BlockColumns, BlockEntry, ChosenBlocks, choose_whole
from tests.core.test_tiers import forget, request, serve, settle
from tests.harness.effort import examples
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine
from tests.harness.toy_tiers import TIMEOUT_S, ToyTier

WINDOW = GroupSpec(BLOCK_SIZE, 64, GroupKind.SLIDING, 2 * BLOCK_SIZE + 1)
ANY = RequestFilter()


def engine_of(num_slots: int = 64, num_blocks: int = 64, **options) -> ToyEngine:
    engine = ToyEngine(num_slots, num_blocks, **options)
    engine.step_s = 0.01
    return engine


def opened(engine: ToyEngine, tier: ToyTier | None = None) -> ToyTier:
    """A store that the engine's pool is exported to, or imported from."""
    tier = ToyTier(engine) if tier is None else tier
    # For the ledger, which has to know what a promotion brings.
    engine.stores["store"] = tier
    engine.offload.tiers.exchange.open("store", tier)
    return tier


def closed(engine: ToyEngine, tier: ToyTier) -> None:
    engine.offload.tiers.exchange.close(engine.now_s)
    assert not tier.wrongs
    assert tier.holds_right_bytes()


def wait(engine: ToyEngine, batch: Batch) -> list[BlockEntry]:
    """Poll until a batch has ended, and return the blocks that were copied."""
    while batch.is_open:
        engine.now_s += 0.1
        engine.offload.tiers.exchange.poll(engine.now_s)
    return [one for one, ok in zip(batch.entries, batch.ok.tolist(), strict=True) if ok]


def export(engine: ToyEngine, match: RequestFilter = ANY, max_bytes: int | None = None) -> list[BlockEntry]:
    """The blocks that are exported, in their order."""
    exchange = engine.offload.tiers.exchange
    blocks, found = exchange.choose(match, max_bytes), list[BlockEntry]()
    while len(blocks.slots):
        batch, blocks = exchange.store(blocks, engine.now_s)
        found += wait(engine, batch)
    return found


def bring(engine: ToyEngine, entries: Sequence[BlockEntry], **options) -> list[BlockEntry]:
    """The blocks that are imported."""
    exchange, found = engine.offload.tiers.exchange, list[BlockEntry]()
    for first in range(0, len(entries), exchange.batch_blocks):
        some = entries[first : first + exchange.batch_blocks]
        found += wait(engine, exchange.load(some, engine.now_s, **({"may_evict": False} | options)))
    return found


def positions(entries: Sequence[BlockEntry]) -> list[int]:
    return [entry.position for entry in entries]


# --- the choice of blocks ---------------------------------------------------------------------------------------------


@st.composite
def forests(draw):
    """Blocks of some prompts as columns, of which some are not known to have a parent, and which are wanted."""
    count = draw(st.integers(1, 25))
    parents = [draw(st.none() | st.integers(0, i - 1)) if i else None for i in range(count)]
    depth = list[int]()
    for parent in parents:
        depth.append(0 if parent is None else depth[parent] + 1)
    hashes = draw(st.lists(st.integers(1, 2**64 - 1), min_size=count, max_size=count, unique=True))
    order = draw(st.permutations(range(count)))
    columns = BlockColumns(
        np.array([hashes[i] for i in order], dtype=np.uint64),
        np.array([0 if parents[i] is None else hashes[parents[i]] for i in order], dtype=np.uint64),
        np.array([depth[i] * 16 for i in order], dtype=np.int64),
        np.array([draw(st.integers(1, 5)) for _ in order], dtype=np.int64),
        np.array([draw(st.integers(0, 2)) for _ in order], dtype=np.uint8),
        np.array([draw(st.integers(0, 4)) for _ in order], dtype=np.float64),
    )
    return columns, np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=np.bool_)


@given(forests(), st.none() | st.integers(0, 60))
def test_choice_keeps_prefixes_whole_and_prefers_the_latest_used(forest, max_bytes) -> None:
    columns, is_wanted = forest
    at = {int(value): i for i, value in enumerate(columns.hashes)}
    above = [at.get(int(parent)) for parent in columns.parents]
    rank = list(zip(columns.classes.tolist(), columns.used_s.tolist(), strict=True))
    classes, used_s = columns.classes.tolist(), columns.used_s.tolist()
    expected = set[int]()
    for i in range(len(rank)):
        block: int | None = i
        while block is not None:
            if is_wanted[i]:
                expected.add(block)
            classes[block] = max(classes[block], rank[i][0])
            used_s[block] = max(used_s[block], rank[i][1])
            block = above[block]
    sizes = columns.sizes.tolist()
    chosen = choose_whole(columns, is_wanted.copy(), max_bytes).tolist()
    whole = sorted(expected, key=lambda i: (-classes[i], -used_s[i], columns.tokens[i]))
    for place, block in enumerate(chosen):
        parent = above[block]
        assert parent is None or parent in chosen[:place]
    keys = [(-classes[i], -used_s[i], int(columns.tokens[i])) for i in chosen]
    assert keys == [(-classes[i], -used_s[i], int(columns.tokens[i])) for i in whole[: len(chosen)]]
    if max_bytes is None:
        assert set(chosen) == expected
    else:
        assert sum(sizes[i] for i in chosen) <= max_bytes


def test_choice_by_request_includes_the_beginning_that_others_stored() -> None:
    engine = engine_of()
    serve(engine, request("first", 4), request("other", 5, family=2), request("second", 7))
    tier = opened(engine)
    found = export(engine, RequestFilter(request="second"))
    assert positions(found) == list(range(7))
    assert [one.origin.request_id for one in found] == ["first"] * 4 + ["second"] * 3
    closed(engine, tier)
    engine.check_idle()


def test_export_of_few_bytes_takes_what_was_used_last_from_its_beginning() -> None:
    engine = engine_of()
    serve(engine, request("old", 6), request("new", 6, family=2), request("again", 8))
    tier = opened(engine)
    # The device has the beginning of `again`, so that the pool counts no hit on it.
    found = export(engine, max_bytes=8 * engine.groups[0].slot_bytes)
    assert positions(found) == list(range(8))
    assert {one.origin.request_id for one in found} == {"old", "again"}
    closed(engine, tier)


# --- import -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("specs", [None, (GroupSpec(BLOCK_SIZE, 64), WINDOW)])
@pytest.mark.parametrize("blocks_per_slot", [1, 2])
def test_imported_blocks_are_hits_in_the_pool(specs, blocks_per_slot: int) -> None:
    options = {} if specs is None else {"specs": specs, "null_block": 0}
    engine = engine_of(128, blocks_per_slot=blocks_per_slot, **options)
    serve(engine, request("r", 6))
    tier = opened(engine)
    exported = export(engine)
    forget(engine)
    closed(engine, tier)
    # The reset was of the pool that was exported, and concerns no import that begins later.
    opened(engine, tier)
    assert {one.key for one in bring(engine, exported)} == {one.key for one in exported}
    closed(engine, tier)
    assert serve(engine, request("later", 6)).host_hit == 6 * BLOCK_SIZE
    engine.check_idle()


def exported_and_forgotten(num_blocks: int = 6, **options) -> tuple[ToyEngine, ToyTier, list[BlockEntry]]:
    """An engine that imports from a store what its pool has forgotten."""
    engine = engine_of(**options)
    serve(engine, request("r", num_blocks))
    tier = opened(engine)
    exported = export(engine)
    forget(engine)
    closed(engine, tier)
    return engine, opened(engine, tier), exported


@pytest.mark.parametrize("what", ["whole", "match", "other match", "block"])
@pytest.mark.parametrize("is_under_way", [True, False])
def test_reset_since_an_import_began_keeps_blocks_out(what: str, is_under_way: bool) -> None:
    engine, tier, exported = exported_and_forgotten()
    exchange = engine.offload.tiers.exchange
    batch = exchange.load(exported[:3], engine.now_s, may_evict=False) if is_under_way else Batch()
    if what == "block":
        engine.offload.resets.drop_block(exported[1].key, engine.now_s)
    else:
        engine.reset({"whole": None, "match": RequestFilter("r*"), "other match": RequestFilter("x")}[what])
    arrived = wait(engine, batch) + bring(engine, exported[3 * is_under_way :])
    expected = {"whole": [], "match": [], "other match": list(range(6)), "block": [0, 2, 3, 4, 5]}[what]
    assert positions(arrived) == expected
    assert exchange.resets.is_whole == (what == "whole")
    closed(engine, tier)
    hit = serve(engine, request("later", 6)).host_hit // BLOCK_SIZE
    assert hit == {"whole": 0, "match": 0, "other match": 6, "block": 1}[what]
    engine.check_idle()


def test_import_into_a_full_pool_evicts_only_if_it_may() -> None:
    engine, tier, exported = exported_and_forgotten(num_slots=16)
    serve(engine, *(request(f"own{family}", 5, family=family) for family in (2, 3, 4)))
    free = engine.manager.counts().free
    assert len(bring(engine, exported)) == free < 6
    assert not bring(engine, exported[free:])
    assert engine.offload.tiers.exchange.max_import_blocks(may_evict=False) == 0
    assert len(bring(engine, exported[free:], may_evict=True)) == 6 - free
    closed(engine, tier)
    engine.check()


def test_imported_blocks_put_in_order_are_evicted_from_the_end_of_the_export() -> None:
    engine, tier, exported = exported_and_forgotten(num_slots=16)
    batches = [bring(engine, exported[:2]), bring(engine, exported[2:4]), bring(engine, exported[4:])]
    for batch in reversed(batches):
        engine.offload.tiers.exchange.put_in_order([one.key for one in batch])
    closed(engine, tier)
    serve(engine, request("own", 13, family=2))
    left = [one.position for one in exported if engine.manager.lookup_each([one.key])[0] >= 0]
    assert left == [0, 1, 2]


def test_blocks_that_are_here_or_on_their_way_are_not_imported_again() -> None:
    engine, tier, exported = exported_and_forgotten()
    exchange = engine.offload.tiers.exchange
    first = exchange.load(exported[:2], engine.now_s, may_evict=False)
    again = exchange.load(exported[:3], engine.now_s, may_evict=False)
    assert (again.num_present, len(again.entries)) == (2, 1)
    assert len(wait(engine, first)) == 2
    wait(engine, again)
    assert exchange.load(exported[:3], engine.now_s, may_evict=False).num_present == 3
    closed(engine, tier)


@pytest.mark.parametrize("what", ["export", "import"])
def test_store_that_does_not_answer_holds_no_slot_beyond_its_time(what: str) -> None:
    engine, tier, exported = exported_and_forgotten()
    exchange = engine.offload.tiers.exchange
    if what == "export":
        bring(engine, exported)
    tier.due = lambda number: False
    if what == "export":
        batch, _ = exchange.store(exchange.choose(None, None), engine.now_s)
    else:
        batch = exchange.load(exported, engine.now_s, may_evict=False)
    assert batch.is_open
    engine.now_s += TIMEOUT_S + 1
    assert not wait(engine, batch)
    counts = engine.manager.counts()
    assert (counts.pinned, counts.storing) == (0, 0)
    closed(engine, tier)
    engine.check_idle()


@pytest.mark.parametrize("what", ["export", "import"])
def test_store_that_fails_at_its_announcement_gets_no_block(what: str) -> None:
    engine, tier, exported = exported_and_forgotten()
    exchange = engine.offload.tiers.exchange
    if what == "export":
        bring(engine, exported)
    closed(engine, tier)
    tier = ToyTier(engine)
    tier.raises = {"on_new_request"}
    opened(engine, tier)
    if what == "export":
        blocks = exchange.choose(None, None)
        batch, _ = exchange.store(blocks, engine.now_s)
        assert batch.blocks is not None
    else:
        batch = exchange.load(exported, engine.now_s, may_evict=False)
    assert batch.entries
    assert not batch.is_open
    assert not batch.ok.any()
    closed(engine, tier)
    engine.check_idle()


@pytest.mark.parametrize("may_cancel", [True, False])
@pytest.mark.parametrize("what", ["export", "import"])
def test_closing_while_a_batch_is_open_frees_its_slots(what: str, may_cancel: bool) -> None:
    engine, tier, exported = exported_and_forgotten()
    exchange = engine.offload.tiers.exchange
    if what == "export":
        bring(engine, exported)
        batch, _ = exchange.store(exchange.choose(None, None), engine.now_s)
    else:
        batch = exchange.load(exported, engine.now_s, may_evict=False)
    tier.raises = set() if may_cancel else {"cancel"}
    closed(engine, tier)
    assert batch.is_open is not may_cancel, "a copy that hangs keeps its slots"
    engine.now_s += 1.0
    exchange.poll(engine.now_s)
    assert not batch.is_open
    assert not batch.ok.any()
    counts = engine.manager.counts()
    assert (counts.pinned, counts.storing) == (0, 0)
    engine.check_idle()


# --- at any time ------------------------------------------------------------------------------------------------------


class Exchanges(RuleBasedStateMachine):
    """One export or import beside an engine that serves, with resets and exceptions.

    The model: what the store holds is what was exported, and what an import has published since the last reset is in
    the pool or was evicted. The toys check bytes, pins and slots.
    """

    @initialize()
    def begin(self) -> None:
        self.engine = engine_of(24, 24)
        self.tier = ToyTier(self.engine)
        self.exported: list[BlockEntry] = []
        self.batches: list[Batch] = []
        self.is_open = False
        self.num_requests = 0
        self.forbidden: set[bytes] = set()

    @property
    def exchange(self):
        return self.engine.offload.tiers.exchange

    @precondition(lambda self: not self.is_open)
    @rule()
    def open(self) -> None:
        opened(self.engine, self.tier)
        self.is_open, self.forbidden = True, set()

    @precondition(lambda self: self.is_open)
    @rule()
    def close(self) -> None:
        closed(self.engine, self.tier)
        self.is_open = False
        assert not any(batch.is_open for batch in self.batches)
        self._end()

    @rule(family=st.integers(1, 3), num_blocks=st.integers(1, 6))
    def serve(self, family: int, num_blocks: int) -> None:
        self.num_requests += 1
        serve(self.engine, request(f"{family}-{self.num_requests}", num_blocks, family=family))

    @rule(family=st.integers(1, 3), num_blocks=st.integers(1, 6))
    def start(self, family: int, num_blocks: int) -> None:
        self.num_requests += 1
        self.engine.device.forget_all()
        self.engine.add(request(f"{family}-{self.num_requests}", num_blocks, family=family))
        self.engine.step()

    @precondition(lambda self: self.is_open and len(self.batches) < 3)
    @rule(match=st.sampled_from([ANY, RequestFilter("1-*"), RequestFilter("2-*")]), max_bytes=st.none() | st.just(256))
    def store(self, match: RequestFilter, max_bytes: int | None) -> None:
        blocks: ChosenBlocks = self.exchange.choose(match, max_bytes)
        self.batches.append(self.exchange.store(blocks, self.engine.now_s)[0])

    @precondition(lambda self: self.is_open and self.exported and len(self.batches) < 3)
    @rule(data=st.data(), may_evict=st.booleans())
    def load(self, data, may_evict: bool) -> None:
        some = data.draw(st.lists(st.sampled_from(self.exported), unique_by=lambda one: one.key, max_size=3))
        self.batches.append(self.exchange.load(some, self.engine.now_s, may_evict=may_evict))

    @rule(due=st.booleans())
    def poll(self, due: bool) -> None:
        self.tier.due = lambda number: due
        self.engine.now_s += 0.1
        self.exchange.poll(self.engine.now_s)
        self._end()

    @rule()
    def wait_for_the_time_limit(self) -> None:
        self.engine.now_s += TIMEOUT_S + 1
        self.exchange.poll(self.engine.now_s)
        assert not any(batch.is_open for batch in self.batches)
        self._end()

    @rule(family=st.none() | st.integers(1, 3))
    def reset(self, family: int | None) -> None:
        match = None if family is None else RequestFilter(f"{family}-*")
        self.engine.reset(match)
        concerned = self.exported if match is None else [one for one in self.exported if match.matches(one.origin)]
        keys = {one.key for one in concerned}
        self.forbidden |= keys
        assert all(slot < 0 for slot in self.engine.manager.lookup_each(list(keys)).tolist())

    @rule()
    def abandon(self) -> None:
        assert not self.engine.offload.abandon_all(self.engine.now_s)
        self.engine.run()
        self.forbidden |= {one.key for one in self.exported}

    @invariant()
    def holds(self) -> None:
        assert not self.tier.wrongs
        assert self.tier.holds_right_bytes()
        self.engine.check()

    def _end(self) -> None:
        for batch in [one for one in self.batches if not one.is_open]:
            self.batches.remove(batch)
            done = [one for one, ok in zip(batch.entries, batch.ok.tolist(), strict=True) if ok]
            if batch.blocks is None:
                assert not {one.key for one in done} & self.forbidden
            else:
                known = {one.key for one in self.exported}
                self.exported += [one for one in done if one.key not in known]

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.exchange.close(self.engine.now_s)
        settle(self.engine)
        self.engine.run()
        settle(self.engine)
        self.engine.check_idle()
        assert self.engine.manager.counts().pinned == 0


TestExchanges = Exchanges.TestCase
TestExchanges.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
