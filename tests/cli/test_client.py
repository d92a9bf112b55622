"""The client that programs import, against a real service."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse, RedirectResponse, StreamingResponse

from kvferry.app.client import KVFerryClient, Refused, Unreachable
from kvferry.app.settings import BadSettings
from tests.harness.engine_peer import EnginePeer
from tests.harness.http_server import serve
from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import ADMIN, READ, Service


@pytest.fixture
def client(service: Service) -> Iterator[KVFerryClient]:
    with KVFerryClient(service.url, ADMIN) as client:
        yield client


def test_every_call_of_the_admin_api(client: KVFerryClient, service: Service) -> None:
    service.engine.run(LoopRequest("all-calls", 64, seed=77))
    service.settle()
    assert client.stats()["pool"]["slots"] == 16
    assert client.policy()["store"]["value"] is True
    assert client.patch_policy({"priority": "high"})["priority"] == {"value": "high", "source": "runtime"}
    assert client.patch_policy({"priority": None})["priority"]["source"] == "default"
    assert client.put_request_policy("x/y", {"load": False}, ttl_s=5)["load"]["value"] is False
    assert client.request_policy("x/y")["id"] == "x/y"
    client.delete_request_policy("x/y")
    rule = client.put_rule("sql", order=3, match={"lora": "sql-*"}, policy={"load": False})
    assert client.rule("sql") == rule
    assert client.rules().items == [rule]
    client.delete_rule("sql")
    assert client.rules(limit=1).items == []
    assert client.request("all-calls")["prompt_tokens"]["total"] == 64
    assert client.requests(limit=2).next_cursor is not None
    assert client.blocks(limit=1).items
    assert client.evictions(reason="capacity", limit=1).items
    assert client.evictions_summary()["total"] >= 1
    assert client.config()["port"]["value"] == 8787
    assert client.patch_config({"log_level": "error"})["log_level"]["source"] == "runtime"
    assert client.patch_config({"log_level": None})["log_level"]["source"] == "default"
    assert client.reset(match={"request": "nobody"}, reason="test")["dropped_blocks"] == 0
    service.settle_history()
    assert any(item["outcome"] for item in client.audit(limit=5).items)


def test_pages_follow_one_another(client: KVFerryClient) -> None:
    seen: list[str] = []
    cursor = None
    while True:
        page = client.evictions(limit=5, cursor=cursor)
        seen += [item["id"] for item in page.items]
        cursor = page.next_cursor
        if cursor is None:
            break
    assert len(seen) == len(set(seen)) >= 16


def test_stats_stream(client: KVFerryClient) -> None:
    with closing(client.stats_stream(0.1)) as stream:
        first, second = next(stream), next(stream)
    assert second["uptime_s"] > first["uptime_s"]
    assert client.stats()["uptime_s"] > second["uptime_s"], "the client can be used on"


def test_events(client: KVFerryClient) -> None:
    with closing(client.events(["rule"])) as stream:
        assert next(stream)["type"] == "open"
        with KVFerryClient(client.url, ADMIN) as other:
            other.put_rule("told")
            other.delete_rule("told")
        assert [next(stream)["change"], next(stream)["change"]] == ["set", "removed"]
    with pytest.raises(Refused, match="type"):
        next(client.events(["nothing"]))


def test_a_refusal_carries_the_problem(client: KVFerryClient) -> None:
    with pytest.raises(Refused) as caught:
        client.patch_policy({"store": 3, "colour": "red"})
    assert caught.value.status == 422
    assert {error["field"] for error in caught.value.problem["errors"]} == {"store", "colour"}
    with pytest.raises(Refused, match="409") as caught:
        client.patch_config({"device_blocks": 1})
    assert caught.value.problem["settings"] == ["device_blocks"]
    with pytest.raises(Refused) as caught:
        client.request("never heard of")
    assert caught.value.status == 404
    with pytest.raises(Refused) as caught:
        next(client.stats_stream(-1))
    assert caught.value.status == 422


def test_tokens_from_the_environment(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_URL", service.url)
    monkeypatch.setenv("KVFERRY_READ_TOKEN", READ)
    with KVFerryClient() as reader:
        assert reader.stats()["epoch"] >= 0
        with pytest.raises(Refused) as caught:
            reader.reset()
        assert caught.value.status == 403
    monkeypatch.setenv("KVFERRY_ADMIN_TOKEN", ADMIN)
    with KVFerryClient() as admin:
        assert admin.patch_policy({}) is not None
    with KVFerryClient(token="wrong") as nobody, pytest.raises(Refused) as caught:
        nobody.stats()
    assert caught.value.status == 401
    assert "wrong" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8787", "ftp://h", "http://", "http://[::1", "http://h:99999", "http://a b", "http://u:pw@h"]
)
def test_what_is_no_url(url: str) -> None:
    with pytest.raises(BadSettings, match="must be a URL such as"):
        KVFerryClient(url, "token")


def test_nobody_there() -> None:
    with KVFerryClient("http://127.0.0.1:1", "token") as client:
        with pytest.raises(Unreachable, match=r"cannot reach http://127.0.0.1:1: "):
            client.stats()
        with pytest.raises(Unreachable):
            next(client.stats_stream())


def test_a_server_that_does_not_answer_in_time() -> None:
    asked, over = threading.Event(), threading.Event()
    app = FastAPI()

    @app.get("/admin/v1/stats")
    def stats() -> None:
        asked.set()
        over.wait(30)

    with serve(app) as running, KVFerryClient(running.url, "t", timeout_s=0.2) as client:
        try:
            with pytest.raises(Unreachable, match="no answer in time"):
                client.stats()
        finally:
            over.set()
        assert asked.is_set()


def test_a_server_that_is_something_else() -> None:
    app = FastAPI()
    app.get("/admin/v1/stats")(lambda: PlainTextResponse("hello"))
    app.get("/admin/v1/policy")(lambda: [1])
    app.get("/admin/v1/config")(lambda: RedirectResponse("/login"))
    app.get("/admin/v1/stats/stream")(lambda: PlainTextResponse("hello"))
    with serve(app) as running, KVFerryClient(running.url, "t") as client:
        calls = (client.stats, client.policy, client.config, lambda: next(client.stats_stream()))
        for call in calls:
            with pytest.raises(Refused, match="is that the right URL"):
                call()
        with pytest.raises(Refused) as caught:
            client.audit()
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
        stream_of_stats = client.stats_stream()
        assert next(stream_of_stats) == {"epoch": 1}
        with pytest.raises(Unreachable):
            next(stream_of_stats)


def test_completions() -> None:
    peer = EnginePeer()
    with serve(peer.app) as running, KVFerryClient(running.url, "t") as client:
        (model,) = client.models()
        assert model["id"] == "peer"
        chunks = list(client.stream_completion([3, 4, 5], max_tokens=3, request_id="mine"))
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[65]] * 3
    assert peer.request_ids == ["mine"]
    assert peer.bodies == [{"prompt": [3, 4, 5], "max_tokens": 3, "stream": True}]


def test_the_token_does_not_show() -> None:
    with KVFerryClient("http://127.0.0.1:1", "hunter2-hunter2") as client:
        assert "hunter2" not in repr(client)
