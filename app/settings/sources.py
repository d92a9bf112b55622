"""Sources of settings for pydantic-settings, in order of precedence: engine, environment, `.env`, TOML file."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from enum import StrEnum
from io import StringIO
from pathlib import Path
from typing import Any, Self

from dotenv.parser import parse_stream
from pydantic import PrivateAttr, ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from kvferry.app.settings.errors import (
    PREFIX,
    BadSettings,
    Problem,
    advice_of,
    is_secret_field,
    unknown_problem,
    value_problem,
)
from kvferry.app.settings.types import expand_home

FILE_SUFFIX = "_FILE"
CONFIG = "config"
URL = "url"
_CONFIG_FILE = "config file"
"""Name of problems of the file that CONFIG names."""
NOT_SETTINGS = (URL, CONFIG)
"""Names that every source may have, and that are no settings of a service."""
# With DOTALL the last `.*` always matches, so that each place where it may begin is tried once.
_KUBERNETES_NAME = re.compile(
    r"KVFERRY_(SERVICE|PORT)_.*|KVFERRY_.+_SERVICE_(HOST|PORT(_.*)?)|KVFERRY_.+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?",
    re.DOTALL,
)
_KUBERNETES_PORT = re.compile(r"KVFERRY_([^=]+_)?PORT=(tcp|udp|sctp)://.*", re.DOTALL)


class Source(StrEnum):
    """Kind of source. `.env` and the TOML file are both `file`; a secret's `_FILE` has the source of its name."""

    DEFAULT = "default"
    ENV = "env"
    FILE = "file"
    CONNECTOR = "connector"
    RUNTIME = "runtime"


@dataclass(frozen=True, slots=True)
class SettingOrigin:
    """A place where settings are written.

    Attributes:
        is_prefixed: Names are spelled `KVFERRY_NAME`, else `name`.
        named_by: The place that names this file.
    """

    source: Source
    label: str
    is_prefixed: bool = False
    named_by: SettingOrigin | None = None

    def spell(self, name: str) -> str:
        """Return a setting's name as it is spelled in this place."""
        return PREFIX + name.upper() if self.is_prefixed else name


DEFAULT = SettingOrigin(Source.DEFAULT, "default", is_prefixed=True)
ENVIRONMENT = SettingOrigin(Source.ENV, "environment variable", is_prefixed=True)
CONNECTOR = SettingOrigin(Source.CONNECTOR, "given by the engine")
RUNTIME = SettingOrigin(Source.RUNTIME, "set over HTTP")


class SettingSource(PydanticBaseSettingsSource):
    """The values that are written in one place, by setting; unknown names are included.

    Attributes:
        origin: The place.
        values: The readable values.
        spelled: Each name as it is written there, of unreadable values too.
        files: The file of each secret that is read from one.
        problems: Why values cannot be read.
        injected: Environment variables that Kubernetes injects, which are ignored.
    """

    injected: Sequence[str] = ()

    def __init__(
        self,
        settings_cls: type[BaseSettings],
        origin: SettingOrigin,
        given: Iterable[tuple[str, Any]],
        other_names: Mapping[str, str] | None = None,
    ) -> None:
        """Read the pairs of name and value in `given`. `other_names` are names of settings in this place only."""
        self.origin = origin
        self._other_names = {} if other_names is None else other_names
        self.spelled: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.values: dict[str, Any] = {}
        self.files: dict[str, Path] = {}
        self._fields = settings_cls.model_fields
        super().__init__(settings_cls)
        for spelled, value in given:
            self._read(spelled, value)

    def __call__(self) -> dict[str, Any]:
        """Return the values as pydantic-settings merges them."""
        hidden = () if self.origin is RUNTIME else NOT_SETTINGS
        return {name: value for name, value in self.values.items() if name in self._fields or name not in hidden}

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """See `PydanticBaseSettingsSource`."""
        return self.values.get(field_name), field_name, False

    def _read(self, spelled: str, value: Any) -> None:
        name = self._name_of(spelled)
        secret = name.removesuffix(FILE_SUFFIX.lower())
        # A file is never named over HTTP.
        is_file = secret != name and self._is_secret(secret) and self.origin is not RUNTIME
        name = secret if is_file else name
        if name in self.spelled:
            advice = f"is given twice here, also as {self.spelled[name]}; keep one"
            self.problems.append(value_problem(name, spelled, None, self.origin.label, advice))
            return
        self.spelled[name] = spelled
        try:
            self._check_given(name, value)
            if is_file:
                self.files[name] = expand_home(str(value))
            self.values[name] = _read_secret(self.files[name]) if is_file else value
        except ValueError as error:
            shown, is_secret = "null" if value is None else value, self._is_secret(name) and not is_file
            self.problems.append(
                value_problem(name, spelled, shown, self.origin.label, str(error), is_secret=is_secret)
            )

    def without(self, names: Collection[str]) -> SettingSource:
        """Return the source without the values of these settings."""
        return self._with({name: value for name, value in self.values.items() if name not in names})

    def _with(self, values: dict[str, Any]) -> SettingSource:
        source = copy(self)
        source.values = values
        return source

    def reread(self, name: str) -> SettingSource:
        """Return the source with the file of a secret read again; itself if the secret is the same, or in no file.

        Raises `BadSettings` if the file cannot be read.
        """
        if name not in self.files:
            return self
        try:
            value = _read_secret(self.files[name])
        except ValueError as error:
            spelled, path = self.spelled[name], str(self.files[name])
            raise BadSettings([value_problem(name, spelled, path, self.origin.label, str(error))]) from None
        return self if value == self.values[name] else self._with(self.values | {name: value})

    def _is_secret(self, name: str) -> bool:
        return name in self._fields and is_secret_field(self._fields[name])

    def _name_of(self, spelled: str) -> str:
        """Return the setting's name. A prefixed name that is not upper case is kept as it is, and is unknown."""
        name = spelled.removeprefix(PREFIX)
        is_prefixed = self.origin.is_prefixed and spelled.isupper() and name != spelled
        return name.lower() if is_prefixed else self._other_names.get(spelled, spelled)

    def _check_given(self, name: str, value: Any) -> None:
        """Raise `ValueError` for a known name without a value."""
        is_known = name in self._fields or name in NOT_SETTINGS
        if is_known and value is None:
            raise ValueError("has no value; give one or leave it out")
        if is_known and isinstance(value, str) and not value.strip():
            raise ValueError("is empty; give a value or leave it out")


def _read_secret(path: Path) -> str:
    """Return the secret in a file, without surrounding whitespace. Raises `ValueError`."""
    secret = _read_text(path).strip()
    if not secret:
        raise ValueError("the file is empty")
    return secret


def read_sources(
    settings_cls: type[BaseSettings],
    given: Mapping[str, Any],
    env_file: str | Path | None,
    other_names: Mapping[str, str] | None = None,
) -> list[SettingSource]:
    """Return all sources in order of precedence.

    `given` are the values of an embedding engine, and `other_names` what it calls some settings.
    """
    injected = _injected_names()
    variables = [pair for pair in os.environ.items() if pair[0].upper().startswith(PREFIX) and pair[0] not in injected]
    environment = SettingSource(settings_cls, ENVIRONMENT, variables)
    environment.injected = injected
    sources = [SettingSource(settings_cls, CONNECTOR, given.items(), other_names), environment]
    if env_file is not None and Path(env_file).is_file():
        sources.append(_env_file(settings_cls, Path(env_file)))
    naming = next((source for source in sources if CONFIG in source.values), None)
    if naming is not None:
        sources.append(_toml_file(settings_cls, naming))
    return sources


def _injected_names() -> list[str]:
    """Return the environment variables that Kubernetes injects for a service called kvferry."""
    return [
        name
        for name, value in os.environ.items()
        if name.startswith(PREFIX)
        and (_KUBERNETES_NAME.fullmatch(name) or _KUBERNETES_PORT.fullmatch(f"{name}={value}"))
    ]


def _env_file(settings_cls: type[BaseSettings], path: Path) -> SettingSource:
    origin = SettingOrigin(Source.FILE, str(path), is_prefixed=True)
    broken: list[Problem] = []
    try:
        text = _read_text(path)
    except ValueError as error:
        text, broken = "", [value_problem(path.name, path.name, None, origin.label, str(error))]
    source = SettingSource(settings_cls, origin, _bindings(text, origin, broken))
    source.problems += broken
    return source


def _bindings(text: str, origin: SettingOrigin, broken: list[Problem]) -> Iterator[tuple[str, str]]:
    """Yield the names of kvferry and their values, as written: python-dotenv alone would expand `${...}`."""
    for binding in parse_stream(StringIO(text)):
        if not binding.error:
            if binding.key is not None and binding.key.upper().startswith(PREFIX):
                yield binding.key, binding.value or ""
            continue
        start = binding.original.string.strip().removeprefix("export").lstrip()
        if start.upper().startswith(PREFIX):
            name = re.split(r"\W", start, maxsplit=1)[0]
            advice = f"line {binding.original.line} cannot be read; write NAME=value"
            broken.append(value_problem(name, name, None, origin.label, advice))


def _toml_file(settings_cls: type[BaseSettings], naming: SettingSource) -> SettingSource:
    """Read the file that another source names."""
    named, spelled = str(naming.values[CONFIG]), naming.spelled[CONFIG]
    origin = SettingOrigin(Source.FILE, named, named_by=naming.origin)
    try:
        path = expand_home(named)
        origin = SettingOrigin(Source.FILE, str(path), named_by=naming.origin)
        content = tomllib.loads(_read_text(path))
    except ValueError as error:
        advice = f"is not TOML: {error}" if isinstance(error, tomllib.TOMLDecodeError) else str(error)
        source = SettingSource(settings_cls, origin, [])
        source.problems.append(value_problem(_CONFIG_FILE, spelled, named, naming.origin.label, advice))
        return source
    source = SettingSource(settings_cls, origin, content.items())
    if CONFIG in content:
        advice = "a settings file cannot name another one"
        source.problems.append(value_problem(_CONFIG_FILE, CONFIG, content[CONFIG], origin.label, advice))
    return source


def _read_text(path: Path) -> str:
    """Return the text of a file. Raises `ValueError` with what is wrong with the file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise ValueError("there is no such file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the file is not UTF-8 text (byte {error.start})") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"the file cannot be read: {getattr(error, 'strerror', None) or error}") from error


class SourcedSettings(BaseSettings):
    """Settings that know the source of each value. Frozen."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", case_sensitive=True, validate_default=False)

    _sources: tuple[SettingSource, ...] = PrivateAttr(default=())

    def __init__(self, *, _sources: Sequence[SettingSource]) -> None:
        """Read the sources, given in order of precedence. Raises `BadSettings` with every problem."""
        sources, is_strict = _sources, self.model_config["extra"] == "forbid"
        problems = [one for one in _unreadable(sources) if is_strict or one.name in type(self).model_fields]
        try:
            super().__init__(_build_sources=(tuple(sources), {}))
        except ValidationError as error:
            invalid: set[str] = set()
            for item in error.errors(include_url=False, include_context=False, include_input=False):
                name = str(item["loc"][0])
                source = next(source for source in sources if name in source.values)
                problems.append(self._problem(source, name, item["type"], item["msg"]))
                invalid.add(name)
            # The rules between settings are checked with what is left. Other settings share these sources.
            sources = [source.without(invalid) for source in sources]
            super().__init__(_build_sources=(tuple(sources), {}))
        self._sources = tuple(sources)
        problems += self._rule_problems({problem.name for problem in problems})
        if problems:
            raise BadSettings(problems)

    @classmethod
    def read(cls, sources: Sequence[SettingSource]) -> Self:
        """Return settings read from these sources, for subclasses without a constructor. Raises `BadSettings`."""
        return cls(_sources=sources)

    @classmethod
    def _problem(cls, source: SettingSource, name: str, kind: str, message: str) -> Problem:
        """Return what pydantic found of the setting `name`."""
        fields, spelled, value, label = cls.model_fields, source.spelled[name], source.values[name], source.origin.label
        if kind != "extra_forbidden":
            field = fields[name]
            advice = advice_of(field, message)
            return value_problem(name, spelled, value, label, advice, is_secret=is_secret_field(field))
        secrets = [name for name, field in fields.items() if is_secret_field(field)]
        names = list(fields)
        if source.origin is not RUNTIME:
            names += [*(secret + FILE_SUFFIX.lower() for secret in secrets), *NOT_SETTINGS]
        return unknown_problem(spelled, value, label, {name: source.origin.spell(name) for name in names}, secrets)

    def _rule_problems(self, unreadable: Collection[str]) -> Iterable[Problem]:
        """Return the problems of rules between settings, except those that read an unreadable one."""
        return ()

    def origin_of(self, name: str) -> tuple[SettingOrigin, str]:
        """Return where a setting's value was set, and how the setting is spelled there."""
        source = next((source for source in self._sources if name in source.values), None)
        return (DEFAULT, DEFAULT.spell(name)) if source is None else (source.origin, source.spelled[name])


def _unreadable(sources: Sequence[SettingSource]) -> Iterator[Problem]:
    """Yield why values cannot be read, except values that a stronger source replaces."""
    seen: set[str] = set()
    for source in sources:
        yield from (problem for problem in source.problems if problem.name not in seen)
        seen |= source.spelled.keys()
