"""kvferry inside stock vLLM: an out-of-tree KV connector, loaded by name from vLLM's `--kv-transfer-config`.

vLLM imports this module and asks it for `KVFerryConnector`. Nothing here imports vLLM before that, and nothing of it is
imported before its version was looked at, so that an unsupported one is refused with one line.
"""

from __future__ import annotations

from typing import Any

CONNECTOR = "KVFerryConnector"

__all__ = ["CONNECTOR"]


def __getattr__(name: str) -> Any:
    """The connector's class, once vLLM is known to be one that it fits. Raises `UnsupportedVllm`."""
    if name != CONNECTOR:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from app.engines.vllm.versions import check_vllm

    check_vllm()
    from app.engines.vllm.connector import KVFerryConnector

    return KVFerryConnector
