"""What an engine's processes settle about their pool before they map it: what it is called, and whose blocks fit it."""

from __future__ import annotations

import copy
import multiprocessing
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tests.vllm.fabricated as fake
from kvferry.app.engines.identity import DigestCache
from kvferry.app.engines.vllm.connector import KVFerryConnector
from kvferry.app.engines.vllm.copies import RankCopies
from kvferry.app.engines.vllm.fingerprint import engine_name, fingerprint, has_random_hashes, start_digest
from kvferry.app.engines.vllm.layout import read_layout
from kvferry.core.errors import StartError
from kvferry.cuda_ops.pool.backing import SHARED_MEMORY
from tests.harness.resident import resident_bytes
from tests.harness.waiting import wait_until
from tests.vllm.engines import engine_options, transfer_config
from tests.vllm.fabricated import allocate, cache_config, groups_of
from vllm import EngineArgs
from vllm.config import MultiModalConfig, VllmConfig
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_layout import KVCacheLayout

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text()
PINNED_WAIT_S = 120.0
CACHE = cache_config(KVCacheLayout.LBNHC, groups_of(fake.FULL))
LAYOUT = read_layout(CACHE)


@pytest.fixture(scope="module")
def base(llama: Path) -> VllmConfig:
    return EngineArgs(**engine_options(llama), kv_transfer_config=transfer_config()).create_engine_config()


def changed(config: VllmConfig, part: str, **fields: object) -> Any:
    """The configuration with other values in one of its parts."""
    found = copy.copy(config)
    inner = copy.copy(getattr(config, part))
    for name, value in fields.items():
        setattr(inner, name, value)
    setattr(found, part, inner)
    return found


def with_option(config: VllmConfig, **fields: Any) -> Any:
    """The configuration with other values of its own."""
    found = copy.copy(config)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def with_images(config: VllmConfig, **options: Any) -> Any:
    return changed(config, "model_config", multimodal_config=MultiModalConfig(**options))


def about(config: Any) -> dict[str, object]:
    return fingerprint(config, CACHE, LAYOUT, DigestCache(None))


CHANGES: dict[str, tuple[str, Callable[[VllmConfig], Any]]] = {
    "another model of the hub": ("model", lambda config: changed(config, "model_config", model="another/model")),
    "rope by hand": ("overrides", lambda config: changed(config, "model_config", hf_overrides={"rope_theta": 2.0})),
    "quantization": ("quantization", lambda config: changed(config, "model_config", quantization="fp8")),
    "arguments of quantization": (
        "quantization",
        lambda config: changed(config, "model_config", quantization_config={"linear": "fp8_per_tensor"}),
    ),
    "class of the model": (
        "code",
        lambda config: changed(config, "model_config", model_class_overrides={"LlamaForCausalLM": "my.code:Llama"}),
    ),
    "size of images": ("multimodal", lambda config: with_images(config, mm_processor_kwargs={"max_pixels": 4096})),
    "type of the encoder of images": ("multimodal", lambda config: with_images(config, mm_encoder_attn_dtype="fp8")),
    "pruned videos": ("multimodal", lambda config: with_images(config, video_pruning_rate=0.5)),
    "which recurrent states": ("cache_dtype", lambda config: changed(config, "cache_config", mamba_cache_mode="align")),
    "type of the cache": ("cache_dtype", lambda config: changed(config, "cache_config", cache_dtype="fp8")),
    "hash": (
        "hash_algorithm",
        lambda config: changed(config, "cache_config", prefix_caching_hash_algo="sha256_cbor"),
    ),
    "ranks": ("tensor_parallel", lambda config: changed(config, "parallel_config", tensor_parallel_size=2)),
    # Some models (LongRoPE, Llama 4) compute other keys by the longest prompt that is to be served.
    "longest prompt": ("longest", lambda config: changed(config, "model_config", original_max_model_len=9999)),
    "layers kept apart": (
        "cache_dtype",
        lambda config: changed(config, "cache_config", kv_cache_dtype_skip_layers=["sliding_window"]),
    ),
    "type of recurrent states": (
        "cache_dtype",
        lambda config: changed(config, "cache_config", mamba_ssm_cache_dtype="float16"),
    ),
    "backend of attention": (
        "attention",
        lambda config: changed(config, "attention_config", backend="FLASH_ATTN"),
    ),
    "backend of attention, by kind": (
        "attention_by_kind",
        lambda config: changed(config, "attention_config", backend_per_kind={"sliding_window": "FLASH_ATTN"}),
    ),
    "attention to later tokens": (
        "non_causal",
        lambda config: changed(config, "attention_config", use_non_causal=True),
    ),
    "options of a plugin": ("platform", lambda config: with_option(config, additional_config={"rotate": True})),
    "what it is run as": ("runner", lambda config: changed(config, "model_config", convert="embed")),
    "code of the hub": ("code", lambda config: changed(config, "model_config", code_revision="abc")),
    "random weights": ("revision", lambda config: changed(config, "load_config", load_format="dummy")),
}


@pytest.mark.parametrize("name", CHANGES)
def test_fingerprint_when_content_changes_differs_and_so_does_name(name: str, base: VllmConfig) -> None:
    field, change = CHANGES[name]
    before, after = about(base), about(change(base))
    assert before == about(base)
    assert before.get(field) != after[field]
    assert engine_name(base, before) != engine_name(base, after)


def test_fields_of_the_fingerprint_are_those_in_the_docs(base: VllmConfig) -> None:
    section = PAGE.partition("### What a kept pool belongs to")[2].partition("\n## ")[0]
    cells = re.findall(r"^\|.*\|(.*)\|$", section, re.MULTILINE)
    optional = {"attention_by_kind", "non_causal", "platform", "ranks_per_copy"}
    assert set(re.findall(r"`(\w+)`", " ".join(cells))) == {*about(base), *optional}


def test_hash_seed_is_a_digest_in_the_fingerprint_and_not_in_the_name(
    base: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random one would make another pool at each start, and leave them all behind."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    fast = changed(base, "cache_config", prefix_caching_hash_algo="xxhash")
    other_start = changed(fast, "kv_transfer_config", engine_id="another")
    assert [has_random_hashes(config) for config in (base, fast)] == [False, True]
    seeds = [about(config)["hash_seed"] for config in (base, fast, other_start)]
    assert len(set(seeds)) == 3
    assert engine_name(fast, about(fast)) == engine_name(fast, about(other_start))
    assert start_digest(fast) != start_digest(other_start)
    monkeypatch.setenv("PYTHONHASHSEED", "20261121")
    assert not has_random_hashes(fast)
    assert about(fast)["hash_seed"] == about(other_start)["hash_seed"] not in seeds
    assert "20261121" not in str(about(fast))


def test_fingerprint_of_a_copied_model_is_the_same(base: VllmConfig, tmp_path: Path) -> None:
    model = Path(base.model_config.model)
    copied = Path(shutil.copytree(model, tmp_path / "copy"))
    weights = copied / "model.safetensors"
    about_copy = about(changed(base, "model_config", model=str(copied)))
    assert about_copy == about(base)
    status, data = weights.stat(), bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = about(changed(base, "model_config", model=str(copied)))
    assert {name for name in after if after[name] != about_copy[name]} == {"revision"}


def test_revision_when_weights_are_not_in_the_folder_is_none(base: VllmConfig) -> None:
    for load_format in ("ipc_cache", "tensorizer", "a-plugin"):
        assert about(changed(base, "load_config", load_format=load_format))["revision"] is None


def test_fingerprint_of_a_temporary_pool_reads_no_weights(base: VllmConfig) -> None:
    assert fingerprint(base, CACHE, LAYOUT, None)["revision"] is None


def revision_in_a_process(config: Any, tell: Any) -> None:
    """In a process of vLLM's own, which was started before it loaded the model."""
    before = fingerprint(config, CACHE, LAYOUT, DigestCache(None))["revision"]
    weights = Path(config.model_config.model) / "model.safetensors"
    weights.write_bytes(weights.read_bytes())
    after = [fingerprint(config, CACHE, LAYOUT, DigestCache(None))["revision"] for _ in range(2)]
    tell.put((before, after))


def test_revision_when_weights_change_after_start_is_of_this_start(base: VllmConfig, tmp_path: Path) -> None:
    model = Path(shutil.copytree(base.model_config.model, tmp_path / "copy"))
    # The kernel counts the start of a process in ticks of 10 ms, rounded down.
    copied_s = max(path.stat().st_ctime for path in model.iterdir())
    wait_until(lambda: time.time() > copied_s + 0.1, "the copy is older than the worker", PINNED_WAIT_S)
    context = multiprocessing.get_context("spawn")
    tell = context.Queue()
    config = changed(base, "model_config", model=str(model))
    worker = context.Process(target=revision_in_a_process, args=(config, tell))
    worker.start()
    try:
        before, after = tell.get(timeout=PINNED_WAIT_S)
        assert str(before).startswith("files-")
        assert after == [f"start-{start_digest(config)}"] * 2
    finally:
        worker.join(PINNED_WAIT_S)


def start(config: Any, *roles: KVConnectorRole) -> None:
    """Create an engine's connectors in this order, until one raises."""
    made = []
    try:
        for role in roles:
            made.append(connector := KVFerryConnector(config, role, CACHE))
            if role is KVConnectorRole.WORKER:
                connector.register_kv_caches(allocate(CACHE))
    finally:
        for one in made:
            one.shutdown()


def with_pool(config: VllmConfig, **extra: object) -> Any:
    given = {"pool_bytes": "8MiB", "port": 0, "store_mode": "eager", **extra}
    return changed(config, "kv_transfer_config", kv_connector_extra_config=given)


def kept(folder: Path) -> dict[str, object]:
    return {"pool_kind": "file", "pool_path": str(folder / "pool")}


def tiers(folder: Path) -> dict[str, object]:
    return {"tiers": [{"type": "fs", "path": str(folder / "tier"), "max_bytes": "8MiB"}]}


def where_a_bound_rank_copies(config: Any, cpus: set[int], tell: Any) -> None:
    """In a process of its own: what vLLM's CPU backend does before it creates a worker's connector."""
    os.sched_setaffinity(0, cpus)
    connector = KVFerryConnector(config, KVConnectorRole.WORKER, CACHE)
    connector.register_kv_caches(allocate(CACHE))
    threads = [each.native_id for each in threading.enumerate() if each.name in ("kvferry-copy", "kvferry-seal")]
    tell.put([os.sched_getaffinity(thread) for thread in threads])
    connector.shutdown()


def test_rank_copies_on_cpus_without_compute(base: VllmConfig, tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    (first, *others) = sorted(allowed)
    context = multiprocessing.get_context("spawn")
    tell = context.Queue()
    config = with_pool(base, **kept(tmp_path))
    rank = context.Process(target=where_a_bound_rank_copies, args=(config, {first}, tell))
    rank.start()
    try:
        assert tell.get(timeout=PINNED_WAIT_S) == [set(others) or allowed] * 2
    finally:
        rank.join(PINNED_WAIT_S)


def test_private_pool_is_allocated_before_the_first_request(base: VllmConfig) -> None:
    """Requests would otherwise wait for the kernel to give each page when it is first stored to."""
    connector = KVFerryConnector(with_pool(base, pool_bytes="64MiB"), KVConnectorRole.WORKER, CACHE)
    try:
        connector.register_kv_caches(allocate(CACHE))
        worker = connector._worker
        assert worker is not None
        assert isinstance(worker._copies, RankCopies)
        extent_bytes = (64 << 20) // 8
        assert resident_bytes(worker._copies, 0) >= 0.9 * extent_bytes
    finally:
        connector.shutdown()


BOTH = (KVConnectorRole.WORKER, KVConnectorRole.SCHEDULER)


@pytest.mark.parametrize("extra", [kept, tiers])
def test_unknown_weights_with_a_persistent_pool_are_refused(
    base: VllmConfig, tmp_path: Path, extra: Callable[[Path], dict[str, object]]
) -> None:
    streamed = changed(with_pool(base, **extra(tmp_path)), "model_config", model_weights="s3://bucket/model")
    trained = copy.copy(with_pool(base, **extra(tmp_path)))
    trained.weight_transfer_config = WeightTransferConfig()
    for config in (streamed, trained):
        with pytest.raises(StartError, match=r"the revision of the model .*is unknown.*local folder"):
            start(config, *BOTH)
    start(with_pool(base, **extra(tmp_path)), *BOTH)
    assert not [path for path in SHARED_MEMORY.glob("kvferry-*") if start_digest(base) in path.name]


@pytest.mark.parametrize("extra", [kept, tiers])
def test_engine_core_without_access_to_the_pool_is_refused(
    base: VllmConfig, tmp_path: Path, extra: Callable[[Path], dict[str, object]]
) -> None:
    """As where they are on several hosts."""
    with pytest.raises(StartError, match=r"does not exist here: .* on one host, .*; remove tiers and set pool_kind"):
        start(with_pool(base, **extra(tmp_path)), KVConnectorRole.SCHEDULER)
