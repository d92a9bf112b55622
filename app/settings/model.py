"""The settings of a process: read from every layer at once, judged together, and told with where each came from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ModelWrapValidatorHandler, PrivateAttr, ValidationError
from pydantic import model_validator as validates_model
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from kvferry.app.settings import review
from kvferry.app.settings.fields import MUTABLE, SettingFields
from kvferry.app.settings.kinds import PoolKind
from kvferry.app.settings.layers import Layer, LayerSource, Names, read_layers
from kvferry.app.settings.origin import DEFAULT, PREFIX, RUNTIME, Given, Place, Source
from kvferry.app.settings.problems import NeedsRestart
from kvferry.app.settings.view import SettingView, place_words, plain
from kvferry.core.policy import RequestPolicy

ENV_FILE = ".env"
LAYERS = "_layers"


class Settings(BaseSettings, SettingFields):
    """All settings of one kvferry process, checked; frozen.

    `Settings(**given)` reads every layer: `given` (what an embedding engine was told, lower-case names), then the
    environment, `.env`, and the TOML file. `_env_file=None` leaves `.env` out. Raises `BadSettings`.
    """

    model_config = SettingsConfigDict(frozen=True, extra="forbid", validate_default=False)

    _given: dict[str, Given] = PrivateAttr(default_factory=dict)
    _notices: tuple[str, ...] = PrivateAttr(default=())

    POLICY_SETTINGS: ClassVar[Mapping[str, str]] = {
        "offload_prompt_only": "offload_prompt_only",
        "max_offload_tokens": "max_offload_tokens",
        "level": "offload_level",
        "max_load_tokens": "max_load_tokens",
    }
    """Which setting is the default of which field of a request policy."""

    def __init__(
        self, *, _env_file: str | Path | None = ENV_FILE, _layers: Sequence[Layer] | None = None, **given: Any
    ) -> None:
        # All layers are read here, `.env` too: pydantic-settings would pass over the lines that it cannot parse.
        env_files = [] if _env_file is None else [Path(_env_file)]
        layers = read_layers(self.names(), given, env_files) if _layers is None else _layers
        through: dict[str, Any] = {LAYERS: layers}
        super().__init__(_env_file=None, **through)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """One source a layer, the strongest first."""
        layers = init_settings.init_kwargs[LAYERS] if isinstance(init_settings, InitSettingsSource) else ()
        return tuple(LayerSource(settings_cls, layer) for layer in ({LAYERS: layers}, *layers))

    @classmethod
    def names(cls) -> Names:
        """The names of all settings, and of the secret ones."""
        secrets = [name for name, field in cls.model_fields.items() if "SecretStr" in str(field.annotation)]
        return Names(tuple(cls.model_fields), secrets)

    @classmethod
    def mutable_names(cls) -> tuple[str, ...]:
        """The settings that may change while kvferry runs."""
        return tuple(name for name, field in cls.model_fields.items() if MUTABLE in field.metadata)

    @validates_model(mode="wrap")
    @classmethod
    def _check(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Read what every layer gave; raise all that is wrong with it at once."""
        if not isinstance(data, dict) or LAYERS not in data:
            return handler(data)  # not read from layers yet; `__init__` does
        names = cls.names()
        given = {name: item for name, item in data.items() if name != LAYERS}
        report = review.Report(names)
        readable = report.take(given)
        try:
            settings = handler(readable)
        except ValidationError as error:
            report.take_errors(error)
            settings = handler({name: value for name, value in readable.items() if name not in report.problems})
        report.take_rules(settings)
        report.raise_if_bad()
        settings._given = report.known
        settings._notices = review.notices(given)
        return settings

    @property
    def notices(self) -> tuple[str, ...]:
        """What deserves a warning at start, though it does no harm."""
        return self._notices

    def source(self, name: str) -> Source:
        """Which layer a setting's value came from."""
        return self._place(name).source

    def _place(self, name: str) -> Place:
        return self._given[name].place if name in self._given else DEFAULT

    def describe(self) -> list[SettingView]:
        """Every setting with its value and where that came from, safe to show."""
        secrets = self.names().secrets
        mutable = self.mutable_names()
        return [
            SettingView(
                name=name,
                value=plain(name, getattr(self, name)),
                default=plain(name, field.get_default(call_default_factory=True, validated_data={})),
                source=self.source(name),
                place=place_words(self._place(name), self._given[name].spelled if name in self._given else name),
                description=field.description or "",
                mutable=name in mutable,
                secret=name in secrets,
            )
            for name, field in type(self).model_fields.items()
        ]

    def as_written(self, message: str) -> str:
        """A message in which settings that the engine gave are named the way they stand there, without prefix."""

        def spell(found: re.Match[str]) -> str:
            name = found[1].lower()
            return self._given[name].spelled if self.source(name) is Source.CONNECTOR else found[0]

        longest_first = "|".join(sorted((name.upper() for name in self.names().settings), key=len, reverse=True))
        return re.sub(rf"{PREFIX}({longest_first})\b", spell, message)

    def change(self, patch: Mapping[str, object], mutable: Sequence[str] | None = None) -> Self:
        """These settings with some changed while running, all that may change or those of them that are `mutable`.

        Raises `BadSettings` for unknown names and bad values, else `NeedsRestart` for settings that cannot change now.
        """
        names = self.names()
        mutable = self.mutable_names() if mutable is None else mutable
        fixed = [name for name in patch if name in names.settings and name not in mutable]
        changed = {name: Given(value, RUNTIME, name) for name, value in patch.items() if name not in fixed}
        kept = {name: Given(getattr(self, name), given.place, given.spelled) for name, given in self._given.items()}
        settings = type(self)(_layers=[changed, kept])
        if fixed:
            raise NeedsRestart(fixed, mutable)
        settings._notices = self._notices
        return settings

    def resolved_database_url(self) -> str:
        """The database URL with its password and with the state folder in its place. Not for logs."""
        return self.database_url.get_secret_value().replace("{STATE_DIR}", str(self.state_dir))

    @property
    def has_lasting_blocks(self) -> bool:
        """Whether blocks outlive the process, in a kept pool or in tiers."""
        return self.pool_kind is not PoolKind.PINNED or bool(self.tiers)

    def request_policy(self) -> RequestPolicy:
        """The default request policy."""
        return RequestPolicy(**{field: getattr(self, name) for field, name in self.POLICY_SETTINGS.items()})

    def request_policy_sources(self) -> dict[str, str]:
        """Which layer settled each of the policy fields that settings can set."""
        return {field: self.source(name).value for field, name in self.POLICY_SETTINGS.items()}
