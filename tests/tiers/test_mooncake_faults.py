"""A Mooncake tier whose master, hosts or client die, hang, fill up or are not there."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import psutil
import pytest

from kvferry.app.tiers.block_store import TierRefused
from tests.harness.commands import running_script
from tests.harness.mooncake_server import SOON_LOST_S, mooncake_rig, mooncake_store
from tests.harness.server_process import stopped
from tests.harness.tier_rig import SHORT, WAIT_S, Rig
from tests.harness.tier_slots import LARGE, keys_of
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.long

KEYS = keys_of(range(4))
SEGMENT = {"segment_bytes": "64MiB"}


def client_of(rig: Rig) -> psutil.Process:
    return psutil.Process(rig.tier._store._client._process.pid)


def test_reset_holds_after_the_master_lost_it(tmp_path: Path) -> None:
    with (
        mooncake_store(tmp_path) as (master, _),
        # Nothing hangs here: no call has to end by a time limit, which a busy machine exceeds.
        closing(mooncake_rig(master, prefix="lost")) as rig,
        closing(mooncake_rig(master, prefix="lost")) as other,
    ):
        assert rig.serves(KEYS)
        assert other.load(KEYS) == [True] * 4
        rig.reset()
        master.kill()
        master.start()
        for one in (rig, other):
            # Health last: housekeeping that found no space may have stopped the tier while this store succeeded.
            wait_until(lambda: one.store(keys_of([9])) == [True] and not one.health(), "stores", WAIT_S)  # noqa: B023
            assert one.find(KEYS) == one.load(KEYS) == [False] * 4
        assert other.serves(KEYS)
        assert rig.load(KEYS) == [True] * 4


def test_master_down_at_start_is_used_once_it_is_up(tmp_path: Path) -> None:
    with mooncake_store(tmp_path) as (master, _):
        master.kill()
        with closing(mooncake_rig(master, is_up=False, **SHORT)) as rig:
            rig.wait_for_reason("the master cannot be reached")
            assert rig.store(KEYS) == [False] * 4
            master.start()
            wait_until(lambda: not rig.health() and rig.serves(KEYS), "serves", WAIT_S)


def test_device_that_does_not_exist_refuses_start(tmp_path: Path) -> None:
    with mooncake_store(tmp_path) as (master, _), pytest.raises(TierRefused, match="the client cannot be set up: see"):
        mooncake_rig(master, protocol="rdma", devices="mlx5_99")


def test_store_without_memory_keeps_nothing_until_there_is_some(tmp_path: Path) -> None:
    with mooncake_store(tmp_path, lost_s=SOON_LOST_S) as (master, node):
        node.kill()
        wait_until(lambda: not master.names(), "forgotten", WAIT_S)
        with closing(mooncake_rig(master, is_up=False, **SHORT)) as rig:
            rig.wait_for_reason("the store has no space: no host gives it memory, or all of it is in use")
            assert rig.store(KEYS) == [False] * 4
            node.start()
            rig.wait_healthy()
            assert rig.serves(KEYS)


def test_full_store_evicts_and_serves(tmp_path: Path) -> None:
    with mooncake_store(tmp_path, num_bytes=32 << 20) as (master, _), closing(mooncake_rig(master)) as rig:
        keys = keys_of(LARGE[:80])
        for key in keys:
            # A block that finds no space makes the store evict some.
            wait_until(lambda: rig.store([key]) == [True], "stored", WAIT_S)  # noqa: B023
        counts = rig.counts()
        assert (counts.failed, counts.corrupt, counts.unavailable) == (0, 0, 0)
        found = rig.load(keys[-8:])
        assert any(found)
        assert not all(rig.find(keys))
        rig.wait_healthy()
        rig.reset()
        assert rig.find(keys) == [False] * 80
        wait_until(lambda: rig.serves(keys[:4]), "serves", WAIT_S)


def test_host_that_dies_costs_its_blocks_and_no_reset_is_lost(tmp_path: Path) -> None:
    given = {"prefix": "hosts", **SEGMENT}
    with (
        mooncake_store(tmp_path, lost_s=SOON_LOST_S) as (master, node),
        closing(mooncake_rig(master, **given)) as other,
    ):
        first = mooncake_rig(master, **given)
        keys = keys_of(range(16))
        assert first.serves(keys)
        first.reset()
        assert first.serves(keys)
        client_of(first).kill()
        node.kill()
        first.close()
        left = other.load(keys)
        with closing(mooncake_rig(master, **given)) as later:
            wait_until(lambda: later.find(keys) == other.find(keys), "hosts are forgotten", WAIT_S)
            for one in (other, later):
                wait_until(lambda: not one.health() and one.serves(keys), "serves", WAIT_S)  # noqa: B023
            # A copy of the epoch was on each host, so that it was not lost.
            assert other.shared_epoch().startswith(b"2-")
            assert later.shared_epoch() == other.shared_epoch()
        assert other.counts().corrupt == 0
        assert left.count(True) < 16


def test_client_that_is_killed_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with mooncake_store(tmp_path) as (master, _), closing(mooncake_rig(master, **SHORT)) as rig:
        wait_until(lambda: rig.serves(KEYS), "serves", WAIT_S)
        client_of(rig).kill()
        wait_until(lambda: rig.load(KEYS) == [True] * 4 and not rig.health(), "serves", WAIT_S)
        client = client_of(rig)
        rig.close()
        assert not client.is_running()
    assert "the client's process is started again" in caplog.text


def test_reset_by_another_holds_for_a_client_that_was_paused(tmp_path: Path) -> None:
    given = {"prefix": "paused", **SHORT, "timeout_s": 1.0}
    with (
        mooncake_store(tmp_path) as (master, _),
        closing(mooncake_rig(master, num_slots=32, **given)) as rig,
        closing(mooncake_rig(master, **given)) as other,
    ):
        wait_until(lambda: rig.serves(KEYS), "serves", WAIT_S)
        new = keys_of(LARGE[:4])
        with stopped([client_of(rig).pid]):
            number, load = rig.submit_store(new, first_slot=8), rig.submit_load(KEYS)
            assert not any(rig.wait(number).ok)
            assert not any(rig.wait(load).ok)
            rig.slots.wipe()
            other.reset()
            assert other.find(KEYS) == [False] * 4
            rig.wait_for_reason("the client did not answer in time")
        rig.wait_healthy()
        # Late answers of the client have changed no slot.
        assert all(rig.slots.is_wiped(slot) for slot in range(16))
        for one in (rig, other):
            assert one.find([*KEYS, *new]) == one.load([*KEYS, *new]) == [False] * 8
        wait_until(lambda: rig.serves(KEYS), "serves", WAIT_S)
        wait_until(lambda: other.load(KEYS) == [True] * 4, "the other loads", WAIT_S)


def test_client_ends_with_an_engine_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from tests.harness.mooncake_server import mooncake_rig\n"
        "rig = mooncake_rig(sys.argv[1], segment_bytes='64MiB')\n"
        "print(rig.tier._store._client._process.pid, flush=True)\n"
        "time.sleep(1000)\n"
    )
    with mooncake_store(tmp_path) as (master, _):
        with running_script(program, master.address) as (_, out):
            client = psutil.Process(int(out.readline()))
        wait_until(lambda: not client.is_running() or client.status() == psutil.STATUS_ZOMBIE, "the end", WAIT_S)
