"""Discovery of the service by clients: URL and token, from the sources of settings, without validating the rest.

Without a URL, the service announced in the state folder is used, if only one engine is announced there. If none is, and
no state folder was set, it is the only one of this user on this host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from platformdirs import user_state_path
from pydantic import AfterValidator, Field
from pydantic_settings import SettingsConfigDict

from kvferry.app.common.discovery import FoundService, find_on_host, find_services
from kvferry.app.settings.errors import BadSettings, Problem, value_problem
from kvferry.app.settings.fields import APP_NAME
from kvferry.app.settings.settings import ENV_FILE, TOKENS
from kvferry.app.settings.sources import (
    URL,
    SettingOrigin,
    SettingSource,
    Source,
    SourcedSettings,
    read_sources,
)
from kvferry.app.settings.types import FolderPath, Token, Tokens, Word, split_url, tokens_of

LOCAL_URL = "http://127.0.0.1:8787"
_ARGUMENT = SettingOrigin(Source.RUNTIME, "argument")
_OPTIONS = {"--url": URL, "--engine-url": URL, "--token-file": "admin_token_file"}


def _url(text: str) -> str:
    rule = f"must be a URL such as {LOCAL_URL}, without user and password"
    parts = split_url(text, rule, rule)
    if parts.scheme not in ("http", "https") or not text.isascii() or " " in text:
        raise ValueError(rule)
    return parts.geturl().rstrip("/")


class _ClientSettings(SourcedSettings):
    """What clients need of the settings; all others are ignored, valid or not."""

    model_config = SettingsConfigDict(extra="ignore")

    url: Annotated[Word, AfterValidator(_url)] | None = None
    admin_token: Tokens | None = None
    read_token: Tokens | None = None
    engine_api_key: Token | None = None
    state_dir: FolderPath = Field(default_factory=lambda: user_state_path(APP_NAME))
    engine_name: str | None = None

    @property
    def token(self) -> str | None:
        """The token to send to the service, of two the first."""
        return next(iter(tokens_of(self.admin_token) + tokens_of(self.read_token)), None)

    def check_same_source(self, addresses: Iterable[str], tokens: Iterable[str]) -> None:
        """Raise `BadSettings` for a token that would be sent to an address which only a `.env` file names.

        The file is in the working folder, which may be another user's. Each argument has the strongest name first.
        """
        address, token = self._first_set(addresses), self._first_set(tokens)
        env_file = None if address is None else self._env_file_of(address)
        if address is None or token is None or env_file is None or self._env_file_of(token) == env_file:
            return
        advice = (
            f"the token is from elsewhere, and {env_file} may be another user's; set this as an environment variable, "
            f"put the token into {env_file}, or give --url"
        )
        origin, spelled = self.origin_of(address)
        raise BadSettings([value_problem(address, spelled, str(getattr(self, address)), origin.label, advice)])

    def _first_set(self, names: Iterable[str]) -> str | None:
        return next((name for name in names if self.origin_of(name)[0].source is not Source.DEFAULT), None)

    def _env_file_of(self, name: str) -> str | None:
        """Return the `.env` file that a value comes from, also by a settings file that it names."""
        origin = self.origin_of(name)[0]
        origin = origin.named_by or origin
        return origin.label if origin.source is Source.FILE else None


@dataclass(frozen=True, slots=True)
class Connection:
    """URL of the service, and the token to send; the admin token if there is one.

    `unannounced_in` is the state folder in which no service is announced, if `url` is therefore the local default:
    another user's service may answer there.
    """

    url: str
    token: str | None = field(repr=False)
    unannounced_in: Path | None = None


def find_connection(url: str | None = None, *, token_file: Path | None = None) -> Connection:
    """Return `url`, or KVFERRY_URL, or the only service found, or the local default, with a token.

    The token is that in `token_file`, or KVFERRY_ADMIN_TOKEN, or KVFERRY_READ_TOKEN. Raises `BadSettings`
    for an invalid URL or token, if several services are found, and for a token that is from elsewhere than a `.env`
    file that names the service.
    """
    ranks = find_ranks(url, token_file=token_file)
    if len(ranks) > 1:
        urls = ", ".join(connection.url for connection in ranks)
        advice = f"the engine has {len(ranks)} data-parallel ranks; choose one with --url or KVFERRY_URL: {urls}"
        raise BadSettings([Problem(URL, advice, advice)])
    return ranks[0]


def find_ranks(
    url: str | None = None, engine: str | None = None, *, token_file: Path | None = None
) -> list[Connection]:
    """Find the data-parallel ranks of one engine: the one named `engine` or KVFERRY_ENGINE_NAME, or the only one.

    A URL, given as for `find_connection`, is one rank. Raises `BadSettings` also if several engines are found, or none
    has the name `engine`.
    """
    sources = [] if url and token_file else read_sources(_ClientSettings, {}, ENV_FILE)
    arguments = {"--url": url, "--token-file": None if token_file is None else str(token_file)}
    settings = _with_arguments(sources, arguments)
    if settings.token is not None:
        settings.check_same_source(("state_dir",) if engine is not None else (URL, "state_dir"), TOKENS)
    if engine is None and settings.url is not None:
        return [Connection(settings.url, settings.token)]
    urls = _found_urls(settings, engine)
    return [Connection(url, settings.token) for url in urls] or [
        Connection(LOCAL_URL, settings.token, settings.state_dir)
    ]


def _with_arguments(sources: Iterable[SettingSource], arguments: Mapping[str, object]) -> _ClientSettings:
    given = [(name, value) for name, value in arguments.items() if value]
    return _ClientSettings.read([SettingSource(_ClientSettings, _ARGUMENT, given, _OPTIONS), *sources])


def find_engine(
    url: str | None, service: Connection, option: str = "--engine-url", *, is_found: bool = False
) -> Connection:
    """Return the URL of the engine's own API (`url`, given by `option`, or the service's), and KVFERRY_ENGINE_API_KEY.

    Without a key, the service's token is used only if `url` has the service's scheme, host and port. Raises
    `BadSettings` for an invalid URL or key, and if the service was found without a URL, as `is_found` says, for a key
    that is from elsewhere than a `.env` file that names the service.
    """
    settings = _with_arguments(read_sources(_ClientSettings, {}, ENV_FILE), {option: url})
    engine_url = (settings.url if url else None) or service.url
    key = None if settings.engine_api_key is None else settings.engine_api_key.get_secret_value()
    if is_found and url is None:
        settings.check_same_source((URL, "state_dir"), ("engine_api_key",))
    if key is None and _origin(engine_url) == _origin(service.url):
        key = service.token
    return Connection(engine_url, key)


def _origin(url: str) -> tuple[str, str | None, int]:
    """Return scheme, host and port of a URL."""
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)


def _found_urls(settings: _ClientSettings, engine: str | None) -> list[str]:
    """Return the URLs of the only announced engine in the order of its ranks; empty without announcements."""
    services = find_services(settings.state_dir)
    if not services and settings.origin_of("state_dir")[0].source is Source.DEFAULT:
        services = find_on_host()
    ranks = [service for service in services if service.engine == (engine or settings.engine_name)]
    if engine is not None and not ranks:
        advice = f"no engine named {engine} is announced on this host; running: {_listed(services) or 'none'}"
        raise BadSettings([Problem("engine", advice, advice)])
    ranks = ranks or services
    if len({(service.engine, service.state_dir) for service in ranks}) > 1:
        advice = (
            "several services are running; name one with --url or KVFERRY_URL, or its engine with KVFERRY_ENGINE_NAME: "
            f"{_listed(services)}"
        )
        raise BadSettings([Problem(URL, advice, advice)])
    return [service.url for service in sorted(ranks, key=lambda service: (len(service.name), service.name))]


def _listed(services: Iterable[FoundService]) -> str:
    return ", ".join(f"{service.url} ({service.name})" for service in services)
