"""A client of Mooncake Store in a process of its own, which runs this file as a script.

It imports nothing of kvferry. Arguments: a JSON object with the arguments of the client's `setup`, the file descriptor
and size of the shared buffer, and the file descriptors of connections. Over the first connection the result of `setup`
is sent, and nothing else. Each other one is served by a thread: it receives the name of a call with its arguments, and
answers with its result, or with None if it raised. The process ends when the first connection is closed.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

CLOSE_S = 10


class Calls:
    """Calls of the client. Places in the shared buffer are given by their starts."""

    def __init__(self, client: Any, address: int) -> None:
        self._client = client
        self._address = address

    def exists(self, names: list[str]) -> list[int]:
        """Return 1 for each object that exists, 0 for others, or a negative code."""
        result: list[int] = self._client.batch_is_exist(names)
        return result

    def remove(self, names: list[str]) -> list[int]:
        """Remove objects, also those that are being read; return codes."""
        result: list[int] = self._client.batch_remove(names, True)
        return result

    def remove_matching(self, pattern: str) -> int:
        """Remove objects whose names match, and that have no lease; return their number."""
        result: int = self._client.remove_by_regex(pattern, False)
        return result

    def put(self, names: list[str], starts: Sequence[int], sizes: list[int], replicas: int, pinned: bool) -> list[int]:
        """Store objects that do not exist; return codes, 0 also for those that do."""
        from mooncake.store import ReplicateConfig

        config = ReplicateConfig()
        config.replica_num, config.with_hard_pin = replicas, pinned
        result: list[int] = self._client.batch_put_from(names, [self._address + one for one in starts], sizes, config)
        return result

    def get(self, names: list[str], starts: Sequence[int], sizes: list[int]) -> list[int]:
        """Read whole objects of up to these sizes; return their sizes, or negative codes."""
        result: list[int] = self._client.batch_get_into(names, [self._address + one for one in starts], sizes)
        return result


def serve(connection: Connection, calls: Calls) -> None:
    """Answer calls until the connection is closed."""
    while True:
        try:
            name, *args = connection.recv()
        except (EOFError, OSError):
            return
        answer: Any = None
        try:
            call: Callable[..., Any] = getattr(calls, name)
            answer = call(*args)
        except Exception:  # noqa: BLE001 - the caller treats it as a failed call
            answer = None
        try:
            connection.send(answer)
        except OSError:
            return


def main(given: str) -> None:
    """Set the client up, and serve calls until the first connection is closed."""
    # The engine decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    options = json.loads(given)
    first, *others = (Connection(fd) for fd in options["connections"])
    buffer = mmap.mmap(options["buffer"], options["bytes"])
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    code = client.setup(*options["setup"]) or client.register_buffer(address, options["bytes"])
    calls = Calls(client, address)
    for connection in others:
        threading.Thread(target=serve, args=(connection, calls), daemon=True).start()
    try:
        first.send(code)
        if code == 0:
            first.recv()
    except (EOFError, OSError):
        pass
    # Closing holds the interpreter's lock, so that no thread could end it.
    signal.alarm(CLOSE_S)
    client.close()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
