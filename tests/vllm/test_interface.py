"""The installed vLLM as the connector's table of parts says it is, and vLLM's calls as the connector takes them."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import vllm
from kvferry.app.engines.identity import DigestCache
from kvferry.app.engines.vllm import versions
from kvferry.app.engines.vllm.connector import KVFerryConnector
from kvferry.app.engines.vllm.exclusions import KeyRules
from kvferry.app.engines.vllm.layout import LAYOUTS, read_layout
from kvferry.app.engines.vllm.requests import Adapters, VllmRequest
from tests.vllm import fabricated as fake
from tests.vllm.fabricated import BLOCK, cache_config, groups_of
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.request import Request

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


def listed_fields() -> dict[str, set[str]]:
    """The fields by their class, as docs/security.md says for each of them what it does to KV."""
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    found: dict[str, set[str]] = {}
    for owner, names in re.findall(r"^\| ([A-Z]\w+) \| ([^|]+) \|", page, re.MULTILINE):
        found.setdefault(owner, set()).update(re.findall(r"`(\w+)`", names))
    return found


def test_fields_of_vllms_requests_are_all_listed_with_what_they_change() -> None:
    fields = {owner.__name__: set(owner.__struct_fields__) for owner in (SamplingParams, PoolingParams, LoRARequest)}
    fields["MultiModalFeatureSpec"] = {field.name for field in dataclasses.fields(MultiModalFeatureSpec)}
    fields["Request"] = set(parameters_of(Request, "__init__")) - {"self"}
    listed = listed_fields()
    assert {owner: names - listed[owner] for owner, names in fields.items()} == {owner: set() for owner in fields}


NUM_TOKENS = 2 * BLOCK


def image(identifier: str = "photo", offset: int = 0) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, 8), identifier)


def request_with(**fields: Any) -> Request:
    init_none_hash(sha256)
    given = {"prompt_token_ids": [0] * NUM_TOKENS, "sampling_params": SamplingParams(max_tokens=1), **fields}
    return Request("r", pooling_params=None, block_hasher=get_request_block_hasher(BLOCK, sha256), **given)


def rules(*, keeps: bool = True, trusts: bool = False, multimodal: bool = True, diffusion: bool = False) -> KeyRules:
    return KeyRules(versions.hashes_embeddings(), trusts, multimodal, diffusion, keeps)


ADAPTER = LoRARequest("a", 1, "/a")
VECTORS = torch.zeros(NUM_TOKENS, 4)
MIXED = {"prompt_embeds": VECTORS, "prompt_is_token_ids": [True] * NUM_TOKENS}
PAIRS = {
    "prompt_token_ids": ({}, {"prompt_token_ids": [1] * NUM_TOKENS}),
    "prompt_embeds": ({**MIXED}, {**MIXED, "prompt_embeds": VECTORS + 1}),
    "prompt_embeds-and-text": ({}, {**MIXED}),
    "prompt_embeds-alone": ({}, {"prompt_embeds": VECTORS, "prompt_token_ids": None}),
    "prompt_is_token_ids": ({**MIXED}, {**MIXED, "prompt_is_token_ids": [False] * NUM_TOKENS}),
    "cache_salt": ({}, {"cache_salt": "a"}),
    "cache_salt-like-an-adapter": ({"cache_salt": "a"}, {"lora_request": ADAPTER}),
    "lora_name": ({"lora_request": ADAPTER}, {"lora_request": LoRARequest("b", 1, "/a")}),
    "lora_path": ({"lora_request": ADAPTER}, {"lora_request": LoRARequest("a", 1, "/b")}),
    "mm_features": ({}, {"mm_features": [image()]}),
    "mm_features-content": ({"mm_features": [image()]}, {"mm_features": [image("other")]}),
    "mm_features-offset": ({"mm_features": [image()]}, {"mm_features": [image(offset=1)]}),
    "mm_features-under-one-id": ({"mm_features": [image()]}, {"mm_features": [image()]}),
    "resumable": ({"resumable": True}, {"resumable": True}),
}
"""Fields that change KV: two requests that differ in one of them. Of those under one id the content differs."""


@pytest.mark.parametrize("pair", PAIRS)
def test_requests_with_other_kv_have_other_hashes_or_are_not_offloaded(pair: str) -> None:
    first, second = (request_with(**fields) for fields in PAIRS[pair])
    are_hashed = not set(first.block_hashes) & set(second.block_hashes)
    assert len(first.block_hashes) == len(second.block_hashes) == 2
    assert are_hashed or rules().unhashed(second) is not None


def test_request_without_such_fields_is_offloaded() -> None:
    assert rules().unhashed(request_with(cache_salt="a", lora_request=ADAPTER)) is None
    assert rules(multimodal=False).unhashed(request_with(resumable=True)) is None


@pytest.mark.parametrize("field", [{"mm_features": [image()]}, {"resumable": True}])
def test_multimodal_request_when_blocks_stay_or_ids_are_trusted_is_offloaded(field: dict[str, Any]) -> None:
    live = request_with(**field)
    assert rules().unhashed(live) == "multimodal"
    assert rules(trusts=True).unhashed(live) is None
    assert rules(keeps=False).unhashed(live) is None


def test_request_of_a_diffusion_model_where_blocks_stay_is_not_offloaded() -> None:
    """Another request may have set the canvas of an answer that this one finds on the device."""
    assert rules(diffusion=True).unhashed(request_with()) == "diffusion"
    assert rules(diffusion=True, keeps=False).unhashed(request_with()) is None


@pytest.mark.parametrize("field", ["load_inplace", "tensorizer_config_dict"])
def test_adapter_whose_path_does_not_name_its_weights_is_not_offloaded(field: str) -> None:
    if field not in LoRARequest.__struct_fields__:
        pytest.skip("this vLLM's adapters have no such field")
    adapters = Adapters("this start", 100, DigestCache(None))
    live = request_with(lora_request=LoRARequest("a", 1, "/a", **{field: {"tensorizer_dir": "/b"}}))
    assert live.block_hashes
    assert VllmRequest(live, adapters).block_hashes == ()
    assert adapters.find(ADAPTER).is_ambiguous


def test_embeddings_when_the_hash_has_their_mask_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a later vLLM does; those that are tested do not."""
    assert rules().unhashed(request_with(**MIXED)) == "prompt_embeds"
    keys = kv_cache_utils.generate_block_hash_extra_keys

    def with_mask(request: Request, start: int, end: int, first: int) -> tuple[Any, int]:
        found, following = keys(request, start, end, first)
        return (found, tuple(request.prompt_is_token_ids or ())), following

    versions.hashes_embeddings.cache_clear()
    monkeypatch.setattr(kv_cache_utils, "generate_block_hash_extra_keys", with_mask)
    try:
        assert rules().unhashed(request_with(**MIXED)) is None
    finally:
        versions.hashes_embeddings.cache_clear()


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
