"""The places where settings are written, read in order: engine, environment, `.env`, TOML file.

Each layer becomes a pydantic-settings source that hands every value over as a `Given`, unknown names included, so that
one report can say all that is wrong and where it came from.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from dotenv.parser import parse_stream
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from kvferry.app.settings.origin import CONNECTOR, ENVIRONMENT, FILE_SUFFIX, PREFIX, Given, Place, Source

CONFIG = "config"
URL = "url"
MAX_FILE_BYTES = 1 << 20
_KUBERNETES_NAME = re.compile(
    r"KVFERRY_(SERVICE|PORT)_.*|KVFERRY_.+_SERVICE_(HOST|PORT(_.*)?)|KVFERRY_.+_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?"
)
_KUBERNETES_PORT = re.compile(r"KVFERRY_(.+_)?PORT=(tcp|udp|sctp)://.*")

Layer = dict[str, Given]


@dataclass(frozen=True, slots=True)
class Names:
    """The names that mean something: settings, and those among them that are secret and may be read from a file."""

    settings: Collection[str]
    secrets: Collection[str]

    def spellings(self) -> list[str]:
        """Every name that may be written down, lower case."""
        return [*self.settings, *(secret + FILE_SUFFIX.lower() for secret in self.secrets), URL, CONFIG]


def read_layers(names: Names, connector: Mapping[str, Any], env_files: Iterable[Path]) -> list[Layer]:
    """All layers, the strongest first. `url` and `config` stay in them, for those who look for these."""
    layers = [
        _layer(names, _plain(connector.items()), CONNECTOR),
        _environment(names),
        *(_env_file(names, path) for path in env_files),
    ]
    given = next((layer[CONFIG] for layer in layers if CONFIG in layer), None)
    if given is not None and given.trouble is None:
        layers.append(_toml_file(names, given))
    return layers


def _environment(names: Names) -> Layer:
    ours = [(name, value) for name, value in os.environ.items() if name.upper().startswith(PREFIX)]
    foreign = {
        name
        for name, value in ours
        if _KUBERNETES_NAME.fullmatch(name) or _KUBERNETES_PORT.fullmatch(f"{name}={value}")
    }
    layer = _layer(names, _unprefixed((name, value) for name, value in ours if name not in foreign), ENVIRONMENT)
    layer |= {f"environment:{name}": Given("", ENVIRONMENT, name, foreign=True) for name in foreign}
    return layer


def _env_file(names: Names, path: Path) -> Layer:
    place = Place(Source.FILE, str(path), prefixed=True)
    if not path.is_file():
        return {}
    try:
        text = _read_text(path)
    except _UnreadableError as error:
        return {f"{path}": Given(None, place, path.name, str(error))}
    pairs: list[tuple[str, object]] = []
    broken: Layer = {}
    for binding in parse_stream(StringIO(text)):
        if binding.error:
            start = binding.original.string.strip().removeprefix("export").lstrip()
            if start.upper().startswith(PREFIX):
                line = f"line {binding.original.line}"
                name = re.split(r"\W", start, maxsplit=1)[0]
                broken[f"{path}:{line}"] = Given(None, place, name, f"{line} cannot be read; write NAME=value")
        elif binding.key is not None and binding.key.upper().startswith(PREFIX):
            pairs.append((binding.key, binding.value if binding.value is not None else ""))
    return _layer(names, _unprefixed(pairs), place) | broken


def _toml_file(names: Names, config: Given) -> Layer:
    path = Path(str(config.value)).expanduser()
    place = Place(Source.FILE, str(path))

    def trouble(advice: str) -> Layer:
        return {f"{CONFIG} file": Given(config.value, config.place, config.spelled, advice)}

    try:
        content = tomllib.loads(_read_text(path))
    except _UnreadableError as error:
        return trouble(str(error))
    except tomllib.TOMLDecodeError as error:
        return trouble(f"is not TOML: {error}")
    layer = _layer(names, _plain(content.items()), place)
    if CONFIG in layer:
        layer[f"{CONFIG} file"] = Given(content[CONFIG], place, CONFIG, "a settings file cannot name another one")
    return layer


class _UnreadableError(Exception):
    """A file that settings need and that cannot be read, in words."""


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise _UnreadableError(f"the file is larger than {MAX_FILE_BYTES} bytes")
        return content.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise _UnreadableError("there is no such file") from error
    except UnicodeDecodeError as error:
        raise _UnreadableError(f"the file is not UTF-8 text (byte {error.start})") from error
    except (OSError, ValueError) as error:
        raise _UnreadableError(f"the file cannot be read: {getattr(error, 'strerror', None) or error}") from error


def _unprefixed(pairs: Iterable[tuple[str, object]]) -> Iterator[tuple[str, str, object]]:
    """Spelled name, setting's name, value. Only upper case is ours; another spelling stays as it is, and is unknown."""
    for spelled, value in pairs:
        plain = spelled.removeprefix(PREFIX)
        yield spelled, plain.lower() if spelled.isupper() and plain != spelled else spelled, value


def _plain(pairs: Iterable[tuple[str, object]]) -> Iterator[tuple[str, str, object]]:
    return ((spelled, spelled, value) for spelled, value in pairs)


def _layer(names: Names, triples: Iterable[tuple[str, str, object]], place: Place) -> Layer:
    layer: Layer = {}
    for spelled, name, value in triples:
        given = _checked(Given(value, place, spelled))
        target = name.removesuffix(FILE_SUFFIX.lower())
        if target != name and target in names.secrets:
            name, given = target, _from_file(given)
        elif name not in names.settings and name not in (URL, CONFIG):
            name = f"{place.label}:{spelled}"
        if name in layer:
            given = Given("", place, spelled, f"is given twice here, also as {layer[name].spelled}; keep one")
        layer[name] = given
    return layer


def _checked(given: Given) -> Given:
    if given.value is None:
        return Given("null", given.place, given.spelled, "has no value; give one or leave it out")
    if isinstance(given.value, str) and not given.value.strip():
        return Given(given.value, given.place, given.spelled, "is empty; give a value or leave it out")
    return given


def _from_file(given: Given) -> Given:
    """The secret that a file holds, without the newline at its end."""
    if given.trouble is not None:
        return given

    def trouble(advice: str) -> Given:
        return Given(given.value, given.place, given.spelled, advice)

    try:
        text = _read_text(Path(str(given.value)).expanduser())
    except _UnreadableError as error:
        return trouble(str(error))
    if not text.strip():
        return trouble("the file is empty")
    return Given(text.strip(), given.place, given.spelled)


class LayerSource(PydanticBaseSettingsSource):
    """One layer as pydantic-settings wants it."""

    def __init__(self, settings_cls: type[BaseSettings], layer: Mapping[str, object]) -> None:
        super().__init__(settings_cls)
        self._layer = layer

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        """The value as it was given, if it was."""
        return self._layer.get(field_name), field_name, False

    def __call__(self) -> dict[str, Any]:
        return dict(self._layer)
