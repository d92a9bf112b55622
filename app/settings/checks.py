"""Rules that bind several settings together, with the numbers in the message."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from app.settings.fields import SettingFields
from app.settings.values import is_loopback


def _bind(s: SettingFields) -> str | None:
    if s.admin_token is None and s.read_token is None and not is_loopback(s.host):
        return "without a token the service listens on loopback only; set ADMIN_TOKEN, or HOST=127.0.0.1"
    return None


def _tokens_differ(s: SettingFields) -> str | None:
    if s.admin_token is not None and s.admin_token == s.read_token:
        return "must differ from ADMIN_TOKEN, or readers could change things"
    return None


def _step_holds_a_block(s: SettingFields) -> str | None:
    if s.max_batched_tokens < s.block_size:
        return f"a step of {s.max_batched_tokens} tokens is less than a block of BLOCK_SIZE={s.block_size} tokens"
    return None


def _step_holds_all_running(s: SettingFields) -> str | None:
    if s.max_batched_tokens < s.max_running:
        return f"a step of {s.max_batched_tokens} tokens is too small for MAX_RUNNING={s.max_running} requests"
    return None


def _path_is_used(s: SettingFields) -> str | None:
    if s.pool_path is not None and s.pool_kind != "file":
        return f"is used only with POOL_KIND=file, and POOL_KIND is {s.pool_kind}; leave it out"
    return None


def _file_has_path(s: SettingFields) -> str | None:
    if s.pool_kind == "file" and s.pool_path is None:
        return "needs POOL_PATH, the folder of the pool's file"
    return None


CHECKS: tuple[tuple[str, tuple[str, ...], Callable[[SettingFields], str | None]], ...] = (
    ("host", ("admin_token", "read_token"), _bind),
    ("read_token", ("admin_token",), _tokens_differ),
    ("max_batched_tokens", ("block_size",), _step_holds_a_block),
    ("max_batched_tokens", ("max_running",), _step_holds_all_running),
    ("pool_path", ("pool_kind",), _path_is_used),
    ("pool_kind", ("pool_path",), _file_has_path),
)
"""Each rule: the setting to blame, the others it reads, and what is wrong."""


def broken_rules(settings: SettingFields, unreadable: set[str]) -> Iterator[tuple[str, str]]:
    """Name and advice of each rule that does not hold, leaving out rules about values that could not be read."""
    for name, others, check in CHECKS:
        if unreadable.isdisjoint((name, *others)):
            advice = check(settings)
            if advice is not None:
                yield name, advice
