"""Validation of settings: unknown names, invalid values, and rules between settings, all reported together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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


def _broken_rules(s: SettingFields, spell_like: Callable[[str], Spell]) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield the rules between settings that are broken.

    To add a rule, add a condition.

    Args:
        s: The settings.
        spell_like: Returns how other settings are spelled where a setting was given.

    Yields:
        The setting that the problem is reported for; the others that the rule reads; what is wrong and what to do.
    """
    is_remote = not is_loopback(s.host)
    if is_remote and s.admin_token is None and s.read_token is None:
        spell = spell_like("host")
        advice = f"set {spell('admin_token')}, or {spell('host')}=127.0.0.1"
        yield "host", ("admin_token", "read_token"), f"without a token the service listens on loopback only; {advice}"
    for name, token in (("admin_token", s.admin_token), ("read_token", s.read_token)):
        if is_remote and token is not None and len(token.get_secret_value()) < MIN_REMOTE_TOKEN_CHARS:
            yield (
                name,
                ("host",),
                (
                    f"has {len(token.get_secret_value())} characters, and {spell_like(name)('host')}={s.host} can be "
                    f"reached from other machines; use at least {MIN_REMOTE_TOKEN_CHARS}, such as those that "
                    "`openssl rand -hex 32` prints"
                ),
            )
    if s.admin_token is not None and s.admin_token == s.read_token:
        other = spell_like("read_token")("admin_token")
        yield "read_token", ("admin_token",), f"must differ from {other}, or readers could change things"
    spell = spell_like("max_batched_tokens")
    step = f"a step of {s.max_batched_tokens} tokens is"
    if s.max_batched_tokens < s.block_size:
        advice = f"{step} less than a block of {spell('block_size')}={s.block_size} tokens"
        yield "max_batched_tokens", ("block_size",), advice
    if s.max_batched_tokens < s.max_running:
        advice = f"{step} too small for {spell('max_running')}={s.max_running} requests"
        yield "max_batched_tokens", ("max_running",), advice
    if s.pool_kind != "file" and s.pool_path is not None:
        kind = spell_like("pool_path")("pool_kind")
        advice = f"is used only with {kind}=file, and {kind} is {s.pool_kind}; leave it out"
        yield "pool_path", ("pool_kind",), advice
    if s.pool_kind == "file" and s.pool_path is None:
        path = spell_like("pool_kind")("pool_path")
        yield "pool_kind", ("pool_path",), f"needs {path}, the folder of the pool's file"


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

        def raw_of(name: str) -> RawValue:
            default = RawValue(plain(name, getattr(settings, name)), DEFAULT, DEFAULT.spell(name))
            return self.known.get(name, default)

        def spell_like(place: str) -> Spell:
            return lambda name: self.known[name].spelled if name in self.known else raw_of(place).origin.spell(name)

        unreadable = set(self.problems)
        for name, others, advice in _broken_rules(settings, spell_like):
            if unreadable.isdisjoint((name, *others)):
                self._add(name, raw_of(name), advice)

    def raise_if_bad(self) -> None:
        """Raise `BadSettings` with all problems, if there are any."""
        if self.problems:
            raise BadSettings(self.problems.values())

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
