from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from sqlalchemy import Engine, event

from kvferry.app.api.audit import MAX_UNKNOWN_PER_MINUTE, SAFE_PATHS, describe_body
from kvferry.app.store import DatabaseUnavailable
from kvferry.app.store.database import Waits
from kvferry.app.store.threads import MAX_QUEUED
from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import ADMIN, READ, Service, fill, locked, name_of_token, pages, start_service
from tests.harness.stores import busy_writer
from tests.harness.waiting import DEADLINE_S

AUDIT = "/admin/v1/audit"


def latest(client: httpx.Client) -> dict[str, Any]:
    item: dict[str, Any] = client.get(AUDIT, params={"limit": 1}).json()["items"][0]
    return item


def test_audit_client_address_when_forwarded_headers_are_sent_is_real(api: httpx.Client) -> None:
    said = {"X-Forwarded-For": "203.0.113.7", "X-Forwarded-Proto": "https", "Forwarded": "for=203.0.113.7"}
    assert api.post("/admin/v1/reset", json={}, headers=said).status_code == 200
    assert latest(api)["client"] == "127.0.0.1"


def test_every_mutating_call_leaves_a_record(tmp_path: Path) -> None:
    with start_service(tmp_path, admin_token=ADMIN) as running, running.client(ADMIN) as client:
        (block, *_) = fill(running, LoopRequest("one", 64, seed=1, session="s"))
        calls: list[tuple[str, str, Any, int]] = [
            ("PATCH", "/admin/v1/policy", {"store": True}, 200),
            ("PATCH", "/admin/v1/config", {"log_level": "info"}, 200),
            ("PUT", "/admin/v1/requests/r1/policy", {"store": False, "ttl_s": 5}, 200),
            ("DELETE", "/admin/v1/requests/r1/policy", None, 204),
            ("POST", "/admin/v1/rules", {"name": "batch", "match": {"request": "b*"}, "policy": {"load": False}}, 201),
            ("PUT", "/admin/v1/rules/batch", {"order": 5}, 200),
            ("DELETE", "/admin/v1/rules/batch", None, 204),
            ("PUT", "/admin/v1/sessions/s", {"retain_s": 60}, 200),
            ("POST", "/admin/v1/sessions/s/prefetch", {"tiers": None}, 202),
            ("DELETE", "/admin/v1/sessions/s", None, 204),
            ("PUT", f"/admin/v1/blocks/{block}/pin", {"ttl_s": 60}, 200),
            ("DELETE", f"/admin/v1/blocks/{block}/pin", None, 204),
            ("DELETE", f"/admin/v1/blocks/{block}", None, 204),
            ("POST", "/admin/v1/reset", {"reason": "deploy"}, 200),
            ("PUT", "/admin/v1/tiers/disk", {"type": "fs", "path": str(tmp_path / "disk"), "max_bytes": 1 << 30}, 201),
            ("POST", "/admin/v1/tiers/disk/flush", {"tenant": None}, 202),
            ("DELETE", "/admin/v1/tiers/disk/flush", None, 204),
            ("DELETE", "/admin/v1/tiers/disk", None, 204),
            ("PUT", f"/admin/v1/tenants/{'0' * 16}", {"max_pool_bytes": 5}, 200),
            ("DELETE", f"/admin/v1/tenants/{'0' * 16}", None, 204),
        ]
        mutating = {
            (method.upper(), path)
            for path, item in client.get("/openapi.json").json()["paths"].items()
            for method in item
            if path.startswith("/admin/") and method != "get" and path not in SAFE_PATHS
        }
        assert len(mutating) == len(calls)
        for number, (method, path, body, status) in enumerate(calls):
            sent = {} if body is None else {"json": body}
            answer = client.request(method, path, headers={"X-Request-ID": f"call-{number}"}, **sent)
            assert answer.status_code == status, answer.text
            item = latest(client)
            assert item["time"].endswith("Z")
            assert {name: item[name] for name in item if name not in ("id", "time")} == {
                "token": name_of_token(ADMIN, "admin"),
                "client": "127.0.0.1",
                "request_id": f"call-{number}",
                "method": method,
                "path": path,
                "what": body,
                "status": status,
                "outcome": "applied",
            }
        assert len(pages(client, AUDIT, 3)) == len(calls)


@pytest.mark.parametrize(
    ("table", "method", "path", "body", "status"),
    [
        ("overrides", "PUT", "/admin/v1/requests/r1/policy", {"store": False}, 200),
        ("overrides", "DELETE", "/admin/v1/requests/r1/policy", None, 204),
        ("rules", "POST", "/admin/v1/rules", {"name": "batch"}, 201),
        ("rules", "PUT", "/admin/v1/rules/batch", {"order": 5}, 200),
        ("rules", "DELETE", "/admin/v1/rules/batch", None, 204),
    ],
)
def test_override_when_written_shares_a_transaction_with_its_record(
    service: Service, api: httpx.Client, table: str, method: str, path: str, body: Any, status: int
) -> None:
    transactions: list[list[str]] = []

    def note(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("BEGIN IMMEDIATE"):
            transactions.append([])
        elif transactions and (table in statement or "audit" in statement):
            transactions[-1].append(statement.split()[0])

    event.listen(Engine, "before_cursor_execute", note)
    try:
        sent = {} if body is None else {"json": body}
        assert api.request(method, path, **sent).status_code == status
    finally:
        event.remove(Engine, "before_cursor_execute", note)
    (written,) = [one for one in transactions if one]
    assert written[-1] == "INSERT", "the record is the last row"
    assert written[0] == ("DELETE" if method == "DELETE" else "INSERT")
    assert (latest(api)["status"], latest(api)["outcome"]) == (status, "applied")


def test_refused_calls_leave_a_record_too(tmp_path: Path) -> None:
    with (
        start_service(tmp_path, admin_token=ADMIN, read_token=READ) as running,
        running.client(READ) as reader,
        running.client() as stranger,
        running.client(ADMIN) as admin,
    ):
        by_admin = name_of_token(ADMIN, "admin")
        tried: list[tuple[httpx.Client, str, dict[str, Any], int, str]] = [
            (reader, "/admin/v1/policy", {"json": {"store": False}}, 403, name_of_token(READ, "read")),
            (stranger, "/admin/v1/policy", {"json": {"store": False}}, 401, "none"),
            (admin, "/admin/v1/policy", {"json": {"store": 5}}, 422, by_admin),
            (
                admin,
                "/admin/v1/policy",
                {"content": b"{", "headers": {"Content-Type": "application/json"}},
                400,
                by_admin,
            ),
            (
                admin,
                "/admin/v1/policy",
                {"content": b"{}", "headers": {"Content-Type": "text/plain"}},
                415,
                by_admin,
            ),
            (admin, "/admin/v1/config", {"json": {"port": 1}}, 409, by_admin),
            (admin, "/admin/v1/nothing", {"json": {}}, 404, by_admin),
            (admin, "/admin/v1/stats", {"json": {}}, 405, by_admin),
        ]
        for client, path, sent, status, token in tried:
            assert client.patch(path, **sent).status_code == status
            item = latest(admin)
            assert (item["path"], item["status"], item["token"], item["outcome"]) == (
                path,
                status,
                token,
                "refused",
            )
            assert item["what"] in (None, {"store": "***"}, {"port": "***"}, {}, {"unreadable_bytes": 1})


def test_call_when_writes_queue_to_their_bound_is_refused_and_leaves_a_record(
    fresh: Service, caplog: pytest.LogCaptureFixture
) -> None:
    path, client = "/admin/v1/requests/r1/policy", fresh.shared_client
    with busy_writer(fresh.store):
        for _ in range(MAX_QUEUED):
            with pytest.raises(DatabaseUnavailable):
                fresh.store.database.write(lambda connection: None, 0.0)
        assert client.put(path, json={"store": False}).status_code == 503
    (line,) = [record.getMessage() for record in caplog.records if record.name == "kvferry.app.api.audit"]
    assert "1,000 calls wait for the database already" in line
    assert f'"path": "{path}"' in line
    assert '"status": 503, "outcome": "failed"' in line
    assert client.get(path).status_code == 404
    assert client.put(path, json={"store": False}).status_code == 200


def test_reading_leaves_no_record(fresh: Service) -> None:
    with fresh.client() as client:
        for path in ("/admin/v1/stats", "/admin/v1/config", "/admin/v1/blocks", "/healthz", "/metrics", AUDIT):
            client.get(path)
        client.post("/v1/echo", json={})
        assert client.get(AUDIT).json()["items"] == []


def test_secrets_are_never_recorded(tmp_path: Path) -> None:
    secret = "hunter2-hunter2"
    bodies: list[Any] = [
        {"admin_token": secret},
        {"database_url": f"postgresql://me:{secret}@db/x"},
        {"type": "object", "endpoint": f"https://me:{secret}@store"},
        {"nested": {"password": secret, "list": [{"api_key": secret}]}},
    ]
    with start_service(tmp_path, admin_token=ADMIN) as running, running.client(ADMIN) as client:
        for body in bodies:
            client.patch("/admin/v1/config", json=body)
        client.patch(
            "/admin/v1/config", content=f'{{"admin_token": "{secret}"', headers={"Content-Type": "application/json"}
        )
        items = client.get(AUDIT).json()["items"]
    assert len(items) == 5
    assert secret not in json.dumps(items)
    assert ADMIN not in json.dumps(items)
    assert items[4]["what"] == {"admin_token": "***"}
    for name in ("kvferry.db", "kvferry.db-wal"):
        file = tmp_path / name
        assert not file.exists() or secret.encode() not in file.read_bytes()


def test_known_secrets_when_sent_anywhere_are_masked(tmp_path: Path) -> None:
    with start_service(tmp_path, admin_token=ADMIN, read_token=READ) as running, running.client(ADMIN) as client:
        url_of_secret = quote(f"/admin/v1/rules/{READ}") + "x" * 1000
        basic = base64.b64encode(f"user:{ADMIN}".encode()).decode()
        client.delete(url_of_secret, headers={"X-Request-ID": f"id of {ADMIN}"})
        client.delete("/admin/v1/requests/" + "x" * 970 + ADMIN + "/policy")
        client.post("/admin/v1/reset", json={"reason": f"pasted {READ}, Basic {basic}"})
        client.post("/admin/v1/rules", json={f"about {ADMIN}": [READ]})
        client.post("/admin/v1/rules", json={"name": "r", "match": {"lora": ADMIN}})
        items = client.get(AUDIT).json()["items"]
    text = json.dumps(items)
    assert len(items) == 5
    for secret in (ADMIN, READ, ADMIN[:12], basic[8:20]):
        assert secret not in text
    rule, refused, reset, _, deleted = items
    assert deleted["request_id"] == "id of ***"
    assert deleted["path"].startswith("/admin/v1/rules/***x")
    assert reset["what"] == {"reason": f"pasted ***, Basic {basic[:7]}***"}
    assert refused["what"] == {"about ***": "***"}
    assert rule["what"] == {"name": "r", "match": {"lora": "***"}}


def test_audit_of_refused_strangers_is_limited_per_minute(tmp_path: Path) -> None:
    with start_service(tmp_path, admin_token=ADMIN) as running, running.client() as stranger:
        for _ in range(3 * MAX_UNKNOWN_PER_MINUTE):
            assert stranger.post("/admin/v1/reset").status_code == 401
        with running.client(ADMIN) as admin:
            assert admin.post("/admin/v1/reset").status_code == 200
            items = pages(admin, AUDIT, 100)
    # The minute may have turned once in between.
    assert 1 <= sum(item["token"] == "none" for item in items) / MAX_UNKNOWN_PER_MINUTE <= 2
    assert sum(item["token"] == name_of_token(ADMIN, "admin") for item in items) == 1


def test_prefetch_records_when_the_database_is_locked_wait_once(fresh: Service, tmp_path: Path) -> None:
    addresses = [f"127.0.0.{number}" for number in range(2, 8)]
    for address in addresses:
        with httpx.Client(
            base_url=fresh.url, transport=httpx.HTTPTransport(local_address=address), timeout=DEADLINE_S
        ) as client:
            assert client.post("/admin/v1/prefetch", json={"hashes": ["00"]}).status_code == 202
    fresh.store.database.waits = Waits(busy_s=0.05)
    fresh.store.database.open()
    fresh.store.journal.close(DEADLINE_S)
    attempts = []

    def count(connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        # Other services of this process have databases too.
        if statement == "BEGIN IMMEDIATE" and connection.engine.url.database.startswith(str(tmp_path)):
            attempts.append(statement)

    event.listen(Engine, "before_cursor_execute", count)
    try:
        with locked(fresh):
            fresh.context.prefetch_audit.flush(0.0)
    finally:
        event.remove(Engine, "before_cursor_execute", count)
    assert len(attempts) == 1
    fresh.context.prefetch_audit.flush(0.0)
    assert sorted(item["client"] for item in fresh.shared_client.get(AUDIT).json()["items"]) == addresses


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"", None),
        (b"{", {"unreadable_bytes": 1}),
        (b"[1]", {"unreadable_bytes": 3}),
        (b"[" * 50_000, {"unreadable_bytes": 50_000}),
        (b'{"a": NaN, "b": 1e999}', {"a": "nan", "b": "inf"}),
        (b'{"max_offload_tokens": 5, "read_token": "x"}', {"max_offload_tokens": 5, "read_token": "***"}),
        (b'{"match": {"cache_salt": "x", "lora": "s"}}', {"match": {"cache_salt": "***", "lora": "s"}}),
        (b'{"match": {"tenant": "9f86d0*"}}', {"match": {"tenant": "9f86d0*"}}),
        (b'{"match": {"tenant": "a salt put here by mistake"}}', {"match": {"tenant": "***"}}),
        (b'{"a": "' + b"x" * 5000 + b'"}', {"too_large_bytes": 5009}),
    ],
)
def test_body_of_an_applied_call_is_recorded_without_secrets(body: bytes, what: Any) -> None:
    assert describe_body(body, True) == what


def test_body_of_a_refused_call_is_recorded_by_its_names() -> None:
    assert describe_body(b'{"admin_tokn": "x", "match": {"a": [1]}}', False) == {"admin_tokn": "***", "match": "***"}
    assert describe_body(b'{"a\\u0000\\ud800": 1}', False) == {"a\ufffd?": "***"}
