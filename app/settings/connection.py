"""Discovery of the service by clients: URL and token, from the sources of settings, without validating the rest.

Without a URL, the service announced in the state folder is used, if only one engine is announced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from platformdirs import user_state_path
from pydantic import SecretStr

from kvferry.app.discovery import FoundService, find_services
from kvferry.app.settings.errors import BadSettings, Problem, value_problem
from kvferry.app.settings.fields import APP_NAME, NAMES
from kvferry.app.settings.parsers import secret_token
from kvferry.app.settings.sources import (
    CONFIG,
    URL,
    Layer,
    RawValue,
    SettingOrigin,
    Source,
    expand_home,
    read_layers,
    secret_in_file,
)

LOCAL_URL = "http://127.0.0.1:8787"
ARGUMENT = SettingOrigin(Source.RUNTIME, "argument")


@dataclass(frozen=True, slots=True)
class Connection:
    """URL of the service, and the token to send; the admin token if there is one.

    `unannounced_in` is the state folder in which no service is announced, if `url` is therefore the local default:
    another user's service may answer there.
    """

    url: str
    token: str | None = field(repr=False)
    unannounced_in: Path | None = None


def find_connection(
    url: str | None = None,
    token: str | None = None,
    *,
    token_file: Path | None = None,
    env_files: Iterable[Path] = (Path(".env"),),
) -> Connection:
    """Return `url`, or KVFERRY_URL, or the only service found, or the local default, with a token.

    The token is `token`, or that in `token_file`, or KVFERRY_ADMIN_TOKEN, or KVFERRY_READ_TOKEN. Raises `BadSettings`
    for an invalid URL or token, if several services are found, and for a token that is from elsewhere than a `.env`
    file that names the service.
    """
    found = find_ranks(url, token, token_file=token_file, env_files=env_files)
    if len(found) > 1:
        urls = ", ".join(connection.url for connection in found)
        advice = f"the engine has {len(found)} data-parallel ranks; choose one with --url or KVFERRY_URL: {urls}"
        raise BadSettings([Problem(URL, advice, advice)])
    return found[0]


def find_ranks(
    url: str | None = None,
    token: str | None = None,
    engine: str | None = None,
    *,
    token_file: Path | None = None,
    env_files: Iterable[Path] = (Path(".env"),),
) -> list[Connection]:
    """Find the data-parallel ranks of one engine: the one named `engine` or KVFERRY_ENGINE_NAME, or the only one.

    A URL, given as for `find_connection`, is one rank. Raises `BadSettings` also if several engines are found, or none
    has the name `engine`.
    """
    layers: list[Layer] = [{}] if url and (token or token_file) else read_layers(NAMES, {}, [Path(".env")])
    arguments: Layer = {
        name: RawValue(value, ARGUMENT, name) for name, value in (("url", url), ("admin_token", token)) if value
    }
    if token_file is not None:
        arguments["admin_token"] = secret_in_file(RawValue(str(token_file), ARGUMENT, "--token-file"))
    layers.insert(0, arguments)
    given = None if engine is not None else _first(layers, URL, _read_url)
    known = _first(layers, "admin_token", _read_token) or _first(layers, "read_token", _read_token)
    if known is not None:
        names = ("state_dir",) if engine is not None else (URL, "state_dir")
        _check_same_source(layers, names, ("admin_token", "read_token"))
    if given is not None:
        return [Connection(given, known)]
    folder = _state_dir(layers)
    found = [Connection(found, known) for found in _found_urls(folder, layers, engine)]
    return found or [Connection(LOCAL_URL, known, folder)]


def _check_same_source(layers: Sequence[Layer], addresses: Iterable[str], tokens: Iterable[str]) -> None:
    """Raise `BadSettings` for a token that would be sent to an address which only a `.env` file names.

    The file is in the working folder, which may be another user's. Each argument of names has the strongest first.
    """
    name, address = next(((name, raw) for name in addresses if (raw := _find(layers, name))), ("", None))
    token = next((raw for name in tokens if (raw := _find(layers, name))), None)
    env_file = None if address is None else _env_file_of(layers, address)
    if address is None or token is None or env_file is None or _env_file_of(layers, token) == env_file:
        return
    advice = (
        f"the token is from elsewhere, and {env_file} may be another user's; set this as an environment variable, put "
        f"the token into {env_file}, or give --url"
    )
    raise BadSettings([value_problem(name, address, advice, secret=False)])


def _env_file_of(layers: Sequence[Layer], raw: RawValue) -> str | None:
    """Return the `.env` file that a value comes from, also by a settings file that it names; None for other sources."""
    origin = raw.origin
    config = _find(layers, CONFIG)
    if origin.source is Source.FILE and not origin.prefixed and config is not None:
        origin = config.origin
    return origin.label if origin.source is Source.FILE and origin.prefixed else None


def find_engine(
    url: str | None, service: Connection, option: str = "--engine-url", *, is_found: bool = False
) -> Connection:
    """Return the URL of the engine's own API (`url`, given by `option`, or the service's), and KVFERRY_ENGINE_API_KEY.

    Without a key, the service's token is used only if `url` has the service's scheme, host and port. Raises
    `BadSettings` for an invalid URL or key, and if the service was found without a URL, as `is_found` says, for a key
    that is from elsewhere than a `.env` file that names the service.
    """
    argument: Layer = {URL: RawValue(url, ARGUMENT, option)} if url else {}
    engine_url = _first([argument], URL, _read_url) or service.url
    layers = read_layers(NAMES, {}, [Path(".env")])
    key = _first(layers, "engine_api_key", _read_token)
    if is_found and url is None:
        _check_same_source(layers, (URL, "state_dir"), ("engine_api_key",))
    if key is None and _origin(engine_url) == _origin(service.url):
        key = service.token
    return Connection(engine_url, key)


def _origin(url: str) -> tuple[str, str | None, int]:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _state_dir(layers: Iterable[Layer]) -> Path:
    given = _find(layers, "state_dir")
    if given is None or given.problem is not None:
        return user_state_path(APP_NAME)
    try:
        folder = expand_home(str(given.value))
        if os.path.exists(folder) and not os.path.isdir(folder):
            raise ValueError("is not a folder; name another")
        return folder
    except ValueError as error:
        raise BadSettings([value_problem("state_dir", given, str(error), secret=False)]) from error


def _found_urls(state_dir: Path, layers: Iterable[Layer], engine: str | None) -> list[str]:
    """Return the URLs of the only announced engine in the order of its ranks; empty without announcements."""
    found = find_services(state_dir)
    named = next((str(layer["engine_name"].value) for layer in layers if "engine_name" in layer), None)
    ranks = [service for service in found if service.engine == (engine or named)]
    if engine is not None and not ranks:
        advice = f"no engine named {engine} is announced on this host; running: {_listed(found) or 'none'}"
        raise BadSettings([Problem("engine", advice, advice)])
    ranks = ranks or found
    if len({service.engine for service in ranks}) > 1:
        advice = (
            "several services are running; name one with --url or KVFERRY_URL, or its engine with KVFERRY_ENGINE_NAME: "
            f"{_listed(found)}"
        )
        raise BadSettings([Problem(URL, advice, advice)])
    return [service.url for service in sorted(ranks, key=lambda service: (len(service.name), service.name))]


def _listed(services: Iterable[FoundService]) -> str:
    return ", ".join(f"{service.url} ({service.name})" for service in services)


def _find(layers: Iterable[Layer], name: str) -> RawValue | None:
    """Return the value with the highest precedence."""
    return next((layer[name] for layer in layers if name in layer), None)


def _first(layers: Iterable[Layer], name: str, reader: Callable[[object], str]) -> str | None:
    given = _find(layers, name)
    if given is None:
        return None
    secret = name != URL and given.spelled.lower().endswith(name)
    if given.problem is not None:
        raise BadSettings([value_problem(name, given, given.problem, secret=secret)])
    try:
        return reader(given.value)
    except ValueError as error:
        raise BadSettings([value_problem(name, given, str(error), secret=name != URL)]) from error


def _read_url(value: object) -> str:
    rule = f"must be a URL such as {LOCAL_URL}, without user and password"
    try:
        parts = urlsplit(str(value).strip())
        good = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and "@" not in parts.netloc
        )
    except ValueError as error:
        raise ValueError(rule) from error
    if not good or not parts.geturl().isascii() or not parts.geturl().isprintable() or " " in parts.geturl():
        raise ValueError(rule)
    return parts.geturl().rstrip("/")


def _read_token(value: object) -> str:
    token: SecretStr = secret_token(value)
    return token.get_secret_value()
