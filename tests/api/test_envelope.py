from __future__ import annotations

import json
import logging
import socket

import httpx
import pytest

from tests.api.test_openapi import CONTRACT
from tests.harness.loop_service import Service
from tests.harness.waiting import DEADLINE_S


def problem_of(answer: httpx.Response, status: int) -> dict[str, object]:
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/problem+json"
    document: dict[str, object] = answer.json()
    assert {"type", "title", "status", "detail"} <= document.keys()
    assert document["status"] == status
    assert document["request_id"] == answer.headers["X-Request-ID"]
    assert "Traceback" not in answer.text
    return document


def openai_error_of(answer: httpx.Response, status: int) -> dict[str, object]:
    assert answer.status_code == status, answer.text
    assert answer.headers["Content-Type"] == "application/json"
    error: dict[str, object] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert "Traceback" not in answer.text
    return error


def test_unknown_routes_and_methods_are_problems(api: httpx.Client) -> None:
    for path in ("/nowhere", "/admin/v1/nothing", "/admin/v2/stats", "/admin/v1/stats/"):
        problem_of(api.get(path), 404)
    openai_error_of(api.get("/v1/nothing"), 404)
    openai_error_of(api.delete("/v1/echo"), 405)
    answer = api.delete("/admin/v1/stats")
    problem_of(answer, 405)
    assert answer.headers["Allow"] == "GET"


ALLOWED = {path: methods for path, methods in CONTRACT.items() if path.startswith("/admin/")}
# Also the path of a session whose id ends so, as slashes need no encoding.
ALLOWED["/admin/v1/sessions/{id}/prefetch"] = "DELETE, GET, POST, PUT"


@pytest.mark.parametrize(
    ("path", "methods"),
    [*ALLOWED.items(), ("/admin/v1/requests/a%2Fb/policy", "DELETE, GET, PUT"), ("/v1/echo", "POST")],
)
def test_a_refused_method_names_all_that_the_path_takes(api: httpx.Client, path: str, methods: str) -> None:
    for method in ("OPTIONS", "TRACE", "HEAD", "FOO"):
        answer = api.request(method, path.format(id="r1", name="one", hash="00ff"))
        assert (answer.status_code, answer.headers["Allow"]) == (405, methods)


def test_bad_json_is_a_problem(api: httpx.Client) -> None:
    encoded = ("{}".encode("utf-16"), "{}".encode("utf-32-le"))
    for body in (b"{", b"nope", b"\xff\xfe", b'{"store": tru}', b"[" * 9_000, b'{"a": ' + b"9" * 5000 + b"}", *encoded):
        answer = api.patch("/admin/v1/policy", content=body, headers={"Content-Type": "application/json"})
        document = problem_of(answer, 400)
        assert document["type"] == "urn:kvferry:problem:invalid-json"
        assert "JSON" in str(document["detail"])


def test_an_answer_without_a_body_has_no_type(client: httpx.Client) -> None:
    client.put("/admin/v1/rules/one", json={})
    gone = client.delete("/admin/v1/rules/one")
    assert (gone.status_code, gone.content) == (204, b"")
    assert "Content-Type" not in gone.headers
    assert gone.headers["X-Request-ID"]


def test_bodies_must_be_json(api: httpx.Client) -> None:
    for content_type in (
        None,
        "text/plain",
        "application/x-www-form-urlencoded",
        "application/jsonx",
        "multipart/form-data",
    ):
        headers = {} if content_type is None else {"Content-Type": content_type}
        for method, path in (("POST", "/admin/v1/reset"), ("PATCH", "/admin/v1/policy")):
            problem_of(api.request(method, path, content=b"{}", headers=headers), 415)
        openai_error_of(api.post("/v1/echo", content=b"{}", headers=headers), 415)
    assert (
        api.patch(
            "/admin/v1/policy", content=b"{}", headers={"Content-Type": "Application/JSON; charset=utf-8"}
        ).status_code
        == 200
    )


def test_bodies_are_bounded_however_they_are_sent(api: httpx.Client) -> None:
    large = b'{"reason": "' + b"x" * (16 << 20) + b'"}'
    headers = {"Content-Type": "application/json"}
    problem_of(api.post("/admin/v1/reset", content=large, headers=headers), 413)

    def pieces() -> object:
        for start in range(0, len(large), 1 << 16):
            yield large[start : start + (1 << 16)]

    problem_of(api.post("/admin/v1/reset", content=pieces(), headers=headers), 413)
    echoed = api.post("/v1/echo", content=json.dumps({"prompt": "x" * (2 << 20)}), headers=headers)
    assert echoed.status_code == 200
    too_large = api.post("/v1/echo", content=b'"' + b"x" * (16 << 20) + b'"', headers=headers)
    assert "16777216" in str(openai_error_of(too_large, 413)["message"])


@pytest.mark.parametrize("unit", ["[],", '{"a":1},'])
def test_body_of_many_structures_is_413_unparsed(api: httpx.Client, unit: str) -> None:
    body = f'{{"token_ids":[{unit * 10_000}1]}}'
    answer = api.post("/admin/v1/lookup", content=body, headers={"Content-Type": "application/json"})
    assert "10000 arrays, objects and fields" in problem_of(answer, 413)["detail"]


def test_a_declared_size_beyond_the_bound_is_refused_unread(service: Service) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=DEADLINE_S) as raw:
        raw.sendall(
            b"POST /admin/v1/reset HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999999999\r\n\r\n{"
        )
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.parametrize(
    "call",
    [
        b"GET /healthz HTTP/x\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"x" * 20_000,
        b"POST /admin/v1/reset HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    ],
)
def test_malformed_http_is_answered_with_a_400_and_closed(service: Service, call: bytes) -> None:
    with socket.create_connection(("127.0.0.1", service.port), timeout=DEADLINE_S) as raw:
        raw.sendall(call)
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"Traceback" not in answer


def test_client_that_disconnects_while_sending_logs_no_error(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.ERROR),
        socket.create_connection(("127.0.0.1", service.port), timeout=DEADLINE_S) as raw,
    ):
        raw.sendall(
            b"POST /admin/v1/reset HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: 50\r\n\r\n{"
        )
    with service.client() as client:
        assert client.get("/healthz").status_code == 200
    assert not [record for record in caplog.records if record.name.startswith("app.")]


def test_request_ids_are_taken_over_or_made_up(api: httpx.Client) -> None:
    for sent in ("a", "cmpl-123", "order 17", "x" * 512, '~!"#%'):
        assert api.get("/healthz", headers={"X-Request-ID": sent}).headers["X-Request-ID"] == sent
    made = [api.get("/healthz").headers["X-Request-ID"] for _ in range(2)]
    assert made[0] != made[1]
    for unusable in ("x" * 513, b"\xe4", "tab\tbed", ""):
        answered = api.get("/healthz", headers={"X-Request-ID": unusable}).headers["X-Request-ID"]
        assert len(answered) == 32
        assert answered.isalnum()
    twice = api.get("/healthz", headers=[("X-Request-ID", "one"), ("X-Request-ID", "two")])
    assert twice.headers["X-Request-ID"] not in ("one", "two")


def test_engine_routes_receive_the_request_id_of_the_response(api: httpx.Client) -> None:
    for headers in ({}, {"X-Request-ID": "mine"}, {"X-Request-ID": "not\tusable"}):
        answer = api.get("/v1/id", headers=headers)
        assert answer.json() == {"id": answer.headers["X-Request-ID"]}


def test_an_unexpected_error_is_a_500_logged_once(api: httpx.Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        error = openai_error_of(api.get("/v1/fail", headers={"X-Request-ID": "broken-1"}), 500)
    assert "a secret in a message" not in json.dumps(error)
    logged = [record for record in caplog.records if "broken-1" in record.getMessage()]
    assert len(logged) == 1
    assert logged[0].exc_info is not None
    assert not [record for record in caplog.records if record.name == "uvicorn.error"]


def test_an_error_after_the_answer_has_begun_breaks_the_connection(service: Service) -> None:
    with service.client() as client, pytest.raises(httpx.RemoteProtocolError):
        client.get("/v1/fail-late")
    with service.client() as client:
        assert client.get("/healthz").status_code == 200


def test_no_answer_may_be_sniffed_or_cached(api: httpx.Client) -> None:
    for path in ("/healthz", "/admin/v1/stats", "/nowhere", "/docs"):
        headers = api.get(path).headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
    # Has no data, and is revalidated.
    headers = api.get("/ui/").headers
    assert (headers["X-Content-Type-Options"], headers["Cache-Control"]) == ("nosniff", "no-cache")


@pytest.mark.parametrize(
    ("path", "field", "message"),
    [
        ("requests?State=running", "State", "has cursor, limit, missed, session, since, state, tenant"),
        ("blocks?hits=1", "hits", "has cursor"),
        ("evictions/summary?unti=1", "unti", "has since, until"),
        ("audit?offset=1", "offset", "has cursor, limit"),
        ("rules?x", "x", "no such query parameter"),
        ("config?name=pool_bytes", "name", "this call has none"),
        ("events?types=stored", "types", "has max_events, type"),
        ("stats?limit=1", "limit", "this call has none"),
        ("requests/none/policy?ttl=1", "ttl", "this call has none"),
        ("evictions?limit=1&limit=2", "limit", "must not be repeated"),
    ],
)
def test_query_parameter_that_a_call_does_not_have_is_refused(
    api: httpx.Client, path: str, field: str, message: str
) -> None:
    answer = api.get(f"/admin/v1/{path}")
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == field
    assert message in error["message"]
