"""kvferry inside stock vLLM: an out-of-tree KV connector, which vLLM finds by the entry point `register`.

Importing this module imports neither vLLM nor the connector. The connector is imported when vLLM looks its class up,
after the installed vLLM was checked, so that an unsupported release is refused with one line.
"""

from __future__ import annotations

import sys
from typing import Any

CONNECTOR = "KVFerryConnector"
VLLMS_NAMES = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""The names that vLLM looks up instead when --kv-offloading-size is given, in this module if the options name it."""
_LOOKUP_FRAMES = 3
"""How many callers are searched for the configuration: vLLM's lookup by name has one frame more than by module path."""

__all__ = ["CONNECTOR", "register"]


def register() -> None:
    """Register the connector by its name. Entry point of the group `vllm.general_plugins`; every process calls it."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    try:
        KVConnectorFactory.register_connector(CONNECTOR, __name__, CONNECTOR)
    except ValueError:
        # vLLM may load its plugins more than once in a process.
        return


def __getattr__(name: str) -> Any:
    """Return the connector's class after checking the installed vLLM.

    Raises:
        UnsupportedVllm: the connector does not fit this vLLM.
        ConnectorRefused: a setting is wrong. Only where vLLM looks the class up for a configuration.
    """
    if name != CONNECTOR and name not in VLLMS_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvferry.app.engines.vllm.versions import check_vllm

    check_vllm()
    transfer = _given_config()
    if transfer is not None:
        from kvferry.app.engines.vllm.options import check_options

        check_options(transfer)
    from kvferry.app.engines.vllm.connector import KVFerryConnector

    return KVFerryConnector


def _given_config() -> Any:
    """Return the `KVTransferConfig` that vLLM looks the class up for, or None.

    vLLM calls no hook of a connector on every platform before it loads the weights, but looks the class up as it reads
    its options: the configuration is a local variable there.
    """
    frame = sys._getframe(1)
    for _ in range(_LOOKUP_FRAMES):
        if frame.f_back is None:
            return None
        frame = frame.f_back
        if "kv_transfer_config" in frame.f_locals:
            return frame.f_locals["kv_transfer_config"]
    return None
