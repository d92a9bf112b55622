"""How a client finds the service: its URL and token, from the same places as settings, without checking the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from app.settings.layers import URL, Layer, read_layers
from app.settings.model import Settings
from app.settings.origin import Given
from app.settings.problems import BadSettings, value_problem

LOCAL_URL = "http://127.0.0.1:8787"


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the service is, and the token to show it; the admin token if there is one."""

    url: str
    token: str | None = field(repr=False)


def find_connection(url: str | None = None, *, env_files: Iterable[Path] = (Path(".env"),)) -> Connection:
    """`url` or KVFERRY_URL or the local default; KVFERRY_ADMIN_TOKEN or KVFERRY_READ_TOKEN. Raises `BadSettings`."""
    layers = read_layers(Settings.names(), {}, env_files)
    found = url or _first(layers, URL) or LOCAL_URL
    return Connection(found.rstrip("/"), _first(layers, "admin_token") or _first(layers, "read_token"))


def _first(layers: Iterable[Layer], name: str) -> str | None:
    given: Given | None = next((layer[name] for layer in layers if name in layer), None)
    if given is None:
        return None
    if given.trouble is not None:
        raise BadSettings([value_problem(name, given, given.trouble, secret=given.spelled.lower().endswith("_token"))])
    return str(given.value).strip()
