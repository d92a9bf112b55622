"""Settings of a process: read from all sources, validated together, each with its origin.

Unknown names, invalid values and broken rules between settings are reported together.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import SecretStr

from kvferry.app.settings.errors import MASK, PREFIX, NeedsRestart, Problem, mask_url, value_problem
from kvferry.app.settings.fields import MUTABLE_NAMES, SECRET_NAMES, SECTIONS, SETTING_NAMES, PoolKind, SettingFields
from kvferry.app.settings.sources import (
    DEFAULT,
    RUNTIME,
    SettingSource,
    Source,
    SourcedSettings,
    read_sources,
)
from kvferry.app.settings.tiers import TierSettings
from kvferry.app.settings.types import format_size, is_loopback, tokens_of
from kvferry.core.policy import CAP_FIELDS, UNLIMITED, RequestPolicy, TierWait

ENV_FILE = ".env"
TOKENS = ("admin_token", "read_token")
"""Settings whose files are read again while the service runs."""
MIN_REMOTE_TOKEN_CHARS = 16

_SETTING = re.compile(rf"{PREFIX}({'|'.join(sorted(map(str.upper, SETTING_NAMES), key=len, reverse=True))})\b")

CAPS = (*CAP_FIELDS, "tenant_max_bytes")
"""Settings that may be `unlimited`."""

Plain = str | int | float | bool | None | list[Any]


@dataclass(frozen=True, slots=True)
class SettingView:
    """One setting. Secrets are masked."""

    name: str
    value: Plain
    default: Plain
    source: Source
    place: str = field(metadata={"description": "where it was set, in words"})
    variable: str = field(metadata={"description": "its environment variable"})
    description: str
    section: str = field(metadata={"description": "its section in docs/settings.md"})
    mutable: bool = field(metadata={"description": "whether PATCH may change it while running"})
    secret: bool
    shortfall: str | None = field(
        default=None, metadata={"description": "why the last value requested does not apply; `value` does"}
    )
    in_use: str | None = field(
        default=None, metadata={"description": "of `store_mode`, the mode in use and why; null for other settings"}
    )


def plain(name: str, value: object) -> Plain:
    """Return a value as JSON, masked if it is secret."""
    if isinstance(value, SecretStr):
        return mask_url(value.get_secret_value()) if name == "database_url" else MASK
    if name in CAPS and value is None:
        return UNLIMITED
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, (Path, TierWait)):
        return str(value)
    if isinstance(value, tuple):
        return [item.shown() if isinstance(item, TierSettings) else item for item in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    raise TypeError(f"setting {name} has a value of type {type(value).__name__}, which has no plain form")


def written(name: str, value: Plain) -> str:
    """Return a plain value as it would be written in an environment variable."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if name.endswith("_bytes") and isinstance(value, int):
        return format_size(value)
    if isinstance(value, list):
        return ",".join(str(item) for item in value) if value else "[]"
    return str(value)


def _broken_rules(s: SettingFields) -> Iterator[tuple[str, tuple[str, ...], str]]:
    """Yield the rules between settings that are broken.

    To add a rule, add a condition.

    Yields:
        The setting that the problem is reported for; the others that the rule reads; what is wrong and what to do, with
        settings spelled as environment variables.
    """
    hosts = {"host": s.host, "metrics_host": s.metrics_host or s.host}
    remote = [name for name, host in hosts.items() if not is_loopback(host) and getattr(s, name) is not None]
    if s.admin_token is None and s.read_token is None:
        for name in remote:
            advice = f"set KVFERRY_ADMIN_TOKEN, or KVFERRY_{name.upper()}=127.0.0.1"
            yield name, ("admin_token", "read_token"), f"without a token the service listens on loopback only; {advice}"
    tokens = {name: tokens_of(getattr(s, name)) for name in TOKENS}
    for name, values in tokens.items():
        shortest = min(map(len, values), default=MIN_REMOTE_TOKEN_CHARS)
        if remote and shortest < MIN_REMOTE_TOKEN_CHARS:
            advice = (
                f"has {shortest} characters, and KVFERRY_{remote[0].upper()}={hosts[remote[0]]} "
                "can be reached from other machines; "
                f"use at least {MIN_REMOTE_TOKEN_CHARS}, such as those that `openssl rand -hex 32` prints"
            )
            yield name, (remote[0],), advice
    if s.metrics_host is not None and s.metrics_port is None:
        yield "metrics_host", ("metrics_port",), "is used only with KVFERRY_METRICS_PORT; set that too, or leave it out"
    if set(tokens["admin_token"]) & set(tokens["read_token"]):
        yield "read_token", ("admin_token",), "must differ from KVFERRY_ADMIN_TOKEN, or readers could change things"
    step = f"a step of {s.max_batched_tokens} tokens is"
    if s.max_batched_tokens < s.block_size:
        advice = f"{step} less than a block of KVFERRY_BLOCK_SIZE={s.block_size} tokens"
        yield "max_batched_tokens", ("block_size",), advice
    if s.max_batched_tokens < s.max_running:
        advice = f"{step} too small for KVFERRY_MAX_RUNNING={s.max_running} requests"
        yield "max_batched_tokens", ("max_running",), advice
    if s.retain_s > s.max_retain_s:
        yield "retain_s", ("max_retain_s",), f"is more than KVFERRY_MAX_RETAIN_S={s.max_retain_s:g}; raise that too"
    if s.pool_kind != "file" and s.pool_path is not None:
        advice = f"is used only with KVFERRY_POOL_KIND=file, and KVFERRY_POOL_KIND is {s.pool_kind}; leave it out"
        yield "pool_path", ("pool_kind",), advice
    if s.pool_kind == "file" and s.pool_path is None:
        yield "pool_kind", ("pool_path",), "needs KVFERRY_POOL_PATH, the folder of the pool's file"


class Settings(SettingFields):
    """All settings of one kvferry process, validated and frozen.

    `Settings(**given)` reads, in order of precedence: `given` (of an embedding engine, lower-case names), the
    environment, `.env`, and the TOML file. `_env_file=None` skips `.env`; `_sources` replaces all sources.
    Raises `BadSettings`.
    """

    POLICY_SETTINGS: ClassVar[Mapping[str, str]] = {
        "offload_prompt_only": "offload_prompt_only",
        "max_offload_tokens": "max_offload_tokens",
        "level": "offload_level",
        "max_load_tokens": "max_load_tokens",
        "tier_wait": "tier_wait",
        "retain_s": "retain_s",
    }
    """The setting that is the default of each field of a request policy."""

    def __init__(
        self,
        *,
        _env_file: str | Path | None = ENV_FILE,
        _sources: Sequence[SettingSource] | None = None,
        **given: Any,
    ) -> None:
        sources = read_sources(type(self), given, _env_file) if _sources is None else _sources
        SourcedSettings.__init__(self, _sources=sources)

    @property
    def notices(self) -> tuple[str, ...]:
        """Warnings to log at start."""
        injected = [name for source in self._sources for name in source.injected]
        if not injected:
            return ()
        return (
            f"ignored {len(injected)} environment variables that Kubernetes injects for a service called kvferry "
            f"({', '.join(sorted(injected))}); set enableServiceLinks: false in the pod to prevent this",
        )

    def source(self, name: str) -> Source:
        """Return the source of a setting's value."""
        return self.origin_of(name)[0].source

    def describe(self) -> list[SettingView]:
        """Return every setting with its value and origin, secrets masked."""
        return [
            SettingView(
                name=name,
                value=plain(name, getattr(self, name)),
                default=plain(name, info.get_default(call_default_factory=True, validated_data={})),
                source=self.source(name),
                place=self._place(name),
                variable=PREFIX + name.upper(),
                description=info.description or "",
                section=SECTIONS[name],
                mutable=name in MUTABLE_NAMES,
                secret=name in SECRET_NAMES,
            )
            for name, info in type(self).model_fields.items()
        ]

    def _place(self, name: str) -> str:
        """Describe where a setting's value was set."""
        origin, spelled = self.origin_of(name)
        return origin.label if origin in (DEFAULT, RUNTIME) else f"{spelled} ({origin.label})"

    def as_written(self, message: str) -> str:
        """Return a message with settings given by the engine spelled as they were given, without the prefix."""

        def spell(found: re.Match[str]) -> str:
            origin, spelled = self.origin_of(found[1].lower())
            return spelled if origin.source is Source.CONNECTOR else found[0]

        return _SETTING.sub(spell, message)

    def change(self, patch: Mapping[str, object]) -> Self:
        """Return these settings with some of the mutable ones changed.

        Raises `BadSettings` for unknown names and invalid values, and otherwise `NeedsRestart` for fixed settings.
        """
        fixed = [name for name in patch if name in SETTING_NAMES and name not in MUTABLE_NAMES]
        changed = [(name, value) for name, value in patch.items() if name not in fixed]
        settings = type(self)(_sources=[SettingSource(type(self), RUNTIME, changed), *self._sources])
        if fixed:
            raise NeedsRestart(fixed, MUTABLE_NAMES)
        return settings

    def reread_tokens(self) -> Self:
        """Return the settings with the files of tokens read again; themselves if nothing has changed.

        Raises `BadSettings` if a file cannot be read, or has no valid tokens.
        """
        sources = list(self._sources)
        for name in TOKENS:
            used = next((i for i, source in enumerate(sources) if name in source.values), None)
            if used is not None:
                sources[used] = sources[used].reread(name)
        is_same = all(source is old for source, old in zip(sources, self._sources, strict=True))
        return self if is_same else type(self)(_sources=sources)

    def _rule_problems(self, unreadable: Collection[str]) -> Iterator[Problem]:
        for name, others, advice in _broken_rules(self):
            if not {name, *others} & set(unreadable):
                origin, spelled = self.origin_of(name)
                value, text = plain(name, getattr(self, name)), self.as_written(advice)
                yield value_problem(name, spelled, value, origin.label, text, is_secret=name in SECRET_NAMES)

    def resolved_database_url(self) -> str:
        """Return the database URL with its password and the state folder. Not for logs."""
        return self.database_url.get_secret_value().replace("{STATE_DIR}", str(self.state_dir))

    @property
    def tier_root(self) -> Path:
        """Folder below which files and folders of tiers must be that are attached without an admin token."""
        return self.state_dir / "tiers"

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        """Host and port of the metrics' own address, None without one."""
        return None if self.metrics_port is None else (self.metrics_host or self.host, self.metrics_port)

    @property
    def has_lasting_blocks(self) -> bool:
        """Whether blocks outlive the process, in a kept pool or in tiers."""
        return self.pool_kind is not PoolKind.PINNED or bool(self.tiers)

    def request_policy(self) -> RequestPolicy:
        """Return the default request policy."""
        return RequestPolicy(**{field: getattr(self, name) for field, name in self.POLICY_SETTINGS.items()})

    def request_policy_sources(self) -> dict[str, str]:
        """Return the source of each policy field that has a setting."""
        return {field: self.source(name).value for field, name in self.POLICY_SETTINGS.items()}
