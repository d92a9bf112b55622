"""A store that is not available: repeated calls, the pause until a probe succeeds, and what operators see of it."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from kvferry.app.tiers.block_store import StoreUnavailable, TierRefused
from kvferry.app.tiers.breaker import OPEN_AFTER
from tests.harness.dictionary_tier import DictionaryStore
from tests.harness.tier_rig import WAIT_S, Rig, threaded_rig
from tests.harness.tier_slots import keys_of
from tests.harness.waiting import wait_until

DOWN = "the server refuses connections"


def break_down(rig: Rig, store: DictionaryStore, error: Exception) -> None:
    """Have calls fail until the tier stops using its store."""
    store.error = error
    for _ in range(OPEN_AFTER):
        rig.find(keys_of([0]))
    assert rig.counts().unavailable == 1


def test_transient_errors_are_retried_within_the_job(open_rig: Callable[..., Rig], store: DictionaryStore) -> None:
    rig = open_rig()
    for submit in (rig.submit_store, rig.submit_load):
        store.errors = [StoreUnavailable(DOWN)] * (OPEN_AFTER - 1)
        assert list(rig.wait(submit(keys_of([1]))).ok) == [True]
    store.errors = [StoreUnavailable(DOWN)]
    assert rig.find(keys_of([1])) == [True]
    counts = rig.counts()
    assert (counts.retries, counts.outages, counts.failed) == (2 * (OPEN_AFTER - 1) + 1, 0, 0)
    assert not rig.health()


@pytest.mark.parametrize("error", [StoreUnavailable(DOWN, is_transient=False), ConnectionError("no")])
def test_other_errors_are_shown_and_not_retried(
    open_rig: Callable[..., Rig], store: DictionaryStore, error: Exception
) -> None:
    rig = open_rig()
    store.errors = [error]
    assert rig.store(keys_of([1])) == [False]
    assert (rig.counts().retries, rig.counts().failed) == (0, 1)
    rig.find(keys_of([1]))
    text = DOWN if isinstance(error, StoreUnavailable) else "unexpected ConnectionError"
    assert rig.health() == [f"the latest store failed: {text}"]
    assert rig.store(keys_of([1])) == [True]
    assert not rig.health()


def test_no_retry_begins_after_the_time_limit_of_its_job(open_rig: Callable[..., Rig], store: DictionaryStore) -> None:
    rig = open_rig(timeout_s=0.04)
    store.errors = [StoreUnavailable(DOWN)]
    assert rig.find(keys_of([1])) == [False]
    assert rig.counts().retries == 0


def test_retries_end_with_a_canceled_job(open_rig: Callable[..., Rig], store: DictionaryStore) -> None:
    rig = open_rig(threads=1)
    store.gate.clear()
    store.errors = [StoreUnavailable(DOWN)]
    number = rig.submit_load(keys_of([1]))
    assert store.entered.acquire(timeout=WAIT_S)
    rig.tier.cancel(number)
    store.gate.set()
    # The call of the canceled load fails, and the other thread looks up.
    wait_until(lambda: not store.errors, "the failed call", WAIT_S)
    assert rig.find(keys_of([1])) == [False]
    assert rig.counts().retries == 0


def test_store_that_fails_repeatedly_gets_only_probes(open_rig: Callable[..., Rig], store: DictionaryStore) -> None:
    rig = open_rig()
    rig.store(keys_of(range(4)))
    break_down(rig, store, StoreUnavailable(DOWN))
    store.batches.clear()
    before = store.probes
    assert rig.find(keys_of(range(4))) == [False] * 4
    assert rig.load(keys_of(range(4))) == [False] * 4
    assert rig.store(keys_of(range(10, 13))) == [False] * 3
    wait_until(lambda: store.probes > before, "a probe", WAIT_S)
    assert not store.batches
    counts = rig.counts()
    assert (counts.dropped, counts.failed, counts.unavailable, counts.outages) == (3, 4, 1, 1)
    assert rig.health() == [f"{DOWN}; no block is kept or found"]


def test_stores_that_wait_when_the_store_fails_count_as_dropped(
    open_rig: Callable[..., Rig], store: DictionaryStore
) -> None:
    rig = open_rig(threads=1)
    store.gate.clear()
    tried, waiting = rig.submit_store(keys_of([1])), rig.submit_store(keys_of([2, 3]), first_slot=1)
    assert store.entered.acquire(timeout=WAIT_S)
    store.error = StoreUnavailable(DOWN, is_transient=False, needs_probe=True)
    store.gate.set()
    assert not any(rig.wait(tried).ok)
    assert not any(rig.wait(waiting).ok)
    assert (rig.counts().failed, rig.counts().dropped) == (1, 2)


def test_store_that_needs_a_probe_is_not_used_before_it(open_rig: Callable[..., Rig], store: DictionaryStore) -> None:
    rig = open_rig()
    store.errors = [StoreUnavailable(DOWN, is_transient=False, needs_probe=True)]
    before = store.probes
    assert rig.store(keys_of([1])) == [False]
    rig.wait_healthy()
    assert (rig.counts().outages, store.probes) == (1, before + 1)


def test_store_is_used_again_after_a_successful_probe(
    open_rig: Callable[..., Rig], store: DictionaryStore, caplog: pytest.LogCaptureFixture
) -> None:
    rig = open_rig()
    rig.store(keys_of(range(4)))
    with caplog.at_level(logging.WARNING):
        break_down(rig, store, StoreUnavailable(DOWN))
        store.error = None
        rig.wait_healthy()
    assert rig.load(keys_of(range(4))) == [True] * 4
    assert (rig.counts().unavailable, rig.counts().outages) == (0, 1)
    assert [record.getMessage() for record in caplog.records if "probe" in record.getMessage()] == [
        f"tier bench: not used until a probe succeeds: {DOWN}"
    ]
    assert caplog.records[-1].getMessage() == "tier bench: its store answers again"


def test_tier_when_its_store_is_down_starts_and_serves_later(
    open_rig: Callable[..., Rig], store: DictionaryStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.error = StoreUnavailable(DOWN)
    rig = open_rig()
    assert f"tier bench: starts without its store: {DOWN}" in caplog.text
    assert rig.health() == [f"{DOWN}; no block is kept or found"]
    assert rig.find(keys_of([1])) == [False]
    wait_until(lambda: store.probes > 2, "probes", WAIT_S)
    assert (rig.counts().unavailable, rig.counts().outages) == (1, 1)
    store.error = None
    rig.wait_healthy()
    assert (rig.counts().unavailable, rig.counts().outages) == (0, 1)
    assert rig.store(keys_of([1])) == [True]


def test_tier_when_its_first_probe_hangs_starts(
    open_rig: Callable[..., Rig], store: DictionaryStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.probe_gate.clear()
    rig = open_rig(timeout_s=0.02)
    assert rig.health() == ["its store has not answered yet; no block is kept or found"]
    store.probe_gate.set()
    rig.wait_healthy()
    wait_until(lambda: "tier bench: its store answers again" in caplog.messages, "its line", WAIT_S)


def test_wrong_settings_refuse_to_open_and_close_the_store(store: DictionaryStore) -> None:
    store.error = TierRefused("KVFERRY_TIERS: tier bench: password_file=/x: the server refuses the password")
    with pytest.raises(TierRefused, match="the server refuses the password"):
        threaded_rig(store)
    assert store.closed


def test_settings_when_refused_later_make_the_tier_unavailable(
    open_rig: Callable[..., Rig], store: DictionaryStore
) -> None:
    rig = open_rig()
    break_down(rig, store, StoreUnavailable(DOWN))
    store.error = TierRefused("KVFERRY_TIERS: tier bench: password_file=/x: the server refuses the password")
    wait_until(lambda: rig.health() == ["its settings are refused; no block is kept or found"], "seen", WAIT_S)
