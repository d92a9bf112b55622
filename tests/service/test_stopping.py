"""Stop of a service: responses under way end normally, and slow clients get an error."""

from __future__ import annotations

import json
import signal
import socket
from pathlib import Path

import httpx
import pytest

from tests.harness.service_process import Served, serving
from tests.harness.waiting import DEADLINE_S

LONG = 8000
"""More tokens than the embedded engine makes while answers under way may take their time."""


@pytest.mark.parametrize("max_tokens", [LONG, pytest.param(150, marks=pytest.mark.long)])
def test_a_streamed_answer_under_way_comes_to_its_end(tmp_path: Path, max_tokens: int) -> None:
    body = {"model": "tiny", "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    with serving(tmp_path) as served:
        chunks: list[str] = []
        with served.http.stream("POST", "/v1/completions", json=body) as answer:
            for line in filter(None, answer.iter_lines()):
                chunks.append(line.removeprefix("data: "))
                if len(chunks) == 3:
                    served.process.send_signal(signal.SIGTERM)
        *_, last, done = chunks
        assert done == "[DONE]"
        told = json.loads(last)
        if "error" in told:
            assert "aborted" in told["error"]["message"]
        else:
            assert told["choices"][0]["finish_reason"] == "length"
            assert len(chunks) == max_tokens + 1
        check_stopped(served)


@pytest.mark.parametrize("path", ["/v1/completions", pytest.param("/admin/v1/reset", marks=pytest.mark.long)])
def test_stop_when_a_body_does_not_arrive_ends_in_time(tmp_path: Path, path: str) -> None:
    with serving(tmp_path) as served:
        url = httpx.URL(served.url)
        lines = [f"POST {path} HTTP/1.1", f"Host: {url.host}", "Content-Type: application/json", "Content-Length: 9"]
        with socket.create_connection((url.host, url.port or 0), timeout=DEADLINE_S) as client:
            client.sendall("\r\n".join([*lines, "", "{"]).encode())
            served.http.get("/healthz")
            served.process.send_signal(signal.SIGTERM)
            answer = b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"is stopping" in answer
        check_stopped(served)


def check_stopped(served: Served) -> None:
    assert served.process.wait(DEADLINE_S) == 0
    assert "stopped" in served.log()
    assert "ERROR" not in served.log()
    assert "Traceback" not in served.log()
