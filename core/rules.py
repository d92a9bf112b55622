"""Policy rules: the requests that a rule matches, and the policy fields that it sets for them.

Rules are tried by `order`, then by name, and only the first that matches applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvferry.core.keys import RequestFilter, RequestIdentity

MAX_RULES = 100
"""Each rule is tried on every announced request, so their number is bounded."""
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

    Globs are case-sensitive. A missing tenant or LoRA has an empty name, which `*` matches and `?*` does not.
    """

    priority: Span | None = None
    prompt_tokens: Span | None = None

    def applies_to(self, subject: RuleSubject) -> bool:
        """Return whether the rule applies to this request."""
        return (
            self.matches_names(subject.origin)
            and (self.prompt_tokens is None or self.prompt_tokens.contains(subject.num_prompt_tokens))
            and (self.priority is None or self.priority.contains(subject.priority))
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
