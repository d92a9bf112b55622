"""A vLLM plugin for `bench.vllm`: the processes of one engine sleep while they wait for each other.

vLLM's engine core and its ranks yield in a loop while they wait for each other, so that the CPU time of a server is
about twice its wall time, whatever it computes. Both servers get the plugin, so that their CPU time is that of work.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

SLEEP_S = 0.0005


def install(folder: Path) -> None:
    """Have vLLM's processes that this one starts load the plugin."""
    metadata = folder / "bench_vllm_waits-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-vllm-waits\nVersion: 1\n")
    plugin = f"{__name__}:sleep_while_waiting"
    (metadata / "entry_points.txt").write_text(f"[vllm.general_plugins]\nbench_vllm_waits = {plugin}\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", str(Path.cwd()))])


def sleep_while_waiting() -> None:
    """Replace the wait of vLLM's queues in shared memory."""

    def wait(condition: Any, timeout_ms: int | None = None) -> None:
        time.sleep(SLEEP_S)

    SpinCondition.wait = wait
