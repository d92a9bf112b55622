"""Policy rules: the requests that a rule matches, and the policy fields that it sets for them.

Rules are tried by `order`, then by name, and only the first that matches applies.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any

from kvferry.core.keys import RequestFilter, RequestIdentity

MAX_RULES = 1000
"""Rules whose globs begin and end with wildcards are compared with every announced request: their number is bounded."""
MAX_GLOB_CHARS = 200
"""The API rejects longer ones: matching takes up to the product of the lengths of glob and name."""


@dataclass(frozen=True, slots=True)
class Span:
    """Integers from `min` to `max`, both included; None is unbounded."""

    min: int | None = None
    max: int | None = None

    def contains(self, number: int | None) -> bool:
        """Return whether a number is in the span. An unknown number (None) is in the unbounded span only."""
        if number is None:
            return self.min is None and self.max is None
        return (self.min is None or number >= self.min) and (self.max is None or number <= self.max)


@dataclass(frozen=True, slots=True)
class RuleSubject:
    """Properties of a request that rules match on. Numbers are None if unknown."""

    origin: RequestIdentity
    num_prompt_tokens: int | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class RuleMatch(RequestFilter):
    """Conditions that must all hold; None is no condition.

    Globs are case-sensitive. A missing tenant or LoRA has an empty name, which `*` matches and `?*` does not; a
    missing session matches no glob.
    """

    priority: Span | None = None
    prompt_tokens: Span | None = None

    def applies_to(self, subject: RuleSubject) -> bool:
        """Return whether the rule applies to this request."""
        # Globs take the longest.
        return (
            (self.prompt_tokens is None or self.prompt_tokens.contains(subject.num_prompt_tokens))
            and (self.priority is None or self.priority.contains(subject.priority))
            and self.matches_names(subject.origin)
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule: validated values of policy fields, for the requests that it matches."""

    name: str
    order: int
    match: RuleMatch
    policy: Mapping[str, Any]

    @property
    def place(self) -> tuple[int, str]:
        """Sort key among the rules."""
        return self.order, self.name


_NAMES = ("request", "tenant", "lora", "session")
_by_place = attrgetter("place")


class RuleSet:
    """Rules in their order, with an index by the literal start or end of a glob.

    A request tries the rules whose text it has in that place, and among those without a literal start or end the rules
    whose longest literal text it has anywhere.
    """

    def __init__(self) -> None:
        self._by_name: dict[str, Rule] = {}
        self._ordered: list[Rule] = []
        # With the number of a name, and text that it must contain; the text may be empty.
        self._unindexed: list[tuple[Rule, int, str]] = []
        # By glob, length (negative for the end of a name), and text.
        self._indexed: dict[str, dict[int, dict[str, list[Rule]]]] = {name: {} for name in _NAMES}

    def all(self) -> tuple[Rule, ...]:
        """Return the rules in the order in which they are tried."""
        return tuple(self._ordered)

    def get(self, name: str) -> Rule | None:
        """Return the rule of this name, None if there is none."""
        return self._by_name.get(name)

    def put(self, rule: Rule) -> None:
        """Add a rule, or replace the one of its name."""
        self.drop(rule.name)
        self._by_name[rule.name] = rule
        insort(self._ordered, rule, key=_by_place)
        name, length, text = _literal(rule.match)
        if length:
            insort(self._indexed[name].setdefault(length, {}).setdefault(text, []), rule, key=_by_place)
        else:
            insort(self._unindexed, (rule, *_inner_literal(rule.match)), key=_place_of_first)

    def drop(self, name: str) -> bool:
        """Remove a rule. Returns False if there is none of this name."""
        rule = self._by_name.pop(name, None)
        if rule is None:
            return False
        _remove(self._ordered, rule)
        name, length, text = _literal(rule.match)
        if not length:
            del self._unindexed[bisect_left(self._unindexed, rule.place, key=_place_of_first)]
            return True
        by_text = self._indexed[name][length]
        _remove(by_text[text], rule)
        if not by_text[text]:
            del by_text[text]
        if not by_text:
            del self._indexed[name][length]
        return True

    def first(self, subject: RuleSubject) -> Rule | None:
        """Return the first rule that applies to a request, None if there is none."""
        names = _names_of(subject.origin)
        likely = sorted(self._likely(names), key=_by_place)
        rule_found = next((rule for rule in likely if rule.match.applies_to(subject)), None)
        end = len(self._unindexed)
        if rule_found is not None:
            end = bisect_left(self._unindexed, rule_found.place, key=_place_of_first)
        # A text that is found across two names costs a try of the rule.
        joined = ["\0".join(texts) for texts in names]
        possible = (rule for rule, name, text in islice(self._unindexed, end) if text in joined[name])
        return next((rule for rule in possible if rule.match.applies_to(subject)), rule_found)

    def _likely(self, names: Sequence[Sequence[str]]) -> list[Rule]:
        """Return the indexed rules whose literal start or end is that of one of the request's names."""
        rules: list[Rule] = []
        for buckets, texts in zip(self._indexed.values(), names, strict=True):
            for length, by_text in buckets.items():
                for text in texts:
                    rules += by_text.get(text[:length] if length > 0 else text[length:], ())
        return rules


def _names_of(origin: RequestIdentity) -> tuple[tuple[str, ...], ...]:
    """Return the texts that the globs of `_NAMES` are compared with."""
    sessions = () if origin.session is None else (origin.session,)
    return (origin.request_id, *origin.aliases), (origin.tenant or "",), (origin.lora or "",), sessions


def _place_of_first(entry: tuple[Rule, int, str]) -> tuple[int, str]:
    return entry[0].place


def _inner_literal(match: RuleMatch) -> tuple[int, str]:
    """Return the longest text between wildcards of a glob: number of the glob, text; the text may be empty."""
    # All that may be within brackets is left out.
    parts = [re.split(r"\[.*\]|[][*?]", getattr(match, name) or "", flags=re.DOTALL) for name in _NAMES]
    return max(((number, part) for number, found in enumerate(parts) for part in found), key=lambda one: len(one[1]))


def _literal(match: RuleMatch) -> tuple[str, int, str]:
    """Return the longest literal start or end of a glob: name of the glob, length, text; the length may be 0."""
    longest = _NAMES[0], 0, ""
    for name in _NAMES:
        parts = re.split(r"[][*?]", getattr(match, name) or "")
        for length, text in ((len(parts[0]), parts[0]), (-len(parts[-1]), parts[-1])):
            if abs(length) > abs(longest[1]):
                longest = name, length, text
    return longest


def _remove(rules: list[Rule], rule: Rule) -> None:
    del rules[bisect_left(rules, rule.place, key=_by_place)]
