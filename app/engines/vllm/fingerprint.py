"""What a block's bytes depend on inside vLLM, and the name of the engine that follows from it."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from app.engines.vllm.layout import VllmLayout

_DIGITS = 8
_NAME_CHARS = 40


def fingerprint(config: Any, cache: Any, layout: VllmLayout) -> dict[str, object]:
    """Everything in a `VllmConfig` that changes what the bytes under a key mean."""
    model, parallel = config.model_config, config.parallel_config
    return {
        "model": model.model,
        "revision": model.revision,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "layout": str(cache.kv_cache_layout),
        "groups": [
            (group.spec.block_size, group.spec.block_bytes, group.spec.kind.value, group.spec.window_tokens)
            for group in layout.groups
        ],
        "hash_block_size": layout.hash_block_size,
        "hash_algorithm": str(config.cache_config.prefix_caching_hash_algo),
        "tensor_parallel": parallel.tensor_parallel_size,
        "pipeline_parallel": parallel.pipeline_parallel_size,
    }


def engine_name(config: Any, about: dict[str, object]) -> str:
    """A name for an engine that was given none: the model's, and what tells apart all that changes its bytes."""
    text = json.dumps(about, sort_keys=True, default=str)
    model = str(config.model_config.model).rstrip("/").rsplit("/", 1)[-1]
    short = "".join(char if char.isalnum() else "-" for char in model)
    return f"{short[:_NAME_CHARS]}-{hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]}"
