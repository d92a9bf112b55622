"""What every tier does, whatever it is made of: the promises of `Tier` in core, kept by each kind there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.core.keys import RequestFilter
from kvferry.core.tiers.base import TierResetResult
from tests.harness.dictionary_tier import DictionaryStore
from tests.harness.documented_tier import documented_rig
from tests.harness.effort import examples
from tests.harness.mooncake_server import mooncake_rig, shared_store
from tests.harness.object_server import object_rig, shared_object_server
from tests.harness.redis_server import redis_rig, shared_server
from tests.harness.tier_rig import WAIT_S, Rig, file_rig, reference_rig, threaded_rig
from tests.harness.tier_slots import ORIGIN, OTHER, key_of, keys_of, length_of
from tests.harness.waiting import wait_until

KINDS: dict[str, Callable[[Path], Rig]] = {
    "reference": lambda path: reference_rig(),
    "threaded": lambda path: threaded_rig(DictionaryStore()),
    "threaded on two ranks": lambda path: threaded_rig(DictionaryStore(), num_ranks=2),
    "threaded in batches": lambda path: threaded_rig(DictionaryStore(batch_blocks=5), batch_bytes="1MiB"),
    "files": lambda path: file_rig(path / "tier"),
    "shared files": lambda path: file_rig(path / "tier", shared=True),
    "redis": lambda path: redis_rig(shared_server()),
    "object": lambda path: object_rig(shared_object_server().url),
    "mooncake": lambda path: mooncake_rig(shared_store()[0]),
    "documented": lambda path: documented_rig(path),
}


LONG = {"object", "mooncake"}
"""Kinds whose server takes seconds to start."""


@pytest.fixture(params=[pytest.param(kind, marks=pytest.mark.long if kind in LONG else ()) for kind in KINDS])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Rig]:
    made = KINDS[request.param](tmp_path)
    yield made
    made.close()


def test_stored_blocks_are_found_and_loaded_byte_for_byte(rig: Rig) -> None:
    keys = keys_of(range(8))
    assert rig.find(keys) == [False] * 8
    assert rig.store(keys) == [True] * 8
    assert rig.find([*keys, key_of(99)]) == [True] * 8 + [False]
    assert rig.load(keys) == [True] * 8


def test_blocks_stored_twice_are_kept_once(rig: Rig) -> None:
    keys = keys_of(range(4))
    rig.store(keys)
    assert rig.store(keys) == [True] * 4
    counts = rig.counts()
    assert (counts.blocks, counts.stored, counts.present) == (4, 4, 4)


def test_groups_of_one_hash_are_different_blocks(rig: Rig) -> None:
    full, window = key_of(7, group=0), key_of(7, group=1)
    rig.store([full])
    assert rig.find([full, window]) == [True, False]
    rig.store([window])
    assert rig.load([window, full]) == [True, True]


def test_load_returns_the_origins_of_its_blocks(rig: Rig) -> None:
    rig.store(keys_of([0]), ORIGIN)
    rig.store(keys_of([1]), OTHER)
    result = rig.wait(rig.submit_load(keys_of([0, 1, 2])))
    assert list(result.origins) == [ORIGIN, OTHER, None]


def test_results_contain_bytes_and_seconds(rig: Rig) -> None:
    keys = keys_of(range(3))
    total = sum(length_of(key) for key in keys)
    stored = rig.wait(rig.submit_store(keys))
    loaded = rig.wait(rig.submit_load([*keys, key_of(50)]))
    assert (stored.num_bytes, loaded.num_bytes) == (total, total)
    assert stored.seconds >= 0
    assert loaded.seconds >= 0
    counts = rig.counts()
    assert (counts.stored_bytes, counts.loaded_bytes, counts.loaded, counts.missing) == (total, total, 3, 1)
    assert total <= counts.bytes
    assert not counts.max_bytes or counts.bytes <= counts.max_bytes


def test_jobs_without_keys_return_no_results(rig: Rig) -> None:
    assert rig.find([]) == []
    assert rig.store([]) == []
    assert rig.load([]) == []


def test_a_canceled_load_leaves_its_slots_alone(rig: Rig) -> None:
    keys = keys_of(range(8))
    rig.store(keys)
    for _ in range(20):
        rig.slots.wipe()
        number = rig.submit_load(keys)
        rig.cancel(number)
        rig.slots.wipe()
        rig.find(keys)
        rig.poll()
        assert all(rig.slots.is_wiped(slot) for slot in range(8))


def test_canceled_store_keeps_only_earlier_bytes_of_its_slots(rig: Rig) -> None:
    for start in range(0, 80, 8):
        keys = keys_of(range(start, start + 8))
        number = rig.submit_store(keys)
        rig.cancel(number)
        rig.slots.wipe()
        rig.load(keys)


def test_cancel_of_an_unknown_job_is_harmless(rig: Rig) -> None:
    rig.tier.cancel(12345)
    assert rig.store(keys_of([1])) == [True]
    rig.tier.cancel(1)
    assert rig.load(keys_of([1])) == [True]


def test_dropped_keys_are_misses_and_the_drop_ends(rig: Rig) -> None:
    keys = keys_of(range(4))
    rig.store(keys)
    number = rig.drop([keys[1], key_of(99)])
    assert rig.find(keys) == [True, False, True, True]
    wait_until(lambda: rig.has(number), "the end of the drop", WAIT_S)
    assert rig.results[number] == TierResetResult(number)
    assert rig.load(keys) == [True, False, True, True]
    assert rig.store(keys[1:2]) == [True]
    assert rig.load(keys) == [True] * 4


def test_reset_forgets_all_blocks_and_returns_their_number(rig: Rig) -> None:
    keys = keys_of(range(4))
    rig.store(keys)
    held = rig.counts()
    result = rig.reset()
    assert (result.dropped_blocks, result.dropped_bytes) == (4, held.bytes)
    assert rig.find(keys) == [False] * 4
    assert rig.counts().blocks == 0
    assert rig.store(keys) == [True] * 4
    assert rig.load(keys) == [True] * 4


def test_lookups_during_a_reset_find_nothing(rig: Rig) -> None:
    keys = keys_of(range(4))
    rig.store(keys)
    before = rig.submit_load(keys)
    number = next(rig.numbers)
    rig.tier.reset(number, None)
    assert rig.find(keys) == [False] * 4
    assert not any(rig.wait(before).ok)
    wait_until(lambda: rig.has(number), "the reset", WAIT_S)
    assert rig.find(keys) == [False] * 4


def test_a_store_submitted_before_a_reset_is_not_kept(rig: Rig) -> None:
    keys = keys_of(range(8))
    number = rig.submit_store(keys)
    rig.reset()
    # A fast tier may have stored them before the reset.
    rig.wait(number)
    assert rig.find(keys) == [False] * 8
    assert rig.counts().blocks == 0


@pytest.mark.parametrize(
    "match",
    [
        RequestFilter(tenant="fedc*"),
        RequestFilter(request="r2"),
        RequestFilter(request="r?", tenant="f*"),
        RequestFilter(lora=""),
    ],
)
def test_reset_by_match_forgets_blocks_of_matching_requests(rig: Rig, match: RequestFilter) -> None:
    rig.store(keys_of([0, 1]), ORIGIN)
    rig.store(keys_of([2, 3, 4]), OTHER)
    stays = rig.tier.drops_matching
    assert rig.reset(match).dropped_blocks == (3 if stays else 5)
    assert rig.find(keys_of(range(5))) == [stays, stays, False, False, False]
    assert rig.load(keys_of(range(2))) == [stays, stays]


def test_reset_by_match_finds_aliases(rig: Rig) -> None:
    rig.store(keys_of([0]), ORIGIN)
    assert rig.reset(RequestFilter(request="alias-?")).dropped_blocks == 1


def test_resets_in_a_row_all_end(rig: Rig) -> None:
    rig.store(keys_of(range(3)))
    numbers = [next(rig.numbers) for _ in range(5)]
    for number in numbers:
        rig.tier.reset(number, None)
    wait_until(lambda: all(rig.has(number) for number in numbers), "all resets", WAIT_S)
    assert sum(rig.results[number].dropped_blocks for number in numbers) == 3
    assert rig.store(keys_of([9])) == [True]


def test_many_jobs_at_once_all_end_and_none_takes_anothers_bytes(rig: Rig) -> None:
    numbers = [rig.submit_store(keys_of(range(slot * 10, slot * 10 + 2)), first_slot=2 * slot) for slot in range(8)]
    assert all(all(rig.wait(number).ok) for number in numbers)
    rig.slots.wipe()
    numbers = [rig.submit_load(keys_of(range(slot * 10, slot * 10 + 2)), first_slot=2 * slot) for slot in range(8)]
    assert all(all(rig.wait(number).ok) for number in numbers)
    for slot in range(8):
        assert all(rig.slots.holds(2 * slot + i, key_of(slot * 10 + i)) for i in range(2))


def test_nothing_touches_a_slot_once_closed(rig: Rig) -> None:
    keys = keys_of(range(8))
    rig.store(keys)
    rig.submit_load(keys)
    rig.tier.close(WAIT_S)
    rig.slots.wipe()
    rig.tier.poll()
    assert all(rig.slots.is_wiped(slot) for slot in range(8))


@pytest.mark.parametrize("kind", ["threaded", "threaded on two ranks", "threaded in batches", "files"])
@settings(max_examples=examples(15), suppress_health_check=list(HealthCheck))
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["store", "store", "load", "load", "find", "drop", "cancel", "reset", "match"]),
            st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True),
        ),
        max_size=25,
    )
)
def test_any_order_of_calls_matches_the_model_tier(
    kind: str, steps: list[tuple[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """One call after the other; that many at once do no harm is tested elsewhere."""
    rig, obvious = KINDS[kind](tmp_path_factory.mktemp("any")), reference_rig()
    try:
        for what, numbers in steps:
            keys = keys_of(numbers)
            origin = ORIGIN if numbers[0] % 2 else OTHER
            answers = []
            for one in (rig, obvious):
                if what == "store":
                    answers.append(one.store(keys, origin))
                elif what == "load":
                    answers.append(one.load(keys))
                elif what == "find":
                    answers.append(one.find(keys))
                elif what == "drop":
                    # A block has to be removed before it can be stored again.
                    drop = one.drop(keys)
                    wait_until(lambda: one.has(drop), "the drop", WAIT_S)  # noqa: B023
                elif what == "cancel":
                    one.cancel(one.submit_load(keys))
                else:
                    answers.append([one.reset(RequestFilter(tenant="f*") if what == "match" else None).dropped_blocks])
            assert answers[:1] == answers[1:], (what, numbers)
        assert rig.counts().blocks == obvious.counts().blocks
    finally:
        rig.close()
