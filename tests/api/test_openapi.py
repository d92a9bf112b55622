from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kvferry.app.engines.embedded.api import completions_router
from kvferry.app.engines.embedded.engine import EmbeddedEngine
from kvferry.app.settings import Settings
from kvferry.app.telemetry.miss_texts import CAUSES, EVICTED, NOT_STORED, SHORT
from tests.harness.loop_service import ADMIN, READ, Service
from tests.harness.service_process import ROOT

CONTRACT = {
    "/healthz": "GET, HEAD",
    "/readyz": "GET, HEAD",
    "/health": "GET, HEAD",
    "/version": "GET, HEAD",
    "/metrics": "GET, HEAD",
    "/admin/v1/stats": "GET",
    "/admin/v1/stats/stream": "GET",
    "/admin/v1/stats/causes": "GET",
    "/admin/v1/stats/history": "GET",
    "/admin/v1/reset": "POST",
    "/admin/v1/policy": "GET, PATCH",
    "/admin/v1/requests": "GET",
    "/admin/v1/requests/{id}": "GET",
    "/admin/v1/requests/{id}/policy": "DELETE, GET, PUT",
    "/admin/v1/sessions": "GET",
    "/admin/v1/sessions/{id}": "DELETE, GET, PUT",
    "/admin/v1/sessions/{id}/prefetch": "POST",
    "/admin/v1/rules": "GET, POST",
    "/admin/v1/rules/{name}": "DELETE, GET, PUT",
    "/admin/v1/rules/test": "POST",
    "/admin/v1/blocks": "GET",
    "/admin/v1/blocks/{hash}": "DELETE, GET",
    "/admin/v1/blocks/{hash}/pin": "DELETE, PUT",
    "/admin/v1/slots/map": "GET",
    "/admin/v1/evictions": "GET",
    "/admin/v1/evictions/summary": "GET",
    "/admin/v1/config": "GET, PATCH",
    "/admin/v1/audit": "GET",
    "/admin/v1/token": "GET",
    "/admin/v1/events": "GET",
    "/admin/v1/breaks": "GET",
    "/admin/v1/what-if": "GET",
    "/admin/v1/tenants": "GET",
    "/admin/v1/tiers": "GET",
    "/admin/v1/tiers/{name}": "DELETE, GET, PUT",
    "/admin/v1/tiers/{name}/flush": "DELETE, POST",
}
"""Methods by path."""


@pytest.fixture
def document(api: httpx.Client) -> dict[str, Any]:
    answer: dict[str, Any] = api.get("/openapi.json").json()
    return answer


def operations(document: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (method.upper(), path, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]


@pytest.mark.long
def test_the_documents_are_valid(document: dict[str, Any]) -> None:
    # Imported here: this takes seconds, which each process that collects tests would spend.
    from openapi_spec_validator import validate

    validate(document)
    completions = FastAPI()
    completions.include_router(completions_router(EmbeddedEngine(Settings.model_construct(device="cpu"))))
    validate(completions.openapi())


def test_every_call_of_the_contract_is_described(document: dict[str, Any]) -> None:
    found = {path: ", ".join(sorted(map(str.upper, item))) for path, item in document["paths"].items()}
    assert found.items() >= CONTRACT.items()


def test_every_operation_has_a_summary_and_responses(document: dict[str, Any]) -> None:
    ours = [(method, path, op) for method, path, op in operations(document) if not path.startswith("/v1/")]
    described = {tag["name"] for tag in document["tags"]}
    for method, path, operation in ours:
        assert operation["summary"], path
        assert set(operation["tags"]) <= described, path
        assert operation["description"], path
        assert operation["tags"], path
        success = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
        assert success, path
        assert method == "HEAD" or all("content" in answer for answer in success) or "204" in operation["responses"], (
            path
        )
        for status, answer in operation["responses"].items():
            if method == "HEAD":
                assert "content" not in answer, path
            elif status[0] in "45" and (path, status) not in (("/readyz", "503"), ("/health", "503")):
                assert list(answer["content"]) == ["application/problem+json"], (path, status)
        if "{" in path:
            assert "404" in operation["responses"], path
        if "requestBody" in operation:
            assert {"413", "415", "422"} <= set(operation["responses"]), path
    assert "HTTPValidationError" not in document["components"]["schemas"]


def test_whole_bounds_are_described_as_whole_numbers(document: dict[str, Any]) -> None:
    text = json.dumps(document)
    assert re.search(r'"(m|exclusiveM)(in|ax)imum": [0-9]+[,}]', text)
    assert not re.search(r'imum": [-0-9]+(\.0|e\+[0-9]+)[,}]', text)


def test_security_is_described_as_it_is(document: dict[str, Any], guarded: Service) -> None:
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    assert all(operation["security"] == [] for _, _, operation in operations(document)), "no token is set"
    with guarded.client(READ) as reader:
        described = reader.get("/openapi.json").json()
    for _, path, operation in operations(described):
        assert operation["security"] == ([] if path in ("/healthz", "/readyz", "/health") else [{"token": []}]), path


def test_examples_of_bodies_are_accepted(guarded: Service, document: dict[str, Any]) -> None:
    tried, admin = 0, guarded.client(ADMIN)
    for method, path, operation in operations(document):
        content = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if content is None or path.startswith("/v1/"):
            continue
        schema = content["schema"]
        refs = (
            [schema["$ref"]] if "$ref" in schema else [one["$ref"] for one in schema.get("anyOf", ()) if "$ref" in one]
        )
        examples = schema.get("examples", []) + [
            example
            for ref in refs
            for example in document["components"]["schemas"][ref.rsplit("/", 1)[1]].get("examples", [])
        ]
        assert examples, path
        for example in examples:
            names = {"{id}": "r1", "{hash}": "00" * 33, "{name}": "r1", "{tenant}": "0" * 16}
            for placeholder, value in names.items():
                path = path.replace(placeholder, value)
            answer = admin.request(method, path, json=example)
            assert answer.status_code in (200, 201, 202, 404), (path, answer.text)
            tried += 1
    admin.close()
    assert tried >= 5


def test_the_documentation_is_complete_without_other_hosts(api: httpx.Client) -> None:
    for path in ("/docs", "/ui/"):
        answer = api.get(path)
        assert answer.status_code == 200
        assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        assert not re.search(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", answer.text)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
    assert "SwaggerUIBundle" in api.get("/docs/swagger-ui-bundle.js").text
    assert "swagger-ui" in api.get("/docs/swagger-ui.css").text
    for name in ("nothing.js", "..%2Fapp.py", "%2e%2e%2f__init__.py"):
        assert api.get(f"/docs/{name}").status_code == 404


def test_pages_run_nothing_but_their_own_script(api: httpx.Client) -> None:
    for path, hashes in (("/docs", 2), ("/ui/", 0)):
        answer = api.get(path)
        policy = answer.headers["Content-Security-Policy"]
        assert len(re.findall(r"'sha256-[A-Za-z0-9+/=]{44}'", policy)) == hashes
        assert hashes or ("script-src 'self';" in policy and "style-src 'self';" in policy and "blob:" not in policy)
        assert not re.search(r"\son\w+=|javascript:|\sstyle=", answer.text)


def test_dashboard_when_fetched_is_exactly_its_files(api: httpx.Client) -> None:
    kinds = {"app.js": "text/javascript", "style.css": "text/css", "favicon.svg": "image/svg+xml"}
    for name, kind in {**kinds, "pages/pool.js": "text/javascript", "vendor/uPlot.esm.js": "text/javascript"}.items():
        answer = api.get(f"/ui/{name}")
        assert (answer.status_code, answer.headers["Content-Type"].split(";")[0]) == (200, kind), name
        assert answer.headers["Cache-Control"] == "no-cache"
        unchanged = api.get(f"/ui/{name}", headers={"If-None-Match": answer.headers["ETag"]})
        assert (unchanged.status_code, unchanged.content) == (304, b"")
        assert api.get(f"/ui/{name}", headers={"If-None-Match": '"other"'}).content == answer.content
        refused = api.post(f"/ui/{name}", json={})
        assert (refused.status_code, refused.headers["Allow"]) == (405, "GET, HEAD")
    for name in ("docs.html", "pages", "pages/", "..%2Fapp.py", "%2e%2e%2fapp.py"):
        assert api.get(f"/ui/{name}").status_code == 404, name


def test_scripts_of_the_dashboard_write_no_markup() -> None:
    for path in (ROOT / "app" / "api" / "ui").rglob("*.js"):
        markup = re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", path.read_text("utf-8"))
        assert path.parent.name == "vendor" or not markup, path


def test_every_cause_of_missed_tokens_is_in_words(api: httpx.Client) -> None:
    answer = api.get("/admin/v1/stats/causes").json()
    assert answer == {"causes": CAUSES, "evicted": EVICTED, "not_stored": NOT_STORED, "short": SHORT}
    assert set(answer) - {"short"} == set(api.get("/admin/v1/stats").json()["missed_tokens"])


def test_the_root_leads_to_the_dashboard(api: httpx.Client, guarded: Service) -> None:
    answer = api.get("/", follow_redirects=False)
    assert (answer.status_code, answer.headers["Location"]) == (307, "/ui/")
    with guarded.client(READ) as reader, guarded.client(ADMIN) as admin:
        assert reader.get("/ui/").status_code == admin.get("/ui/").status_code == 200
