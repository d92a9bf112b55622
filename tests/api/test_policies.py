from __future__ import annotations

import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.policy import POLICY_FIELDS
from tests.harness.effort import examples
from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import Service, errors_of, start_service
from tests.harness.waiting import wait_until

DEFAULTS = {
    "offload_prompt_only": {"value": True, "source": "env"},
    "max_offload_tokens": {"value": "unlimited", "source": "default"},
    "level": {"value": "block", "source": "default"},
    "store": {"value": True, "source": "default"},
    "load": {"value": True, "source": "default"},
    "max_load_tokens": {"value": "unlimited", "source": "default"},
    "tiers": {"value": None, "source": "default"},
    "tier_wait": {"value": "timeout", "source": "default"},
    "priority": {"value": "normal", "source": "default"},
    "retain_s": {"value": 0.0, "source": "default"},
}
BAD_FIELDS: list[tuple[Any, list[str]]] = [
    ({"offload_prompt_only": 1}, ["offload_prompt_only"]),
    ({"offload_prompt_only": "false"}, ["offload_prompt_only"]),
    ({"store": 0}, ["store"]),
    ({"load": "yes"}, ["load"]),
    ({"max_offload_tokens": True}, ["max_offload_tokens"]),
    ({"max_offload_tokens": False}, ["max_offload_tokens"]),
    ({"max_offload_tokens": "5"}, ["max_offload_tokens"]),
    ({"max_offload_tokens": 5.5}, ["max_offload_tokens"]),
    ({"max_offload_tokens": -1}, ["max_offload_tokens"]),
    ({"max_offload_tokens": 2**53}, ["max_offload_tokens"]),
    ({"max_offload_tokens": "Unlimited"}, ["max_offload_tokens"]),
    ({"max_offload_tokens": [5]}, ["max_offload_tokens"]),
    ({"max_load_tokens": "5"}, ["max_load_tokens"]),
    ({"level": "blocks"}, ["level"]),
    ({"level": 1}, ["level"]),
    ({"tiers": "disk"}, ["tiers"]),
    ({"tiers": [5]}, ["tiers.0"]),
    ({"tiers": ["a", ""]}, ["tiers.1"]),
    ({"tiers": ["x"] * 65}, ["tiers"]),
    ({"priority": "urgent"}, ["priority"]),
    ({"tier_wait": "timeout:"}, ["tier_wait"]),
    ({"retain_s": -1}, ["retain_s"]),
    ({"retain_s": True}, ["retain_s"]),
    ({"retain_s": "60"}, ["retain_s"]),
    ({"retain_s": 3600.5}, ["retain_s"]),
    ({"prompt_only": True}, ["prompt_only"]),
    ({"store": 1, "load": 1, "max_offload_tokens": -1}, ["max_offload_tokens", "store", "load"]),
    ([], ["body"]),
    (None, ["body"]),
    ("x", ["body"]),
]


def put(client: httpx.Client, request_id: str, body: Any) -> httpx.Response:
    return client.put(f"/admin/v1/requests/{quote(request_id, safe='')}/policy", json=body)


def get(client: httpx.Client, request_id: str) -> httpx.Response:
    return client.get(f"/admin/v1/requests/{quote(request_id, safe='')}/policy")


def fields_of(answer: httpx.Response) -> dict[str, Any]:
    return {name: answer.json()[name] for name in POLICY_FIELDS}


# --- runtime defaults


def test_defaults_come_with_their_sources(client: httpx.Client) -> None:
    assert client.get("/admin/v1/policy").json() == DEFAULTS


def test_runtime_defaults_are_laid_over_settings_and_taken_away_again(client: httpx.Client) -> None:
    patched = client.patch("/admin/v1/policy", json={"offload_prompt_only": False, "max_offload_tokens": 0})
    assert patched.status_code == 200
    assert patched.json() == client.get("/admin/v1/policy").json()
    assert patched.json() == {
        **DEFAULTS,
        "offload_prompt_only": {"value": False, "source": "runtime"},
        "max_offload_tokens": {"value": 0, "source": "runtime"},
    }
    lifted = client.patch("/admin/v1/policy", json={"max_offload_tokens": "unlimited", "tiers": [], "level": "request"})
    assert lifted.json()["max_offload_tokens"] == {"value": "unlimited", "source": "runtime"}
    assert lifted.json()["tiers"] == {"value": [], "source": "runtime"}
    assert lifted.json()["level"] == {"value": "request", "source": "runtime"}
    nulls = dict.fromkeys(POLICY_FIELDS)
    assert client.patch("/admin/v1/policy", json=nulls).json() == DEFAULTS
    assert client.patch("/admin/v1/policy", json={}).json() == DEFAULTS


@pytest.mark.parametrize(("body", "fields"), BAD_FIELDS)
def test_policy_when_invalid_is_refused_and_unchanged(api: httpx.Client, body: Any, fields: list[str]) -> None:
    before = api.get("/admin/v1/policy").json()
    assert sorted(errors_of(api.patch("/admin/v1/policy", json=body))) == sorted(fields)
    assert api.get("/admin/v1/policy").json() == before


def test_runtime_defaults_apply_to_stores(fresh: Service, client: httpx.Client) -> None:
    client.patch("/admin/v1/policy", json={"max_offload_tokens": 64})
    fresh.engine.answer(LoopRequest("capped", 160, seed=1))
    fresh.settle()
    assert client.get("/admin/v1/stats").json()["store"]["stored"] == 4
    client.patch("/admin/v1/policy", json={"store": False})
    fresh.engine.answer(LoopRequest("none", 160, seed=2))
    shown = client.get("/admin/v1/requests/none").json()
    assert shown["store"]["skipped"]["disabled"] == 10
    assert shown["policy"]["store"] == {"value": False, "source": "runtime"}


# --- overrides


def test_an_override_before_the_request_arrives(fresh: Service, client: httpx.Client) -> None:
    assert get(client, "soon").status_code == 404
    answer = put(client, "soon", {"max_offload_tokens": 32, "offload_prompt_only": False})
    assert answer.status_code == 200
    assert fields_of(answer) == {
        **DEFAULTS,
        "max_offload_tokens": {"value": 32, "source": "override"},
        "offload_prompt_only": {"value": False, "source": "override"},
    }
    assert get(client, "soon").json() == answer.json()
    expected = client.get("/admin/v1/requests/soon").json()
    assert (expected["id"], expected["state"]) == ("soon", "expected")
    assert expected["policy"] == fields_of(answer)
    fresh.engine.answer(LoopRequest("soon", 160, seed=1, kv_transfer_params={"max_offload_tokens": 128, "load": False}))
    fresh.settle()
    shown = client.get("/admin/v1/requests/soon").json()
    assert shown["state"] == "finished"
    assert client.get("/admin/v1/stats").json()["store"]["stored"] == 2
    assert shown["policy"]["max_offload_tokens"] == {"value": 32, "source": "override"}
    assert shown["policy"]["load"] == {"value": False, "source": "request"}


def test_an_override_while_the_request_runs(fresh: Service, client: httpx.Client) -> None:
    hold = threading.Event()
    fresh.engine.enqueue(LoopRequest("running", 160, seed=1, hold=hold))
    wait_until(lambda: client.get("/admin/v1/requests/running").status_code == 200, "it is announced")
    assert client.get("/admin/v1/requests/running").json()["policy"]["store"]["source"] == "default"
    assert fields_of(get(client, "running")) == DEFAULTS
    assert get(client, "running").json()["override"] is None
    put(client, "running", {"store": False})
    assert client.get("/admin/v1/requests/running").json()["policy"]["store"] == {
        "value": False,
        "source": "override",
    }
    hold.set()
    fresh.engine.wake()
    wait_until(lambda: client.get("/admin/v1/requests/running").json()["state"] == "finished", "it has finished")
    assert client.get("/admin/v1/requests/running").json()["store"]["skipped"]["disabled"] == 10


def test_put_replaces_and_null_leaves_a_field_out(client: httpx.Client) -> None:
    put(client, "r", {"store": False, "load": False})
    replaced = put(client, "r", {"store": False, "load": None, "max_offload_tokens": "unlimited"})
    assert replaced.json()["load"] == DEFAULTS["load"]
    assert replaced.json()["store"] == {"value": False, "source": "override"}
    assert replaced.json()["max_offload_tokens"] == {"value": "unlimited", "source": "override"}
    assert fields_of(put(client, "r", {"store": None})) == DEFAULTS


def test_an_override_lifts_a_cap_that_the_request_sent(fresh: Service, client: httpx.Client) -> None:
    put(client, "lifted", {"max_offload_tokens": "unlimited"})
    fresh.engine.answer(LoopRequest("lifted", 160, seed=1, kv_transfer_params={"max_offload_tokens": 0}))
    fresh.settle()
    assert client.get("/admin/v1/stats").json()["store"]["stored"] == 10


def test_an_override_is_taken_away(client: httpx.Client) -> None:
    put(client, "r", {"store": False})
    gone = client.delete("/admin/v1/requests/r/policy")
    assert (gone.status_code, gone.content) == (204, b"")
    assert client.delete("/admin/v1/requests/r/policy").status_code == 404
    assert get(client, "r").status_code == 404
    assert client.get("/admin/v1/requests/r").status_code == 404


def test_an_override_ends_by_itself(fresh: Service, client: httpx.Client) -> None:
    now_s = datetime.now(UTC).timestamp()
    answer = put(client, "hour", {"store": False})
    ends_s = datetime.fromisoformat(answer.json()["override"]["expires_at"]).timestamp()
    assert now_s + 3599 < ends_s < now_s + 3700
    assert answer.json()["override"]["fields"] == ["store"]
    put(client, "short", {"store": False, "ttl_s": 0.05})
    wait_until(lambda: get(client, "short").status_code == 404, "the override has ended")
    assert client.delete("/admin/v1/requests/short/policy").status_code == 404
    fresh.engine.answer(LoopRequest("short", 64, seed=1))
    assert client.get("/admin/v1/requests/short").json()["policy"]["store"]["source"] == "default"


def test_overrides_survive_a_restart(tmp_path: Path) -> None:
    body = {
        "max_offload_tokens": "unlimited",
        "tiers": ["disk"],
        "level": "request",
        "priority": "high",
        "store": False,
    }
    with start_service(tmp_path) as running, running.client() as client:
        before = put(client, "kept/\u00e9", body).json()
        put(client, "dropped", body)
        put(client, "over", {"store": False, "ttl_s": 0.01})
        client.delete("/admin/v1/requests/dropped/policy")
    with start_service(tmp_path) as running, running.client() as client:
        assert get(client, "kept/\u00e9").json() == before
        assert get(client, "dropped").status_code == 404
        assert get(client, "over").status_code == 404
        running.engine.answer(LoopRequest("kept/\u00e9", 64))
        shown = client.get("/admin/v1/requests/" + quote("kept/\u00e9", safe="")).json()
        assert shown["policy"]["store"] == {"value": False, "source": "override"}


@pytest.mark.parametrize(("body", "fields"), BAD_FIELDS)
def test_override_when_invalid_is_refused(api: httpx.Client, body: Any, fields: list[str]) -> None:
    assert sorted(errors_of(put(api, "refused", body))) == sorted(fields)
    assert get(api, "refused").status_code == 404


@pytest.mark.parametrize("ttl", [0, -1, True, "60", None, [], 366 * 86400 + 1, 1e300])
def test_a_time_to_live_is_positive_and_bounded(api: httpx.Client, ttl: Any) -> None:
    assert errors_of(put(api, "refused", {"store": False, "ttl_s": ttl})) == ["ttl_s"]


AWKWARD_IDS = [
    "a/b",
    "a/policy",
    "policy",
    "a//b",
    "../up",
    "%2F",
    "a%2Fb",
    "a b",
    "a?b",
    "a#b",
    "caf\u00e9",
    "a;b",
    "+",
    "x" * 512,
    ".",
]


@pytest.mark.parametrize("request_id", AWKWARD_IDS)
def test_any_printable_id_works(service: Service, api: httpx.Client, request_id: str) -> None:
    url = f"{service.url}/admin/v1/requests/{quote(request_id, safe='').replace('.', '%2E')}"
    assert api.get(url).status_code == 404
    assert api.put(url + "/policy", json={"store": False}).json()["id"] == request_id
    assert api.get(url).json()["id"] == request_id
    assert service.engine.offload.policies.override((request_id,), 0.0) is not None
    assert api.delete(url + "/policy").status_code == 204


def test_a_slash_may_stay_as_it_is(client: httpx.Client) -> None:
    assert client.put("/admin/v1/requests/a/b/policy", json={"store": False}).json()["id"] == "a/b"
    assert client.get("/admin/v1/requests/a/b").json()["id"] == "a/b"


@pytest.mark.parametrize("raw", ["%00", "%0A", "%ff", "x" * 513, "", "%e2%80%a8"])
def test_request_id_when_not_printable_is_refused(api: httpx.Client, raw: str) -> None:
    assert errors_of(api.put(f"/admin/v1/requests/{raw}/policy", json={})) == ["id"]


@settings(max_examples=examples(60))
@given(
    body=st.fixed_dictionaries(
        {},
        optional={
            "offload_prompt_only": st.booleans(),
            "max_offload_tokens": st.one_of(st.integers(0, 2**53 - 1), st.just("unlimited")),
            "level": st.sampled_from(["block", "request"]),
            "store": st.booleans(),
            "load": st.booleans(),
            "max_load_tokens": st.one_of(st.integers(0, 2**53 - 1), st.just("unlimited")),
            "tiers": st.lists(st.from_regex(r"\A[!-~]{1,64}\Z"), max_size=5),
            "priority": st.sampled_from(["low", "normal", "high"]),
            "retain_s": st.one_of(st.integers(0, 3600), st.floats(0, 3600)),
            "tier_wait": st.sampled_from(["best_effort", "wait_complete", "timeout", "timeout:0.25"]),
        },
    )
)
def test_put_then_get_returns_the_same(service: Service, body: dict[str, Any]) -> None:
    client = service.shared_client
    for answer in (put(client, "any", body), get(client, "any")):
        assert answer.status_code == 200
        for name in POLICY_FIELDS:
            shown = answer.json()[name]
            if name in body:
                assert shown == {"value": body[name], "source": "override"}
            else:
                assert shown["source"] != "override"


def test_an_alias_is_covered_by_the_override_of_its_id(fresh: Service, client: httpx.Client) -> None:
    put(client, "mine", {"store": False})
    fresh.engine.answer(LoopRequest("cmpl-mine-0-12345678", 64, seed=1, aliases=("mine",)))
    for name in ("mine", "cmpl-mine-0-12345678"):
        shown = client.get(f"/admin/v1/requests/{name}").json()
        assert shown["id"] == "cmpl-mine-0-12345678"
        assert shown["policy"]["store"] == {"value": False, "source": "override"}
        assert shown["override"]["fields"] == ["store"]
        assert get(client, name).json()["store"] == {"value": False, "source": "override"}
