"""Settings of a process: read from all sources, validated together, each with its origin."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ConfigDict, PrivateAttr, ValidationError

from kvferry.app.settings.errors import NeedsRestart
from kvferry.app.settings.fields import MUTABLE_NAMES, NAMES, PoolKind, SettingFields
from kvferry.app.settings.sources import PREFIX, RUNTIME, Layer, Names, RawValue, Source, read_layers
from kvferry.app.settings.validation import Report, start_notices
from kvferry.app.settings.view import SettingView, origin_text, plain
from kvferry.core.policy import RequestPolicy

ENV_FILE = ".env"


class Settings(SettingFields):
    """All settings of one kvferry process, validated and frozen.

    `Settings(**given)` reads, in order of precedence: `given` (of an embedding engine, lower-case names), the
    environment, `.env`, and the TOML file. `_env_file=None` skips `.env`; `_layers` replaces all sources.
    Raises `BadSettings`.
    """

    # Not pydantic-settings: its sources drop a value's origin and unknown names, which every error here needs.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    _raw: dict[str, RawValue] = PrivateAttr(default_factory=dict)
    _notices: tuple[str, ...] = PrivateAttr(default=())

    POLICY_SETTINGS: ClassVar[Mapping[str, str]] = {
        "offload_prompt_only": "offload_prompt_only",
        "max_offload_tokens": "max_offload_tokens",
        "level": "offload_level",
        "max_load_tokens": "max_load_tokens",
    }
    """The setting that is the default of each field of a request policy."""

    def __init__(
        self, *, _env_file: str | Path | None = ENV_FILE, _layers: Sequence[Layer] | None = None, **given: Any
    ) -> None:
        env_files = [] if _env_file is None else [Path(_env_file)]
        layers = read_layers(NAMES, given, env_files) if _layers is None else _layers
        raw_values: Layer = {}
        for layer in reversed(layers):
            raw_values |= layer
        report = Report(raw_values)
        try:
            super().__init__(**report.values())
        except ValidationError as error:
            report.add_errors(error)
            super().__init__(**report.values())
        report.check_rules(self)
        report.raise_if_bad()
        self._raw = report.known
        self._notices = start_notices(raw_values)

    @classmethod
    def names(cls) -> Names:
        """Return the names of all settings, and of the secret ones."""
        return NAMES

    @classmethod
    def mutable_names(cls) -> tuple[str, ...]:
        """Return the settings that can change while kvferry runs."""
        return MUTABLE_NAMES

    @property
    def notices(self) -> tuple[str, ...]:
        """Warnings to log at start."""
        return self._notices

    def source(self, name: str) -> Source:
        """Return the source of a setting's value."""
        return self._raw[name].origin.source if name in self._raw else Source.DEFAULT

    def describe(self) -> list[SettingView]:
        """Return every setting with its value and origin, secrets masked."""
        return [
            SettingView(
                name=name,
                value=plain(name, getattr(self, name)),
                default=plain(name, field.get_default(call_default_factory=True, validated_data={})),
                source=self.source(name),
                place=origin_text(self._raw.get(name)),
                description=field.description or "",
                mutable=name in MUTABLE_NAMES,
                secret=name in NAMES.secrets,
            )
            for name, field in type(self).model_fields.items()
        ]

    def as_written(self, message: str) -> str:
        """Return a message with settings given by the engine spelled as they were given, without the prefix."""

        def spell(found: re.Match[str]) -> str:
            name = found[1].lower()
            return self._raw[name].spelled if self.source(name) is Source.CONNECTOR else found[0]

        longest_first = "|".join(sorted((name.upper() for name in NAMES.settings), key=len, reverse=True))
        return re.sub(rf"{PREFIX}({longest_first})\b", spell, message)

    def change(self, patch: Mapping[str, object], mutable: Sequence[str] = MUTABLE_NAMES) -> Self:
        """Return these settings with some of the `mutable` ones changed.

        Raises `BadSettings` for unknown names and invalid values, and otherwise `NeedsRestart` for fixed settings.
        """
        fixed = [name for name in patch if name in NAMES.settings and name not in mutable]
        changed = {name: RawValue(value, RUNTIME, name) for name, value in patch.items() if name not in fixed}
        kept = {name: RawValue(getattr(self, name), raw.origin, raw.spelled) for name, raw in self._raw.items()}
        settings = type(self)(_layers=[changed, kept])
        if fixed:
            raise NeedsRestart(fixed, mutable)
        settings._notices = self._notices
        return settings

    def resolved_database_url(self) -> str:
        """Return the database URL with its password and the state folder. Not for logs."""
        return self.database_url.get_secret_value().replace("{STATE_DIR}", str(self.state_dir))

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
