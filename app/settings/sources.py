"""Sources of settings, read in order of precedence: engine, environment, `.env`, TOML file.

Each source is a layer: a dict of raw values by setting, with unknown names and unreadable values included, so that all
problems are reported together, each with its origin.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from io import StringIO
from pathlib import Path
from typing import Any

from dotenv.parser import parse_stream

PREFIX = "KVFERRY_"
FILE_SUFFIX = "_FILE"
CONFIG = "config"
URL = "url"
MAX_FILE_BYTES = 1 << 20
MAX_BLANKS = 256
_LONG_BLANKS = re.compile(rf"[^\S\r\n]{{{MAX_BLANKS}}}")
"""python-dotenv takes quadratic time for blanks in a row."""
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
    """A place where settings are written, with names spelled `KVFERRY_NAME` if `prefixed`, else `name`."""

    source: Source
    label: str
    prefixed: bool = False

    def spell(self, name: str) -> str:
        """Return a setting's name as it is spelled in this place."""
        return PREFIX + name.upper() if self.prefixed else name


DEFAULT = SettingOrigin(Source.DEFAULT, "default", prefixed=True)
ENVIRONMENT = SettingOrigin(Source.ENV, "environment variable", prefixed=True)
CONNECTOR = SettingOrigin(Source.CONNECTOR, "given by the engine")
RUNTIME = SettingOrigin(Source.RUNTIME, "set over HTTP")


@dataclass(frozen=True, slots=True)
class RawValue:
    """One value as written. `problem` is why it cannot be read; `is_injected` marks a variable set by Kubernetes."""

    value: object
    origin: SettingOrigin
    spelled: str
    problem: str | None = None
    is_injected: bool = False


Layer = dict[str, RawValue]


@dataclass(frozen=True, slots=True)
class Names:
    """Names of the settings, and of the secret ones, whose value can be in a file."""

    settings: Collection[str]
    secrets: Collection[str]

    def spellings(self) -> list[str]:
        """Return every known name, in lower case."""
        return [*self.settings, *(secret + FILE_SUFFIX.lower() for secret in self.secrets), URL, CONFIG]


def read_layers(names: Names, connector: Mapping[str, Any], env_files: Iterable[Path]) -> list[Layer]:
    """Return all layers in order of precedence. They include `url` and `config`, which are not settings."""
    layers = [
        _layer(names, ((name, name, value) for name, value in connector.items()), CONNECTOR),
        _environment(names),
        *(_env_file(names, path) for path in env_files),
    ]
    config = next((layer[CONFIG] for layer in layers if CONFIG in layer), None)
    if config is not None and config.problem is None:
        layers.append(_toml_file(names, config))
    return layers


def _environment(names: Names) -> Layer:
    variables = {name: value for name, value in os.environ.items() if name.upper().startswith(PREFIX)}
    injected = {
        name
        for name, value in variables.items()
        if _KUBERNETES_NAME.fullmatch(name) or _KUBERNETES_PORT.fullmatch(f"{name}={value}")
    }
    layer = _layer(names, _unprefixed(pair for pair in variables.items() if pair[0] not in injected), ENVIRONMENT)
    return layer | {f"environment:{name}": RawValue("", ENVIRONMENT, name, is_injected=True) for name in injected}


def _env_file(names: Names, path: Path) -> Layer:
    origin = SettingOrigin(Source.FILE, str(path), prefixed=True)
    if not path.is_file():
        return {}
    try:
        text = _read_text(path)
    except ValueError as error:
        return {f"{path}": RawValue(None, origin, path.name, str(error))}
    pairs: list[tuple[str, object]] = []
    broken: Layer = {}
    if _LONG_BLANKS.search(text):
        problem = f"{MAX_BLANKS} blanks in a row cannot be read; write NAME=value without them"
        return {f"{path}": RawValue(None, origin, path.name, problem)}
    for binding in parse_stream(StringIO(text)):
        if binding.error:
            start = binding.original.string.strip().removeprefix("export").lstrip()
            if start.upper().startswith(PREFIX):
                line = f"line {binding.original.line}"
                name = re.split(r"\W", start, maxsplit=1)[0]
                broken[f"{path}:{line}"] = RawValue(None, origin, name, f"{line} cannot be read; write NAME=value")
        elif binding.key is not None and binding.key.upper().startswith(PREFIX):
            pairs.append((binding.key, binding.value or ""))
    return _layer(names, _unprefixed(pairs), origin) | broken


def _toml_file(names: Names, config: RawValue) -> Layer:
    origin = SettingOrigin(Source.FILE, str(config.value))
    try:
        path = expand_home(str(config.value))
        origin = SettingOrigin(Source.FILE, str(path))
        content = tomllib.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        problem = f"is not TOML: {error}" if isinstance(error, tomllib.TOMLDecodeError) else str(error)
        return {f"{CONFIG} file": replace(config, problem=problem)}
    layer = _layer(names, ((name, name, value) for name, value in content.items()), origin)
    if CONFIG in layer:
        problem = "a settings file cannot name another one"
        layer[f"{CONFIG} file"] = RawValue(content[CONFIG], origin, CONFIG, problem)
    return layer


def expand_home(text: str) -> Path:
    """Return a path, with `~` replaced by a home folder. Raises `ValueError` if there is no such folder."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"there is no home folder for {Path(text).parts[0]}; write the whole path") from error


def _read_text(path: Path) -> str:
    """Return the text of a file. Raises `ValueError` with what is wrong with the file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        text = content.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ValueError("there is no such file") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"the file is not UTF-8 text (byte {error.start})") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"the file cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ValueError(f"the file is larger than {MAX_FILE_BYTES} bytes")
    return text


def _unprefixed(pairs: Iterable[tuple[str, object]]) -> Iterator[tuple[str, str, object]]:
    """Yield spelled name, setting's name and value. A name that is not upper case is kept, and is unknown."""
    for spelled, value in pairs:
        name = spelled.removeprefix(PREFIX)
        yield spelled, name.lower() if spelled.isupper() and name != spelled else spelled, value


def _layer(names: Names, triples: Iterable[tuple[str, str, object]], origin: SettingOrigin) -> Layer:
    layer: Layer = {}
    for spelled, name, value in triples:
        raw = _not_empty(RawValue(value, origin, spelled))
        target = name.removesuffix(FILE_SUFFIX.lower())
        if target != name and target in names.secrets:
            name, raw = target, secret_in_file(raw)
        elif name not in names.settings and name not in (URL, CONFIG):
            name = f"{origin.label}:{spelled}"
        if name in layer:
            problem = f"is given twice here, also as {layer[name].spelled}; keep one"
            raw = RawValue("", origin, spelled, problem)
        layer[name] = raw
    return layer


def _not_empty(raw: RawValue) -> RawValue:
    if raw.value is None:
        return replace(raw, value="null", problem="has no value; give one or leave it out")
    if isinstance(raw.value, str) and not raw.value.strip():
        return replace(raw, problem="is empty; give a value or leave it out")
    return raw


def secret_in_file(raw: RawValue) -> RawValue:
    """Return the secret in the file that `raw` names, without surrounding whitespace."""
    if raw.problem is not None:
        return raw
    try:
        secret = _read_text(expand_home(str(raw.value))).strip()
    except ValueError as error:
        return replace(raw, problem=str(error))
    return replace(raw, value=secret) if secret else replace(raw, problem="the file is empty")
