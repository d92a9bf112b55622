"""Presentation of settings to operators: values as JSON, with secrets masked, and where they were set."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from kvferry.app.settings.errors import MASK, mask_url
from kvferry.app.settings.parsers import format_size
from kvferry.app.settings.sources import DEFAULT, PREFIX, RUNTIME, RawValue, Source
from kvferry.app.settings.tiers import TierSettings
from kvferry.core.policy import CAP_FIELDS, UNLIMITED

Plain = str | int | float | bool | None | list[Any]


@dataclass(frozen=True, slots=True)
class SettingView:
    """One setting with secrets masked. `value` and `default` are JSON; `place` describes where the value was set."""

    name: str
    value: Plain
    default: Plain
    source: Source
    place: str
    description: str
    mutable: bool
    secret: bool

    @property
    def variable(self) -> str:
        """The environment variable of the setting."""
        return PREFIX + self.name.upper()


def plain(name: str, value: object) -> Plain:
    """Return a value as JSON, masked if it is secret."""
    if isinstance(value, SecretStr):
        return mask_url(value.get_secret_value()) if name == "database_url" else MASK
    if name in CAP_FIELDS and value is None:
        return UNLIMITED
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, Path):
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


def origin_text(raw: RawValue | None) -> str:
    """Describe where a value was set; None for a default."""
    if raw is None or raw.origin is RUNTIME:
        return (DEFAULT if raw is None else RUNTIME).label
    return f"{raw.spelled} ({raw.origin.label})"
