"""Out-of-tree KV connector for stock vLLM, registered by the entry point `register`.

Importing this module imports neither vLLM nor the connector. The connector is imported when vLLM looks up its class,
after the installed vLLM was checked, so that an unsupported release is refused with one line.
"""

from __future__ import annotations

import sys
from typing import Any

CONNECTOR = "KVFerryConnector"
VLLM_CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""Names that vLLM looks up for --kv-offloading-size, in this module if `kv_connector_module_path` names it."""
_LOOKUP_FRAMES = 3
"""Number of callers searched for the configuration; vLLM's lookup by name has one frame more than by module path."""

__all__ = ["CONNECTOR", "register"]


def register() -> None:
    """Register the connector by name. Entry point of the group `vllm.general_plugins`, called in every process."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, __name__, CONNECTOR)
    except ValueError:
        # Already registered: vLLM may load its plugins more than once in a process.
        return


def __getattr__(name: str) -> Any:
    """Return the connector class after checking the installed vLLM.

    Raises:
        UnsupportedVllm: vLLM lacks parts that the connector needs.
        StartError: A setting is invalid; only if vLLM looks up the class for a configuration.
    """
    if name != CONNECTOR and name not in VLLM_CONNECTORS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvferry.app.engines.vllm.versions import check_vllm

    check_vllm()
    transfer = _config_of_caller()
    if transfer is not None:
        from kvferry.app.engines.vllm.options import check_options

        check_options(transfer)
    from kvferry.app.engines.vllm.connector import KVFerryConnector

    return KVFerryConnector


def _config_of_caller() -> Any:
    """Return the `KVTransferConfig` for which vLLM looks up the class, or None.

    No hook of a connector is called on every platform before the weights are loaded, but the class is looked up when
    vLLM reads its options. The configuration is a local variable of that caller.
    """
    frame = sys._getframe(1)
    for _ in range(_LOOKUP_FRAMES):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if "kv_transfer_config" in frame.f_locals:
            return frame.f_locals["kv_transfer_config"]
    return None
