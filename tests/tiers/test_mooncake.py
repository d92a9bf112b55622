"""A Mooncake tier: several engines on one store, states that are lost or late, and damaged objects."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvferry.app.settings.tiers import read_tiers
from kvferry.app.tiers.block_store import TierRefused
from kvferry.app.tiers.opening import check_tiers
from tests.harness.mooncake_server import Objects, mooncake_rig, program, shared_store
from tests.harness.tier_rig import WAIT_S, Rig
from tests.harness.tier_slots import keys_of
from tests.harness.waiting import wait_until


@pytest.fixture
def rig_of(request: pytest.FixtureRequest) -> Iterator[Callable[..., Rig]]:
    """Opens tiers on the shared store that share a prefix; they are closed with the test."""
    master, _ = shared_store()
    rigs: list[Rig] = []
    prefix = f"test-{abs(hash(request.node.nodeid)):x}-{id(rigs):x}"

    def open_rig(**settings: Any) -> Rig:
        rigs.append(mooncake_rig(master, **{"prefix": prefix} | settings))
        return rigs[-1]

    yield open_rig
    for rig in rigs:
        rig.close()


@pytest.fixture
def objects() -> Objects:
    return shared_store()[1]


def names_of(rig: Rig, part: str = "/b/") -> list[str]:
    """The names of the objects of a rig's namespace that have this in them."""
    return [name for name in shared_store()[0].names(part) if name.startswith(rig.tier._store._folder)]


# --- several engines ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_resets_of_two_engines_at_once_all_hold(rig_of: Callable[..., Rig]) -> None:
    rigs = [rig_of(), rig_of()]
    rigs[0].store(keys_of(range(12)))

    def reset(number: int) -> None:
        for _ in range(6):
            rigs[number].reset()

    threads = [threading.Thread(target=reset, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert rigs[0].load(keys_of(range(12))) == rigs[1].load(keys_of(range(12))) == [False] * 12
    assert rigs[0].shared_epoch() == rigs[1].shared_epoch()


# --- the epoch ------------------------------------------------------------------------------------------------------


def test_store_that_lost_its_epoch_serves_no_earlier_block(
    rig_of: Callable[..., Rig], objects: Objects, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(range(3))
    rig = rig_of()
    rig.store(keys)
    objects.remove(*names_of(rig, "/epoch"))
    assert rig.load(keys) == [False] * 3
    assert rig.serves(keys_of(range(3)))
    assert rig_of().load(keys) == [True] * 3
    rig.reset()
    assert rig_of().find(keys) == rig.find(keys) == [False] * 3
    assert "starts empty: the store has no epoch of its namespace" in caplog.text


@pytest.mark.long
def test_store_that_returns_to_an_earlier_state_serves_no_reset_block(
    rig_of: Callable[..., Rig], objects: Objects
) -> None:
    keys = keys_of(range(3))
    rig = rig_of()
    rig.store(keys)
    earlier = {name: objects.get(name) for part in ("/b/", "/epoch") for name in names_of(rig, part)}
    rig.reset()
    wait_until(lambda: not names_of(rig), "old blocks are removed", WAIT_S)
    # As a master that is restored from a snapshot.
    objects.remove(*names_of(rig, "/epoch"))
    for name, value in earlier.items():
        objects.put(name, value, pinned="/b/" not in name)
    assert rig.find(keys) == rig.load(keys) == [False] * 3
    assert rig_of().find(keys) == [False] * 3


# --- objects --------------------------------------------------------------------------------------------------------


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"master": "http://db:50051"}, "master=http://db:50051 must be HOST:PORT"),
        ({"master": "db:0"}, "must be HOST:PORT"),
        ({"master": 5}, "must be HOST:PORT"),
        ({"metadata": "redis://:hunter2@db:6379"}, "metadata=*** must not contain a user or password"),
        ({"metadata": "db:2379"}, "must be P2PHANDSHAKE, http://HOST:PORT/metadata"),
        ({"protocol": "ib"}, "protocol=ib must be 'tcp' or 'rdma'"),
        ({"devices": "mlx5_0"}, "devices needs protocol=rdma"),
        ({"protocol": "rdma", "devices": "mlx5 0"}, "must be names of RDMA devices"),
        ({"segment_bytes": "1MiB"}, "segment_bytes=1048576 must be 16777216 or more"),
        ({"replicas": 0}, "replicas=0 must be"),
        ({"max_bytes": "1GiB"}, "max_bytes cannot be enforced in a store that others write to: set segment_bytes"),
        ({"ttl_s": 60}, "ttl_s is no limit of this store"),
        ({"prefix": "a*"}, "prefix=a* must be 1 to 64 letters"),
        ({"global_segment_size": 1}, "global_segment_size is no field of it"),
    ],
)
def test_wrong_settings_are_refused_without_passwords(change: dict[str, object], words: str) -> None:
    program()
    with pytest.raises(ValueError, match="tier 1") as caught:
        read_tiers([{"type": "mooncake", "master": "db:50051"} | change])
    assert words in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_missing_libraries_refuse_start_naming_their_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> None:
        if name != "libnuma.so.1":
            raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", load)
    entries = read_tiers([{"type": "mooncake", "master": "127.0.0.1:50051", "segment_bytes": "64MiB"}])
    with pytest.raises(TierRefused, match=r"KVFERRY_TIERS: tier mooncake: .*apt-get install libibverbs1 libcurl4$"):
        check_tiers(entries, slot_bytes=None)
