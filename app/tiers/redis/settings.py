"""Settings of a tier of type `redis`."""

from __future__ import annotations

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, SecretStr, model_validator

from kvferry.app.settings.tiers import ServerSettings
from kvferry.app.settings.types import FilePath, Flag, Name, Word, split_url

_SCHEMES = ("redis", "rediss")
DEFAULT_PORT = 6379


def _url(value: object) -> SecretStr:
    """Parse the URL of a server. The value is masked in errors, since it may contain a password."""
    rule = "must be redis://HOST:PORT or rediss://HOST:PORT (TLS), with /NUMBER for a database other than 0"
    parts = split_url(
        value,
        rule,
        "must not contain a user or password, since URLs end up in logs: set username, and put the password into a "
        "file that password_file names",
    )
    database = parts.path.removeprefix("/")
    if parts.scheme not in _SCHEMES or (database and not (database.isascii() and database.isdigit())):
        raise ValueError(rule)
    return SecretStr(parts.geturl())


class RedisTierSettings(ServerSettings):
    """An entry of TIERS of type `redis`. `RedisStore.probe` checks that the server's maxmemory or `ttl_s` bounds it."""

    limits = "maxmemory in the server, or ttl_s"

    url: Annotated[SecretStr, BeforeValidator(_url)] = Field(
        description="URL of the server, or of one server of a cluster; `rediss://` for TLS"
    )
    cluster: Flag = Field(default=False, description="whether the server is in a cluster")
    username: Word | None = Field(default=None, description="user, if not the default one")
    password_file: FilePath | None = Field(
        default=None, description="file with the password, read again for each new connection"
    )
    ca_file: FilePath | None = Field(default=None, description="certificates that the server's is verified with")
    cert_file: FilePath | None = Field(default=None, description="certificate of this client")
    key_file: FilePath | None = Field(default=None, description="key of this client's certificate")
    prefix: Name = Field(default="kvferry", description="first part of all keys in the server")

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.username and not self.password_file:
            raise ValueError("username needs password_file")
        if not self.is_tls and (self.ca_file or self.cert_file or self.key_file):
            raise ValueError("ca_file, cert_file and key_file need a url that begins with rediss://")
        if self.key_file and not self.cert_file:
            raise ValueError("key_file needs cert_file")
        if self.cluster and self.database:
            raise ValueError("a cluster has only database 0; leave the number out of url")
        return self

    @property
    def is_tls(self) -> bool:
        """Whether connections are encrypted."""
        return urlsplit(self.url.get_secret_value()).scheme == "rediss"

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(self.url.get_secret_value())
        return parts.hostname or "", parts.port or DEFAULT_PORT

    @property
    def database(self) -> int:
        """Number of the database."""
        return int(urlsplit(self.url.get_secret_value()).path.removeprefix("/") or 0)
