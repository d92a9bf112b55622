"""The client that benchmarks poll with: it counts whole answers of whom it was told to ask, and nothing else."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from bench.poller import NOBODY, OTHER, OWN, polling
from tests.waiting import wait_until

WAIT_S = 60.0
BODY = b"x" * 300_000


class Pages(ThreadingHTTPServer):
    """Answers calls and counts them by path: a large body, one without a body, a connection that ends, a refusal."""

    daemon_threads = True

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        super().__init__(("127.0.0.1", 0), Page)

    def url(self, path: str) -> str:
        """Where a page is."""
        return f"http://127.0.0.1:{self.server_port}{path}"


class Page(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    server: Pages

    def do_GET(self) -> None:
        self.server.calls[self.path] += 1
        refused = self.path == "/refused"
        body = BODY if self.path == "/large" else b""
        self.send_response(404 if refused else 200)
        # Some servers write it so, and some in small letters.
        self.send_header("content-length" if self.path == "/ends" else "CONTENT-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = self.path == "/ends"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  its name in the library
        """Be quiet."""


@contextmanager
def pages() -> Iterator[Pages]:
    with Pages() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_polls_whom_it_is_told_to_and_counts_whole_answers() -> None:
    with pages() as server, polling([server.url("/large"), server.url("/ends")], rate=200) as poller:
        for arm, path in ((OWN, "/large"), (OTHER, "/ends")):
            asked, before = server.calls[path], poller.polls
            poller.ask(arm)
            wait_until(lambda path=path, asked=asked: server.calls[path] > asked + 20, "twenty calls", WAIT_S)  # type: ignore[misc]
            # The last call may be without its answer still.
            assert poller.polls >= before + 20
        poller.ask(NOBODY)


def test_ends_at_an_answer_that_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    with pages() as server:
        urls = [server.url("/large"), server.url("/refused")]
        with pytest.raises(SystemExit, match="does not get up to speed"), polling(urls, rate=200):
            pass
    assert "is not 200" in capfd.readouterr().err
