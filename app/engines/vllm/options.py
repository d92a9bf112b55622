"""kvferry's settings as they hold inside vLLM: the connector's extra config first, then the environment and the file.

What vLLM itself decides (the model, its device, its blocks) is refused where somebody sets it here, since it would be
ignored otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from app.engines.vllm.refusal import ConnectorRefused
from app.settings import BadSettings, Settings, Source

_log = logging.getLogger(__name__)

VLLMS_OWN = (
    "engine",
    "model",
    "device",
    "dtype",
    "device_blocks",
    "block_size",
    "max_batched_tokens",
    "max_running",
    "max_waiting",
)
"""Settings of the embedded engine."""


def read_options(transfer: Any) -> Settings:
    """Settings from a `KVTransferConfig` and the layers below it. Raises `ConnectorRefused` with all that is wrong."""
    extra: Mapping[str, Any] = transfer.kv_connector_extra_config or {}
    try:
        settings = Settings(_env_file=None, **extra)
    except BadSettings as error:
        raise ConnectorRefused(str(error)) from error
    given = [name for name in VLLMS_OWN if settings.source(name) is Source.CONNECTOR]
    if given:
        raise ConnectorRefused(
            f"{', '.join(given)} in kv_connector_extra_config: inside vLLM these are vLLM's own to decide; leave out"
        )
    _check_transfer(transfer)
    return settings


def check_options(transfer: Any) -> None:
    """Raise `ConnectorRefused` for settings that are wrong, with a line of our own in the log."""
    try:
        read_options(transfer)
    except ConnectorRefused as error:
        log_refusal(error)
        raise


def log_refusal(error: BaseException) -> None:
    """Log why the connector does not start."""
    for line in str(error).splitlines():
        _log.error("kvferry does not start: %s", line)


def _check_transfer(transfer: Any) -> None:
    if transfer.kv_role != "kv_both":
        raise ConnectorRefused(f"kv_role={transfer.kv_role}: kvferry stores and loads; set kv_role to kv_both")
    if transfer.kv_load_failure_policy != "recompute":
        raise ConnectorRefused(
            f"kv_load_failure_policy={transfer.kv_load_failure_policy}: a block that cannot be loaded would end its "
            'request with an error; set "kv_load_failure_policy": "recompute"'
        )


def check_parallel(parallel: Any) -> None:
    """Refuse ways of spreading a model over ranks in which a block is not what it is on one rank."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConnectorRefused(f"{name}={size}: kvferry does not support context parallelism; set it to 1")
    if getattr(parallel, "nnodes", 1) > 1:
        raise ConnectorRefused(
            f"nnodes={parallel.nnodes}: the ranks of one engine must be on one host for kvferry; set nnodes to 1"
        )


def check_caching(cache: Any) -> None:
    """Refuse a vLLM whose blocks go by names that kvferry could not find again."""
    if not cache.enable_prefix_caching:
        raise ConnectorRefused(
            "enable_prefix_caching=False: what kvferry brings back is found as a prefix; leave "
            "--no-enable-prefix-caching out"
        )
