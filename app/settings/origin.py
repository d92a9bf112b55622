"""Where a value came from: its source, and the words for it in a message."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "KVFERRY_"
FILE_SUFFIX = "_FILE"


class Source(StrEnum):
    """The layers. `.env` and the TOML file are both `file`; a secret's `_FILE` belongs to the layer with its name."""

    DEFAULT = "default"
    ENV = "env"
    FILE = "file"
    CONNECTOR = "connector"
    RUNTIME = "runtime"


@dataclass(frozen=True, slots=True)
class Place:
    """A place where settings are written. `prefixed` says whether names there are spelled `KVFERRY_NAME` or `name`."""

    source: Source
    label: str
    prefixed: bool = False

    def spell(self, name: str) -> str:
        """A setting's name the way it is written here."""
        return PREFIX + name.upper() if self.prefixed else name


DEFAULT = Place(Source.DEFAULT, "default", prefixed=True)
ENVIRONMENT = Place(Source.ENV, "environment variable", prefixed=True)
CONNECTOR = Place(Source.CONNECTOR, "given by the engine")
RUNTIME = Place(Source.RUNTIME, "set over HTTP")


@dataclass(frozen=True, slots=True)
class Given:
    """One value as it was written. `trouble` says why it cannot be read; `foreign` marks a name that is not ours."""

    value: object
    place: Place
    spelled: str
    trouble: str | None = None
    foreign: bool = False
