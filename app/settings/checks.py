"""Rules that bind several settings together, with the numbers in the message."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pydantic import SecretStr

from kvferry.app.settings.fields import SettingFields
from kvferry.app.settings.values import is_loopback

MIN_REMOTE_TOKEN_CHARS = 16

Spell = Callable[[str], str]
"""Returns a setting's name the way it is written where the setting was given."""


def _bind(s: SettingFields, spell: Spell) -> str | None:
    if s.admin_token is None and s.read_token is None and not is_loopback(s.host):
        return (
            "without a token the service listens on loopback only; "
            f"set {spell('admin_token')}, or {spell('host')}=127.0.0.1"
        )
    return None


def _token_is_long(token: SecretStr | None, s: SettingFields, spell: Spell) -> str | None:
    if token is None or is_loopback(s.host) or len(token.get_secret_value()) >= MIN_REMOTE_TOKEN_CHARS:
        return None
    return (
        f"has {len(token.get_secret_value())} characters, and {spell('host')}={s.host} can be reached from other "
        f"machines; use at least {MIN_REMOTE_TOKEN_CHARS}, such as those that `openssl rand -hex 32` prints"
    )


def _admin_token_is_long(s: SettingFields, spell: Spell) -> str | None:
    return _token_is_long(s.admin_token, s, spell)


def _read_token_is_long(s: SettingFields, spell: Spell) -> str | None:
    return _token_is_long(s.read_token, s, spell)


def _tokens_differ(s: SettingFields, spell: Spell) -> str | None:
    if s.admin_token is not None and s.admin_token == s.read_token:
        return f"must differ from {spell('admin_token')}, or readers could change things"
    return None


def _step_holds_a_block(s: SettingFields, spell: Spell) -> str | None:
    if s.max_batched_tokens < s.block_size:
        return (
            f"a step of {s.max_batched_tokens} tokens is less than a block of {spell('block_size')}={s.block_size} "
            "tokens"
        )
    return None


def _step_holds_all_running(s: SettingFields, spell: Spell) -> str | None:
    if s.max_batched_tokens < s.max_running:
        return (
            f"a step of {s.max_batched_tokens} tokens is too small for {spell('max_running')}={s.max_running} requests"
        )
    return None


def _path_is_used(s: SettingFields, spell: Spell) -> str | None:
    if s.pool_path is not None and s.pool_kind != "file":
        kind = spell("pool_kind")
        return f"is used only with {kind}=file, and {kind} is {s.pool_kind}; leave it out"
    return None


def _file_has_path(s: SettingFields, spell: Spell) -> str | None:
    if s.pool_kind == "file" and s.pool_path is None:
        return f"needs {spell('pool_path')}, the folder of the pool's file"
    return None


CHECKS: tuple[tuple[str, tuple[str, ...], Callable[[SettingFields, Spell], str | None]], ...] = (
    ("host", ("admin_token", "read_token"), _bind),
    ("admin_token", ("host",), _admin_token_is_long),
    ("read_token", ("host",), _read_token_is_long),
    ("read_token", ("admin_token",), _tokens_differ),
    ("max_batched_tokens", ("block_size",), _step_holds_a_block),
    ("max_batched_tokens", ("max_running",), _step_holds_all_running),
    ("pool_path", ("pool_kind",), _path_is_used),
    ("pool_kind", ("pool_path",), _file_has_path),
)
"""Each rule: the setting to blame, the others it reads, and what is wrong."""


def broken_rules(
    settings: SettingFields, unreadable: set[str], speller: Callable[[str], Spell]
) -> Iterator[tuple[str, str]]:
    """Name and advice of each rule that does not hold, leaving out rules about values that could not be read.

    `speller` returns, for the setting to blame, how names of other settings are spelled in its message.
    """
    for name, others, check in CHECKS:
        if unreadable.isdisjoint((name, *others)):
            advice = check(settings, speller(name))
            if advice is not None:
                yield name, advice
