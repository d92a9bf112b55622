"""An OpenTelemetry collector: an HTTP server that parses what it is sent, and may refuse or never answer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.harness.waiting import DEADLINE_S, wait_until


@dataclass(frozen=True)
class Span:
    """A span as it was received; ids are hexadecimal, times in seconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began_s: float
    ended_s: float
    attributes: dict[str, Any]
    resource: dict[str, Any]
    is_error: bool
    trace_state: str


@dataclass
class Collector:
    """The spans that have arrived, and what the collector does with the next ones."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    status: int = 200
    may_answer: threading.Event = field(default_factory=threading.Event)

    def named(self, name: str, request: str | None = None) -> list[Span]:
        """The spans of this name, or those of them in the trace of the request with this id."""
        spans = list(self.spans)
        traces = {span.trace_id for span in spans if span.attributes.get("kvferry.request_id") == request}
        return [span for span in spans if span.name == name and (request is None or span.trace_id in traces)]

    def wait_for(self, name: str, request: str | None = None) -> Span:
        """Wait for a span."""
        wait_until(lambda: bool(self.named(name, request)), f"{name} of {request}", DEADLINE_S)
        return self.named(name, request)[0]


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


def _spans(body: bytes) -> Iterator[Span]:
    for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        for scope in of_resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    span.name,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.parent_span_id.hex(),
                    span.start_time_unix_nano / 1e9,
                    span.end_time_unix_nano / 1e9,
                    _values(span.attributes),
                    _values(of_resource.resource.attributes),
                    span.status.code == 2,
                    span.trace_state,
                )


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector at a free port, until the block ends."""
    collector = Collector()
    collector.may_answer.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.headers.append(dict(self.headers))
            collector.may_answer.wait(DEADLINE_S)
            if self.path == "/v1/traces" and collector.status == 200:
                collector.spans += _spans(body)
            self.send_response(collector.status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, name="collector", daemon=True)
    thread.start()
    collector.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield collector
    finally:
        collector.may_answer.set()
        server.shutdown()
        server.server_close()
        thread.join(DEADLINE_S)
