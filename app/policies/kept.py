"""Overrides and rules as operators want them: kept in the database first, and in force once they are there.

What would be forgotten at the next start is not taken. Database and memory change under one lock, so that they agree
also while another database is being filled with what memory knows.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from kvferry.app.event_feed import EventFeed, EventType
from kvferry.app.field_errors import field_errors
from kvferry.app.policies.rule_wire import NamedRuleBody, match_to_wire, rule_to_wire
from kvferry.app.policies.wire import PolicyBody, patch_to_wire
from kvferry.app.store import OverrideRecord, RuleRecord, Store, StoreUnavailable
from kvferry.app.times import rfc3339
from kvferry.core.policy import MAX_OVERRIDES, Override, PolicyResolver
from kvferry.core.rules import MAX_RULES, Rule

_log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 3.0


class RuleExistsError(Exception):
    """A rule of this name exists already."""


class TooManyError(Exception):
    """There are as many overrides or rules as there may be."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What an earlier process left that still holds."""

    num_overrides: int
    num_rules: int


class KeptPolicies:
    """The one way in which overrides and rules change. Any thread; calls wait for the database, for a bounded time.

    `StoreUnavailable` means that nothing was changed.
    """

    def __init__(self, store: Store, policies: PolicyResolver, feed: EventFeed) -> None:
        self._store = store
        self._policies = policies
        self._feed = feed
        self._lock = threading.Lock()

    def load(self, now_s: float) -> Kept:
        """At start, before the engine: put into force what outlived the last process.

        What does not validate any more is left out and logged.
        """
        overrides = [override for record in self._store.reader.load_overrides(now_s) if (override := _override(record))]
        rules = [rule for record in self._store.reader.load_rules() if (rule := _rule(record))]
        for rule in rules[MAX_RULES:]:
            _log.warning("the rule %r is left out: there are more than %d", rule.name, MAX_RULES)
        for override in overrides:
            self._policies.set_override(override)
        for rule in rules[:MAX_RULES]:
            self._policies.put_rule(rule)
        return Kept(len(overrides), len(rules[:MAX_RULES]))

    def set_override(self, override: Override, now_s: float) -> None:
        """Set the policy of one request id, in place of what was set for it. Raises `TooManyError`."""
        wire = patch_to_wire(override.patch)
        with self._turn():
            if not self._policies.may_override(override.request_id):
                raise TooManyError(f"there are {MAX_OVERRIDES:,} overrides already: take some away, or let them end")
            self._store.intents.save_override(override.request_id, wire, now_s, override.expires_s)
            self._policies.set_override(override)
        what = {"request": override.request_id, "policy": wire, "expires_at": rfc3339(override.expires_s)}
        self._tell(EventType.OVERRIDE, "set", what, now_s)

    def drop_override(self, request_id: str, now_s: float) -> bool:
        """Take an override away; False if there was none."""
        with self._turn():
            was_kept = self._store.intents.delete_override(request_id, now_s)
            was_set = self._policies.drop_override(request_id, now_s)
        if was_set:
            self._tell(EventType.OVERRIDE, "removed", {"request": request_id}, now_s)
        return was_kept or was_set

    def add_rule(self, rule: Rule, now_s: float) -> None:
        """Add a rule. Raises `RuleExistsError` and `TooManyError`."""
        with self._turn():
            if self._knows(rule.name):
                raise RuleExistsError(f"a rule named {rule.name!r} exists already")
            self._keep(rule)
        self._tell(EventType.RULE, "set", {"rule": rule_to_wire(rule)}, now_s)

    def put_rule(self, rule: Rule, now_s: float) -> bool:
        """Put a rule in place of the one of its name, and say whether there was one. Raises `TooManyError`."""
        with self._turn():
            known = self._knows(rule.name)
            self._keep(rule)
        self._tell(EventType.RULE, "set", {"rule": rule_to_wire(rule)}, now_s)
        return known

    def drop_rule(self, name: str, now_s: float) -> bool:
        """Take a rule away; False if there was none."""
        with self._turn():
            was_kept = self._store.intents.delete_rule(name)
            was_set = self._policies.drop_rule(name)
        if was_set:
            self._tell(EventType.RULE, "removed", {"rule": {"name": name}}, now_s)
        return was_kept or was_set

    def write_again(self, now_s: float) -> None:
        """Another database was opened under us: make it say what holds."""
        with self._turn():
            overrides = [
                OverrideRecord(override.request_id, patch_to_wire(override.patch), now_s, override.expires_s)
                for override in self._policies.overrides()
            ]
            rules = [_record(rule) for rule in self._policies.rules()]
            self._store.intents.replace_policies(overrides, rules)

    def _keep(self, rule: Rule) -> None:
        if not self._knows(rule.name) and len(self._policies.rules()) >= MAX_RULES:
            raise TooManyError(f"there are {MAX_RULES} rules already: take one away, or make one glob out of several")
        self._store.intents.save_rule(_record(rule))
        self._policies.put_rule(rule)

    def _knows(self, name: str) -> bool:
        return any(rule.name == name for rule in self._policies.rules())

    def _tell(self, type_: EventType, change: str, what: dict[str, Any], now_s: float) -> None:
        self._feed.changed(type_, {"change": change, **what}, now_s)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=LOCK_TIMEOUT_S):
            raise StoreUnavailable(f"another change of policies has been under way for {LOCK_TIMEOUT_S:g} s")
        try:
            yield
        finally:
            self._lock.release()


def _record(rule: Rule) -> RuleRecord:
    return RuleRecord(rule.name, rule.order, match_to_wire(rule.match), patch_to_wire(rule.patch))


def _override(record: OverrideRecord) -> Override | None:
    # SQLite keeps a value of any type in a column of numbers.
    if not _is_number(record.expires_s):
        _log.warning("the override kept for request %r is left out, not valid: expires_at", record.request)
        return None
    try:
        return Override(record.request, PolicyBody.model_validate(record.policy).patch(), record.expires_s)
    except ValidationError as error:
        _log.warning("the override kept for request %r is left out, not valid: %s", record.request, _fields(error))
        return None


def _rule(record: RuleRecord) -> Rule | None:
    kept = {"name": record.name, "order": record.order, "match": record.match, "policy": record.policy}
    try:
        return NamedRuleBody.model_validate(kept).to_core(record.name)
    except ValidationError as error:
        _log.warning("the rule %r that was kept is left out, not valid: %s", record.name, _fields(error))
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float))


def _fields(error: ValidationError) -> str:
    return ", ".join(found.field for found in field_errors(error.errors(include_input=False), skip=0))
