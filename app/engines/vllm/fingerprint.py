"""What a block's bytes depend on inside vLLM, and the name of the engine that follows from it."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

from kvferry.app.engines.digests import DigestCache, FileUnknown
from kvferry.app.engines.naming import name_of_engine
from kvferry.app.engines.revision import ContentDigest, digest_of_files, name_in_fingerprint, revision_of
from kvferry.app.engines.vllm.layout import VllmLayout

_DIGITS = 16
_NOT_NAMING = frozenset({"hash_seed"})
"""A random seed would make a new pool of each start, and leave the old one behind."""
_FOLDER_FORMATS = frozenset(
    (
        *("auto", "hf", "safetensors", "pt", "npcache", "fastsafetensors", "instanttensor", "mistral", "gguf"),
        *("sharded_state", "runai_streamer", "runai_streamer_sharded"),
    )
)
"""Load formats of vLLM that read the weights from the model's folder. Others bring them from elsewhere."""


def fingerprint(config: Any, cache: Any, layout: VllmLayout, digests: DigestCache | None) -> dict[str, object]:
    """Everything in a `VllmConfig` that changes what the bytes under a key mean, or what the key is.

    Alike in all processes of an engine. `revision` is None where nothing says which weights the model has. Files of a
    local model are read whole for it, which takes a while the first time; with `digests` None, where nothing outlives
    the engine, they are not read.
    """
    model, cache_types, parallel = config.model_config, config.cache_config, config.parallel_config
    draft, revision = _draft(config, digests), _revision(config, digests)
    return {
        "vllm": vllm.__version__,
        "device": _device(),
        "model": name_in_fingerprint(str(model.model), revision),
        "revision": None if draft is not None and draft[1] is None else revision,
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
        **({"ranks_per_copy": layout.ranks_per_copy} if layout.ranks_per_copy > 1 else {}),
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


def _revision(config: Any, digests: DigestCache | None) -> str | None:
    model = config.model_config
    load_format = str(config.load_config.load_format)
    if load_format == "dummy":
        return f"dummy-{model.seed}"
    if load_format not in _FOLDER_FORMATS or model.model_weights or config.weight_transfer_config is not None:
        # They come from elsewhere, and the folder has the configuration only; or they change while it runs.
        return None
    weights = _weights(config, model, digests)
    if weights is None or not model.hf_config_path:
        return weights
    # The configuration is not the weights' own.
    if digests is None:
        return None
    try:
        about = digest_of_files(Path(str(model.hf_config_path)), digests)
    except FileUnknown:
        about = start_digest(config)
    return None if about is None else f"{weights}-{about}"


def _weights(config: Any, model: Any, digests: DigestCache | None) -> str | None:
    """The revision of one of the engine's models. vLLM resolves a revision on the hub to a commit."""
    name, commit = str(model.model), getattr(model.revision, "resolved", None)
    if not os.path.exists(name):
        return str(commit) if commit else revision_of(name, None, model.hf_config, "")
    if digests is None:
        return None
    with ContentDigest(Path(name), digests) as content:
        started_s = _load_began_s()
        if started_s is not None and content.newest_change_s() >= started_s:
            content.refuse("files changed after the engine had started to load them")
        return revision_of(name, content, model.hf_config, start_digest(config))


def _load_began_s() -> float | None:
    """Unix time before which this process cannot have begun to load the model; None where that is not known.

    vLLM makes the connector after the model is loaded, so how its files were before is told by times only. A process
    of vLLM's own is started for one engine; a program that runs the engine in itself may be much older.
    """
    if multiprocessing.parent_process() is None:
        return None
    # psutil counts from a time of boot in whole seconds, and so is up to a second off.
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age_s


def read_ahead(config: Any, digests: DigestCache) -> None:
    """Start to read the files of local models into the cache of digests, on a thread of its own."""
    speculative = config.speculative_config
    draft = None if speculative is None else getattr(speculative, "draft_model_config", None)
    names = [str(model.model) for model in (config.model_config, draft) if model is not None]

    def read() -> None:
        for name in filter(os.path.exists, names):
            try:
                digest_of_files(Path(name), digests)
            except FileUnknown:
                # Reported by the one that needs the digest.
                return

    threading.Thread(target=read, name="kvferry-read-ahead", daemon=True).start()


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


def _draft(config: Any, digests: DigestCache | None) -> list[object] | None:
    """The model that drafts, whose KV may lie in the same blocks."""
    speculative = config.speculative_config
    draft = None if speculative is None else getattr(speculative, "draft_model_config", None)
    if draft is None:
        return None
    revision = _weights(config, draft, digests)
    return [name_in_fingerprint(str(draft.model), revision), revision]


def _device() -> str:
    """What the kernels that write blocks are made for: some backends order a block's bytes by it."""
    if current_platform.is_cpu():
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{current_platform.get_cpu_architecture().name} {capability} amx={torch.cpu._is_amx_tile_supported()}"
    return str(current_platform.get_device_name())


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGITS]
