"""An S3 server for tests (moto's, a process of its own), a proxy in front of it that fails as tests want, and tiers."""

from __future__ import annotations

import atexit
import http.client
import ssl
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from kvferry.app.tiers.object import ObjectTier
from kvferry.core.keys import Key
from tests.harness.server_process import ServerProcess, free_port
from tests.harness.tier_rig import Rig, StoreBench, rig_of
from tests.harness.tier_slots import changed
from tests.harness.waiting import DEADLINE_S, wait_until

BUCKET = "blocks"
NUM_SLOTS = 16
KEY_ID, SECRET = "tier-key-id", "tier-secret-key"
_SIGNATURE = f"AWS4-HMAC-SHA256 Credential={KEY_ID}/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


class ObjectServer(ServerProcess):
    """A server on loopback with one bucket, which it forgets when it is killed."""

    start_s = 120.0

    def __init__(self) -> None:
        pytest.importorskip("moto.server", reason="no S3 server: pip install 'moto[server]'")
        super().__init__()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]

    def answers(self) -> bool:
        try:
            return self.request("PUT", "")[0] == 200
        except OSError:
            return False

    def request(self, method: str, name: str, body: bytes | None = None) -> tuple[int, bytes]:
        """Send a request for an object of the bucket. This server does not check signatures."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)
        try:
            connection.request(method, f"/{BUCKET}/{name}".removesuffix("/"), body, {"Authorization": _SIGNATURE})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def names(self, prefix: str) -> list[str]:
        """The names of all objects with a prefix."""
        # As the answer lists at most 1,000, which no test has.
        _, text = self.request("GET", f"?list-type=2&prefix={prefix}")
        return sorted(part.partition("</Key>")[0] for part in text.decode().split("<Key>")[1:])

    def read(self, name: str) -> bytes:
        status, body = self.request("GET", name)
        assert status == 200, name
        return body

    def write(self, name: str, body: bytes) -> None:
        assert self.request("PUT", name, body)[0] == 200

    def delete(self, name: str) -> None:
        assert self.request("DELETE", name)[0] == 204


@contextmanager
def object_server() -> Iterator[ObjectServer]:
    """A server of a test's own."""
    server = ObjectServer()
    try:
        yield server
    finally:
        server.kill()


@cache
def shared_object_server() -> ObjectServer:
    """A server for all tests that only store and load; each uses a prefix of its own."""
    server = ObjectServer()
    atexit.register(server.kill)
    return server


@dataclass
class Call:
    """A request at the proxy. `changed` may be called by a fault to change its headers."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def condition(self) -> str | None:
        """Name of its condition."""
        return next((name for name in self.headers if name.lower() in ("if-match", "if-none-match")), None)


@dataclass
class Answer:
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    num_sent: int | None = None
    """Bytes of the body after which the connection breaks; None for all."""


class Broken(Exception):
    """Raised by a fault: the connection breaks without an answer."""


Fault = Callable[[Call, Callable[[], Answer]], Answer]
"""Receives a request, and a function that returns the server's answer to it."""


class Proxy:
    """Passes requests to a server, through `fault` if there is one."""

    def __init__(self, server: ObjectServer, tls: ssl.SSLContext | None = None) -> None:
        self.fault: Fault | None = None
        self.calls: list[Call] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                call = Call(self.command, self.path, dict(self.headers), self.rfile.read(size))
                proxy.calls.append(call)
                try:
                    fault = proxy.fault
                    answer = _ask(server, call) if fault is None else fault(call, lambda: _ask(server, call))
                except (Broken, OSError, http.client.HTTPException):
                    self.close_connection = True
                    return
                self._send(answer)

            def _send(self, answer: Answer) -> None:
                self.send_response_only(answer.status)
                for name, value in answer.headers.items():
                    if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                        self.send_header(name, value)
                length = answer.headers.get("Content-Length") if self.command == "HEAD" else str(len(answer.body))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer.body[: answer.num_sent])
                self.close_connection |= answer.num_sent is not None

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any  # noqa: N815

            def log_message(self, *args: object) -> None:
                """Log nothing."""

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                """Ignore clients that have gone."""

        self._http = Server(("127.0.0.1", 0), Handler)
        self._scheme = "http" if tls is None else "https"
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self._http.server_port}"

    @contextmanager
    def faulty(self, fault: Fault) -> Iterator[None]:
        self.fault = fault
        try:
            yield
        finally:
            self.fault = None

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


def _ask(server: ObjectServer, call: Call) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE_S)
    try:
        connection.request(call.method, call.path, call.body, call.headers)
        answer = connection.getresponse()
        return Answer(answer.status, dict(answer.getheaders()), answer.read())
    finally:
        connection.close()


@contextmanager
def object_proxy(server: ObjectServer, tls: ssl.SSLContext | None = None) -> Iterator[Proxy]:
    proxy = Proxy(server, tls)
    try:
        yield proxy
    finally:
        proxy.close()


def refuses(call: Call, ask: Callable[[], Answer]) -> Answer:
    """A fault: every connection breaks."""
    raise Broken


def has_no_space(call: Call, ask: Callable[[], Answer]) -> Answer:
    """A fault: every write is refused, as by a server whose quota is used up."""
    if call.method != "PUT":
        return ask()
    return Answer(403, {"Content-Type": "application/xml"}, b"<Error><Code>QuotaExceeded</Code></Error>")


def error_of(status: int, code: str) -> Fault:
    """A fault: every request is answered by an error."""

    def fault(call: Call, ask: Callable[[], Answer]) -> Answer:
        return Answer(status, {"Content-Type": "application/xml"}, f"<Error><Code>{code}</Code></Error>".encode())

    return fault


@cache
def credentials_file() -> Path:
    """A file with credentials that the server accepts: any."""
    path = Path(mkdtemp(prefix="kvferry-object-")) / "credentials"
    path.write_text(f"[default]\naws_access_key_id = {KEY_ID}\naws_secret_access_key = {SECRET}\n")
    atexit.register(path.unlink)
    return path


def object_rig(
    endpoint: str,
    prefix: str = "",
    fingerprint: dict[str, object] | None = None,
    *,
    is_up: bool = True,
    **settings: Any,
) -> Rig:
    """An object tier on a server or proxy, by default with a prefix of its own, once it uses that if it is up."""
    given: dict[str, Any] = {
        "type": "object",
        "name": "object",
        "url": f"s3://{BUCKET}/{prefix or f'test-{uuid.uuid4().hex}'}",
        "endpoint": endpoint,
        "region": "us-east-1",
        "credentials_file": credentials_file(),
        "ttl_s": 86400,
        "threads": 3,
        "io_timeout_s": DEADLINE_S,
        "timeout_s": DEADLINE_S,
    }
    entry = ObjectTier.Settings(**{name: value for name, value in (given | settings).items() if value is not None})
    rig = rig_of(ObjectTier, entry, fingerprint, NUM_SLOTS)
    if is_up:
        wait_until(lambda: not rig.tier.counts().unavailable, "the store is used", DEADLINE_S)
    return rig


def free_address() -> str:
    """The URL of a port on which nothing listens."""
    return f"http://127.0.0.1:{free_port()}"


class ObjectBench(StoreBench):
    """The object tier as a `StoreBench`: the proxy breaks connections, or holds them up."""

    def __init__(self, proxy: Proxy, server: ObjectServer) -> None:
        self._proxy = proxy
        self._server = server
        self._prefix = f"bench-{uuid.uuid4().hex}"

    def make_rig(self, fingerprint: dict[str, object] | None, **settings: Any) -> Rig:
        return object_rig(self._proxy.url, self._prefix, fingerprint, **settings)

    @contextmanager
    def down(self) -> Iterator[None]:
        with self._proxy.faulty(refuses):
            yield

    def spoil(self, key: Key) -> None:
        (name,) = [name for name in self._server.names(self._prefix) if name.endswith(f"/{key.hex()}")]
        self._server.write(name, changed(self._server.read(name)))


@contextmanager
def object_bench(path: Path) -> Iterator[ObjectBench]:
    server = shared_object_server()
    with object_proxy(server) as proxy, closing(ObjectBench(proxy, server)) as bench:
        yield bench
