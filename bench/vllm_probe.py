"""Connectors for `bench.vllm`: kvferry's with counters of its own processor time, and one that does nothing.

`--only share` has vLLM load `MeasuredConnector` in place of `KVFerryConnector`. Each process writes what it counts into
a file of the folder that the environment names, and names its threads so that /proc shows what they are.
"""

from __future__ import annotations

import mmap
import os
import pickle
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from kvferry.app.engines.vllm.connector import KVFerryConnector

FOLDER = "BENCH_PROBE_FOLDER"
COUNTERS = ("hooks", "pickling", "calls")
"""CPU seconds in hooks, those that it takes to pickle and unpickle plans and reports, and the number of calls."""
THREADS = ("kvferry", "AnyIO")
"""How the names of threads begin that an engine process has for kvferry."""
_STARTING = ("register_kv_caches", "set_xfer_handshake_metadata_pp_aware", "shutdown")
"""Hooks that are not called while requests run."""
_PICKLED = ("build_connector_meta", "build_connector_worker_meta")
"""Hooks whose results vLLM sends from process to process."""


def read_counters(path: Path) -> dict[str, float]:
    """Return what a process has counted, by name."""
    return dict(zip(COUNTERS, memoryview(path.read_bytes()).cast("d"), strict=True))


class _Counters:
    """Counters in a file, which other processes can read at any time."""

    def __init__(self) -> None:
        path = Path(os.environ[FOLDER], str(os.getpid()))
        path.write_bytes(bytes(8 * len(COUNTERS)))
        with path.open("r+b") as file:
            self._values = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        self.is_inside = False

    def add(self, name: str, amount: float) -> None:
        self._values[COUNTERS.index(name)] += amount


def _counted(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Count the CPU time of the engine's thread in a hook; of nested hooks that of the outermost."""

    @wraps(hook)
    def counted(self: MeasuredConnector, *args: Any, **kwargs: Any) -> Any:
        counters = self.counters
        if counters.is_inside:
            return hook(self, *args, **kwargs)
        counters.is_inside, began_s = True, time.thread_time()
        try:
            result = hook(self, *args, **kwargs)
        finally:
            ended_s = time.thread_time()
            counters.add("hooks", ended_s - began_s)
            counters.add("calls", 1)
            counters.is_inside = False
        if name in _PICKLED:
            pickle.loads(pickle.dumps(result, pickle.HIGHEST_PROTOCOL))
            counters.add("pickling", time.thread_time() - ended_s)
        return result

    return counted


def _name_threads() -> None:
    """Give threads their Python names in /proc, which Python does from 3.14 on."""
    start = threading.Thread.start

    def named_start(self: threading.Thread) -> None:
        start(self)
        Path(f"/proc/self/task/{self.native_id}/comm").write_text(self.name[:15])

    threading.Thread.start = named_start  # type: ignore[method-assign]


class MeasuredConnector(KVFerryConnector):
    """Counts the CPU time of its hooks and names its threads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _name_threads()
        self.counters = _Counters()
        super().__init__(*args, **kwargs)


for _name, _hook in vars(KVFerryConnector).items():
    if callable(_hook) and not _name.startswith("_") and _name not in _STARTING:
        setattr(MeasuredConnector, _name, _counted(_name, _hook))


class IdleConnector(KVConnectorBase_V1, SupportsHMA):
    """Does nothing, so that a server with it spends what vLLM itself spends for any connector."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None
