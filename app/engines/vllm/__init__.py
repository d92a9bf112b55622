"""kvferry inside stock vLLM: an out-of-tree KV connector, loaded by name from vLLM's `--kv-transfer-config`.

vLLM imports this module and asks it for `KVFerryConnector`. Nothing here imports vLLM before that, and nothing of it is
imported before its version was looked at, so that an unsupported one is refused with one line.
"""

from __future__ import annotations

import sys
from typing import Any

CONNECTOR = "KVFerryConnector"
VLLMS_NAMES = ("OffloadingConnector", "SimpleCPUOffloadConnector")
"""With --kv-offloading-size vLLM looks its own connector up instead, in this module where the options name it."""

__all__ = ["CONNECTOR"]


def __getattr__(name: str) -> Any:
    """The connector's class, once vLLM is known to be one that it fits.

    Raises:
        UnsupportedVllm: the connector does not fit this vLLM.
        ConnectorRefused: a setting is wrong. Only where vLLM looks the class up for a configuration.
    """
    if name != CONNECTOR and name not in VLLMS_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from app.engines.vllm.versions import check_vllm

    check_vllm()
    # vLLM calls no hook of a connector before it loads the weights, but looks the class up as it reads its options.
    transfer = sys._getframe(1).f_locals.get("kv_transfer_config")
    if transfer is not None:
        from app.engines.vllm.options import check_options

        check_options(transfer)
    from app.engines.vllm.connector import KVFerryConnector

    return KVFerryConnector
