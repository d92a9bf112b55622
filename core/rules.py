"""Policy rules: the requests that a rule matches, and the policy fields that it sets for them.

Rules are tried by `order`, then by name, and only the first that matches applies.
"""

from __future__ import annotations

import re
from bisect import insort
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.core.keys import RequestFilter, RequestIdentity

MAX_RULES = 1000
"""Every rule is looked at for every announced request: their number is bounded."""
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


class RuleSet:
    """Rules in their order. A request is only compared with those that have their longest literal text from it."""

    def __init__(self) -> None:
        self._entries: list[tuple[Rule, int, str]] = []
        """Each with the number of a name in `_NAMES`, and text that it must contain; the text may be empty."""

    def all(self) -> tuple[Rule, ...]:
        """Return the rules in the order in which they are tried."""
        return tuple(rule for rule, _, _ in self._entries)

    def get(self, name: str) -> Rule | None:
        """Return the rule of this name, None if there is none."""
        return next((rule for rule, _, _ in self._entries if rule.name == name), None)

    def put(self, rule: Rule) -> None:
        """Add a rule, or replace the one of its name."""
        self.drop(rule.name)
        insort(self._entries, (rule, *_literal(rule.match)), key=lambda entry: entry[0].place)

    def drop(self, name: str) -> bool:
        """Remove a rule. Returns False if there is none of this name."""
        num_before = len(self._entries)
        self._entries = [entry for entry in self._entries if entry[0].name != name]
        return len(self._entries) < num_before

    def first(self, subject: RuleSubject) -> Rule | None:
        """Return the first rule that applies to a request, None if there is none."""
        origin = subject.origin
        # A text that is found across two ids costs a try of the rule.
        ids = "\0".join((origin.request_id, *origin.aliases))
        names = ids, origin.tenant or "", origin.lora or "", origin.session or ""
        likely = (rule for rule, number, text in self._entries if text in names[number])
        return next((rule for rule in likely if rule.match.applies_to(subject)), None)


def _literal(match: RuleMatch) -> tuple[int, str]:
    """Return the longest text between wildcards of a glob: number of the glob, text; the text may be empty."""
    # All that may be within brackets is left out.
    parts = [re.split(r"\[.*\]|[][*?]", getattr(match, name) or "", flags=re.DOTALL) for name in _NAMES]
    return max(((number, part) for number, texts in enumerate(parts) for part in texts), key=lambda one: len(one[1]))
