"""Policy rules: which requests a rule is about, and which policy fields it settles for them.

Rules are tried by `order`, then by name, and the first that matches is the only one that counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import translate
from typing import Any

from kvferry.core.origins import Origin

MAX_RULES = 100
"""Each is tried on every request that is announced, so their number is bounded."""
MAX_GLOB_CHARS = 200
"""The border refuses longer ones: trying a glob on a name costs up to the product of their lengths."""


@dataclass(frozen=True, slots=True)
class Span:
    """Whole numbers from `least` to `most`, both included; None is without end."""

    least: int | None = None
    most: int | None = None

    def holds(self, number: int | None) -> bool:
        """Whether a number lies in it. One that is not known lies only in the span that has no ends."""
        if self.least is None and self.most is None:
            return True
        if number is None:
            return False
        return (self.least is None or number >= self.least) and (self.most is None or number <= self.most)


EVERYTHING = Span()

_Test = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class RuleSubject:
    """What rules may ask of a request. Numbers are None where they are not known."""

    origin: Origin
    num_prompt_tokens: int | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class RuleMatch:
    """Conditions that must all hold; one that is None is not asked.

    `request`, `tenant` and `lora` are globs, case-sensitive. `request` is tried on every id that the request goes by,
    `tenant` on the digest. No tenant and no LoRA are the empty name, which `*` matches and `?*` does not.
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
        # Compiled once: the standard library would keep the latest few hundred only.
        for name, glob in (("_request", self.request), ("_tenant", self.tenant), ("_lora", self.lora)):
            object.__setattr__(self, name, None if glob is None else re.compile(translate(glob)).match)

    def matches(self, subject: RuleSubject) -> bool:
        """Whether the rule is about this request."""
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
    """A named rule: the policy fields that it settles, with values already validated, for the requests it matches."""

    name: str
    order: int
    match: RuleMatch
    patch: Mapping[str, Any]

    @property
    def place(self) -> tuple[int, str]:
        """Where it stands among the others."""
        return self.order, self.name

    @property
    def source(self) -> str:
        """What is shown as the source of the fields that it settles."""
        return f"rule:{self.name}"
