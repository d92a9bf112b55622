"""A setting as an operator sees it: value (masked), source, description, and whether it may change while running."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from kvferry.app.settings.origin import PREFIX, Place, Source
from kvferry.app.settings.problems import MASK, mask_url
from kvferry.app.settings.tiers import TierSettings
from kvferry.app.settings.values import format_size
from kvferry.core.policy import CAP_FIELDS, UNLIMITED

Plain = str | int | float | bool | None | list[Any]


@dataclass(frozen=True, slots=True)
class SettingView:
    """One setting, safe to show. `value` and `default` are plain JSON; `place` says in words where it was given."""

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
        """Its environment variable."""
        return PREFIX + self.name.upper()


def plain(name: str, value: object) -> Plain:
    """A value as JSON, masked where it is secret."""
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
    """A plain value the way it would be written in an environment variable."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if name.endswith("_bytes") and isinstance(value, int):
        return format_size(value)
    if isinstance(value, list):
        return ",".join(str(item) for item in value) if value else "[]"
    return str(value)


def place_words(place: Place, spelled: str) -> str:
    """Where a value was given, in words."""
    return place.label if place.source in (Source.DEFAULT, Source.RUNTIME) else f"{spelled} ({place.label})"
