"""Fingerprint of everything in vLLM's configuration that the content of a block depends on, and the engine's name."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, resolve_none_hash_seed
from vllm.v1.request import Request

from kvferry.app.engines.identity import (
    ContentDigest,
    DigestCache,
    FileUnknown,
    digest_of_files,
    name_in_fingerprint,
    name_of_engine,
    revision_of,
)
from kvferry.app.engines.vllm.layout import VllmLayout
from kvferry.app.engines.vllm.requests import Adapters
from kvferry.core.engine_api import HashPrompt
from kvferry.core.keys import RANDOM_SEED

_DIGITS = 16
_NOT_IN_NAME = frozenset({"hash_seed"})
"""Fields that are not part of an engine's name; with a random seed, each start would create another pool."""
_FOLDER_FORMATS = frozenset(
    (
        *("auto", "hf", "safetensors", "pt", "npcache", "fastsafetensors", "instanttensor", "mistral", "gguf"),
        *("sharded_state", "runai_streamer", "runai_streamer_sharded"),
    )
)
"""Load formats of vLLM that read the weights from the model's folder."""


def fingerprint(config: Any, cache: Any, layout: VllmLayout, digests: DigestCache | None) -> dict[str, object]:
    """Return every field of a `VllmConfig` that changes the bytes stored under a key, or the key.

    All processes of an engine compute the same fingerprint. `revision` is None if the weights cannot be identified.

    Args:
        config: The `VllmConfig`.
        cache: The `KVCacheConfig`.
        layout: Layout read from `cache`.
        digests: Cache of file digests. The files of a local model are read to compute its revision; with None, for
            pools that do not outlive the engine, they are not read.
    """
    model, cache_types, parallel = config.model_config, config.cache_config, config.parallel_config
    attention_by_kind = config.attention_config.backend_per_kind
    additional = config.additional_config
    draft, revision = _draft(config, digests), _revision(config, digests)
    return {
        "vllm": vllm.__version__,
        "device": _device(),
        "model": name_in_fingerprint(str(model.model), revision),
        "revision": None if draft is not None and draft[1] is None else revision,
        # Only the overrides: workers change the model's configuration while they load it.
        "overrides": _to_json(model.hf_overrides),
        "code": [str(model.model_impl), str(model.code_revision), _to_json(model.model_class_overrides)],
        "runner": [str(model.runner_type), str(model.convert)],
        # Some models rotate keys by it. The requested value, since vLLM may adjust it to the available memory.
        "longest": str(model.original_max_model_len),
        "draft": draft,
        "dtype": str(model.dtype),
        "quantization": [str(model.quantization), str(model.quantization_config)],
        "multimodal": _multimodal(model.multimodal_config),
        "cache_dtype": [
            str(cache_types.cache_dtype),
            str(cache_types.mamba_cache_dtype),
            str(cache_types.mamba_ssm_cache_dtype),
            str(cache_types.mamba_cache_mode),
            cache_types.replayssm_buffer_len if cache_types.use_replayssm else None,
            sorted(cache_types.kv_cache_dtype_skip_layers),
        ],
        "attention": str(config.attention_config.backend),
        "layout": str(cache.kv_cache_layout),
        "groups": [
            [group.spec.block_size, group.spec.block_bytes, group.spec.kind.value, group.spec.window_tokens]
            for group in layout.groups
        ],
        "hash_block_size": layout.hash_block_size,
        "hash_algorithm": str(cache_types.prefix_caching_hash_algo),
        "hash_seed": _hash_seed(config),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
        **({"attention_by_kind": _to_json(attention_by_kind)} if attention_by_kind else {}),
        **({"non_causal": True} if getattr(config.attention_config, "use_non_causal", False) else {}),
        **({"platform": _to_json(additional)} if additional else {}),
        **({"ranks_per_copy": layout.ranks_per_copy} if layout.ranks_per_copy > 1 else {}),
    }


def engine_name(config: Any, fields: dict[str, object]) -> str:
    """Return the default name of an engine with this fingerprint; see `name_of_engine`."""
    named = {name: value for name, value in fields.items() if name not in _NOT_IN_NAME}
    return name_of_engine(str(config.model_config.model), named)


def start_digest(config: Any) -> str:
    """Return an id of this start of the engine, the same in all of its processes.

    It is derived from random ids that vLLM generates when it reads its configuration.
    """
    rank = int(config.parallel_config.data_parallel_index)
    return _digest(repr((config.kv_transfer_config.engine_id, config.instance_id, rank)))


def has_random_hashes(config: Any) -> bool:
    """Return whether vLLM generates a new hash seed at each start, so that keys of an earlier start never recur."""
    hash_function = _hash_function(config)
    return bool(resolve_none_hash_seed(hash_function) != resolve_none_hash_seed(hash_function))


def hash_bytes(config: Any) -> int:
    """Return the length of vLLM's hashes."""
    return len(_hash_function(config)(b""))


def prompt_hasher(config: Any, hash_block_size: int, adapters: Adapters) -> HashPrompt:
    """Return the function that hashes a prompt as vLLM's engine core hashes that of a request."""
    # vLLM 0.33 has models whose hashes cover tokens after their block.
    lookahead = getattr(config, "num_hash_lookahead_tokens", 0)
    more = [lookahead] if lookahead else []
    hash_request = get_request_block_hasher(hash_block_size, _hash_function(config), *more)

    def hash_prompt(token_ids: Sequence[int], cache_salt: str | None, lora: str | None) -> Sequence[bytes]:
        path, suffix = ("", b"") if lora is None else adapters.path_and_suffix(lora)
        request = Request(
            "lookup",
            list(token_ids),
            SamplingParams(max_tokens=1),
            None,
            lora_request=None if lora is None else LoRARequest(lora, 1, path),
            cache_salt=cache_salt,
            block_hasher=hash_request,
        )
        return [block_hash + suffix for block_hash in request.block_hashes]

    return hash_prompt


def _hash_function(config: Any) -> Callable[[Any], bytes]:
    found: Callable[[Any], bytes] = get_hash_fn_by_name(str(config.cache_config.prefix_caching_hash_algo))
    return found


def _hash_seed(config: Any) -> str:
    """Return a digest of the seed of vLLM's hashes; some of its hash algorithms need a secret seed."""
    if has_random_hashes(config):
        return f"{RANDOM_SEED}{start_digest(config)}"
    return _digest(resolve_none_hash_seed(_hash_function(config)))


def _revision(config: Any, digests: DigestCache | None) -> str | None:
    model = config.model_config
    load_format = str(config.load_config.load_format)
    if load_format == "dummy":
        return f"dummy-{model.seed}"
    if load_format not in _FOLDER_FORMATS or model.model_weights or config.weight_transfer_config is not None:
        # The weights are not in the folder, or change while the engine runs.
        return None
    weights = _weights(config, model, digests)
    if weights is None or not model.hf_config_path:
        return weights
    # The configuration comes from another folder than the weights.
    if digests is None:
        return None
    try:
        model_config = digest_of_files(Path(str(model.hf_config_path)), digests)
    except FileUnknown:
        model_config = start_digest(config)
    return None if model_config is None else f"{weights}-{model_config}"


def _weights(config: Any, model: Any, digests: DigestCache | None) -> str | None:
    """Return the revision of one of the engine's models; vLLM resolves a revision on the hub to a commit."""
    name, commit = str(model.model), getattr(model.revision, "resolved", None)
    if not os.path.exists(name):
        return str(commit) if commit else revision_of(name, None, model.hf_config, "")
    if digests is None:
        return None
    with ContentDigest(Path(name), digests) as content:
        started_s = _earliest_load_s()
        if started_s is not None and content.newest_change_s() >= started_s:
            content.refuse("files changed after the engine had started to load them")
        return revision_of(name, content, model.hf_config, start_digest(config))


def _earliest_load_s() -> float | None:
    """Return the Unix time at which this process started, or None if it was not started by vLLM for one engine.

    vLLM creates the connector after it has loaded the model, so files changed after this time may not be the files
    that were loaded. A program that runs the engine in its own process may have started much earlier.
    """
    if multiprocessing.parent_process() is None:
        return None
    # psutil rounds the time of boot to seconds, so its start times may be wrong by a second.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def prefetch_digests(config: Any, digests: DigestCache) -> None:
    """Start a thread that reads the files of local models into the cache of digests."""
    models = (config.model_config, _draft_model(config))
    names = [str(model.model) for model in models if model is not None]

    def read() -> None:
        for name in filter(os.path.exists, names):
            try:
                digest_of_files(Path(name), digests)
            except FileUnknown:
                # Reported when the digest is needed.
                return

    threading.Thread(target=read, name="kvferry-digests", daemon=True).start()


def _to_json(value: Any) -> object:
    """Convert an option that is a dictionary or a function to a JSON value."""
    if callable(value):
        return f"{value.__module__}.{value.__qualname__}"
    return json.loads(json.dumps(value, sort_keys=True, default=str))


def _multimodal(config: Any) -> list[object] | None:
    """Return the options for preprocessing images, audio and video; keys identify the input before preprocessing."""
    if config is None:
        return None
    return [
        _to_json(config.media_io_kwargs),
        _to_json(config.mm_processor_kwargs),
        # Hash of the options of the encoder.
        config.compute_hash(),
        [config.video_pruning_rate, str(config.video_pruning_method)],
    ]


def _draft_model(config: Any) -> Any:
    """Return the `ModelConfig` of the draft model of speculative decoding, or None."""
    return getattr(config.speculative_config, "draft_model_config", None)


def _draft(config: Any, digests: DigestCache | None) -> list[object] | None:
    """Return name and revision of the draft model, whose KV may be in the same blocks."""
    draft = _draft_model(config)
    if draft is None:
        return None
    revision = _weights(config, draft, digests)
    return [name_in_fingerprint(str(draft.model), revision), revision]


def _device() -> str:
    """Return the device type, since the order of bytes in a block depends on it with some attention backends."""
    if current_platform.is_cpu():
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{current_platform.get_cpu_architecture().name} {capability} amx={torch.cpu._is_amx_tile_supported()}"
    return str(current_platform.get_device_name())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
