"""Connections to Redis: clients, and constant texts for their errors.

`/readyz` needs no token, and messages of the client may contain addresses, user names or parts of commands. Operators
therefore see only the texts of this module.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.credentials import CredentialProvider
from redis.exceptions import RedisClusterException
from redis.retry import Retry

from kvferry.app.tiers.block_store import StoreUnavailable
from kvferry.app.tiers.redis.settings import RedisTierSettings
from kvferry.app.tiers.shared_values import SettingsRefused, StoreFull

Client = redis.Redis | RedisCluster
CLIENT_ERRORS = (redis.RedisError, RedisClusterException, OSError)
Command = tuple[Any, ...]
"""Name and arguments of a command: bytes, text, integers and `Pieces`."""

READ_BYTES = 512 << 10
"""Read from a connection at once. With the client's 32 KiB values of 1 MiB arrive at two thirds of the speed."""


class Pieces(tuple[bytes | memoryview, ...]):
    """A value in pieces, which are sent one after the other and never joined."""

    __slots__ = ()


class _Packer:
    """Packs commands as the client does, except for those with `Pieces`.

    Values of 1 MiB that are joined for the client take twice the processor time to store.
    """

    def __init__(self, others: Any) -> None:
        self._others = others

    def pack(self, *args: Any) -> list[bytes | memoryview]:
        """Return a command as chunks to send."""
        if not any(isinstance(arg, Pieces) for arg in args):
            packed: list[bytes | memoryview] = self._others.pack(*args)
            return packed
        chunks: list[bytes | memoryview] = []
        text = b"*%d\r\n" % len(args)
        for arg in args:
            pieces = arg if isinstance(arg, Pieces) else (arg if isinstance(arg, bytes) else str(arg).encode(),)
            text += b"$%d\r\n" % sum(map(len, pieces))
            for piece in pieces:
                if isinstance(piece, memoryview):
                    chunks += (text, piece)
                    text = b""
                else:
                    text += piece
            text += b"\r\n"
        return [*chunks, text]


class _PasswordUnreadable(redis.AuthenticationError):
    """The password file cannot be read."""


class _PasswordFile(CredentialProvider):
    """Reads the password for each new connection, so that it can be changed without a restart."""

    def __init__(self, path: Path, username: str | None) -> None:
        self._path = path
        self._username = username

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the credentials of a new connection. Raises `redis.AuthenticationError`."""
        try:
            password = self._path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeError) as error:
            raise _PasswordUnreadable("password_file") from error
        return (self._username, password) if self._username else (password,)


def connect(settings: RedisTierSettings, previous: Client | None = None) -> Client:
    """Return a client with a pool of connections and no retries of its own. A cluster is contacted at once.

    Of a cluster, any server that `previous` knew will do: the one in the settings may be down.
    """
    host, port = settings.address
    options: dict[str, Any] = {
        "protocol": 2,
        "socket_connect_timeout": settings.connect_timeout_s,
        "socket_timeout": settings.io_timeout_s,
        "socket_keepalive": True,
        "socket_read_size": READ_BYTES,
        # The client of a cluster calls it after its own preparation of a connection, the other one instead of that.
        "redis_connect_func": _accept_pieces if settings.cluster else _prepare,
        "retry": Retry(NoBackoff(), 0),
    }
    if settings.password_file is not None:
        options["credential_provider"] = _PasswordFile(settings.password_file, settings.username)
    if settings.is_tls:
        files = {
            "ssl_ca_certs": settings.ca_file,
            "ssl_certfile": settings.cert_file,
            "ssl_keyfile": settings.key_file,
        }
        options |= {"ssl": True} | {name: str(path) for name, path in files.items() if path is not None}
    if settings.cluster:
        addresses = {(host, port)}
        if isinstance(previous, RedisCluster):
            addresses |= {(node.host, node.port) for node in previous.get_nodes()}  # type: ignore[no-untyped-call]
        nodes = [ClusterNode(*address) for address in addresses]  # type: ignore[no-untyped-call]
        return RedisCluster(startup_nodes=nodes, require_full_coverage=False, **options)
    return redis.Redis(host=host, port=port, db=settings.database, **options)


def _prepare(connection: Any) -> None:
    connection.on_connect()
    _accept_pieces(connection)


def _accept_pieces(connection: Any) -> None:
    """Have a connection send `Pieces`. Called each time that it connects."""
    if not isinstance(connection._command_packer, _Packer):
        connection._command_packer = _Packer(connection._command_packer)


def primaries(client: Client) -> list[redis.Redis]:
    """Return a client for each server that holds keys. Raises `CLIENT_ERRORS`."""
    if isinstance(client, RedisCluster):
        nodes = client.get_primaries()  # type: ignore[no-untyped-call]
        return [client.get_redis_connection(node) for node in nodes]
    return [client]


def run_pipeline(client: Client, commands: Sequence[Command]) -> list[Any]:
    """Run commands, in order for each server, in one round trip. Raises `StoreUnavailable`.

    An item of the result is an exception if the server refused that command.
    """
    try:
        pipeline: Any = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        results: list[Any] = pipeline.execute(raise_on_error=False)
    except CLIENT_ERRORS as error:
        raise unavailable(error) from None
    for result in results:
        if isinstance(result, Exception):
            # Its frames hold the results and the pool of connections: a cycle, which would outlive the client.
            result.__traceback__ = None
    return results


_REFUSALS = (redis.AuthenticationError, redis.exceptions.NoPermissionError, redis.exceptions.MovedError)


def unavailable(error: BaseException) -> StoreUnavailable:
    """Return a failure with a constant text for an exception of the client."""
    # The client replaces some errors by errors of connections or clusters.
    causes = list(_causes(error))
    if any(isinstance(one, ssl.SSLError) for one in causes):
        return SettingsRefused("TLS with the server failed; see url, ca_file, cert_file, key_file", is_transient=False)
    if str(error).startswith("DB index is out of range"):
        return SettingsRefused("the server has no database of this number; see url", is_transient=False)
    if str(error).startswith("MISCONF"):
        return StoreUnavailable("the server cannot save its data, and refuses writes; see its log", is_transient=False)
    error = next((one for one in causes if isinstance(one, _REFUSALS)), error)
    kind = SettingsRefused if isinstance(error, _REFUSALS) else StoreUnavailable
    if isinstance(error, redis.OutOfMemoryError):
        kind = StoreFull
    for kinds, text, is_transient in _TEXTS:
        if isinstance(error, kinds):
            return kind(text, is_transient=is_transient, needs_probe=isinstance(error, redis.ReadOnlyError))
    return kind("the client of the server failed", is_transient=False)


_TEXTS: tuple[tuple[tuple[type[BaseException], ...], str, bool], ...] = (
    ((_PasswordUnreadable,), "password_file cannot be read", False),
    (
        (redis.AuthenticationError, redis.exceptions.AuthenticationWrongNumberOfArgsError),
        "the server refuses the credentials; see username and password_file",
        False,
    ),
    ((redis.exceptions.NoPermissionError,), "the server does not permit the user a command that the tier needs", False),
    ((redis.exceptions.MovedError,), "the server is one of a cluster; set cluster to true", False),
    ((redis.BusyLoadingError,), "the server is loading its data", True),
    ((redis.ReadOnlyError,), "the server is a read-only replica", False),
    ((redis.OutOfMemoryError,), "the server is full", False),
    ((redis.TimeoutError, TimeoutError), "the server did not answer in time", False),
    ((redis.exceptions.ClusterError, redis.exceptions.TryAgainError), "the cluster is down or being changed", True),
    ((RedisClusterException,), "the cluster cannot be reached, or the server is in none", True),
    ((redis.ConnectionError, OSError), "the server cannot be reached", True),
    ((redis.ResponseError,), "the server refused a command", False),
)
"""Kinds of errors, their text, and whether a call is worth repeating; the first that matches counts."""


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
