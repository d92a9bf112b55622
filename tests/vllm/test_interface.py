"""The installed vLLM as the connector's table of parts says it is, and vLLM's calls as the connector takes them."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

import vllm
from kvferry.app.engines.vllm import versions
from kvferry.app.engines.vllm.connector import KVFerryConnector
from kvferry.app.engines.vllm.layout import LAYOUTS, read_layout
from tests.vllm import fabricated as fake
from tests.vllm.fabricated import BLOCK, cache_config, groups_of
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.v1.kv_cache_layout import KVCacheLayout

HOOKS = sorted(
    name
    for base in (KVConnectorBase_V1, SupportsHMA)
    for name, value in vars(base).items()
    if name in vars(KVFerryConnector) and inspect.isfunction(getattr(value, "__func__", value))
)


def parameters_of(owner: type, name: str) -> list[str]:
    return list(inspect.signature(getattr(owner, name)).parameters)


def test_parts_when_compared_with_the_installed_vllm_are_all_there() -> None:
    assert list(versions.missing_parts()) == []
    assert versions.is_tested(vllm.__version__)


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_parameters_are_those_of_vllms_hook(hook: str) -> None:
    base = KVConnectorBase_V1 if hasattr(KVConnectorBase_V1, hook) else SupportsHMA
    assert parameters_of(KVFerryConnector, hook) == parameters_of(base, hook)


def test_hooks_when_listed_are_those_that_the_table_requires() -> None:
    listed = {member.partition("(")[0] for part in versions.PARTS for member in part.members}
    # Since 0.32 and 0.33, and not needed.
    later = {"get_external_cache_hit_sources", "supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
    assert set(HOOKS) - later <= listed


def test_memory_layouts_of_vllm_are_all_listed() -> None:
    assert set(LAYOUTS) == {layout.name for layout in KVCacheLayout}


def config_with(**fields: Any) -> SimpleNamespace:
    """As much of vLLM's configuration as block hashes depend on."""
    cache = {"block_size": 128, "enable_prefix_caching": True, "prefix_match_unit": None, **fields}
    return SimpleNamespace(
        cache_config=SimpleNamespace(**cache),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
        kv_transfer_config=object(),
    )


@pytest.mark.parametrize(
    ("specs", "unit", "expected"),
    [([fake.FULL], None, BLOCK), ([fake.FULL, fake.WINDOW], None, BLOCK), ([fake.MAMBA, fake.FULL], 16, 16)],
)
def test_hash_blocks_when_vllm_does_not_name_them_are_resolved(specs: Any, unit: int | None, expected: int) -> None:
    """Before 0.32 only the engine core knows them."""
    cache = cache_config(KVCacheLayout.LBNHC, groups_of(*specs))
    cache.hash_block_size = None
    found = versions.hash_block_size(config_with(prefix_match_unit=unit), cache)
    assert found == read_layout(cache, found).hash_block_size == expected


def test_hash_lookahead_when_there_is_a_connector_is_none() -> None:
    """With it a block's hash covers tokens behind the block; where there is a connector, vLLM does without."""
    lookahead = vars(VllmConfig).get("num_hash_lookahead_tokens")
    if lookahead is None:
        pytest.skip("this vLLM has no such hashes")
    drafts = SimpleNamespace(use_eagle_block_drop=lambda: True, disable_lookahead_block_hashes=False)
    config = SimpleNamespace(
        speculative_config=drafts,
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        num_prefill_lookahead_tokens=1,
        kv_transfer_config=None,
    )
    assert lookahead.fget(config) == 1
    config.kv_transfer_config = object()
    assert lookahead.fget(config) == 0
