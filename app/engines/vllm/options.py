"""kvferry's settings as they hold inside vLLM: the connector's extra config first, then the environment and the file.

What vLLM itself decides (the model, its device, its blocks) is refused where somebody sets it here, since it would be
ignored otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.platforms import current_platform

from kvferry.app.engines.vllm.versions import installed_version, is_tested
from kvferry.app.settings import BadSettings, Settings, Source
from kvferry.app.settings.fields import NAMES
from kvferry.app.settings.sources import Layer, read_layers
from kvferry.core.errors import StartError


class ConnectorRefused(StartError):
    """What was asked for cannot be served inside this vLLM; the message says which setting, and what would be right."""


_log = logging.getLogger(__name__)

VLLMS_SIZE = "cpu_bytes_to_use"
"""The pool's size as vLLM's own connector calls it, and as vLLM passes on --kv-offloading-size."""
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
    "max_wait_s",
)
"""Settings of the embedded engine."""


def read_options(transfer: Any) -> Settings:
    """Settings from a `KVTransferConfig` and the layers below it. Raises `ConnectorRefused` with all that is wrong."""
    try:
        settings = Settings(_layers=_layers(transfer.kv_connector_extra_config or {}))
    except BadSettings as error:
        raise ConnectorRefused(str(error)) from error
    given = [name for name in VLLMS_OWN if settings.source(name) is Source.CONNECTOR]
    if given:
        raise ConnectorRefused(
            f"{', '.join(given)} in kv_connector_extra_config: inside vLLM these are vLLM's own to decide; leave out"
        )
    _check_transfer(transfer)
    return settings


def _layers(extra: Mapping[str, Any]) -> list[Layer]:
    """The layers of settings, with vLLM's own name for the size of host memory taken as `pool_bytes`."""
    given = dict(extra)
    if VLLMS_SIZE not in given:
        return read_layers(NAMES, given, [])
    if "pool_bytes" in given:
        raise ConnectorRefused(
            f"{VLLMS_SIZE} (--kv-offloading-size) and pool_bytes both set the size of the pool; leave one of them out"
        )
    size = given.pop(VLLMS_SIZE)
    # vLLM makes it of a number of GiB, which need not be whole.
    layers = read_layers(NAMES, {**given, "pool_bytes": int(size) if isinstance(size, float) else size}, [])
    layers[0]["pool_bytes"] = replace(layers[0]["pool_bytes"], spelled=VLLMS_SIZE)
    return layers


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
    if transfer.kv_load_failure_policy != "recompute" and not is_tested(installed_version()):
        raise ConnectorRefused(
            f"kv_load_failure_policy={transfer.kv_load_failure_policy}: a block that cannot be loaded would end its "
            "request with an error, and this version of vLLM was not tested to let the connector change that; set "
            '"kv_load_failure_policy": "recompute"'
        )


def recompute_failed_loads(transfer: Any) -> None:
    """Have vLLM recompute what cannot be loaded, where the user left the default, which ends the request.

    Its scheduler reads the policy from this configuration after it has made the connector. Inside a MultiConnector it
    reads that of the outer configuration, which a connector does not see.
    """
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        _log.info("kv_load_failure_policy: recompute")


def check_parallel(parallel: Any) -> None:
    """Refuse ways of spreading a model over ranks in which a block is not what it is on one rank."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise ConnectorRefused(
                f"{name}={size}: kvferry does not support context parallelism, in which a block's tokens are spread "
                f"over ranks; leave --{name.replace('_', '-')} out, or set it to 1"
            )
    if getattr(parallel, "nnodes", 1) > 1:
        raise ConnectorRefused(
            f"nnodes={parallel.nnodes}: the ranks of one engine must be on one host for kvferry; set nnodes to 1"
        )


def check_caching(config: Any) -> None:
    """Refuse a `VllmConfig` without prefix caching, and name vLLM where it was switched off by vLLM itself."""
    if config.cache_config.enable_prefix_caching:
        return
    reason = _no_caching_reason(config)
    if reason is not None:
        raise ConnectorRefused(
            f"enable_prefix_caching=False: vLLM switched prefix caching off by itself, since {reason}; kvferry finds "
            "blocks by their prefix, so leave the connector out"
        )
    raise ConnectorRefused(
        "enable_prefix_caching=False: kvferry finds blocks by their prefix; leave --no-enable-prefix-caching out (if "
        "it was not given, vLLM switched prefix caching off by itself, as its log says: leave the connector out)"
    )


def _no_caching_reason(config: Any) -> str | None:
    """Why vLLM switches prefix caching off for this model and platform, whatever was asked for; None if it does not."""
    model = config.model_config
    if not model.is_prefix_caching_supported:
        return f"it has none for {model.runner_type} models of attention type {model.attn_type}"
    if getattr(config, "is_mm_encoder_only", False):
        return "this instance runs the multimodal encoder only"
    if current_platform.is_cpu() and model.use_mla:
        return "its CPU backend has none for MLA models on this processor"
    return None
