"""The client that programs import, against a real service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, RedirectResponse, StreamingResponse

from kvferry.app.cli.remote import connect
from kvferry.app.client import KVFerryClient, Refused, Unreachable
from kvferry.app.settings import BadSettings
from kvferry.app.settings.connection import find_connection
from tests.harness.http_server import serve
from tests.harness.loop_service import ADMIN, READ, Service
from tests.harness.waiting import DEADLINE_S


@pytest.fixture
def client(service: Service) -> Iterator[KVFerryClient]:
    with KVFerryClient(service.url, ADMIN) as client:
        yield client


def test_calls_return_the_object_of_the_response(client: KVFerryClient) -> None:
    assert client.get("stats")["pool"]["slots"] == 16
    assert client.send("PATCH", "policy", {"priority": "high"})["priority"] == {"value": "high", "source": "runtime"}
    assert client.send("PATCH", "policy", {"priority": None})["priority"]["source"] == "default"
    assert client.send("PUT", "rules/sql", {"order": 3})["order"] == 3
    assert len(client.get("rules", limit=1, cursor=None)["items"]) == 1
    assert client.send("DELETE", "rules/sql") == {}
    assert client.get("/admin/v1/rules")["items"] == []


def test_events(client: KVFerryClient) -> None:
    with closing(client.events("events", type=["rule"])) as stream:
        assert next(stream)["type"] == "open"
        with KVFerryClient(client.url, ADMIN) as other:
            other.send("PUT", "rules/told", {})
            other.send("DELETE", "rules/told")
        assert [next(stream)["change"], next(stream)["change"]] == ["set", "removed"]
    with pytest.raises(Refused, match="type"):
        next(client.events("events", type=["nothing"]))


def test_a_refusal_carries_the_problem(client: KVFerryClient) -> None:
    with pytest.raises(Refused) as caught:
        client.send("PATCH", "policy", {"store": 3, "colour": "red"})
    assert caught.value.status == 422
    assert {error["field"] for error in caught.value.problem["errors"]} == {"store", "colour"}
    with pytest.raises(Refused, match="409") as caught:
        client.send("PATCH", "config", {"device_blocks": 1})
    assert caught.value.problem["settings"] == ["device_blocks"]
    with pytest.raises(Refused) as caught:
        client.get("requests/unknown")
    assert caught.value.status == 404
    with pytest.raises(Refused) as caught:
        next(client.events("stats/stream", interval_s=-1))
    assert caught.value.status == 422


def test_tokens_from_the_environment(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_URL", service.url)
    monkeypatch.setenv("KVFERRY_READ_TOKEN", READ)
    with connect(None) as reader:
        assert reader.get("stats")["epoch"] >= 0
        with pytest.raises(Refused) as caught:
            reader.send("POST", "reset")
        assert caught.value.status == 403
    monkeypatch.setenv("KVFERRY_ADMIN_TOKEN", ADMIN)
    with connect(None) as admin:
        assert admin.send("PATCH", "policy", {}) is not None
    with KVFerryClient(service.url, "wrong") as nobody, pytest.raises(Refused) as caught:
        nobody.get("stats")
    assert caught.value.status == 401
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("127.0.0.1:8787", "ftp://h", "http://", "http://[::1", "http://h:99999", "http://a b", "http://u:pw@h"),
        *(f"http://{64 * 'a'}", "http://a..b"),
    ],
)
def test_client_url_when_invalid_is_refused(url: str) -> None:
    with pytest.raises(BadSettings, match="must be a URL such as"):
        find_connection(url)


def test_a_server_that_does_not_answer_in_time() -> None:
    over = threading.Event()
    app = FastAPI()

    @app.get("/admin/v1/stats")
    def stats() -> None:
        over.wait(DEADLINE_S)

    with serve(app) as running, KVFerryClient(running.url, "t", timeout_s=0.2) as client:
        try:
            with pytest.raises(Unreachable, match="no answer in time"):
                client.get("stats")
        finally:
            over.set()


def test_a_server_that_is_something_else() -> None:
    app = FastAPI()
    app.get("/admin/v1/stats")(lambda: PlainTextResponse("hello"))
    app.get("/admin/v1/policy")(lambda: [1])
    app.get("/admin/v1/config")(lambda: RedirectResponse("/login"))
    app.get("/admin/v1/stats/stream")(lambda: PlainTextResponse("hello"))
    with serve(app) as running, KVFerryClient(running.url, "t") as client:
        for path in ("stats", "policy", "config"):
            with pytest.raises(Refused, match="is that the right URL"):
                client.get(path)
        with pytest.raises(Refused, match="is that the right URL"):
            next(client.events("stats/stream"))
        with pytest.raises(Refused) as caught:
            client.get("audit")
        assert caught.value.status == 404


def test_a_stream_that_breaks_off_is_unreachable() -> None:
    app = FastAPI()

    @app.get("/admin/v1/stats/stream")
    def stream() -> StreamingResponse:
        def body() -> Iterator[str]:
            yield 'data: {"epoch": 1}\n\n'
            raise RuntimeError("broken")

        return StreamingResponse(body(), media_type="text/event-stream")

    with serve(app) as running, KVFerryClient(running.url, "t") as client:
        stream_of_stats = client.events("stats/stream")
        assert next(stream_of_stats) == {"epoch": 1}
        with pytest.raises(Unreachable):
            next(stream_of_stats)


def test_the_token_does_not_show() -> None:
    with KVFerryClient("http://127.0.0.1:1", "hunter2-hunter2") as client:
        assert "hunter2" not in repr(client)
