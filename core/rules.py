"""Policy rules: which requests a rule is about, and which policy fields it settles for them.

Rules are tried by `order`, then by name, and the first that matches is the only one that counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any

from kvferry.core.keys import RequestIdentity

MAX_RULES = 100
"""Each rule is tried on every announced request, so their number is bounded."""
MAX_GLOB_CHARS = 200
"""The API rejects longer ones: matching takes up to the product of the lengths of glob and name."""


@dataclass(frozen=True, slots=True)
class Span:
    """Integers from `least` to `most`, both included; None is unbounded."""

    least: int | None = None
    most: int | None = None

    def holds(self, number: int | None) -> bool:
        """Return whether a number is in the span. An unknown one (None) is only in the unbounded span."""
        if self.least is None and self.most is None:
            return True
        if number is None:
            return False
        return (self.least is None or number >= self.least) and (self.most is None or number <= self.most)


EVERYTHING = Span()

_Test = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class RuleSubject:
    """Properties of a request that rules match on. Numbers are None if unknown."""

    origin: RequestIdentity
    num_prompt_tokens: int | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """Conditions that must all hold; None matches everything.

    `request`, `tenant` and `lora` are globs, case-sensitive. `request` is matched with every id of the request,
    `tenant` with the digest. Without tenant or LoRA the name is empty, which `*` matches and `?*` does not.
    """

    request: str | None = None
    tenant: str | None = None
    lora: str | None = None
    priority: Span = EVERYTHING
    prompt_tokens: Span = EVERYTHING
    _request: _Test | None = field(init=False, repr=False, compare=False)
    _tenant: _Test | None = field(init=False, repr=False, compare=False)
    _lora: _Test | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Compiled once, as the standard library caches only the latest few hundred.
        for name, glob in (("_request", self.request), ("_tenant", self.tenant), ("_lora", self.lora)):
            object.__setattr__(self, name, None if glob is None else re.compile(translate(glob)).match)

    def matches(self, subject: RuleSubject) -> bool:
        """Return whether the rule applies to this request."""
        origin = subject.origin
        if self._request is not None and not self._request(origin.request_id):
            for alias in origin.aliases:
                if self._request(alias):
                    break
            else:
                return False
        if self._tenant is not None and not self._tenant(origin.tenant or ""):
            return False
        if self._lora is not None and not self._lora(origin.lora or ""):
            return False
        return self.prompt_tokens.holds(subject.num_prompt_tokens) and self.priority.holds(subject.priority)


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule: validated values of policy fields, for the requests it matches."""

    name: str
    order: int
    match: RuleMatch
    patch: Mapping[str, Any]

    @property
    def place(self) -> tuple[int, str]:
        """Sort key among the rules."""
        return self.order, self.name

    @property
    def source(self) -> str:
        """Source shown for the fields that the rule sets."""
        return f"rule:{self.name}"
