"""The table of sessions against a list of all requests; and what a session's end leaves of its counters and hashes."""

from __future__ import annotations

from threading import RLock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.engine_api import StoreMode
from kvferry.core.keys import SessionKey, make_keys
from kvferry.core.scheduler.sessions import SessionTable
from kvferry.core.stats import PromptTokens
from tests.harness.effort import examples
from tests.harness.toy_engine import BLOCK_SIZE, ToyEngine
from tests.harness.toy_requests import answer, request

HASH_BYTES = 4
NAMES = st.builds(SessionKey, st.sampled_from([None, "t"]), st.sampled_from("abcd"))
TOKENS = st.lists(st.integers(0, 1), max_size=6)


def chain(tokens: list[int], hash_bytes: int = HASH_BYTES) -> list[bytes]:
    """Hashes of which each stands for all tokens up to its own."""
    return [
        int("1" + "".join(map(str, tokens[: end + 1])), 2).to_bytes(hash_bytes, "big") for end in range(len(tokens))
    ]


ENDS = st.tuples(NAMES, st.none() | TOKENS, st.integers(0, 9), st.sampled_from([HASH_BYTES, HASH_BYTES + 1]))


def shared(one: list[bytes], other: list[bytes]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@settings(max_examples=examples(400), deadline=None)
@given(ends=st.lists(ENDS, max_size=30), num_kept=st.integers(1, 8), hash_bytes=st.integers(0, 80))
def test_table_has_counters_and_hashes_of_the_latest_sessions(
    ends: list[tuple[SessionKey, list[int] | None, int, int]], num_kept: int, hash_bytes: int
) -> None:
    table = SessionTable(RLock(), num_kept, hash_bytes)
    counts: dict[SessionKey, list[int]] = {}
    chains: dict[SessionKey, list[bytes]] = {}
    for now_s, (key, tokens, hit, step) in enumerate(ends):
        given_hashes = None if tokens is None else chain(tokens, step)
        table.record(key, PromptTokens(10, hit, 0, {"disk": 10 - hit}, 0), given_hashes, now_s)
        number, hits, _ = counts.pop(key, [0, 0, 0])
        counts[key] = [number + 1, hits + hit, now_s]
        for gone in list(counts)[:-num_kept]:
            del counts[gone]
            chains.pop(gone, None)
        if given_hashes is not None:
            chains.pop(key, None)
            chains[key] = given_hashes
        while sum(len(one) for of_one in chains.values() for one in of_one) > hash_bytes:
            del chains[next(iter(chains))]
        latest = table.page(None, 100)
        assert [one.key for one in latest] == list(reversed(counts))
        for one in latest:
            tokens_of = one.prompt_tokens
            assert [one.num_requests, tokens_of.device_hit, one.last_seen_s] == counts[one.key]
            assert tokens_of.total == tokens_of.device_hit + tokens_of.tier_hit["disk"] == 10 * one.num_requests
            assert table.hashes(one.key) == chains.get(one.key)
        for name in "abcd":
            assert {one.key for one in table.named(name)} == {each for each in counts if each.session == name}
        for each, own in chains.items():
            num_shared = max((shared(own, other) for name, other in chains.items() if name != each), default=0)
            assert table.own_hashes(each, 1) == own[num_shared:]
            assert table.own_hashes(each, 3) == own[-(-num_shared // 3) * 3 :]


def test_pages_have_each_session_once_although_new_requests_come() -> None:
    table = SessionTable(RLock())
    keys = [SessionKey(None, f"s{number}") for number in range(10)]
    for now_s, key in enumerate(keys):
        table.record(key, PromptTokens(), None, now_s)
    first = table.page(None, 4)
    assert [one.key for one in first] == keys[9:5:-1]
    table.record(keys[8], PromptTokens(), None, 20)
    table.record(keys[2], PromptTokens(), None, 21)
    second = table.page(first[-1].sequence, 4)
    assert [one.key for one in second] == [keys[5], keys[4], keys[3], keys[1]]
    assert [one.key for one in table.page(second[-1].sequence, 4)] == [keys[0]]


@pytest.mark.parametrize("mode", list(StoreMode))
def test_request_that_ends_is_counted_for_its_session(mode: StoreMode) -> None:
    engine = ToyEngine(100, 100, store_mode=mode)
    table, key = engine.offload.sessions, SessionKey("tenant", "s")
    first = answer(engine, "first", 5, tenant="tenant", session="s", max_tokens=2 * BLOCK_SIZE)
    assert table.hashes(key) == first.block_hashes[:7]
    answer(engine, "other", 5, session="s")
    answer(engine, "none", 5)
    engine.device.forget_all()
    second = answer(engine, "second", 6, tenant="tenant", session="s")
    (found,) = (one for one in table.named("s") if one.key == key)
    views = [engine.offload.requests.find(name, engine.now_s) for name in ("first", "second")]
    assert found.num_requests == 2
    assert found.last_seen_s == views[1].times.finished_s
    for name in ("total", "device_hit", "host_hit", "recomputed"):
        assert getattr(found.prompt_tokens, name) == sum(getattr(view.prompt_tokens, name) for view in views)
    assert table.hashes(key) == second.block_hashes
    assert table.own_hashes(key, 1) == second.block_hashes[5:], "the other tenant's session has the rest"
    assert [one.key for one in table.page(None, 10)] == [key, SessionKey(None, "s")]
    engine.reset()
    assert len(table.page(None, 10)) == 2
    # The key of a block that was stored is that of its hash.
    assert make_keys(table.hashes(key), 0) == make_keys(second.block_hashes, 0)


def test_aborted_request_is_counted_and_leaves_the_hashes_of_the_one_before() -> None:
    engine = ToyEngine(100, 100)
    table, key = engine.offload.sessions, SessionKey(None, "s")
    before = answer(engine, "before", 5, session="s")
    engine.add(aborted := request("aborted", 9, session="s"))
    engine.finish(aborted)
    (found,) = table.named("s")
    assert (found.num_requests, found.prompt_tokens.total) == (2, 21)
    assert table.hashes(key) == before.block_hashes


def test_request_whose_hashes_leave_something_out_leaves_none() -> None:
    engine = ToyEngine(100, 100)
    answer(engine, "r", 5, session="s", unhashed="multimodal")
    assert engine.offload.sessions.hashes(SessionKey(None, "s")) is None
    assert engine.offload.sessions.named("s")[0].num_requests == 1


def test_kv_hints_are_counted_by_type_up_to_a_bound() -> None:
    engine = ToyEngine(100, 100)
    names = [f"pin.v{number}" for number in range(20)]
    for number, name in enumerate(names):
        answer(engine, f"r{number}", 2, kv_hint_types=[name, name, names[0]])
    answer(engine, "odd", 2, kv_hint_types=["a b", "x" * 65, "\ud800"])
    counts = engine.offload.snapshot().requests.kv_hints
    assert counts == {names[0]: 20} | dict.fromkeys(names[1:16], 1) | {"other": 5}
