"""Whatever is sent, the answer is a document of ours, never a 500 and never a traceback."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.app.operations.policy_json import RuleMatchBody
from kvferry.app.settings.fields import MUTABLE_NAMES
from kvferry.core.policy import POLICY_FIELDS
from tests.harness.effort import examples
from tests.harness.loop_service import Service

FIELDS = [
    *POLICY_FIELDS,
    *RuleMatchBody.model_fields,
    *MUTABLE_NAMES,
    *("ttl_s", "tiers", "match", "drain_timeout_s", "reason", "name", "order", "policy", "min", "max"),
]
MUTATIONS = [
    ("POST", "/admin/v1/reset"),
    ("PATCH", "/admin/v1/policy"),
    ("PUT", "/admin/v1/requests/fuzzed/policy"),
    ("PUT", "/admin/v1/sessions/fuzzed"),
    ("POST", "/admin/v1/sessions/fuzzed/prefetch"),
    ("PUT", "/admin/v1/blocks/00ff/pin"),
    ("POST", "/admin/v1/rules"),
    ("PUT", "/admin/v1/rules/fuzzed"),
    ("PATCH", "/admin/v1/config"),
]
LISTS = [
    "requests",
    "sessions",
    "blocks",
    "evictions",
    "evictions/summary",
    "audit",
    "stats",
    "config",
    "policy",
    "rules",
]
values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(alphabet=st.characters(), max_size=20),
        st.sampled_from(["unlimited", "block", "high", "host", "\ud800", "\0", "*", "[", "debug"]),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
bodies = st.one_of(st.dictionaries(st.sampled_from(FIELDS), values, max_size=5), values)


def check(answer: Any) -> None:
    assert answer.status_code < 500, answer.text
    assert "Traceback" not in answer.text
    if answer.status_code >= 400:
        document = answer.json()
        assert answer.headers["Content-Type"] == "application/problem+json"
        assert document["status"] == answer.status_code
        if answer.status_code == 422:
            fields = [error["field"] for error in document["errors"]]
            assert fields
            assert len(fields) == len(set(fields))


@settings(max_examples=examples(250))
@given(call=st.sampled_from(MUTATIONS), body=bodies)
def test_any_body(service: Service, call: tuple[str, str], body: Any) -> None:
    if isinstance(body, dict) and call[1].endswith("reset"):
        body["drain_timeout_s"] = 0
    headers = {"Content-Type": "application/json"}
    check(service.shared_client.request(*call, content=json.dumps(body), headers=headers))


@settings(max_examples=examples(100))
@given(call=st.sampled_from(MUTATIONS), body=st.binary(max_size=60))
def test_any_bytes(service: Service, call: tuple[str, str], body: bytes) -> None:
    check(service.shared_client.request(*call, content=body, headers={"Content-Type": "application/json"}))


@settings(max_examples=examples(150))
@given(
    path=st.sampled_from(LISTS),
    query=st.dictionaries(
        st.sampled_from(["limit", "cursor", "since", "until", "reason", "request", "tenant", "state"]),
        st.one_of(
            st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12),
            st.integers().map(str),
            st.datetimes().map(lambda moment: moment.isoformat() + "Z"),
        ),
        max_size=3,
    ),
)
def test_any_query(service: Service, path: str, query: dict[str, str]) -> None:
    check(service.shared_client.get(f"/admin/v1/{path}", params=query))


@settings(max_examples=examples(150))
@given(
    method=st.sampled_from(["GET", "PUT", "DELETE"]),
    template=st.sampled_from(
        ["requests/{}", "requests/{}/policy", "blocks/{}", "blocks/{}/pin", "rules/{}", "{}", "docs/{}"]
    ),
    raw=st.text(alphabet="abc019%2Ff/.~-_\u00e9\u4e2d", min_size=1, max_size=12),
)
def test_any_path(service: Service, method: str, template: str, raw: str) -> None:
    answer = service.shared_client.request(method, "/admin/v1/" + template.format(raw), follow_redirects=False)
    check(answer)
