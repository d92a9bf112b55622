from __future__ import annotations

import json
import logging
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.keys import tenant_digest
from kvferry.core.rules import MAX_RULES, Rule, RuleMatch, RuleSubject
from tests.api.test_policies import BAD_FIELDS
from tests.harness.effort import examples
from tests.harness.loop_engine import LoopRequest
from tests.harness.loop_service import Service, errors_of, pages, start_service
from tests.harness.waiting import wait_until

RULES = "/admin/v1/rules"
ALL = {"session": None, "request": None, "lora": None, "tenant": None, "priority": None, "prompt_tokens": None}
SALT = "a-salt-that-nobody-may-see"


def send(client: httpx.Client, method: str, url: str, body: Any) -> httpx.Response:
    """In ASCII, so that halves of characters get through."""
    return client.request(method, url, content=json.dumps(body), headers={"Content-Type": "application/json"})


def put(client: httpx.Client, name: str, **body: Any) -> httpx.Response:
    return client.put(f"{RULES}/{name}", json=body)


def names(client: httpx.Client) -> list[str]:
    return [rule["name"] for rule in client.get(RULES).json()["items"]]


def policy_of(client: httpx.Client, request_id: str) -> dict[str, Any]:
    policy: dict[str, Any] = client.get(f"/admin/v1/requests/{request_id}").json()["policy"]
    return policy


# --- the resource


def test_a_rule_is_added_read_replaced_and_taken_away(client: httpx.Client) -> None:
    body = {"name": "batch", "order": 5, "match": {"request": "batch-*"}, "policy": {"store": False}}
    added = client.post(RULES, json=body)
    assert (added.status_code, added.headers["Location"]) == (201, f"{RULES}/batch")
    assert added.json() == {**body, "match": {**ALL, "request": "batch-*"}}
    assert client.get(f"{RULES}/batch").json() == added.json()
    assert client.get(RULES).json() == {"items": [added.json()], "next_cursor": None}
    again = client.post(RULES, json=body)
    assert (again.status_code, again.json()["type"]) == (409, "urn:kvferry:problem:rule-exists")
    replaced = put(client, "batch", policy={"load": False})
    assert (replaced.status_code, replaced.json()) == (
        200,
        {"name": "batch", "order": 0, "match": ALL, "policy": {"load": False}},
    )
    gone = client.delete(f"{RULES}/batch")
    assert (gone.status_code, gone.content) == (204, b"")
    for answer in (client.delete(f"{RULES}/batch"), client.get(f"{RULES}/batch")):
        assert answer.status_code == 404
        assert answer.headers["Content-Type"] == "application/problem+json"
    assert put(client, "batch").status_code == 201
    assert names(client) == ["batch"]


def test_rules_are_listed_in_the_order_in_which_they_are_tried(client: httpx.Client) -> None:
    for name, order in (("z", 1), ("b", 2), ("a", 2), ("first", -1), ("c", 2)):
        put(client, name, order=order)
    for limit in (1, 2, 3, 1000):
        assert [rule["name"] for rule in pages(client, RULES, limit)] == ["first", "z", "a", "b", "c"]


def test_pages_are_stable_while_rules_come_and_go(client: httpx.Client) -> None:
    for order in range(10):
        put(client, f"r{order}", order=order)
    first = client.get(RULES, params={"limit": 4}).json()
    assert [rule["name"] for rule in first["items"]] == ["r0", "r1", "r2", "r3"]
    for name in ("r0", "r3", "r5"):
        client.delete(f"{RULES}/{name}")
    put(client, "new", order=2)
    put(client, "r9", order=100)
    rest = client.get(RULES, params={"cursor": first["next_cursor"]}).json()
    assert [rule["name"] for rule in rest["items"]] == ["r4", "r6", "r7", "r8", "r9"]


def copy_rule(folder: Path, name: str, count: int) -> None:
    """Add copies of a rule to the database, named more0, more1 and so on."""
    with closing(sqlite3.connect(folder / "kvferry.db")) as connection, connection:
        connection.executemany(
            "INSERT INTO rules SELECT engine, ?, 9, match, policy, created_at, updated_at FROM rules WHERE name = ?",
            [(f"more{number}", name) for number in range(count)],
        )


def test_rules_beyond_their_limit_are_409(tmp_path: Path) -> None:
    with start_service(tmp_path) as running, running.client() as client:
        put(client, "r")
    copy_rule(tmp_path, "r", MAX_RULES - 2)
    with start_service(tmp_path) as running, running.client() as client:
        assert put(client, "last").status_code == 201
        for refused in (put(client, "one"), client.post(RULES, json={"name": "one"})):
            assert (refused.status_code, refused.json()["type"]) == (409, "urn:kvferry:problem:too-many")
            assert f"{MAX_RULES:,}" in refused.json()["detail"]
        assert put(client, "more5", order=3).status_code == 200
        assert client.delete(f"{RULES}/more6").status_code == 204
        assert put(client, "one").status_code == 201


# --- what is no rule

BAD_RULES: list[tuple[Any, list[str]]] = [
    ({"order": "1"}, ["order"]),
    ({"order": 1.5}, ["order"]),
    ({"order": True}, ["order"]),
    ({"order": None}, ["order"]),
    ({"order": 2**31}, ["order"]),
    ({"order": -(2**70)}, ["order"]),
    ({"match": None}, ["match"]),
    ({"match": []}, ["match"]),
    ({"match": {"user": "x"}}, ["match.user"]),
    ({"match": {"request": ""}}, ["match.request"]),
    ({"match": {"request": 5}}, ["match.request"]),
    ({"match": {"request": "\ud800"}}, ["match.request"]),
    ({"match": {"lora": "x" * 201}}, ["match.lora"]),
    ({"match": {"tenant": "A" * 16}}, ["match.tenant"]),
    ({"match": {"tenant": "not a digest"}}, ["match.tenant"]),
    ({"match": {"cache_salt": ""}}, ["match.cache_salt"]),
    ({"match": {"cache_salt": "\udc00"}}, ["match.cache_salt"]),
    ({"match": {"cache_salt": "x" * 1025}}, ["match.cache_salt"]),
    ({"match": {"cache_salt": 5}}, ["match.cache_salt"]),
    ({"match": {"cache_salt": "x", "tenant": "a*"}}, ["match"]),
    ({"match": {"priority": "1"}}, ["match.priority"]),
    ({"match": {"priority": True}}, ["match.priority"]),
    ({"match": {"priority": 1.5}}, ["match.priority"]),
    ({"match": {"priority": 2**53}}, ["match.priority.max", "match.priority.min"]),
    ({"match": {"prompt_tokens": -1}}, ["match.prompt_tokens.max", "match.prompt_tokens.min"]),
    ({"match": {"prompt_tokens": {"max": -1}}}, ["match.prompt_tokens.max"]),
    ({"match": {"priority": {"least": 1}}}, ["match.priority.least"]),
    ({"match": {"prompt_tokens": {"min": "2"}}}, ["match.prompt_tokens.min"]),
    ({"match": {"prompt_tokens": [1, 2]}}, ["match.prompt_tokens"]),
    ({"policy": None}, ["policy"]),
    ({"policy": {"ttl_s": 5}}, ["policy.ttl_s"]),
    ({"store": False}, ["store"]),
    ({"order": "1", "match": {"lora": 1}, "policy": {"store": 1}}, ["match.lora", "order", "policy.store"]),
    ([], ["body"]),
    (None, ["body"]),
    *(
        ({"policy": body}, [f"policy.{field}" for field in fields])
        for body, fields in BAD_FIELDS
        if isinstance(body, dict)
    ),
]


@pytest.mark.parametrize(("body", "fields"), BAD_RULES)
def test_rule_when_invalid_is_refused_with_its_fields(api: httpx.Client, body: Any, fields: list[str]) -> None:
    assert sorted(errors_of(send(api, "PUT", f"{RULES}/refused", body))) == sorted(fields)
    named = {**body, "name": "refused"} if isinstance(body, dict) else body
    assert sorted(errors_of(send(api, "POST", RULES, named))) == sorted(fields)
    assert "refused" not in names(api)


@pytest.mark.parametrize("name", ["", "-", "a b", ".hidden", "x" * 65, "caf\u00e9", "a/b", "a\n", None, 5, "\ud800"])
def test_rule_name_when_invalid_or_missing_is_refused(api: httpx.Client, name: Any) -> None:
    for body in ({"name": name}, {}):
        assert errors_of(send(api, "POST", RULES, body)) == ["name"]


@pytest.mark.parametrize("raw", ["a%20b", "%00", "x" * 65, "%ff", "caf%C3%A9"])
def test_rule_name_in_a_path_when_invalid_is_refused(api: httpx.Client, raw: str) -> None:
    for method, body in (("GET", None), ("PUT", {}), ("DELETE", None)):
        assert errors_of(api.request(method, f"{RULES}/{raw}", json=body)) == ["name"]
    for raw in ("a%2Fb", "a/b", ""):
        assert api.get(f"{RULES}/{raw}").status_code == 404


def test_reserved_rule_name_when_written_is_refused(api: httpx.Client) -> None:
    tried = {"POST": {"name": "test"}, "PUT": {}}
    for method, body in tried.items():
        answer = send(api, method, RULES if method == "POST" else f"{RULES}/test", body)
        (error,) = answer.json()["errors"]
        assert (answer.status_code, error["field"]) == (422, "name")
        assert "'test' is reserved" in error["message"]
        assert "choose another name" in error["message"]
    assert errors_of(send(api, "POST", f"{RULES}/test", {"rule": {"name": "test"}})) == ["rule.name"]
    assert errors_of(send(api, "PUT", f"{RULES}/other", {"name": "test"})) == ["name"]
    assert put(api, "test-2").status_code == 201
    assert names(api) == ["test-2"]
    assert api.delete(f"{RULES}/test-2").status_code == 204


SPANS = st.one_of(
    st.none(),
    st.integers(0, 50),
    st.fixed_dictionaries({}, optional={"min": st.none() | st.integers(0, 50), "max": st.none() | st.integers(50, 99)}),
)


@settings(max_examples=examples(60))
@given(
    order=st.integers(-(2**31) + 1, 2**31 - 1),
    match=st.fixed_dictionaries(
        {},
        optional={
            "request": st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200),
            "lora": st.none() | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200),
            "tenant": st.none() | st.from_regex(r"\A[0-9a-f*?\[\]!-]{1,16}\Z"),
            "priority": SPANS,
            "prompt_tokens": SPANS,
        },
    ),
    policy=st.fixed_dictionaries({}, optional={"store": st.booleans(), "max_offload_tokens": st.integers(0, 9)}),
)
def test_put_then_get_returns_the_same(service: Service, order: int, match: Any, policy: Any) -> None:
    def shown(span: Any) -> Any:
        if isinstance(span, int):
            return {"min": span, "max": span}
        return {"min": None, "max": None, **span} if span and any(v is not None for v in span.values()) else None

    client = service.shared_client
    made = put(client, "any", order=order, match=match, policy=policy)
    assert made.status_code in (200, 201), made.text
    spans = {name: shown(match.get(name)) for name in ("priority", "prompt_tokens")}
    expected = {"name": "any", "order": order, "match": {**ALL, **match, **spans}, "policy": policy}
    back = client.put(f"{RULES}/any", json=made.json())
    assert made.json() == back.json() == client.get(f"{RULES}/any").json() == expected
    other = client.put(f"{RULES}/other", json=made.json())
    assert (other.status_code, other.json()["type"]) == (409, "urn:kvferry:problem:name-differs")


# --- what it does


def test_rules_apply_after_override_and_request(fresh: Service, client: httpx.Client) -> None:
    client.patch("/admin/v1/policy", json={"max_offload_tokens": 16, "priority": "low"})
    rule = {"max_offload_tokens": 32, "load": False, "offload_prompt_only": False, "store": True}
    put(client, "sql", match={"lora": "sql-*"}, policy=rule)
    put(client, "later", order=1, policy={"store": False})
    client.put("/admin/v1/requests/r1/policy", json={"load": True})
    sent = {"offload_prompt_only": True}
    fresh.engine.answer(LoopRequest("r1", 160, seed=1, lora="sql-3", kv_transfer_params=sent))
    policy = policy_of(client, "r1")
    assert policy["max_offload_tokens"] == {"value": 32, "source": "rule:sql"}
    assert policy["load"] == {"value": True, "source": "override"}
    assert policy["offload_prompt_only"] == {"value": True, "source": "request"}
    assert policy["store"] == {"value": True, "source": "rule:sql"}
    assert policy["priority"] == {"value": "low", "source": "runtime"}
    assert policy["level"]["source"] == "default"
    fresh.settle()
    assert client.get("/admin/v1/stats").json()["store"]["stored"] == 2
    fresh.engine.answer(LoopRequest("r2", 160, seed=2))
    assert policy_of(client, "r2")["store"] == {"value": False, "source": "rule:later"}


@pytest.mark.parametrize(
    ("match", "matching"),
    [
        ({}, {"a", "b", "c"}),
        ({"request": "the-*"}, {"b"}),
        ({"tenant": f"{tenant_digest('salt-a')}"}, {"a"}),
        ({"tenant": f"{str(tenant_digest('salt-a'))[:5]}*"}, {"a"}),
        ({"cache_salt": "salt-b"}, {"b"}),
        ({"cache_salt": "salt"}, set()),
        ({"prompt_tokens": {"max": 64}, "priority": {"min": 1}}, {"c"}),
    ],
)
def test_conditions_hold_together(
    service: Service, api: httpx.Client, match: dict[str, Any], matching: set[str]
) -> None:
    put(api, "rule", match=match, policy={"store": False})
    for request in (
        LoopRequest("a", 64, seed=1, tenant=tenant_digest("salt-a"), priority=0),
        LoopRequest("b", 128, seed=2, tenant=tenant_digest("salt-b"), lora="x", priority=1, aliases=("the-b",)),
        LoopRequest("c", 64, seed=3, priority=5),
    ):
        service.engine.answer(request)
    found = {name for name in "abc" if policy_of(api, name)["store"]["source"] == "rule:rule"}
    assert found == matching
    assert api.delete(f"{RULES}/rule").status_code == 204


def test_rule_applies_to_later_blocks_of_a_running_request(fresh: Service, client: httpx.Client) -> None:
    hold = threading.Event()
    fresh.engine.enqueue(LoopRequest("running", 160, seed=1, hold=hold))
    wait_until(lambda: client.get("/admin/v1/requests/running").status_code == 200, "it is announced")
    put(client, "cap", match={"prompt_tokens": 160}, policy={"max_offload_tokens": 48})
    assert policy_of(client, "running")["max_offload_tokens"] == {"value": 48, "source": "rule:cap"}
    client.delete(f"{RULES}/cap")
    assert policy_of(client, "running")["max_offload_tokens"]["source"] == "default"
    put(client, "cap", match={"prompt_tokens": 160}, policy={"max_offload_tokens": 48})
    hold.set()
    fresh.engine.wake()
    wait_until(lambda: client.get("/admin/v1/requests/running").json()["state"] == "finished", "it has finished")
    fresh.settle()
    assert client.get("/admin/v1/requests/running").json()["store"]["stored"] == 3


def test_policy_of_an_expected_request_applies_rules_by_id(client: httpx.Client) -> None:
    put(client, "long", match={"request": "soon", "prompt_tokens": {"min": 1}}, policy={"load": False})
    put(client, "soon", order=1, match={"request": "so*"}, policy={"store": False, "load": True})
    client.put("/admin/v1/requests/soon/policy", json={"max_offload_tokens": 5})
    for policy in (policy_of(client, "soon"), client.get("/admin/v1/requests/soon/policy").json()):
        assert policy["store"] == {"value": False, "source": "rule:soon"}
        assert policy["load"] == {"value": True, "source": "rule:soon"}
        assert policy["max_offload_tokens"] == {"value": 5, "source": "override"}


# --- tenants


def test_a_cache_salt_is_neither_shown_nor_kept_nor_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with start_service(tmp_path) as running, running.client() as client:
        texts = [
            put(client, "by-salt", match={"cache_salt": SALT}).text,
            put(client, "wrong", match={"cache_salt": SALT, "lora": 5}).text,
            put(client, "wrong", match={"tenant": SALT}).text,
            put(client, "wrong", match={"cache_salt": [SALT]}).text,
            client.post(RULES, json={"name": "wrong", "match": {"cache_salt": {"x": SALT}}}).text,
            client.get(f"{RULES}/by-salt").text,
            client.get(RULES).text,
            client.get("/admin/v1/audit").text,
        ]
        assert client.get(f"{RULES}/by-salt").json()["match"]["tenant"] == tenant_digest(SALT)
        assert client.get("/openapi.json").json()
    kept = b"".join(path.read_bytes() for path in tmp_path.iterdir())
    assert all(SALT not in text for text in (*texts, caplog.text))
    assert SALT.encode() not in kept
    assert str(tenant_digest(SALT)).encode() in kept


# --- kept


def test_rules_survive_a_restart(tmp_path: Path) -> None:
    match = {"cache_salt": SALT, "priority": {"min": 1}}
    with start_service(tmp_path) as running, running.client() as client:
        put(client, "kept", order=3, match=match, policy={"max_offload_tokens": "unlimited", "tiers": ["disk"]})
        put(client, "first", order=1, policy={"store": False})
        put(client, "dropped")
        client.delete(f"{RULES}/dropped")
        before = client.get(RULES).json()
    with start_service(tmp_path) as running, running.client() as client:
        assert client.get(RULES).json() == before
        running.engine.answer(LoopRequest("r", 64))
        assert policy_of(client, "r")["store"] == {"value": False, "source": "rule:first"}


def test_stored_rows_when_invalid_are_skipped_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with start_service(tmp_path) as running, running.client() as client:
        for name in ("good", "bad-match", "bad-policy", "torn"):
            put(client, name, policy={"store": False})
        for name in ("fine", "torn", "timeless"):
            client.put(f"/admin/v1/requests/{name}/policy", json={"store": False})
    with closing(sqlite3.connect(tmp_path / "kvferry.db", isolation_level=None)) as connection:
        connection.execute("""UPDATE rules SET match = '{"lora": 5}' WHERE name = 'bad-match'""")
        connection.execute("""UPDATE rules SET policy = '{"stor": true}' WHERE name = 'bad-policy'""")
        connection.execute("""UPDATE rules SET match = '{"lora":' WHERE name = 'torn'""")
        connection.execute("""UPDATE overrides SET policy = '{"store": fals' WHERE request = 'torn'""")
        connection.execute("UPDATE overrides SET expires_at = 'never' WHERE request = 'timeless'")
    caplog.clear()
    with start_service(tmp_path) as running, running.client() as client:
        assert names(client) == ["good"]
        found = [client.get(f"/admin/v1/requests/{name}/policy").status_code for name in ("fine", "torn", "timeless")]
        assert found == [200, 404, 404]
    told = [
        record.getMessage().removeprefix("stored record not valid, skipped: ")
        for record in caplog.records
        if record.name == "kvferry.app.operations.policy_store" and record.levelno == logging.WARNING
    ]
    assert sorted(told) == [
        "override of request 'timeless': could not convert string to float: 'never'",
        "override of request 'torn': body",
        "rule 'bad-match': match.lora",
        "rule 'bad-policy': policy.stor",
        "rule 'torn': match",
    ]


@pytest.mark.parametrize("field", ["priority", "prompt_tokens"])
def test_a_rule_with_an_empty_span_is_refused(api: httpx.Client, field: str) -> None:
    body = {"match": {field: {"min": 2, "max": 1}}}
    for answer in (api.post(RULES, json=body | {"name": "none"}), api.put(f"{RULES}/none", json=body)):
        assert (answer.status_code, answer.json()["type"]) == (409, "urn:kvferry:problem:empty-span")
        assert [error["field"] for error in answer.json()["errors"]] == [f"match.{field}"]


def test_whole_numbers_may_be_written_with_a_fraction_of_zero(client: httpx.Client) -> None:
    """JSON Schema, and with it the API's description, calls 5.0 an integer."""
    body = {"order": 5.0, "match": {"priority": 3.0}, "policy": {"max_offload_tokens": 7.0}}
    made = client.put(f"{RULES}/whole", json=body).json()
    assert (made["order"], made["match"]["priority"]) == (5, {"min": 3, "max": 3})
    assert made["policy"] == {"max_offload_tokens": 7}
    changed = client.patch("/admin/v1/config", json={"store_threshold": 2.0}).json()
    assert changed["store_threshold"]["value"] == 2


# --- tests of a change


def test_rule_when_tested_reports_requests_and_fields_that_change(fresh: Service, client: httpx.Client) -> None:
    put(client, "low", order=20, match={"request": "batch-*"}, policy={"priority": "low"})
    client.put("/admin/v1/requests/batch-2/policy", json={"store": True})
    for number in range(4):
        fresh.engine.answer(LoopRequest(f"batch-{number}", 64, seed=number, priority=number))
    fresh.engine.answer(LoopRequest("chat", 64, seed=9))
    rule = {"name": "new", "order": 10, "match": {"priority": {"min": 1}}, "policy": {"store": False, "load": True}}
    assert client.post(f"{RULES}/test", json={"rule": rule}).json() == {
        "requests": 5,
        "matching": 3,
        "changed": 3,
        "rules": [{"now": "low", "then": "new", "requests": 3}],
        "fields": [
            {"field": "priority", "now": "low", "then": "normal", "requests": 3},
            {"field": "store", "now": True, "then": False, "requests": 2},
        ],
        "examples": ["batch-3", "batch-2", "batch-1"],
    }
    later = client.post(f"{RULES}/test", json={"rule": {**rule, "order": 30}}).json()
    assert (later["matching"], later["changed"], later["rules"]) == (0, 0, [])
    assert names(client) == ["low"]
    assert not [one for one in client.get("/admin/v1/audit").json()["items"] if one["method"] == "POST"]


def test_deletion_of_a_rule_when_tested_reports_what_applies_then(fresh: Service, client: httpx.Client) -> None:
    put(client, "first", order=1, match={"request": "a*"}, policy={"max_load_tokens": 64})
    put(client, "second", order=2, policy={"store": False})
    fresh.engine.answer(LoopRequest("a1", 64, seed=1))
    tested = client.post(f"{RULES}/test", json={"without": "first"}).json()
    assert tested["rules"] == [{"now": "first", "then": "second", "requests": 1}]
    assert {one["field"]: one["then"] for one in tested["fields"]} == {"max_load_tokens": "unlimited", "store": False}
    assert names(client) == ["first", "second"]


def test_rules_when_a_change_is_tested_are_not_all_tried(fresh: Service, client: httpx.Client) -> None:
    tried: list[RuleSubject] = []

    class Tried(RuleMatch):
        def applies_to(self, subject: RuleSubject) -> bool:
            tried.append(subject)
            return super().applies_to(subject)

    for number in range(4):
        fresh.engine.answer(LoopRequest(f"batch-{number}", 64, seed=number))
    for number in range(100):
        match = Tried(request=f"*-{number}" if number < 50 else f"*{number}*")
        fresh.context.scheduler.policies.put_rule(Rule(f"r{number}", number, match, {"store": False}))
    tried.clear()
    assert client.post(f"{RULES}/test", json={"without": "r1"}).json()["examples"] == ["batch-1"]
    # The rule itself for each request, and the others for the one that it applies to.
    assert len(tried) <= 4 + 1 + 50


@pytest.mark.parametrize("body", [{}, {"rule": None}, {"rule": {"order": 1}}, {"without": "no name"}, {"other": 1}])
def test_rules_when_their_test_is_invalid_are_refused(api: httpx.Client, body: Any) -> None:
    assert send(api, "POST", f"{RULES}/test", body).status_code == 422
