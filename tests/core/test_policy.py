"""Which source settles a policy field, and what end users may say."""

from __future__ import annotations

from threading import RLock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.keys import RequestIdentity
from kvferry.core.policy import (
    POLICY_FIELDS,
    REQUEST_FIELDS_DEFAULT,
    Level,
    Override,
    PolicyResolver,
    Priority,
    RequestPolicy,
    TierWait,
    TierWaitMode,
    bounded_repr,
    parse_request_fields,
)
from kvferry.core.rules import Rule, RuleMatch, RuleSubject

VALUES = {
    "offload_prompt_only": st.booleans(),
    "max_offload_tokens": st.one_of(st.none(), st.integers(0, 10**6)),
    "level": st.sampled_from(Level),
    "store": st.booleans(),
    "load": st.booleans(),
    "max_load_tokens": st.one_of(st.none(), st.integers(0, 10**6)),
    "tiers": st.one_of(st.none(), st.lists(st.text(max_size=3), max_size=2).map(tuple)),
    "tier_wait": st.builds(TierWait, st.sampled_from(TierWaitMode)),
    "priority": st.sampled_from(Priority),
}
PATCHES = st.fixed_dictionaries({}, optional=VALUES)
ANY_JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.text(max_size=3), inner, max_size=2)),
    max_leaves=4,
)


SUBJECT = RuleSubject(RequestIdentity("id", aliases=("alias",)))


@given(settings=PATCHES, runtime=PATCHES, rule=PATCHES, request=PATCHES, override=PATCHES, expired=st.booleans())
def test_the_strongest_source_that_names_a_field_settles_it(
    settings, runtime, rule, request, override, expired
) -> None:
    book = PolicyResolver(RequestPolicy(**settings), dict.fromkeys(settings, "env"), RLock())
    book.set_runtime(runtime)
    book.put_rule(Rule("one", 0, RuleMatch(), rule))
    book.set_override(Override("alias", override, 5.0))
    settled = book.resolve(SUBJECT, request, 6.0 if expired else 4.0)
    layers = [
        ("override", {} if expired else override),
        ("request", request),
        ("rule:one", rule),
        ("runtime", runtime),
        ("env", settings),
    ]
    for name in POLICY_FIELDS:
        source, value = next(
            ((source, layer[name]) for source, layer in layers if name in layer),
            ("default", getattr(RequestPolicy(), name)),
        )
        assert (settled.sources[name], getattr(settled.policy, name)) == (source, value)


def test_override_of_the_exact_id_precedes_those_of_aliases() -> None:
    book = PolicyResolver(RequestPolicy(), {}, RLock())
    book.set_override(Override("alias", {"store": False}, 9.0))
    book.set_override(Override("id", {"load": False}, 9.0))
    settled = book.resolve(SUBJECT, {}, 1.0)
    assert (settled.policy.load, settled.policy.store) == (False, True)


def test_an_override_that_was_renewed_outlives_its_first_time() -> None:
    book = PolicyResolver(RequestPolicy(), {}, RLock())
    book.set_override(Override("id", {"store": False}, 5.0))
    book.set_override(Override("id", {"store": False}, 9.0))
    version = book.version
    assert book.expire(6.0) == 0
    assert book.version == version
    assert book.override(("id",), 6.0) is not None
    assert book.expire(9.0) == 1
    assert book.version > version
    assert book.overrides() == []


@given(params=st.one_of(ANY_JSON, st.fixed_dictionaries({}, optional=dict.fromkeys(POLICY_FIELDS, ANY_JSON))))
def test_request_fields_of_wrong_type_or_not_allowed_are_ignored(params) -> None:
    patch, ignored = parse_request_fields(params, REQUEST_FIELDS_DEFAULT)
    assert set(patch) | set(ignored) <= set(REQUEST_FIELDS_DEFAULT)
    assert not set(patch) & set(ignored)
    for name, value in patch.items():
        if name == "max_offload_tokens":
            assert type(value) is int
            assert value >= 0
        else:
            assert type(value) is bool


def test_more_fields_can_be_allowed_and_are_checked_alike() -> None:
    sent = {"level": "request", "priority": "urgent", "tiers": ["disk"], "store": 1}
    patch, ignored = parse_request_fields(sent, POLICY_FIELDS)
    assert patch == {"level": Level.REQUEST, "tiers": ("disk",)}
    assert set(ignored) == {"priority", "store"}


class WholeReprs:
    """Counts calls of `__repr__`."""

    def __init__(self) -> None:
        self.count = 0

    def __repr__(self) -> str:
        self.count += 1
        return "x"


@pytest.mark.parametrize("make", [lambda item: [item] * 10_000, lambda item: dict.fromkeys(range(10_000), item)])
def test_a_large_value_when_of_the_wrong_type_is_not_printed_whole(make) -> None:
    item = WholeReprs()
    _, ignored = parse_request_fields({"store": make(item), "max_offload_tokens": [make(item)]}, POLICY_FIELDS)
    assert set(ignored) == {"store", "max_offload_tokens"}
    assert item.count == 0
    assert "10000" in ignored["max_offload_tokens"]


@pytest.mark.parametrize("value", ["x" * 2_000_000, 10**4000, ["x" * 2_000_000], {"x" * 2_000_000: 1}])
def test_a_shown_value_when_long_is_cut(value: object) -> None:
    assert len(bounded_repr(value)) <= 80


@pytest.mark.parametrize("names", [["disk"] * 1000, ["d" * 1000]])
def test_tiers_when_too_many_or_too_long_are_ignored(names: list[str]) -> None:
    patch, ignored = parse_request_fields({"tiers": names}, POLICY_FIELDS)
    assert patch == {}
    assert list(ignored) == ["tiers"]


def test_override_when_renewed_many_times_takes_bounded_memory() -> None:
    book = PolicyResolver(RequestPolicy(), {}, RLock())
    for number in range(5000):
        book.set_override(Override("id", {}, 100.0 + number))
    assert len(book.expiries) < 1000
    for number in range(5000):
        book.set_override(Override(f"id{number}", {}, 100.0))
    assert 0 < book.expire(200.0) < 5000, "a bounded number a call"
    while book.expire(200.0):
        continue
    assert [override.request_id for override in book.overrides()] == ["id"]
