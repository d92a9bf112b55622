"""What every store does as a tier when it is full, damaged, unreachable or hangs, and after a restart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvferry.core.keys import RequestFilter
from tests.harness.mounts import disk
from tests.harness.store_benches import SERVER_BENCHES, STORE_BENCHES
from tests.harness.tier_rig import WAIT_S, Rig, StoreBench
from tests.harness.tier_slots import LARGE, key_of, keys_of
from tests.harness.waiting import wait_until


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.long if name in SERVER_BENCHES else ()) for name in STORE_BENCHES]
)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreBench]:
    with STORE_BENCHES[request.param](tmp_path) as made:
        yield made


@pytest.fixture(params=[name for name in STORE_BENCHES if name not in SERVER_BENCHES])
def limited(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreBench]:
    """A store with a limit in bytes."""
    with STORE_BENCHES[request.param](tmp_path) as made:
        yield made


@pytest.fixture(params=["dictionary", "files", "shared files"])
def hanging(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StoreBench]:
    """A store that can hang: skipped where that takes a disk which a test may not make."""
    with ExitStack() as stack:
        path = tmp_path if request.param == "dictionary" else stack.enter_context(disk(tmp_path / "disk"))
        yield stack.enter_context(STORE_BENCHES[request.param](path))


def submit_hanging(rig: Rig) -> int:
    """Submit a store of blocks to a store that hangs, from slot 8 on, and wait until it has hung for too long."""
    number = rig.submit_store(keys_of(range(10, 14)), first_slot=8)
    wait_until(lambda: any("threads have waited" in reason for reason in rig.health()), "a hung thread", WAIT_S)
    return number


def must_return(call: Callable[[], object]) -> None:
    """Call on another thread, and fail if the call has not returned while the store hangs."""
    caller = threading.Thread(target=call, daemon=True)
    caller.start()
    caller.join(WAIT_S)
    assert not caller.is_alive(), "a call waits for a store that hangs"


def test_blocks_are_found_after_a_restart_by_the_same_model_only(bench: StoreBench) -> None:
    """LMCache#4492, vllm#49261, vllm#42125: another model of the same name found old blocks."""
    keys = keys_of(range(6))
    bench.open().store(keys)
    other = bench.open(fingerprint={"model": "other"})
    assert other.find(keys) == [False] * 6
    assert other.load(keys) == [False] * 6
    other.store(keys[:2])
    again = bench.open()
    assert again.find(keys) == [True] * 6
    assert again.load(keys) == [True] * 6


def test_store_when_full_keeps_to_its_limit(limited: StoreBench) -> None:
    limit = 4_000_000
    rig = limited.open(max_bytes=limit)
    keys = keys_of(LARGE[:14])
    for key in keys:
        assert rig.store([key]) == [True]
        assert rig.counts().bytes <= limit
    counts = rig.counts()
    assert (counts.max_bytes, counts.stored) == (limit, 14)
    assert counts.evicted == counts.stored - counts.blocks > 0
    loaded = rig.load(keys)
    assert loaded[-1]
    assert loaded.count(True) == counts.blocks
    assert not rig.health()


def test_changed_block_is_a_miss_and_can_be_stored_again(bench: StoreBench) -> None:
    """LMCache 0.5.6: overwritten bytes in a disk block came back as a hit."""
    rig = bench.open()
    rig.store(keys_of(range(4)))
    bench.spoil(key_of(1))
    assert rig.load(keys_of(range(4))) == [True, False, True, True]
    assert (rig.counts().corrupt, rig.counts().loaded) == (1, 3)
    assert rig.find(keys_of(range(4))) == [True, False, True, True]
    wait_until(lambda: rig.store(keys_of([1])) == [True], "stored again", WAIT_S)
    assert rig.load(keys_of(range(4))) == [True] * 4
    assert not rig.health()


def test_store_when_down_misses_at_once_and_recovers(bench: StoreBench, caplog: pytest.LogCaptureFixture) -> None:
    rig = bench.open()
    keys, new = keys_of(range(4)), keys_of(range(10, 12))
    rig.store(keys)
    with bench.down():
        rig.wait_unavailable(keys)
        assert rig.load(keys) == [False] * 4
        assert rig.store(new) == [False] * 2
        assert rig.counts().dropped == 2
        assert "secret" not in " ".join(rig.health()) + caplog.text
    rig.wait_healthy()
    assert rig.load(keys) == [True] * 4
    assert rig.store(new) == [True] * 2
    assert "again" in caplog.text


def test_reset_while_down_serves_nothing_until_it_is_done(bench: StoreBench) -> None:
    rig = bench.open()
    keys = keys_of(range(4))
    rig.store(keys)
    with bench.down():
        rig.wait_unavailable(keys)
        rig.tier.reset(number := next(rig.numbers), RequestFilter(request="*"))
        assert rig.find(keys) == [False] * 4
    wait_until(lambda: rig.has(number), "the reset", WAIT_S)
    rig.wait_healthy()
    assert rig.find(keys) == [False] * 4
    assert bench.open().find(keys) == [False] * 4


def test_every_block_is_counted_once(bench: StoreBench) -> None:
    rig = bench.open()
    num_stores = num_loads = 0
    for first in (0, 2):
        rig.store(keys_of(range(first, first + 4)))
        num_stores += 4
    bench.spoil(key_of(3))
    for first in (0, 4):
        rig.load(keys_of(range(first, first + 4)))
        num_loads += 4
    with bench.down():
        for number in range(20, 27):
            rig.store(keys_of([number]))
            rig.load(keys_of([number, 0]))
            num_stores, num_loads = num_stores + 1, num_loads + 2
    counts = rig.counts()
    assert (counts.stored >= 6, counts.present, counts.corrupt, counts.missing >= 2) == (True, 2, 1, True)
    assert counts.loaded >= 5
    stores = counts.stored + counts.present + counts.dropped
    loads = counts.loaded + counts.missing + counts.corrupt
    assert stores + loads + counts.failed == num_stores + num_loads


def test_hung_store_delays_no_call_and_touches_no_canceled_slot(hanging: StoreBench) -> None:
    """dynamo#5012: storage hung on an overlay file system."""
    rig = hanging.open(timeout_s=0.2)
    keys = keys_of(range(4))
    rig.store(keys)
    with hanging.hung():
        number = submit_hanging(rig)
        load = rig.submit_load(keys)
        must_return(lambda: (rig.tier.cancel(number), rig.tier.cancel(load)))
        rig.slots.wipe()
        must_return(lambda: (rig.tier.look_up(next(rig.numbers), keys), rig.submit_store(keys_of([30]), first_slot=5)))
        must_return(lambda: (rig.poll(), rig.tier.health(), rig.tier.counts(), rig.drop(keys_of([40]))))
    rig.wait_healthy()
    assert number not in rig.results
    assert all(rig.slots.is_wiped(slot) for slot in (0, 1, 2, 3, 8, 9, 10, 11))
    wait_until(lambda: rig.load(keys) == [True] * 4, "served again", WAIT_S)


def test_block_dropped_while_it_is_stored_is_not_found(hanging: StoreBench) -> None:
    rig = hanging.open(timeout_s=0.2)
    with hanging.hung():
        number = submit_hanging(rig)
        must_return(lambda: rig.drop(keys_of([11])))
    assert list(rig.wait(number).ok) == [True, False, True, True]
    rig.wait_healthy()
    assert rig.find(keys_of(range(10, 14))) == [True, False, True, True]


def test_reset_while_hung_is_reported_and_serves_nothing(hanging: StoreBench) -> None:
    rig = hanging.open(timeout_s=0.2)
    keys = keys_of(range(4))
    rig.store(keys)
    with hanging.hung():
        stored = submit_hanging(rig)
        number = next(rig.numbers)
        must_return(lambda: rig.tier.reset(number, None))
        assert not any(rig.wait(stored).ok)
        assert rig.find(keys) == [False] * 4
        wait_until(lambda: any("a reset has been under way" in one for one in rig.health()), "reported", WAIT_S)
        assert not rig.has(number)
    wait_until(lambda: rig.has(number), "the reset", WAIT_S)
    rig.wait_healthy()
    assert rig.find([*keys, *keys_of(range(10, 14))]) == [False] * 8
    assert rig.counts().blocks == 0


def test_close_while_hung_returns_and_touches_no_slot(hanging: StoreBench) -> None:
    rig = hanging.open(timeout_s=0.2)
    keys = keys_of(range(4))
    rig.store(keys)
    with hanging.hung():
        submit_hanging(rig)
        rig.submit_load(keys)
        must_return(lambda: rig.tier.close(0.05))
        rig.slots.wipe()
    rig.close()
    assert all(rig.slots.is_wiped(slot) for slot in range(16))
    assert hanging.open().load(keys) == [True] * 4
