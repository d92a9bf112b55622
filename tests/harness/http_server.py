"""A real server for tests: uvicorn on a free port, the real app over the real core, and the real store in a folder."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
import uvicorn
from starlette.types import ASGIApp

from kvferry.app.service.server import Server
from kvferry.app.service.timed_heads import TimedHeads
from tests.harness.waiting import DEADLINE_S, wait_until


@dataclass
class Running:
    """A server that answers at `url`."""

    server: uvicorn.Server
    thread: threading.Thread
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, token: str | None = None, **options: object) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # Reading the certificates of `verify` takes longer than most tests here.
        options = {"timeout": DEADLINE_S, "trust_env": False, "verify": False, **options}
        return httpx.Client(base_url=self.url, headers=headers, **options)  # type: ignore[arg-type]

    def stop(self) -> bool:
        """Ask it to stop, and say whether it did."""
        self.server.should_exit = True
        self.thread.join(DEADLINE_S)
        return not self.thread.is_alive()


class ClosingFlag:
    """What `AdminContext.closing` asks: whether the server was told to stop. Bound to a server once there is one."""

    def __init__(self) -> None:
        self.server: uvicorn.Server | None = None

    def __call__(self) -> bool:
        return self.server is not None and self.server.should_exit


@contextmanager
def serve(app: ASGIApp, closing: ClosingFlag | None = None, http: type[TimedHeads] = TimedHeads) -> Iterator[Running]:
    """Serve an app until the block ends."""
    # With the protocol named, asyncio sets TCP_NODELAY on what it accepts; without, every answer waits 40 ms.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(128)
    server = Server(app, 10, lambda: None)
    server.config.http = http
    if closing is not None:
        closing.server = server
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="test-server", daemon=True)
    thread.start()
    running = Running(server, thread, listener.getsockname()[1])
    try:
        wait_until(lambda: server.started or not thread.is_alive(), "the server has started")
        if not thread.is_alive():
            raise RuntimeError("the server did not start")
        yield running
    finally:
        if not running.stop():
            raise TimeoutError("the server did not stop")
