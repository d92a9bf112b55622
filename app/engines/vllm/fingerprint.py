"""What a block's bytes depend on inside vLLM, and the name of the engine that follows from it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from app.engines.naming import name_of_engine
from app.engines.revision import digest_of_files, revision_of
from app.engines.vllm.layout import VllmLayout

_DIGITS = 16
_NOT_NAMING = frozenset({"hash_seed"})
"""A random seed would make a new pool of each start, and leave the old one behind."""


def fingerprint(config: Any, cache: Any, layout: VllmLayout) -> dict[str, object]:
    """Everything in a `VllmConfig` that changes what the bytes under a key mean, or what the key is.

    Alike in all processes of an engine. `revision` is None where nothing says which weights the model has.
    """
    model, cache_types, parallel = config.model_config, config.cache_config, config.parallel_config
    draft = _draft(config)
    return {
        "vllm": vllm.__version__,
        "device": _device(),
        "model": model.model,
        "revision": None if draft is not None and draft[1] is None else _revision(config),
        # The configuration that they are laid over is not asked: workers change theirs as they load.
        "overrides": _plain(model.hf_overrides),
        "code": [str(model.model_impl), str(model.code_revision), _plain(model.model_class_overrides)],
        "runner": [str(model.runner_type), str(model.convert)],
        # Some models turn keys by it. As it was asked for: vLLM may fit it to the memory that there is.
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
        "hash_algorithm": str(config.cache_config.prefix_caching_hash_algo),
        "hash_seed": _hash_seed(config),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
    }


def engine_name(config: Any, about: dict[str, object]) -> str:
    """See `name_of_engine`; `about` is the fingerprint."""
    return name_of_engine(
        str(config.model_config.model), {name: value for name, value in about.items() if name not in _NOT_NAMING}
    )


def start_digest(config: Any) -> str:
    """Of this start of the engine: alike in all of its processes, and in no other's. vLLM draws the ids when it reads
    its configuration."""
    return _digest(repr((config.kv_transfer_config.engine_id, config.instance_id, _data_parallel_rank(config))))


def has_random_hashes(config: Any) -> bool:
    """Whether vLLM draws a new seed for its hashes at each start, so that no key of an earlier one ever comes again."""
    hash_function = _hash_function(config)
    return bool(resolve_none_hash_seed(hash_function) != resolve_none_hash_seed(hash_function))


def hash_bytes(config: Any) -> int:
    """Bytes of each of vLLM's hashes."""
    return len(_hash_function(config)(b""))


def _hash_function(config: Any) -> Callable[[Any], bytes]:
    found: Callable[[Any], bytes] = get_hash_fn_by_name(str(config.cache_config.prefix_caching_hash_algo))
    return found


def _hash_seed(config: Any) -> str:
    """The seed of vLLM's hashes as a digest, since some of its algorithms need it to be secret."""
    if has_random_hashes(config):
        return f"random-{start_digest(config)}"
    return _digest(resolve_none_hash_seed(_hash_function(config)))


def _data_parallel_rank(config: Any) -> int:
    return int(config.parallel_config.data_parallel_index)


def _revision(config: Any) -> str | None:
    model = config.model_config
    if str(config.load_config.load_format) == "dummy":
        return f"dummy-{model.seed}"
    if model.model_weights or config.weight_transfer_config is not None:
        # They are streamed from elsewhere, and the folder has the configuration only; or they change while it runs.
        return None
    weights = _weights(str(model.model), model.revision, model.hf_config)
    if weights is None or not model.hf_config_path:
        return weights
    # The configuration is not the weights' own.
    path = str(model.hf_config_path)
    about = digest_of_files(Path(path))
    return None if about is None else f"{weights}-{about}"


def _weights(name: str, revision: Any, config: Any) -> str | None:
    """vLLM resolves a model's revision on the hub to a commit."""
    commit = getattr(revision, "resolved", None)
    return str(commit) if commit and not os.path.exists(name) else revision_of(name, config)


def _plain(given: Any) -> object:
    """What a user gave as a dictionary or as a function, as something that JSON can write."""
    if callable(given):
        return f"{given.__module__}.{given.__qualname__}"
    return json.loads(json.dumps(given, sort_keys=True, default=str))


def _multimodal(config: Any) -> list[object] | None:
    """What becomes of images, sound and videos before the model meets them. Keys hold what they were, by vLLM's hash
    or by an id of the user's own, and not what was made of them."""
    if config is None:
        return None
    return [
        _plain(config.media_io_kwargs),
        _plain(config.mm_processor_kwargs),
        # Of how they are encoded.
        config.compute_hash(),
        [config.video_pruning_rate, str(config.video_pruning_method)],
    ]


def _draft(config: Any) -> list[object] | None:
    """The model that drafts, whose KV may lie in the same blocks."""
    speculative = config.speculative_config
    draft = None if speculative is None else getattr(speculative, "draft_model_config", None)
    if draft is None:
        return None
    return [str(draft.model), _weights(str(draft.model), draft.revision, draft.hf_config)]


def _device() -> str:
    """What the kernels that write blocks are made for: some backends order a block's bytes by it."""
    if current_platform.is_cpu():
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{current_platform.get_cpu_architecture().name} {capability} amx={torch.cpu._is_amx_tile_supported()}"
    return str(current_platform.get_device_name())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
