from __future__ import annotations

import hashlib

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.api.test_openapi import CONTRACT
from tests.harness.effort import examples
from tests.harness.loop_service import ADMIN, READ, Service, start_service
from tests.harness.waiting import DEADLINE_S

STREAMS = ("/admin/v1/stats/stream", "/admin/v1/events")
PATHS = {
    *(path.format(id="r1", name="one", hash="00ff") for path in CONTRACT if path not in STREAMS),
    *("/", "/ui", "/ui/", "/ui/app.js", "/ui/pages/pool.js", "/ui/nothing.js", "/ui/vendor/LICENSE"),
    *("/docs", "/docs/swagger-ui.css", "/openapi.json", "/v1/models", "/v1/completions", "/nowhere"),
    "/admin/v1/nothing",
}
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
CREDENTIALS = {
    "admin": [("Authorization", f"Bearer {ADMIN}")],
    "admin, other case": [("Authorization", f"bEARER {ADMIN}")],
    "read": [("Authorization", f"Bearer {READ}")],
    "none": [],
    "wrong": [("Authorization", "Bearer wrong")],
    "empty": [("Authorization", "Bearer")],
    "prefix": [("Authorization", f"Bearer {ADMIN[:-1]}")],
    "longer": [("Authorization", f"Bearer {ADMIN}x")],
    "basic": [("Authorization", f"Basic {ADMIN}")],
    "bare": [("Authorization", ADMIN)],
    "twice": [("Authorization", "Bearer wrong"), ("Authorization", f"Bearer {ADMIN}")],
    "latin-1": [("Authorization", b"Bearer \xe4\xff")],
}


def expected_refusal(method: str, path: str, who: str) -> int | None:
    """The contract, said once more and differently: what refuses this call, if anything."""
    if path in ("/healthz", "/readyz", "/health"):
        return None
    if (path in ("/", "/ui") or path.startswith("/ui/")) and method in ("GET", "HEAD"):
        return None
    if who.startswith("admin"):
        return None
    if who != "read":
        return 401
    return None if method in ("GET", "HEAD") or path.startswith("/v1/") else 403


@settings(max_examples=examples(400))
@given(
    method=st.sampled_from(METHODS),
    path=st.sampled_from(sorted(PATHS)),
    who=st.sampled_from(sorted(CREDENTIALS)),
    origin=st.sampled_from([None, "http://evil.example"]),
)
def test_every_call_needs_the_token_that_the_contract_says(
    guarded: Service, method: str, path: str, who: str, origin: str | None
) -> None:
    """LMCache#5128, LMCache#2757, sglang#32772: anyone could mutate, and secrets were shown."""
    headers = [*CREDENTIALS[who], *([("Origin", origin)] if origin else [])]
    answer = guarded.shared_client.request(method, path, headers=headers, follow_redirects=False)
    refusal = expected_refusal(method, path, who)
    if refusal is None:
        assert answer.status_code not in (401, 403)
        assert answer.status_code < 500 or path == "/readyz"
        return
    assert answer.status_code == refusal
    assert answer.headers["WWW-Authenticate"].startswith("Bearer")
    if method != "HEAD" and path.startswith("/v1/"):
        assert answer.json()["error"]["code"] == ("invalid_api_key" if refusal == 401 else None)
    elif method != "HEAD":
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert answer.json()["status"] == refusal


def test_every_change_of_the_contract_needs_the_admin_token(guarded: Service) -> None:
    for template, methods in CONTRACT.items():
        path = template.format(id="r1", name="one", hash="00ff")
        for method in set(methods.split(", ")) - {"GET", "HEAD"}:
            statuses = [
                guarded.shared_client.request(method, path, headers=CREDENTIALS[who]).status_code
                for who in ("none", "read")
            ]
            assert statuses == [401, 403], (method, path)


@pytest.mark.parametrize("who", ["none", "wrong", "read", "admin"])
def test_health_paths_refuse_other_methods_whatever_the_token(guarded: Service, who: str) -> None:
    for path in ("/healthz", "/readyz"):
        for method in ("POST", "TRACE", "DELETE"):
            answer = guarded.shared_client.request(method, path, headers=CREDENTIALS[who], content=b"x" * 100)
            assert (answer.status_code, answer.headers["Allow"]) == (405, "GET, HEAD")
            assert answer.json()["detail"] == f"{path} does not support {method}"


def test_a_browser_gets_a_page_that_asks_for_a_token(guarded: Service) -> None:
    with guarded.client() as browser:
        for path, status in (("/", 200), ("/ui/", 200), ("/docs", 401)):
            answer = browser.get(path, headers={"Accept": "text/html,*/*"}, follow_redirects=True)
            assert answer.status_code == status
            assert status == 200 or answer.headers["WWW-Authenticate"].startswith("Bearer")
            assert 'type="password"' in answer.text
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
        for path in ("/openapi.json", "/admin/v1/stats", "/docs/swagger-ui.css"):
            answer = browser.get(path, headers={"Accept": "text/html,*/*"})
            assert (answer.status_code, answer.headers["Content-Type"]) == (401, "application/problem+json")


LOCAL_HOSTS = [
    "localhost",
    "localhost:1234",
    "LOCALHOST",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:80",
    "127.9.9.9",
    "[::1]",
    "[::1]:8787",
]
FOREIGN_HOSTS = [
    "evil.example",
    "evil.example:8787",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil.example#localhost",
    "user@localhost",
    "localhost@evil.example",
    "10.0.0.1",
    "0.0.0.0",
    "[::]",
    "[::2]:80",
    "::1",
    "",
    "localhost:99999",
    "localhost:x",
    "127.1",
    "2130706433",
]


@pytest.mark.parametrize("host", LOCAL_HOSTS)
def test_without_tokens_loopback_names_are_served(service: Service, host: str) -> None:
    answer = httpx.get(
        service.url + "/admin/v1/stats", headers={"Host": host}, trust_env=False, verify=False, timeout=DEADLINE_S
    )
    assert answer.status_code == 200


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_without_tokens_a_foreign_host_is_refused(service: Service, host: str) -> None:
    for path in ("/admin/v1/stats", "/metrics", "/v1/models", "/ui/"):
        answer = httpx.get(
            service.url + path, headers={"Host": host}, trust_env=False, verify=False, timeout=DEADLINE_S
        )
        assert answer.status_code == 403
        if path == "/v1/models":
            assert answer.json()["error"]["type"] == "invalid_request_error"
        else:
            assert answer.headers["Content-Type"] == "application/problem+json"
    answer = httpx.get(
        service.url + "/healthz", headers={"Host": host}, trust_env=False, verify=False, timeout=DEADLINE_S
    )
    assert answer.status_code == 200


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "https://evil.example", "null", "", "file://", "http://localhost.evil.example", "http://10.0.0.1",
     "http://localhost/path", "chrome-extension://abc", "http://localhost@evil.example", "http://[::1", "localhost"],
)  # fmt: skip
def test_without_tokens_a_foreign_origin_is_refused(service: Service, origin: str) -> None:
    with service.client() as client:
        assert client.get("/admin/v1/stats", headers={"Origin": origin}).status_code == 403
        assert client.post("/admin/v1/reset", headers={"Origin": origin}).status_code == 403
        assert client.post("/v1/echo", headers={"Origin": origin}, json={}).status_code == 403


def fetched(site: str, mode: str = "cors", dest: str = "empty") -> dict[str, str]:
    return {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": mode, "Sec-Fetch-Dest": dest}


@pytest.mark.parametrize("path", [*STREAMS, "/admin/v1/stats", "/metrics", "/v1/models", "/openapi.json"])
@pytest.mark.parametrize("site", ["cross-site", "same-site", "unheard-of"])
def test_without_tokens_a_get_by_a_foreign_page_is_refused(service: Service, path: str, site: str) -> None:
    with service.client() as client:
        for mode, dest in (("no-cors", "image"), ("cors", "empty"), ("navigate", "iframe"), ("navigate", "document")):
            with client.stream("GET", path, headers=fetched(site, mode, dest)) as answer:
                assert answer.status_code == 403


@pytest.mark.parametrize("site", ["none", "same-origin"])
def test_without_tokens_browsers_may_get_from_our_own_origin(service: Service, site: str) -> None:
    with service.client() as client:
        for path in (*STREAMS, "/admin/v1/stats", "/ui/"):
            with client.stream("GET", path, headers=fetched(site)) as answer:
                assert answer.status_code == 200


@pytest.mark.parametrize("path", ["/", "/ui/", "/docs"])
def test_without_tokens_a_link_on_a_foreign_page_leads_to_pages(service: Service, path: str) -> None:
    with service.client() as client:
        assert client.get(path, headers=fetched("cross-site", "navigate", "document")).status_code in (200, 307)
        for mode, dest in (("navigate", "iframe"), ("no-cors", "script"), ("cors", "empty")):
            assert client.get(path, headers=fetched("cross-site", mode, dest)).status_code == 403


def test_without_tokens_only_our_own_pages_may_change_anything(service: Service) -> None:
    with service.client() as client:
        for name in ("127.0.0.1", "localhost", "[::1]"):
            ours = {"Origin": f"http://{name}:{service.port}"}
            assert client.get("/admin/v1/stats", headers=ours).status_code == 200
            assert client.patch("/admin/v1/policy", json={}, headers=ours).status_code == 200
        other = {"Origin": f"http://localhost:{service.port + 1}"}
        assert client.get("/admin/v1/stats", headers=other).status_code == 200
        assert client.post("/admin/v1/reset", headers=other).status_code == 403
        assert client.patch("/admin/v1/policy", json={}, headers=other).status_code == 403


def test_token_of_a_call_is_named_with_what_it_allows(guarded: Service, api: httpx.Client) -> None:
    for token, may_change in ((ADMIN, True), (READ, False)):
        with guarded.client(token) as client:
            kind = "admin" if may_change else "read"
            name = f"{kind}:{hashlib.sha256(token.encode()).hexdigest()[:8]}"
            assert client.get("/admin/v1/token").json() == {"name": name, "may_change": may_change}
    assert api.get("/admin/v1/token").json() == {"name": "none", "may_change": True}


def test_with_tokens_host_and_origin_do_not_matter(guarded: Service) -> None:
    with guarded.client(READ) as client:
        foreign = {"Host": "kvferry.example", "Origin": "https://ops.example"} | fetched("cross-site")
        assert client.get("/admin/v1/stats", headers=foreign).status_code == 200


def test_writes_when_only_a_read_token_is_set_are_403(tmp_path_factory: pytest.TempPathFactory) -> None:
    with (
        start_service(tmp_path_factory.mktemp("read-only"), read_token=READ) as running,
        running.client(READ) as client,
    ):
        assert client.get("/admin/v1/stats").status_code == 200
        assert client.post("/admin/v1/reset").status_code == 403
        assert client.get("/admin/v1/stats", headers={"Authorization": "Bearer None"}).status_code == 401
