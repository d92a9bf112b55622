from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.app.settings import Settings
from kvferry.app.settings.live import LiveSettings
from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import ADMIN, READ, Service, fill, start_service

CONFIG = "/admin/v1/config"


def test_every_setting_is_shown_with_its_source(client: httpx.Client) -> None:
    config = client.get(CONFIG).json()
    assert set(config) == set(Settings.model_fields)
    assert config["port"]["value"] == 8787
    assert config["port"]["source"] == "default"
    assert config["state_dir"]["source"] == "connector"
    assert config["port"]["variable"] == "KVFERRY_PORT"
    assert config["max_offload_tokens"]["value"] == "unlimited"
    assert config["log_level"]["mutable"] is True
    assert config["pool_kind"]["mutable"] is False
    assert all(setting["description"] for setting in config.values())
    secrets = {"admin_token", "read_token", "engine_api_key", "database_url"}
    assert {name for name, setting in config.items() if setting["secret"]} == secrets


def test_secrets_are_masked_everywhere(guarded: Service) -> None:
    """LMCache#5128, LMCache#2757, sglang#32772: anyone could mutate, and secrets were shown."""
    with guarded.client(ADMIN) as client:
        for path in (CONFIG, "/admin/v1/stats", "/metrics", "/openapi.json"):
            text = client.get(path).text
            assert ADMIN not in text
            assert READ not in text
        config = client.get(CONFIG).json()
    assert config["admin_token"]["secret"] is True
    assert config["admin_token"]["value"] == "***"


def test_mutable_settings_when_patched_apply_at_once(fresh: Service, client: httpx.Client) -> None:
    answer = client.patch(CONFIG, json={"max_pinned_fraction": 0.0, "log_level": "debug"})
    assert answer.status_code == 200
    assert answer.json() == client.get(CONFIG).json()
    assert answer.json()["max_pinned_fraction"]["value"] == 0.0
    assert answer.json()["max_pinned_fraction"]["source"] == "runtime"
    assert logging.getLogger("kvferry.app").level == logging.DEBUG
    (block, *_) = fill(fresh, LoopRequest("one", 64, seed=1))
    assert client.put(f"/admin/v1/blocks/{block}/pin").status_code == 409
    back = client.patch(CONFIG, json={"max_pinned_fraction": None}).json()
    assert (back["max_pinned_fraction"]["value"], back["max_pinned_fraction"]["source"]) == (0.25, "default")
    assert back["log_level"]["value"] == "debug"
    assert client.put(f"/admin/v1/blocks/{block}/pin").status_code == 200
    client.patch(CONFIG, json={"log_level": None})


def test_the_eviction_policy_is_exchanged_and_nothing_is_lost(fresh: Service, client: httpx.Client) -> None:
    hashes = fill(fresh, *(LoopRequest(f"r{number}", 320, seed=number) for number in range(10)))

    def shown() -> tuple[str, int]:
        pool = client.get("/admin/v1/stats").json()["pool"]
        return pool["eviction_policy"], pool["ready"]

    for value, name in (("arc", "arc"), ("arc", "arc"), ("lru", "lru"), ("arc", "arc"), (None, "lru")):
        answer = client.patch(CONFIG, json={"eviction_policy": value})
        assert answer.json()["eviction_policy"]["value"] == name
        assert shown() == (name, 200)
    assert all(client.get(f"/admin/v1/blocks/{block}").status_code == 200 for block in hashes)
    refused = client.patch(CONFIG, json={"eviction_policy": "fifo"})
    (error,) = refused.json()["errors"]
    assert (refused.status_code, error["field"]) == (422, "eviction_policy")
    assert "lru, arc" in error["message"]
    client.patch(CONFIG, json={"eviction_policy": "arc"})
    fill(fresh, *(LoopRequest(f"more{number}", 320, seed=100 + number) for number in range(10)))
    assert shown() == ("arc", 256)


def test_the_store_threshold_holds_from_the_next_offer_on(fresh: Service, client: httpx.Client) -> None:
    assert client.patch(CONFIG, json={"store_threshold": 2}).json()["store_threshold"]["value"] == 2
    for number, stored in ((1, 0), (2, 4)):
        fill(fresh, LoopRequest(f"r{number}", 64, seed=1))
        store = client.get("/admin/v1/stats").json()["store"]
        assert (store["stored"], store["skipped"]["admission"]) == (stored, 4)
    client.patch(CONFIG, json={"store_threshold": None})
    fill(fresh, LoopRequest("r3", 64, seed=3))
    assert client.get("/admin/v1/stats").json()["store"]["stored"] == 8
    assert client.patch(CONFIG, json={"store_threshold": 0}).status_code == 422
    assert client.patch(CONFIG, json={"store_threshold": 64}).status_code == 422


def test_runtime_changes_do_not_survive_a_restart(tmp_path: Path) -> None:
    with start_service(tmp_path) as running, running.client() as client:
        client.patch(CONFIG, json={"eviction_history_days": 1})
        client.patch("/admin/v1/policy", json={"store": False})
    with start_service(tmp_path) as running, running.client() as client:
        assert client.get(CONFIG).json()["eviction_history_days"]["value"] == 30
        assert client.get("/admin/v1/policy").json()["store"] == {"value": True, "source": "default"}


def test_patch_of_immutable_settings_is_409_and_changes_nothing(api: httpx.Client) -> None:
    before = api.get(CONFIG).json()
    answer = api.patch(CONFIG, json={"pool_kind": "shm", "port": 1, "eviction_history_days": 5})
    assert answer.status_code == 409
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert answer.json()["settings"] == ["pool_kind", "port"]
    assert "pool_kind" in answer.json()["detail"]
    assert "restart" in answer.json()["detail"]
    assert api.patch(CONFIG, json={"pool_kind": None}).status_code == 409
    assert api.get(CONFIG).json() == before


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({"pool_byte": 1}, ["pool_byte"]),
        ({"nothing": None}, ["nothing"]),
        ({"max_pinned_fraction": 2}, ["max_pinned_fraction"]),
        ({"max_pinned_fraction": True}, ["max_pinned_fraction"]),
        ({"log_level": "loud", "eviction_history_rows": -1}, ["eviction_history_rows", "log_level"]),
        ({"pool_bytes": 1, "typo": 1}, ["typo"]),
        ([], ["body"]),
        (None, ["body"]),
    ],
)
def test_patch_of_invalid_settings_is_refused(api: httpx.Client, body: Any, fields: list[str]) -> None:
    before = api.get(CONFIG).json()
    answer = api.patch(CONFIG, json=body)
    assert answer.status_code == 422, answer.text
    assert sorted(error["field"] for error in answer.json()["errors"]) == fields
    assert all(error["message"] for error in answer.json()["errors"])
    assert api.get(CONFIG).json() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("store_threshold", "2"),
        ("max_pinned_fraction", "0.1"),
        ("eviction_history_rows", "5"),
        ("pool_bytes", "1048576"),
        ("pool_bytes", "0GiB"),
        ("log_level", "INFO"),
        ("eviction_policy", " lru"),
        ("eviction_history_days", 2**53),
    ],
)
def test_a_value_outside_of_its_description_is_refused(api: httpx.Client, name: str, value: object) -> None:
    answer = api.patch(CONFIG, json={name: value})
    assert answer.status_code == 422, answer.text
    assert [error["field"] for error in answer.json()["errors"]] == [name]


def test_the_bounds_of_settings_are_described_exactly(api: httpx.Client) -> None:
    body = api.get("/openapi.json").json()["paths"][CONFIG]["patch"]["requestBody"]
    properties = body["content"]["application/json"]["schema"]["properties"]
    assert properties["eviction_history_days"]["anyOf"][0]["maximum"] == 2**53 - 1
    assert properties["pool_bytes"]["anyOf"][0]["minimum"] == 1
    (size,) = [one for one in properties["pool_bytes"]["anyOf"] if one["type"] == "string"]
    assert [bool(re.search(size["pattern"], text)) for text in ("8GiB", "1.5 GB", "8", "0GiB")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_change_that_fails_midway_is_taken_back(
    fresh: Service, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = fresh.engine.manager
    switch_policy = manager.switch_policy

    def fail(name: str) -> bool:
        if name == "arc":
            raise MemoryError("no memory for the policy's tables")
        return switch_policy(name)

    monkeypatch.setattr(manager, "switch_policy", fail)
    change = {"max_pinned_fraction": 0.125, "store_threshold": 3, "eviction_policy": "arc"}
    before = client.get(CONFIG).json()
    assert client.patch(CONFIG, json=change).status_code == 500
    assert client.get(CONFIG).json() == before
    assert manager.operator_pins.max_fraction == before["max_pinned_fraction"]["value"]
    assert manager.admission.threshold == before["store_threshold"]["value"]
    monkeypatch.undo()
    assert client.patch(CONFIG, json=change).status_code == 200
    assert manager.operator_pins.max_fraction == 0.125


def test_patch_of_a_misspelled_setting_suggests_the_name(api: httpx.Client) -> None:
    (error,) = api.patch(CONFIG, json={"log_levle": "debug"}).json()["errors"]
    assert "log_level" in error["message"]


def test_shortfall_is_kept_until_the_setting_changes() -> None:
    live = LiveSettings(Settings(_env_file=None, pool_bytes=4 << 20), lambda _settings, _names: None)
    live.change({"pool_bytes": 8 << 20})
    live.record_unapplied("pool_bytes", 8 << 20, 4 << 20, "somebody else has the memory")
    assert live.current.pool_bytes == 4 << 20
    assert live.unapplied == {"pool_bytes": "pool_bytes=8388608 was not applied: somebody else has the memory"}
    live.change({"log_level": "debug"})
    assert live.current.pool_bytes == 4 << 20
    assert "pool_bytes" in live.unapplied
    live.change({"pool_bytes": 2 << 20})
    assert live.unapplied == {}
    live.record_unapplied("pool_bytes", 8 << 20, 4 << 20, "too late: it is not what was asked for last")
    assert (live.current.pool_bytes, dict(live.unapplied)) == (2 << 20, {})


@pytest.mark.parametrize(("name", "field"), [("url", "url"), ("config", "config"), ("", "body")])
def test_patch_of_client_settings_is_refused(api: httpx.Client, name: str, field: str) -> None:
    (error,) = api.patch(CONFIG, json={name: "x"}).json()["errors"]
    assert error["field"] == field
    assert "did you mean" not in error["message"]


def test_no_secret_comes_back_from_a_refusal(guarded: Service) -> None:
    with guarded.client(ADMIN) as client:
        for body in (
            {"admin_token": "hunter2-value"},
            {"admin_tokn": "hunter2-value"},
            {"admin_token": {"x": "hunter2-value"}},
        ):
            answer = client.patch(CONFIG, json=body)
            assert answer.status_code in (409, 422)
            assert "hunter2-value" not in answer.text


def test_limit_of_tenants_is_lifted_by_unlimited(client: httpx.Client) -> None:
    assert client.patch("/admin/v1/config", json={"tenant_max_bytes": "1MiB"}).status_code == 200
    answer = client.patch("/admin/v1/config", json={"tenant_max_bytes": "unlimited"})
    assert (answer.status_code, answer.json()["tenant_max_bytes"]["value"]) == (200, "unlimited")
    assert client.patch("/admin/v1/config", json={"log_level": "info"}).status_code == 200
    assert client.get("/admin/v1/config").json()["tenant_max_bytes"]["value"] == "unlimited"
    assert client.patch("/admin/v1/config", json={"pool_bytes": "unlimited"}).status_code == 422
