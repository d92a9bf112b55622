"""`/tiers`: attaching, disabling and detaching while the service runs."""

from __future__ import annotations

import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.app.api.routes import blocks
from kvferry.app.tiers.registry import MAX_NAMES
from tests.harness.loop_service import ADMIN, Service
from tests.harness.waiting import DEADLINE_S

TIERS = "/admin/v1/tiers"


@pytest.fixture
def definition(tmp_path: Path) -> dict[str, Any]:
    """A tier below the folder in which `fresh` allows it."""
    folder = tmp_path / "tiers"
    folder.mkdir()
    return {"type": "fs", "path": str(folder / "tier"), "max_bytes": "1GiB"}


def test_tier_is_attached_disabled_enabled_and_detached(client: httpx.Client, definition: dict[str, Any]) -> None:
    assert client.get(TIERS).json() == {"items": [], "next_cursor": None}
    attached = client.put(f"{TIERS}/disk", json=definition | {"when": "evict"})
    assert attached.status_code == 201
    assert attached.json()["definition"]["when"] == "evict"
    assert attached.json() == client.get(f"{TIERS}/disk").json() == client.get(TIERS).json()["items"][0]
    assert attached.json()["definition"]["max_bytes"] == 1 << 30
    assert (attached.json()["source"], attached.json()["enabled"]) == ("runtime", True)
    assert list(client.get("/admin/v1/stats").json()["tiers"]) == ["disk"]
    assert client.post("/admin/v1/reset", json={"tiers": ["disk"]}).status_code == 200
    assert client.put(f"{TIERS}/disk", json={"enabled": False}).json()["enabled"] is False
    assert client.put(f"{TIERS}/disk", json={"enabled": True}).json()["enabled"] is True
    assert client.delete(f"{TIERS}/disk").status_code == 204
    assert client.get(TIERS).json() == {"items": [], "next_cursor": None}
    assert client.post("/admin/v1/reset", json={"tiers": ["disk"]}).status_code == 422
    audited = client.get("/admin/v1/audit").json()["items"]
    assert [(one["method"], one["outcome"]) for one in audited if one["path"] == f"{TIERS}/disk"] == [
        ("DELETE", "applied"),
        ("PUT", "applied"),
        ("PUT", "applied"),
        ("PUT", "applied"),
    ]


def test_tiers_are_listed_in_pages_with_health_counts_and_limits(
    client: httpx.Client, definition: dict[str, Any]
) -> None:
    for name in ("one", "two", "three"):
        assert client.put(f"{TIERS}/{name}", json=definition).status_code == 201
    assert client.put(f"{TIERS}/two", json={"enabled": False}).status_code == 200
    first = client.get(TIERS, params={"limit": 2}).json()
    second = client.get(TIERS, params={"limit": 2, "cursor": first["next_cursor"]}).json()
    one, two, three = [*first["items"], *second["items"]]
    assert [tier["name"] for tier in (one, two, three)] == ["one", "two", "three"]
    assert second["next_cursor"] is None
    assert (one["health"], two["health"]) == ([], ["tier two: is disabled by an operator"])
    assert one["counts"] == client.get("/admin/v1/stats").json()["tiers"]["one"]
    assert (one["limits"]["max_bytes"], one["limits"]["timeout_s"]) == (1 << 30, 10)
    assert client.get(TIERS, params={"limit": 0}).status_code == 422


def test_reset_names_detached_tiers_and_reaches_them_when_attached(
    fresh: Service, client: httpx.Client, definition: dict[str, Any]
) -> None:
    assert client.put(f"{TIERS}/disk", json=definition).status_code == 201
    assert client.post("/admin/v1/reset").json()["detached_tiers"] == []
    assert client.delete(f"{TIERS}/disk").status_code == 204
    assert client.post("/admin/v1/reset").json()["detached_tiers"] == ["disk"]
    assert [row.tier for _, row in fresh.store.reader.load_tier_resets()] == ["disk"]
    assert client.put(f"{TIERS}/disk", json=definition).status_code == 201
    fresh.context.tier_resets.sync()
    assert client.post("/admin/v1/reset").json()["detached_tiers"] == []
    fresh.context.tier_resets.sync()
    assert fresh.store.reader.load_tier_resets() == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_bytes": "soon"}, "max_bytes=soon must be"),
        ({"when": "later"}, "when=later must be"),
        ({"path": "~no-such-user/x"}, "there is no home folder for ~no-such-user"),
        ({"paht": "x"}, "did you mean path?"),
        ({"path": "/nowhere/at/all"}, "create /nowhere/at"),
        ({"type": "tape"}, "there is no type of tier called tape"),
        ({"type": None}, "type is missing"),
        ({"name": "other"}, "must be that of the path"),
        ({"enabled": True}, "without other fields"),
    ],
)
def test_bad_definition_is_422_with_the_text_of_a_refused_start(
    guarded: Service, definition: dict[str, Any], change: dict[str, Any], words: str
) -> None:
    with guarded.client(ADMIN) as admin:
        answer = admin.put(f"{TIERS}/disk", json=definition | change)
        assert answer.status_code == 422
        assert words in answer.json()["errors"][0]["message"]
        assert admin.get(TIERS).json() == {"items": [], "next_cursor": None}


def test_files_elsewhere_without_an_admin_token_are_refused(
    client: httpx.Client, tmp_path: Path, definition: dict[str, Any]
) -> None:
    (tmp_path / "tiers" / "link").symlink_to(tmp_path)
    folders = ("elsewhere", "tiers/../elsewhere", "tiers/link/tier")
    refused = [(definition | {"path": f"{tmp_path}/{folder}"}, "path") for folder in folders]
    server = {"ttl_s": 5, "type": "redis", "url": "redis://127.0.0.1:1", "password_file": "/etc/hostname"}
    bucket = {"ttl_s": 5, "type": "object", "url": "s3://b/p", "credentials_file": "/etc/hostname"}
    for given, field in (*refused, (server, "password_file"), (bucket, "credentials_file")):
        answer = client.put(f"{TIERS}/disk", json=given)
        assert answer.status_code == 422
        (error,) = answer.json()["errors"]
        assert error["message"].startswith(f"{field}={given[field]} ")
        assert "set KVFERRY_ADMIN_TOKEN" in error["message"]
    assert client.get(TIERS).json() == {"items": [], "next_cursor": None}


def test_files_elsewhere_with_an_admin_token_are_allowed(
    guarded: Service, tmp_path: Path, definition: dict[str, Any]
) -> None:
    with guarded.client(ADMIN) as admin:
        assert admin.put(f"{TIERS}/disk", json=definition | {"path": str(tmp_path / "elsewhere")}).status_code == 201
        assert admin.delete(f"{TIERS}/disk").status_code == 204


def test_name_of_the_pool_is_refused(api: httpx.Client, definition: dict[str, Any]) -> None:
    assert api.put(f"{TIERS}/host", json=definition).status_code == 422


def test_name_that_exists_is_409(client: httpx.Client, definition: dict[str, Any]) -> None:
    assert client.put(f"{TIERS}/disk", json=definition).status_code == 201
    answer = client.put(f"{TIERS}/disk", json=definition)
    assert (answer.status_code, "detach it first" in answer.json()["detail"]) == (409, True)


def test_tiers_while_another_one_opens_are_listed_and_disabled(
    fresh: Service, client: httpx.Client, definition: dict[str, Any]
) -> None:
    assert client.put(f"{TIERS}/disk", json=definition).status_code == 201
    fresh.may_open.clear()
    with ThreadPoolExecutor() as pool:
        attaches = [pool.submit(client.put, f"{TIERS}/{name}", json=definition) for name in ("one", "other")]
        try:
            (refused,), (attached,) = wait(attaches, DEADLINE_S, FIRST_COMPLETED)
            assert (refused.result().status_code, "try again" in refused.result().json()["detail"]) == (409, True)
            assert [tier["name"] for tier in client.get(TIERS).json()["items"]] == ["disk"]
            assert client.put(f"{TIERS}/disk", json={"enabled": False}).json()["enabled"] is False
            assert client.get(f"{TIERS}/disk").json()["enabled"] is False
            assert client.delete(f"{TIERS}/disk").status_code == 409
        finally:
            fresh.may_open.set()
        assert attached.result().status_code == 201
    assert client.delete(f"{TIERS}/disk").status_code == 204


def test_drop_when_a_tier_has_too_many_open_ones_is_429(
    fresh: Service, client: httpx.Client, definition: dict[str, Any]
) -> None:
    path = f"/admin/v1/blocks/{'00' * 33}"
    assert client.delete(path).status_code == 404
    assert client.put(f"{TIERS}/disk", json=definition).status_code == 201
    fresh.tiers["disk"].due = lambda number: False
    for number in range(blocks.MAX_OPEN_DROPS):
        fresh.engine.offload.resets.drop_block(number.to_bytes(33, "big"), time.time())
    refused = client.delete(path)
    assert (refused.status_code, "Retry-After" in refused.headers) == (429, True)


def test_openapi_names_the_tiers_that_are_attached_now(client: httpx.Client, definition: dict[str, Any]) -> None:
    def names() -> list[Any]:
        paths = client.get("/openapi.json").json()["paths"]
        bodies = [paths[f"/admin/v1/{call}"]["post"]["requestBody"]["content"] for call in ("reset", "prefetch")]
        return [body["application/json"]["schema"]["properties"]["tiers"]["items"]["enum"] for body in bodies]

    assert names() == [["host"], []]
    assert client.put(f"{TIERS}/disk", json=definition).status_code == 201
    assert names() == [["host", "disk"], ["disk"]]
    assert client.delete(f"{TIERS}/disk").status_code == 204
    assert names() == [["host"], []]


def test_unknown_tier_is_404(api: httpx.Client) -> None:
    assert api.get(f"{TIERS}/tape").status_code == 404
    assert api.put(f"{TIERS}/tape", json={"enabled": False}).status_code == 404
    assert api.delete(f"{TIERS}/tape").status_code == 404


def test_names_are_bounded_over_the_life_of_the_process(client: httpx.Client, definition: dict[str, Any]) -> None:
    for number in range(MAX_NAMES):
        assert client.put(f"{TIERS}/disk{number}", json=definition).status_code == 201
        assert client.delete(f"{TIERS}/disk{number}").status_code == 204
    assert client.put(f"{TIERS}/another", json=definition).status_code == 409
    assert client.put(f"{TIERS}/disk0", json=definition).status_code == 201
