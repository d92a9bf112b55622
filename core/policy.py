"""Request policy: the blocks that may be stored and loaded for one request, and the source of each field.

A field has the value of the strongest source that sets it: override > the request's own `kv_transfer_params` > the
first matching rule > runtime default > settings. `PolicyResolver` holds those sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from threading import RLock
from typing import Any

from kvferry.core.expiry import Expiries
from kvferry.core.keys import RequestIdentity
from kvferry.core.rules import Rule, RuleSet, RuleSubject

MAX_OVERRIDES = 100_000
_EXPIRE_AT_ONCE = 100
_SHOWN_CHARS = 80
_SHOWN_ITEMS = 4
_SHOWN_BITS = 192
MAX_REQUEST_TIERS = 64
MAX_TIER_NAME_CHARS = 256

MAX_RETAIN_S = 3600.0
"""Longest lease, unless an operator sets another limit."""

UNLIMITED = "unlimited"
"""Spelling of an unlimited cap outside `core`, where it is None."""


class Level(StrEnum):
    """Blocks that tiers receive: `block`, new blocks only; `request`, every block of the request, prefix hits too."""

    BLOCK = "block"
    REQUEST = "request"


class Priority(StrEnum):
    """Eviction class of the blocks that a request stores; `low` is evicted first."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


PRIORITY_CLASS = {Priority.LOW: 0, Priority.NORMAL: 1, Priority.HIGH: 2}


class TierWaitMode(StrEnum):
    """How long a request waits for tiers once it could run.

    `best_effort`: not at all, so that it gets what has arrived by then. `timeout`: for a limited time. `wait_complete`:
    until the tiers have answered and all promoted blocks have arrived, or the tiers' own time limits end that.
    """

    BEST_EFFORT = "best_effort"
    TIMEOUT = "timeout"
    WAIT_COMPLETE = "wait_complete"


TIER_WAIT_PATTERN = r"^(best_effort|wait_complete|timeout(:[0-9]{1,4}(\.[0-9]{1,3})?)?)$"
"""Spelling of a `TierWait` outside `core`."""


@dataclass(frozen=True, slots=True)
class TierWait:
    """The wait of a request for tiers. A `timeout` without seconds is the time that computing the tokens would take."""

    mode: TierWaitMode = TierWaitMode.TIMEOUT
    timeout_s: float | None = None

    def __str__(self) -> str:
        if self.timeout_s is None:
            return self.mode.value
        return f"{self.mode.value}:{self.timeout_s:.3f}".rstrip("0").rstrip(".")

    @classmethod
    def parse(cls, text: str) -> TierWait:
        """Return the wait that a text means. Raises `ValueError`."""
        if len(text) > MAX_TIER_WAIT_CHARS or _TIER_WAIT.fullmatch(text) is None:
            raise ValueError(TIER_WAIT_RULE)
        mode, _, seconds = text.partition(":")
        return cls(TierWaitMode(mode), float(seconds) if seconds else None)


MAX_TIER_WAIT_CHARS = 32
_TIER_WAIT = re.compile(TIER_WAIT_PATTERN)
TIER_WAIT_RULE = "must be best_effort, wait_complete, timeout, or timeout:SECONDS, such as timeout:2.5 (below 10000)"


@dataclass(frozen=True, slots=True)
class RequestPolicy:
    """The effective policy of a request. Caps and `tiers` are None where unlimited."""

    offload_prompt_only: bool = True
    max_offload_tokens: int | None = None
    level: Level = Level.BLOCK
    store: bool = True
    load: bool = True
    max_load_tokens: int | None = None
    tiers: tuple[str, ...] | None = None
    tier_wait: TierWait = TierWait()
    priority: Priority = Priority.NORMAL
    retain_s: float = 0.0


POLICY_FIELDS = tuple(f.name for f in fields(RequestPolicy))
CAP_FIELDS = ("max_offload_tokens", "max_load_tokens")
"""Fields that are numbers of tokens, None for no cap."""
REQUEST_FIELDS_DEFAULT = ("offload_prompt_only", "max_offload_tokens", "store", "load")

PolicyPatch = Mapping[str, Any]
"""Some policy fields with validated values, in the types of `RequestPolicy`; None is no cap."""


@dataclass(frozen=True, slots=True)
class EffectivePolicy:
    """A policy with the source of each of its fields (`default`, `env`, `rule:<name>`, `request`, `override`, ...).

    `rule` is the one that matched, among the rules of `rules_version`.
    """

    policy: RequestPolicy
    sources: dict[str, str]
    rule: Rule | None = None
    rules_version: int = 0


def parse_request_fields(
    params: Mapping[str, Any] | None, allowed: Iterable[str], max_retain_s: float = MAX_RETAIN_S
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the policy fields that an end user sent, and, as shown in the log, values that are ignored for their type.

    Other keys, fields that are not allowed, and nulls are ignored without a log line. `True` and `"5"` are not
    integers, a cap is not negative, and `retain_s` is at most `max_retain_s`.
    """
    patch: dict[str, Any] = {}
    ignored: dict[str, str] = {}
    if not isinstance(params, Mapping):
        return patch, ignored
    for name in allowed:
        value = params.get(name)
        if value is None:
            continue
        parsed = _parse_field(name, value, max_retain_s)
        if parsed is None:
            ignored[name] = bounded_repr(value)
        else:
            patch[name] = parsed
    return patch, ignored


def bounded_repr(value: object) -> str:
    """Return a client's value as messages show it: at most 80 characters, at a cost independent of its size.

    Longer strings are cut; containers with many or nested items, and integers with many digits, are described.
    """
    return _describe(value, depth=0)[:_SHOWN_CHARS]


def _describe(value: object, depth: int) -> str:
    if isinstance(value, str):
        return repr(value[:_SHOWN_CHARS])
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:
        return f"(an integer of {value.bit_length()} bits)"
    if isinstance(value, (list, tuple, Mapping)):
        if len(value) > _SHOWN_ITEMS or depth > 1:
            return f"({type(value).__name__} of {len(value)} items)"
        if isinstance(value, Mapping):
            items = (f"{_describe(key, depth + 1)}: {_describe(item, depth + 1)}" for key, item in value.items())
            return "{" + ", ".join(items) + "}"
        return "[" + ", ".join(_describe(item, depth + 1) for item in value) + "]"
    return repr(value)


def _parse_field(name: str, value: object, max_retain_s: float) -> Any:
    """Return the value of a field in core's type, None if it has another type or is out of range."""
    if name == "retain_s":
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= max_retain_s:
            return float(value)
        return None
    if name in CAP_FIELDS:
        return value if type(value) is int and value >= 0 else None
    if name == "tiers":
        if not isinstance(value, (list, tuple)) or len(value) > MAX_REQUEST_TIERS:
            return None
        are_names = all(isinstance(item, str) and len(item) <= MAX_TIER_NAME_CHARS for item in value)
        return tuple(value) if are_names else None
    if name == "tier_wait":
        try:
            return TierWait.parse(value) if isinstance(value, str) else None
        except ValueError:
            return None
    if name in ("level", "priority"):
        choices = Level if name == "level" else Priority
        return choices(value) if isinstance(value, str) and value in list(choices) else None
    return value if type(value) is bool else None


@dataclass(frozen=True, slots=True)
class Override:
    """Policy fields that an operator set for one request id, until `expires_s` (Unix time)."""

    request_id: str
    patch: PolicyPatch
    expires_s: float


@dataclass(slots=True)
class PolicyResolver:
    """All sources of request policy, and the resolution of a request's fields.

    Methods acquire the manager lock, unless they require it to be held.
    """

    settings: RequestPolicy
    settings_sources: Mapping[str, str]
    lock: RLock
    version: int = 0
    """Raised by each change that may affect a request."""
    _runtime: dict[str, Any] = field(default_factory=dict)
    _defaults: EffectivePolicy | None = None
    """Shared by all requests that nothing else applies to, since a thousand finished ones are kept."""
    _rules: RuleSet = field(default_factory=RuleSet)
    _rules_version: int = 0
    _overrides: dict[str, Override] = field(default_factory=dict)
    expiries: Expiries[str] = field(default_factory=Expiries)
    """Expiry times of the overrides."""

    def defaults(self) -> EffectivePolicy:
        """Return the settings with the runtime defaults over them."""
        with self.lock:
            if self._defaults is None:
                sources = {name: self.settings_sources.get(name, "default") for name in POLICY_FIELDS}
                sources.update(dict.fromkeys(self._runtime, "runtime"))
                self._defaults = EffectivePolicy(replace(self.settings, **self._runtime), sources)
            return self._defaults

    def set_runtime(self, patch: PolicyPatch, removed: Iterable[str] = ()) -> None:
        """Set runtime defaults over the settings; `removed` fields fall back to the settings."""
        with self.lock:
            self._runtime.update(patch)
            for name in removed:
                self._runtime.pop(name, None)
            self._defaults = None
            self.version += 1

    def rules(self) -> tuple[Rule, ...]:
        """Return all rules, in the order in which they are tried."""
        with self.lock:
            return self._rules.all()

    def rule(self, name: str) -> Rule | None:
        """Return the rule of this name, None if there is none."""
        with self.lock:
            return self._rules.get(name)

    def put_rule(self, rule: Rule) -> None:
        """Add or replace the rule of this name. It applies to blocks that are not offered yet."""
        with self.lock:
            self._rules.put(rule)
            self._rules_version += 1
            self.version += 1

    def drop_rule(self, name: str) -> bool:
        """Remove a rule. Returns False if there is none of this name."""
        with self.lock:
            if not self._rules.drop(name):
                return False
            self._rules_version += 1
            self.version += 1
            return True

    def may_override(self, request_id: str) -> bool:
        """Return whether an override of this id can be set: there are at most `MAX_OVERRIDES`."""
        with self.lock:
            return request_id in self._overrides or len(self._overrides) < MAX_OVERRIDES

    def set_override(self, override: Override) -> None:
        """Set or replace the override of a request id, before the request arrives or while it runs."""
        with self.lock:
            self._overrides[override.request_id] = override
            self.expiries.set(override.request_id, override.expires_s)
            self.version += 1

    def drop_override(self, request_id: str, now_s: float) -> bool:
        """Remove an override. Returns False if there is none or it has expired."""
        with self.lock:
            override = self._overrides.pop(request_id, None)
            if override is None:
                return False
            self.expiries.discard(request_id)
            self.version += 1
            return override.expires_s > now_s

    def override(self, request_ids: Iterable[str], now_s: float) -> Override | None:
        """Return the live override of the first of these ids that has one."""
        with self.lock:
            for request_id in request_ids:
                override = self._overrides.get(request_id)
                if override is not None and override.expires_s > now_s:
                    return override
            return None

    def overrides(self) -> list[Override]:
        """Return all overrides, those that have just expired included."""
        with self.lock:
            return list(self._overrides.values())

    def expected(self, request_ids: Sequence[str], now_s: float) -> EffectivePolicy:
        """Return the policy that a request with these ids would have now, as far as it depends on the ids."""
        origin = RequestIdentity(request_ids[0], aliases=tuple(request_ids[1:]))
        with self.lock:
            return self.resolve(RuleSubject(origin), {}, now_s)

    def expire(self, now_s: float) -> int:
        """Remove expired overrides, a bounded number per call, and return how many; O(1) without any.

        Requires: manager lock held.
        """
        if self.expiries.next_s > now_s:
            return 0
        due = self.expiries.pop_due(now_s, _EXPIRE_AT_ONCE)
        for request_id in due:
            del self._overrides[request_id]
        self.version += bool(due)
        return len(due)

    def resolve(
        self, subject: RuleSubject, request_patch: PolicyPatch, now_s: float, before: EffectivePolicy | None = None
    ) -> EffectivePolicy:
        """Return the effective policy of a request that sent `request_patch`. Requires: manager lock held.

        `before` is the latest policy of the same request: rules are tried again only if they have changed since.
        """
        if before is None or before.rules_version != self._rules_version:
            rule = self._rules.first(subject)
        else:
            rule = before.rule
        base = self.defaults()
        values: dict[str, Any] = {}
        sources: dict[str, str] = {}
        origin = subject.origin
        override = self.override((origin.request_id, *origin.aliases), now_s)
        for source, patch in (
            ("", {}) if rule is None else (f"rule:{rule.name}", rule.policy),
            ("request", request_patch),
            ("override", {} if override is None else override.patch),
        ):
            values.update(patch)
            sources.update(dict.fromkeys(patch, source))
        policy = replace(base.policy, **values) if values else base.policy
        all_sources = base.sources | sources if sources else base.sources
        return EffectivePolicy(policy, all_sources, rule, self._rules_version)
