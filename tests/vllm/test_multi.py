"""Beside another connector: vLLM's `MultiConnector` asks both, loads from one and stores with both."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

import kvferry.app.engines.vllm as entry
from kvferry.app.engines.vllm.metadata import RankHandshake
from kvferry.app.engines.vllm.metrics import KVFerryPromMetrics
from kvferry.core.transfers import Direction, TransferJob
from tests.harness.waiting import DEADLINE_S
from tests.vllm.engines import InProcess, in_process, transfer_config
from tests.vllm.test_in_process import assert_nothing_left
from tests.vllm.test_trouble import copying  # noqa: F401 - a fixture
from tests.vllm.workload import Answer, assert_same, shared_prefixes
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

PROMPTS = shared_prefixes(60, seed=41)
FEW = PROMPTS[:10]
WHOLE_PROMPTS = 4096
"""Tokens a step: vLLM's example connector saves a prompt when it is first scheduled, as if all of it were computed."""


class BesideAnother(InProcess):
    """An engine whose connector is one of several."""

    @property
    def connector(self) -> Any:
        return self.vllm_scheduler.connector.sub_connectors[self.place]

    @property
    def copies(self) -> Any:
        return self.connector_of_worker._the_worker()._copies

    @property
    def connector_of_worker(self) -> Any:
        return get_kv_transfer_group().sub_connectors[self.place]

    place = 0


@pytest.fixture(params=["first", "second"])
def engine(llama: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BesideAnother]:
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "example")},
    }
    ours = transfer_config(load_decision="always")
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [ours, example] if request.param == "first" else [example, ours]},
    }
    options = {"disable_hybrid_kv_cache_manager": True, "max_num_batched_tokens": WHOLE_PROMPTS}
    with in_process(llama, multi, **options) as engine:
        engine = BesideAnother(engine.llm)
        engine.place = 0 if request.param == "first" else 1
        yield engine
        assert_nothing_left(engine)


def _fail_loads(job: TransferJob) -> None:
    if job.direction is Direction.LOAD:
        raise OSError("injected")


def test_answers_with_two_connectors_are_the_same(
    engine: BesideAnother,
    truth: list[Answer],
    copying: Any,  # noqa: F811
) -> None:
    assert_same(engine.generate(PROMPTS), truth)
    first = engine.settle()
    assert first.store.stored > 0
    engine.forget_device()
    assert_same(engine.generate(PROMPTS), truth)
    after = engine.settle()
    hits = engine.metric("vllm:external_prefix_cache_hits")
    if engine.place == 0:
        assert hits == after.prompt_tokens.host_hit > 0
        assert after.load.failed == 0
        copying(_fail_loads)
        engine.forget_device()
        assert_same(engine.generate(FEW), truth[: len(FEW)])
        assert engine.settle().load.failed > 0
    else:
        # The example has the prompts that were asked before, whole: it is asked first, and ours are released.
        assert hits > after.prompt_tokens.host_hit
        assert after.load.failed == 0


def test_statistics_with_two_connectors_reach_vllm(engine: BesideAnother) -> None:
    engine.generate(PROMPTS[:10])
    engine.settle()
    engine.generate(PROMPTS[:1])
    assert engine.metric("vllm:kvferry_stored_bytes") == engine.settle().store.bytes > 0


def test_handshake_with_two_connectors_is_left_to_the_other(engine: BesideAnother) -> None:
    """vLLM takes the first connector's that has one, for all of them: NIXL refuses to start with another's."""
    engine.connector_of_worker._handshake = RankHandshake()
    assert get_kv_transfer_group().get_handshake_metadata() is None
    assert httpx.get(f"{engine.connector._the_core().admin_url}/healthz", timeout=DEADLINE_S).status_code == 200


def test_vllm_reset_with_two_connectors_resets_the_pool(engine: BesideAnother) -> None:
    engine.generate(PROMPTS[:10])
    assert engine.settle().pool.ready > 0
    assert engine.vllm_scheduler.reset_prefix_cache(reset_connector=True) is not None
    assert engine.settle().pool.ready == 0


def test_metrics_that_another_connector_has_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A name that is registered twice would end the server."""
    registry = CollectorRegistry()
    types: dict[Any, Any] = {kind: partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    theirs = Counter("vllm:kv_offload_load_bytes", "bytes", ["engine"], registry=registry)
    caplog.set_level(logging.INFO)
    ours = KVFerryPromMetrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"]})
    ours.observe({"loaded_bytes": 5.0, "stored_bytes": 3.0, "pool_slots": 7.0})
    values = {
        name: registry.get_sample_value(f"vllm:{name}", {"engine": "0"})
        for name in ("kvferry_loaded_bytes_total", "kvferry_pool_slots")
    }
    assert values == {"kvferry_loaded_bytes_total": 5.0, "kvferry_pool_slots": 7.0}
    assert registry.get_sample_value("vllm:kv_offload_store_bytes_total", {"engine": "0"}) == 3.0
    assert next(iter(theirs.collect())).samples == []
    assert caplog.messages == ["metric left out, another connector has it: vllm:kv_offload_load_bytes"]


def test_statistics_in_another_process_are_decoded() -> None:
    """The API server gets them as plain numbers, and looks the connector up by its name alone."""
    assert entry.KVFerryConnector.__name__ == entry.CONNECTOR
    stats = MultiConnector.build_kv_connector_stats({entry.CONNECTOR: {"stored_bytes": 5.0}})
    assert stats.reduce() == {entry.CONNECTOR: {"stored_bytes": 5.0}}
