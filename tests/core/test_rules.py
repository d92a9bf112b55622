"""Which requests a rule is about, which rule counts, and how seldom that is asked."""

from __future__ import annotations

from fnmatch import fnmatchcase
from threading import RLock
from typing import ClassVar

from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.core.keys import RequestIdentity
from kvferry.core.policy import Override, PolicyResolver, RequestPolicy
from kvferry.core.rules import MAX_RULES, Rule, RuleMatch, RuleSubject, Span
from tests.harness.toy_engine import ToyEngine, ToyRequest

GLOBS = st.none() | st.text(alphabet="abA*?[]!-^\\&~|.\n", max_size=6)
NAMES = st.text(alphabet="abA-]\n", max_size=4)
NUMBERS = st.none() | st.integers(-3, 3)
SPANS = st.none() | st.builds(Span, NUMBERS, NUMBERS)
SUBJECT = RuleSubject(RequestIdentity("id", tenant="0123456789abcdef", lora="sql", aliases=("alias",)), 100, 5)


def book_of(*rules: Rule) -> PolicyResolver:
    book = PolicyResolver(RequestPolicy(), {}, RLock())
    for rule in rules:
        book.put_rule(rule)
    return book


def holds(glob: str | None, *names: str | None) -> bool:
    return glob is None or any(fnmatchcase(name or "", glob) for name in names)


def lies_in(span: Span | None, number: int | None) -> bool:
    if span in (None, Span()):
        return True
    least = -99 if span.min is None else span.min
    most = 99 if span.max is None else span.max
    return number is not None and least <= number <= most


@given(
    globs=st.tuples(GLOBS, GLOBS, GLOBS, GLOBS),
    spans=st.tuples(SPANS, SPANS),
    request_id=NAMES,
    alias=NAMES,
    tenant=st.none() | NAMES,
    lora=st.none() | NAMES,
    session=st.none() | NAMES,
    numbers=st.tuples(NUMBERS, NUMBERS),
)
def test_a_rule_matches_where_all_its_conditions_hold(
    globs, spans, request_id, alias, tenant, lora, session, numbers
) -> None:
    match = RuleMatch(*globs, priority=spans[0], prompt_tokens=spans[1])
    subject = RuleSubject(RequestIdentity(request_id, tenant, lora, (alias,), session), numbers[1], numbers[0])
    expected = (
        holds(globs[0], request_id, alias)
        and holds(globs[1], tenant)
        and holds(globs[2], lora)
        and (globs[3] is None or (session is not None and fnmatchcase(session, globs[3])))
        and all(lies_in(span, number) for span, number in zip(spans, numbers, strict=True))
    )
    assert match.applies_to(subject) == expected


@example(glob="ID", name="id")
@given(glob=st.text(max_size=200), name=st.text(max_size=200))
def test_any_text_is_a_glob(glob: str, name: str) -> None:
    assert RuleMatch(lora=glob).applies_to(RuleSubject(RequestIdentity("r", lora=name))) == fnmatchcase(name, glob)


def test_the_first_rule_that_matches_is_the_only_one_that_counts() -> None:
    book = book_of(
        Rule("z", 0, RuleMatch(request="other"), {"store": False}),
        Rule("b", 1, RuleMatch(request="id"), {"priority": "high"}),
        Rule("a", 1, RuleMatch(lora="sql"), {"load": False}),
        Rule("late", 2, RuleMatch(), {"store": False}),
    )
    assert [rule.name for rule in book.rules()] == ["z", "a", "b", "late"]
    settled = book.resolve(SUBJECT, {}, 1.0)
    assert (settled.policy.load, settled.policy.store) == (False, True)
    assert settled.sources["load"] == "rule:a"
    assert settled.sources["store"] == "default"
    assert book.drop_rule("a")
    assert not book.drop_rule("a")
    assert book.resolve(SUBJECT, {}, 1.0).sources["priority"] == "rule:b"


class Tried(RuleMatch):
    """A match that counts how often it is tried."""

    count: ClassVar[int] = 0

    def applies_to(self, subject: RuleSubject) -> bool:
        Tried.count += 1
        return super().applies_to(subject)


@given(
    matches=st.lists(st.builds(RuleMatch, GLOBS, GLOBS, GLOBS, GLOBS, prompt_tokens=SPANS), max_size=8),
    dropped=st.sets(st.integers(0, 7)),
    ids=st.lists(NAMES, min_size=1, max_size=3),
    tenant=st.none() | NAMES,
    lora=st.none() | NAMES,
    session=st.none() | NAMES,
)
def test_first_rule_when_found_by_text_is_the_first_that_matches(matches, dropped, ids, tenant, lora, session) -> None:
    rules = [Rule(f"r{number}", number % 3, match, {}) for number, match in enumerate(matches)]
    book = book_of(*rules)
    for number in dropped:
        book.drop_rule(f"r{number}")
    left = sorted((rule for number, rule in enumerate(rules) if number not in dropped), key=lambda rule: rule.place)
    assert list(book.rules()) == left
    subject = RuleSubject(RequestIdentity(ids[0], tenant, lora, tuple(ids[1:]), session), 2)
    assert book.resolve(subject, {}, 1.0).rule == next((rule for rule in left if rule.match.applies_to(subject)), None)


def test_thousand_rules_when_a_request_arrives_are_not_all_tried() -> None:
    kinds = (
        lambda number: Tried(request=f"batch-{number}-*"),
        lambda number: Tried(tenant=f"{number:016x}", request="*"),
        lambda number: Tried(lora=f"*-v{number}"),
        lambda number: Tried(lora=f"sql-{number}", tenant="?*"),
        lambda number: Tried(request=f"*-job{number}-*", lora="*"),
        lambda number: Tried(session=f"agent-{number}-*"),
    )
    book = book_of(*(Rule(f"r{number}", number, kinds[number % 6](number), {}) for number in range(MAX_RULES)))
    for origin, expected in (
        (RequestIdentity("cmpl-x", aliases=("batch-402-7",)), "r402"),
        (RequestIdentity("cmpl-x", aliases=("y", "cmpl-job406-z")), "r406"),
        (RequestIdentity("y", tenant=f"{403:016x}"), "r403"),
        (RequestIdentity("z", lora="code-v404"), "r404"),
        (RequestIdentity("z", tenant="any", lora="sql-405"), "r405"),
        (RequestIdentity("z", session="agent-407-1"), "r407"),
        (RequestIdentity("none"), None),
    ):
        Tried.count = 0
        rule = book.resolve(RuleSubject(origin), {}, 1.0).rule
        assert (rule and rule.name) == expected
        assert Tried.count <= 2


def test_rules_are_tried_again_only_when_they_have_changed() -> None:
    tried: list[str] = []

    class Counting(RuleMatch):
        def applies_to(self, subject: RuleSubject) -> bool:
            tried.append(subject.origin.request_id)
            return True

    book = book_of(Rule("one", 0, Counting(), {"store": False}))
    settled = book.resolve(SUBJECT, {}, 1.0)
    assert tried == ["id"]
    book.set_override(Override("id", {"load": False}, 9.0))
    book.set_runtime({"max_offload_tokens": 5})
    settled = book.resolve(SUBJECT, {}, 1.0, settled)
    assert settled.policy == RequestPolicy(store=False, load=False, max_offload_tokens=5)
    assert tried == ["id"]
    book.put_rule(Rule("two", 1, RuleMatch(), {}))
    assert book.resolve(SUBJECT, {}, 1.0, settled).sources["store"] == "rule:one"
    assert tried == ["id", "id"]
    book.drop_rule("one")
    assert book.resolve(SUBJECT, {}, 1.0, settled).policy == RequestPolicy(load=False, max_offload_tokens=5)


def test_rule_goes_by_the_prompt_at_the_arrival_when_a_session_goes_on() -> None:
    engine = ToyEngine(64, 64)
    engine.put_rule(Rule("long", 0, RuleMatch(prompt_tokens=Span(min=20)), {"store": False}))
    request = ToyRequest("r1", list(range(10)), 10, 1, num_turns=1)
    engine.add(request)
    engine.step()
    engine.continue_session(request, range(50, 80))
    engine.put_rule(Rule("other", 1, RuleMatch(lora="s*"), {}))
    engine.run()
    view = engine.offload.requests.find("r1", 1.0)
    assert view is not None
    assert view.policy.sources["store"] == "default"
    assert engine.offload.snapshot().store.stored > 5
