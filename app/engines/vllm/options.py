"""kvferry's settings inside vLLM, and the vLLM options that offloading depends on.

Settings come from the connector's extra config first, then from the environment and the settings file. Settings that
vLLM decides itself (model, device, block size) are refused here, because they would have no effect.
"""

from __future__ import annotations

import logging
from typing import Any

from kvferry.app.engines.vllm.versions import installed_version, is_tested
from kvferry.app.settings import BadSettings, Settings, Source
from kvferry.app.settings.sources import read_sources
from kvferry.core.errors import StartError

_log = logging.getLogger(__name__)

VLLM_POOL_OPTION = "cpu_bytes_to_use"
"""Name that vLLM's own connector and --kv-offloading-size use for `pool_bytes`."""
EMBEDDED_SETTINGS = (
    *("engine", "model", "device", "dtype", "device_blocks", "block_size"),
    *("max_batched_tokens", "max_running", "max_waiting"),
)
"""Settings of the embedded engine."""


def read_options(transfer: Any) -> Settings:
    """Read the settings from a `KVTransferConfig` and the sources below it.

    Raises:
        StartError: Settings are invalid; the message lists all of them.
    """
    given = dict(transfer.kv_connector_extra_config or {})
    size = given.get(VLLM_POOL_OPTION)
    if isinstance(size, float):
        # vLLM computes it from a number of GiB, which may be a fraction.
        given[VLLM_POOL_OPTION] = int(size)
    try:
        settings = Settings(_sources=read_sources(Settings, given, None, {VLLM_POOL_OPTION: "pool_bytes"}))
    except BadSettings as error:
        raise StartError(str(error)) from error
    refuse_embedded_settings(settings)
    _check_transfer(transfer)
    return settings


def refuse_embedded_settings(settings: Settings) -> None:
    """Raise `StartError` for settings of the embedded engine in the connector's extra config."""
    invalid = [name for name in EMBEDDED_SETTINGS if settings.source(name) is Source.CONNECTOR]
    if invalid:
        raise StartError(f"kv_connector_extra_config: {', '.join(invalid)} are vLLM's own options; remove them")


def check_options(transfer: Any) -> None:
    """Log and raise `StartError` if settings are invalid."""
    try:
        read_options(transfer)
    except StartError as error:
        log_refusal(error)
        raise


def log_refusal(error: BaseException) -> None:
    """Log why the connector does not start."""
    for line in str(error).splitlines():
        _log.error("kvferry does not start: %s", line)


def _check_transfer(transfer: Any) -> None:
    if transfer.kv_role != "kv_both":
        raise StartError(f"kv_role={transfer.kv_role}: kvferry stores and loads; set kv_role to kv_both")
    if transfer.kv_load_failure_policy != "recompute" and not is_tested(installed_version()):
        raise StartError(
            f"kv_load_failure_policy={transfer.kv_load_failure_policy}: vLLM would fail requests whose blocks cannot "
            "be loaded, and kvferry changes the policy in tested releases of vLLM only; set "
            '"kv_load_failure_policy": "recompute"'
        )


def set_recompute_policy(transfer: Any) -> None:
    """Make vLLM recompute blocks that cannot be loaded; by default it fails the request.

    vLLM's scheduler reads the policy from this configuration after it has created the connector. For a connector inside
    a `MultiConnector` it reads the outer configuration, which the connector cannot change.
    """
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        _log.info("kv_load_failure_policy: recompute")


def check_parallel(parallel: Any) -> None:
    """Refuse kinds of parallelism in which a block differs from a block on one rank."""
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise StartError(
                f"{name}={size}: kvferry does not support context parallelism, which distributes a block's tokens "
                f"over ranks; remove --{name.replace('_', '-')} or set it to 1"
            )
    hosts = getattr(parallel, "nnodes_within_dp", 1)
    if hosts > 1:
        raise StartError(
            f"nnodes={parallel.nnodes}: the ranks of one engine are on {hosts} hosts, and kvferry needs them on one; "
            "give each data-parallel replica a host of its own, or set nnodes to 1"
        )


def check_prefix_caching(config: Any) -> None:
    """Refuse a `VllmConfig` without prefix caching."""
    if not config.cache_config.enable_prefix_caching:
        raise StartError(
            "enable_prefix_caching=False: kvferry needs prefix caching; remove --no-enable-prefix-caching, or remove "
            "the connector if vLLM's log says that vLLM has disabled prefix caching for this model or platform"
        )
