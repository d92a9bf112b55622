"""Overrides and rules: written to the database first, and applied once they are there.

A change that would be lost at the next start is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError
from sqlalchemy import Connection, Row

from kvferry.app.common.call_errors import NamedConflict, field_errors
from kvferry.app.common.times import rfc3339
from kvferry.app.operations.policy_json import (
    NamedRuleBody,
    PolicyBody,
    patch_to_json,
    rule_to_json,
)
from kvferry.app.store import MetadataStore
from kvferry.app.telemetry.events import EventFeed, EventType
from kvferry.core.policy import MAX_OVERRIDES, Override, PolicyResolver
from kvferry.core.rules import MAX_RULES, Rule

T = TypeVar("T")

_log = logging.getLogger(__name__)


class PolicyStore:
    """The only way in which overrides and rules change: by changes for `Database.change`. Thread: writer."""

    def __init__(self, store: MetadataStore, policies: PolicyResolver, feed: EventFeed) -> None:
        self._store = store
        self._policies = policies
        self._feed = feed

    def load(self, now_s: float) -> None:
        """Load what an earlier process left, before the engine starts. Invalid records are logged and skipped."""
        records = self._store.reader.load_overrides(now_s)
        overrides = [override for record in records if (override := _override(record))]
        rules = [rule for record in self._store.reader.load_rules() if (rule := _rule(record))]
        for rule in rules[MAX_RULES:]:
            _log.warning("stored record skipped: more than %d rules: rule %r", MAX_RULES, rule.name)
        for override in overrides:
            self._policies.set_override(override)
        for rule in rules[:MAX_RULES]:
            self._policies.put_rule(rule)
        if overrides or rules:
            _log.info("policies: restored %d overrides and %d rules", len(overrides), len(rules[:MAX_RULES]))

    def set_override(self, override: Override, now_s: float, connection: Connection) -> Callable[[], None]:
        """Set the policy of one request id, replacing an earlier override. Raises `NamedConflict`."""
        if not self._policies.may_override(override.request_id):
            raise NamedConflict(
                "too-many", f"there are {MAX_OVERRIDES:,} overrides already: delete some, or let them expire"
            )
        patch = patch_to_json(override.patch)
        self._store.writer.save_override(override.request_id, patch, now_s, override.expires_s, connection)
        what = {"request": override.request_id, "policy": patch, "expires_at": rfc3339(override.expires_s)}

        def apply() -> None:
            self._policies.set_override(override)
            self._publish(EventType.OVERRIDE, "set", what, now_s)

        return apply

    def drop_override(self, request_id: str, now_s: float, connection: Connection) -> Callable[[], bool]:
        """Delete an override; the result is False without one."""
        was_stored = self._store.writer.delete_override(request_id, now_s, connection)

        def apply() -> bool:
            was_set = self._policies.drop_override(request_id, now_s)
            if was_set:
                self._publish(EventType.OVERRIDE, "removed", {"request": request_id}, now_s)
            return was_stored or was_set

        return apply

    def add_rule(self, rule: Rule, now_s: float, connection: Connection) -> Callable[[], bool]:
        """Add a rule. Raises `NamedConflict`."""
        if self._policies.rule(rule.name) is not None:
            raise NamedConflict("rule-exists", f"a rule named {rule.name!r} exists already: PUT replaces it")
        return self.put_rule(rule, now_s, connection)

    def put_rule(self, rule: Rule, now_s: float, connection: Connection) -> Callable[[], bool]:
        """Add a rule or replace the one of its name; the result is whether there was one. Raises `NamedConflict`."""
        existed = self._policies.rule(rule.name) is not None
        if not existed and len(self._policies.rules()) >= MAX_RULES:
            raise NamedConflict(
                "too-many", f"there are {MAX_RULES:,} rules already: delete one, or combine several globs into one"
            )
        self._store.writer.save_rule(rule_to_json(rule), connection)

        def apply() -> bool:
            self._policies.put_rule(rule)
            self._publish(EventType.RULE, "set", {"rule": rule_to_json(rule)}, now_s)
            return existed

        return apply

    def drop_rule(self, name: str, now_s: float, connection: Connection) -> Callable[[], bool]:
        """Delete a rule; the result is False without one of this name."""
        was_stored = self._store.writer.delete_rule(name, connection)

        def apply() -> bool:
            was_set = self._policies.drop_rule(name)
            if was_set:
                self._publish(EventType.RULE, "removed", {"rule": {"name": name}}, now_s)
            return was_stored or was_set

        return apply

    def _publish(self, type_: EventType, change: str, what: dict[str, Any], now_s: float) -> None:
        self._feed.changed(type_, {"change": change, **what}, now_s)


def _override(record: Row[Any]) -> Override | None:
    def read() -> Override:
        patch = PolicyBody.model_validate(record.policy).patch()
        return Override(record.request, patch, float(record.expires_at))

    return _checked(f"override of request {record.request!r}", read)


def _rule(stored: Mapping[str, Any]) -> Rule | None:
    return _checked(f"rule {stored['name']!r}", lambda: NamedRuleBody.model_validate(stored).to_core(stored["name"]))


def _checked(what: str, read: Callable[[], T]) -> T | None:
    """Return what a row holds; None, and log that, for one that kvferry did not write."""
    try:
        return read()
    except (TypeError, ValueError) as error:
        reason: object = error
        if isinstance(error, ValidationError):
            reason = ", ".join(one.field for one in field_errors(error.errors(include_input=False), skip=0))
        _log.warning("stored record not valid, skipped: %s: %s", what, reason)
        return None
