"""Validation of settings: unknown names, invalid values, and rules between settings, all reported together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ValidationError

from kvferry.app.settings.errors import BadSettings, Problem, unknown_problem, value_problem
from kvferry.app.settings.fields import NAMES, SettingFields
from kvferry.app.settings.parsers import is_loopback
from kvferry.app.settings.sources import CONFIG, DEFAULT, RUNTIME, URL, RawValue
from kvferry.app.settings.view import plain

MIN_REMOTE_TOKEN_CHARS = 16

Spell = Callable[[str], str]
"""Returns a setting's name as it is spelled where the setting was given."""
Rule = Callable[[SettingFields, Spell], str | None]
"""Returns what is wrong, with both numbers and what to do, or None."""


def _is_loopback_without_token(s: SettingFields, spell: Spell) -> str | None:
    if s.admin_token is not None or s.read_token is not None or is_loopback(s.host):
        return None
    return (
        "without a token the service listens on loopback only; "
        f"set {spell('admin_token')}, or {spell('host')}=127.0.0.1"
    )


def _is_long_for_remote(name: str) -> Rule:
    def check(s: SettingFields, spell: Spell) -> str | None:
        token = getattr(s, name)
        num_chars = len(token.get_secret_value()) if token is not None else MIN_REMOTE_TOKEN_CHARS
        if num_chars >= MIN_REMOTE_TOKEN_CHARS or is_loopback(s.host):
            return None
        return (
            f"has {num_chars} characters, and {spell('host')}={s.host} can be reached from other machines; use at "
            f"least {MIN_REMOTE_TOKEN_CHARS}, such as those that `openssl rand -hex 32` prints"
        )

    return check


def _tokens_differ(s: SettingFields, spell: Spell) -> str | None:
    if s.admin_token is None or s.admin_token != s.read_token:
        return None
    return f"must differ from {spell('admin_token')}, or readers could change things"


def _step_holds_a_block(s: SettingFields, spell: Spell) -> str | None:
    if s.max_batched_tokens >= s.block_size:
        return None
    return (
        f"a step of {s.max_batched_tokens} tokens is less than a block of {spell('block_size')}={s.block_size} tokens"
    )


def _step_holds_all_running(s: SettingFields, spell: Spell) -> str | None:
    if s.max_batched_tokens >= s.max_running:
        return None
    return f"a step of {s.max_batched_tokens} tokens is too small for {spell('max_running')}={s.max_running} requests"


def _path_is_used(s: SettingFields, spell: Spell) -> str | None:
    if s.pool_path is None or s.pool_kind == "file":
        return None
    kind = spell("pool_kind")
    return f"is used only with {kind}=file, and {kind} is {s.pool_kind}; leave it out"


def _file_has_path(s: SettingFields, spell: Spell) -> str | None:
    if s.pool_kind != "file" or s.pool_path is not None:
        return None
    return f"needs {spell('pool_path')}, the folder of the pool's file"


RULES: tuple[tuple[str, tuple[str, ...], Rule], ...] = (
    ("host", ("admin_token", "read_token"), _is_loopback_without_token),
    ("admin_token", ("host",), _is_long_for_remote("admin_token")),
    ("read_token", ("host",), _is_long_for_remote("read_token")),
    ("read_token", ("admin_token",), _tokens_differ),
    ("max_batched_tokens", ("block_size",), _step_holds_a_block),
    ("max_batched_tokens", ("max_running",), _step_holds_all_running),
    ("pool_path", ("pool_kind",), _path_is_used),
    ("pool_kind", ("pool_path",), _file_has_path),
)
"""Rules between settings: the setting that a problem is reported for, the others that the rule reads, the rule."""


class Report:
    """All problems of a set of settings. `known` has the raw values that can be validated."""

    def __init__(self, raw_values: Mapping[str, RawValue]) -> None:
        self.problems: dict[str, Problem] = {}
        self.known: dict[str, RawValue] = {}
        for name, raw in raw_values.items():
            is_runtime = raw.origin is RUNTIME
            if raw.problem is not None:
                # A secret's value is hidden, the path of a file that holds it is not.
                secret = name in NAMES.secrets and raw.spelled.lower().endswith(name)
                self.problems[name] = value_problem(name, raw, raw.problem, secret=secret)
            elif name in NAMES.settings:
                self.known[name] = raw
            elif not raw.is_injected and (is_runtime or name not in (URL, CONFIG)):
                candidates = NAMES.settings if is_runtime else NAMES.spellings()
                self.problems[name] = unknown_problem(raw, candidates, NAMES.secrets)

    def values(self) -> dict[str, Any]:
        """Return the values that have no problem so far."""
        return {name: raw.value for name, raw in self.known.items() if name not in self.problems}

    def add_errors(self, error: ValidationError) -> None:
        """Add values that their parsers refused."""
        for item in error.errors(include_url=False, include_context=False):
            name = str(item["loc"][0])
            self._add(name, self.known[name], item["msg"].removeprefix("Value error, "))

    def check_rules(self, settings: SettingFields) -> None:
        """Add broken rules between settings, except rules that read a value with a problem."""
        unreadable = set(self.problems)
        for name, others, rule in RULES:
            raw = self.known.get(name) or RawValue(plain(name, getattr(settings, name)), DEFAULT, DEFAULT.spell(name))
            advice = rule(settings, self._spell_like(raw)) if unreadable.isdisjoint((name, *others)) else None
            if advice is not None:
                self._add(name, raw, advice)

    def raise_if_bad(self) -> None:
        """Raise `BadSettings` with all problems, if there are any."""
        if self.problems:
            raise BadSettings(self.problems.values())

    def _spell_like(self, raw: RawValue) -> Spell:
        """Spell other settings as they were given, or else as in the place of `raw`."""
        return lambda name: self.known[name].spelled if name in self.known else raw.origin.spell(name)

    def _add(self, name: str, raw: RawValue, advice: str) -> None:
        self.problems[name] = value_problem(name, raw, advice, secret=name in NAMES.secrets)


def start_notices(raw_values: Mapping[str, RawValue]) -> tuple[str, ...]:
    """Return what is to be logged as a warning at start."""
    injected = sorted(raw.spelled for raw in raw_values.values() if raw.is_injected)
    if not injected:
        return ()
    return (
        f"ignored {len(injected)} environment variables that Kubernetes injects for a service called kvferry "
        f"({', '.join(injected)}); set enableServiceLinks: false in the pod to prevent this",
    )
