"""What engines that share a store see of each other: the same for every store."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvferry.app.tiers.block_format import MAX_ORIGIN_BYTES
from kvferry.core.keys import MAX_ALIASES, MAX_NAME_CHARS, RequestFilter, RequestIdentity
from tests.harness.server_process import paused
from tests.harness.sharing import OWN_SERVERS, SHARING, Sharing, forged, sharing_of
from tests.harness.tier_rig import FINGERPRINT, WAIT_S, Rig
from tests.harness.tier_slots import LARGE, OTHER, changed, key_of, keys_of
from tests.harness.waiting import wait_until

FORGED = [
    b'[{"a": 1}, null, null, []]',
    b"[null, null, null, []]",
    b'["r", ["t"], null, []]',
    b'["r", "tenant", null, []]',
    b'["r", null, 7, []]',
    b'["r", null, null, "aliases"]',
    b'["r", null, null, [["a"]]]',
    b'["r\\ud800", null, null, []]',
    b'["r", null, "\\udfff", []]',
    b'["' + b"r" * (MAX_NAME_CHARS + 1) + b'", null, null, []]',
    b'["r", null, null, [' + b'"a",' * MAX_ALIASES + b'"a"]]',
    b"[" * (MAX_ORIGIN_BYTES // 2),
    b"\xff\xfe",
    b"7",
]


@pytest.fixture
def sharing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Sharing]:
    with closing(sharing_of(request.param, tmp_path)) as made:
        yield made


def each_kind(*long: str) -> pytest.MarkDecorator:
    """Run a test with every store; with those whose servers take seconds only in the long suite."""
    kinds = [pytest.param(kind, marks=pytest.mark.long if kind in long else ()) for kind in SHARING]
    return pytest.mark.parametrize("sharing", kinds, indirect=True)


@each_kind("object")
def test_blocks_outlive_the_engine_that_stored_them(sharing: Sharing) -> None:
    keys = keys_of(range(8))
    first = sharing()
    assert first.store(keys) == [True] * 8
    first.close()
    cold = sharing()
    assert cold.find([*keys, *keys_of([99])]) == [True] * 8 + [False]
    assert cold.load(keys) == [True] * 8
    assert cold.store(keys) == [True] * 8
    assert (cold.counts().stored, cold.counts().present, len(sharing.names())) == (0, 8, 8)


@each_kind("object", "mooncake")
@pytest.mark.parametrize("changed", [{"tensor_parallel": 2}, {"model": "other"}, {"hash_seed": "1"}])
def test_another_fingerprint_finds_and_resets_nothing(sharing: Sharing, changed: dict[str, object]) -> None:
    keys = keys_of(range(3))
    rig, other = sharing(), sharing(fingerprint=FINGERPRINT | changed)
    rig.store(keys)
    assert other.find(keys) == other.load(keys) == [False] * 3
    other.reset()
    other.reset(RequestFilter())
    assert rig.load(keys) == [True] * 3


@each_kind("object", "mooncake")
def test_concurrent_stores_of_one_key_leave_one_whole_block(sharing: Sharing) -> None:
    keys = keys_of(range(8))
    rigs = [sharing() for _ in range(3)]
    for number, one in [(one.submit_store(keys), one) for one in rigs]:
        assert all(one.wait(number).ok)
    # Housekeeping writes temporary files.
    wait_until(lambda: len(sharing.names()) == 8, "one value a block", WAIT_S)
    assert all(one.load(keys) == [True] * 8 for one in rigs)


@each_kind("object")
def test_reset_of_one_engine_holds_for_the_other_at_once(sharing: Sharing) -> None:
    keys = keys_of(range(4))
    first, second = sharing(), sharing()
    assert first.serves(keys)
    assert second.load(keys) == [True] * 4
    assert first.reset().dropped_blocks == 4
    assert second.load(keys) == second.find(keys) == [False] * 4
    assert second.serves(keys)
    assert first.load(keys) == [True] * 4
    wait_until(lambda: first.tier.shared_epoch() == second.tier.shared_epoch() != b"", "the same namespace", WAIT_S)


def reset_and_wait(sharing: Sharing, rig: Rig) -> None:
    """Reset a tier, and wait until the blocks of before are removed."""

    def are_removed() -> bool:
        rig._maintain_now()
        return not sharing.names()

    rig.reset()
    wait_until(are_removed, "old blocks are removed", WAIT_S)


@each_kind("object", "mooncake")
def test_resets_of_engines_at_once_all_end_in_one_epoch(sharing: Sharing) -> None:
    keys = keys_of(range(3))
    rigs = [sharing() for _ in range(3)]
    rigs[0].store(keys)
    numbers = [(rig, rig.submit_reset()) for _ in range(4) for rig in rigs]
    for rig, number in numbers:
        wait_until(lambda rig=rig, number=number: rig.has(number), "the reset", WAIT_S)
    assert all(rig.find(keys) == [False] * 3 for rig in rigs)
    wait_until(lambda: len({rig.shared_epoch() for rig in rigs}) == 1, "one epoch", WAIT_S)


@each_kind("object", "mooncake")
def test_store_that_returns_to_an_earlier_state_serves_no_reset_block(
    sharing: Sharing, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(range(3))
    rig = sharing()
    rig.store(keys)
    earlier = {name: sharing.read(name) for name in [*sharing.names(), *sharing.epochs()]}
    reset_and_wait(sharing, rig)
    # As after a restore from a snapshot, or a failover to a replica that lags behind.
    for name in sharing.epochs():
        sharing.remove(name)
    for name, value in earlier.items():
        sharing.write(name, value)
    assert rig.find(keys) == rig.load(keys) == [False] * 3
    assert sharing().find(keys) == [False] * 3
    assert "starts empty: " in caplog.text


@each_kind("object")
def test_store_that_lost_its_epoch_serves_no_earlier_block(sharing: Sharing, caplog: pytest.LogCaptureFixture) -> None:
    keys = keys_of(range(3))
    rig = sharing()
    rig.store(keys)
    for name in sharing.epochs():
        sharing.remove(name)
    assert rig.load(keys) == [False] * 3
    wait_until(lambda: rig.serves(keys), "blocks of the new epoch", WAIT_S)
    assert sharing().load(keys) == [True] * 3
    assert "starts empty: " in caplog.text


@each_kind("object", "mooncake")
def test_store_begun_before_a_reset_is_never_found(sharing: Sharing) -> None:
    keys = keys_of(range(4))
    first, second = sharing(), sharing()
    second.store(keys)
    late = {name: sharing.read(name) for name in sharing.names()}
    reset_and_wait(sharing, first)
    # The writes of an engine that knew nothing of the reset, after it.
    for name, value in late.items():
        sharing.write(name, value)
    for rig in (first, second, sharing()):
        assert rig.find(keys) == rig.load(keys) == [False] * 4


@each_kind("object", "mooncake")
def test_reset_by_match_begins_a_new_epoch_for_all_engines(sharing: Sharing) -> None:
    keys = keys_of(range(4))
    first, second = sharing(), sharing()
    second.store(keys[:2])
    second.store(keys[2:], OTHER)
    late = {name: sharing.read(name) for name in sharing.names()}
    assert not first.tier.drops_matching
    first.reset(RequestFilter(tenant="fedc*"))
    for name, value in late.items():
        sharing.write(name, value)
    for rig in (second, first, sharing()):
        assert rig.find(keys) == rig.load(keys) == [False] * 4
    assert second.store(keys, OTHER) == first.load(keys) == [True] * 4


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "byte": lambda value, other: changed(value),
    "cut": lambda value, other: value[:-1],
    "no head": lambda value, other: value[:1],
    "longer": lambda value, other: value + b"x",
    "much longer": lambda value, other: value + bytes(100_000),
    "other key": lambda value, other: other,
}


def settled_names(sharing: Sharing) -> list[Any]:
    """The names of two blocks, at a moment at which the tier's housekeeping writes nothing."""
    found: list[Any] = []

    def are_alone() -> bool:
        found[:] = sharing.names()
        return len(found) == 2

    wait_until(are_alone, "two blocks are there, and nothing else", WAIT_S)
    return found


@each_kind("object", "mooncake")
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_block_is_a_miss_is_counted_and_removed(sharing: Sharing, damage: str) -> None:
    # Of one length, since the length is checked too.
    keys = [key_of(3), key_of(3, group=1)]
    rig = sharing()
    rig.store(keys)
    good, bad = settled_names(sharing)
    sharing.write(bad, DAMAGES[damage](sharing.read(bad), sharing.read(good)))
    assert rig.load(keys) == [True, False]
    assert (rig.counts().loaded, rig.counts().corrupt) == (1, 1)
    assert rig.find(keys) == [True, False]
    wait_until(lambda: sharing.names() == [good], "removed", WAIT_S)
    wait_until(lambda: rig.serves(keys), "stored again", WAIT_S)
    assert not rig.health()


each_server = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind == "redis" else pytest.mark.long) for kind in OWN_SERVERS]
)


@each_server
@pytest.mark.parametrize("resets", [False, True])
def test_server_that_hangs_ends_jobs_in_time_and_recovers(kind: str, resets: bool, tmp_path: Path) -> None:
    keys = keys_of(range(4))
    with OWN_SERVERS[kind](tmp_path) as (server, rig):
        wait_until(lambda: rig.serves(keys), "serves", WAIT_S)
        number = next(rig.numbers)
        with paused(server):
            # The time limit of jobs is the client's, which is not here: the calls themselves end.
            assert rig.load(keys) == [False] * 4
            for _ in range(5):
                rig.find(keys)
            rig.wait_for_reason("did not answer in time; no block is kept or found")
            if resets:
                rig.tier.reset(number, None)
            assert rig.find(keys) == [False] * 4
            assert not rig.has(number)
        if resets:
            wait_until(lambda: rig.has(number), "the reset", WAIT_S)
        rig.wait_healthy()
        wait_until(lambda: rig.load(keys) == [not resets] * 4, "as before, or dropped", WAIT_S)
        wait_until(lambda: rig.serves(keys), "serves again", WAIT_S)


@each_server
def test_killed_server_costs_hits_and_is_used_again_when_back(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(LARGE[:16])
    with OWN_SERVERS[kind](tmp_path) as (server, rig):
        wait_until(lambda: rig.serves(keys[:8]), "serves", WAIT_S)
        load, store = rig.submit_load(keys[:8]), rig.submit_store(keys[8:], first_slot=8)
        server.kill()
        for number in (load, store):
            rig.wait(number)
        reason = "cannot be reached; no block is kept or found"
        wait_until(lambda: rig.find(keys) == [False] * 16 and reason in " ".join(rig.health()), reason, WAIT_S)
        assert rig.store(keys) == rig.load(keys) == [False] * 16
        assert rig.counts().unavailable == 1
        server.start()
        rig.wait_healthy()
        assert rig.load(keys[:8]) == [False] * 8, "the server kept nothing"
        wait_until(lambda: rig.serves(keys), "serves again", WAIT_S)
        counts = rig.counts()
        assert (counts.unavailable, counts.outages >= 1, counts.corrupt) == (0, True, 0)
    assert "not used until a probe succeeds" in caplog.text
    assert "Traceback" not in caplog.text
    assert str(server.port) not in caplog.text


@each_kind("object", "mooncake")
def test_dropped_blocks_are_not_found_and_are_removed(sharing: Sharing) -> None:
    keys = keys_of(range(4))
    rig, other = sharing(), sharing()
    rig.store(keys)
    number = rig.drop(keys[:2])
    assert rig.find(keys) == rig.load(keys) == [False, False, True, True]
    wait_until(lambda: rig.has(number), "the drop", WAIT_S)
    # Housekeeping writes temporary files.
    wait_until(lambda: len(sharing.names()) == 2, "removed", WAIT_S)
    assert other.find(keys) == other.load(keys) == [False, False, True, True]
    wait_until(lambda: rig.counts().blocks == 2, "counted", WAIT_S)


@each_kind("object", "mooncake")
def test_block_whose_origin_is_too_long_is_stored_without_it(sharing: Sharing) -> None:
    rig, other = sharing(), sharing()
    assert rig.store(keys_of([1]), RequestIdentity("r" * MAX_ORIGIN_BYTES)) == [True]
    result = other.wait(other.submit_load(keys_of([1])))
    assert (result.ok.tolist(), list(result.origins)) == ([True], [None])


@each_kind("object", "mooncake")
def test_block_whose_origin_no_request_has_is_a_miss(sharing: Sharing, caplog: pytest.LogCaptureFixture) -> None:
    rig, other = sharing(), sharing()
    keys = keys_of(range(len(FORGED)))
    rig.store(keys)
    for name, packed in zip(sharing.names(), FORGED, strict=False):
        sharing.write(name, forged(name, sharing.read(name), packed))
    assert rig.find(keys) == [True] * len(keys)
    assert other.load(keys) == other.find(keys) == [False] * len(keys)
    wait_until(lambda: not any(rig.find(keys)), "removed", WAIT_S)
    assert not [*rig.health(), *other.health()]
    assert "its origin cannot be read" in caplog.text
    assert "its bytes" not in caplog.text


@each_kind("object", "mooncake")
def test_random_hash_seed_shows_that_nothing_is_shared(sharing: Sharing) -> None:
    shared, random = (sharing(fingerprint=FINGERPRINT | {"hash_seed": seed}) for seed in ("5", "random-5"))
    assert not shared.health()
    (reason,) = random.health()
    assert "set PYTHONHASHSEED to the same value for all engines" in reason
