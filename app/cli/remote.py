"""Options and client of the commands that talk to a running service."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from kvferry.app.cli.console import finite, note, widen, words

if TYPE_CHECKING:
    from kvferry.app.client import KVFerryClient
    from kvferry.app.settings.connection import Connection

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="URL of the service.",
        show_default="KVFERRY_URL, else a discovered service, else http://127.0.0.1:8787",
    ),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        metavar="NAME",
        help="Name of the engine, if several run on this host.",
        show_default="KVFERRY_ENGINE_NAME, else the only one",
    ),
]
BlockTokensOption = Annotated[
    int | None,
    typer.Option(
        metavar="N", min=1, max=65_536, help="Tokens of a block of a trace that does not say it.", show_default="512"
    ),
]
LimitOption = Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Maximum number.")]
CursorOption = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Continue after a page: the next_cursor of its --json.")
]
TtlOption = Annotated[
    float | None,
    typer.Option("--ttl-s", callback=finite, metavar="SECONDS", help="Time until it expires.", show_default="3600"),
]
JsonOption = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")]
TokenFileOption = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        help="File with the token.",
        show_default="KVFERRY_ADMIN_TOKEN or KVFERRY_READ_TOKEN, or the file that one of these with _FILE names",
    ),
]
WideOption = Annotated[
    bool, typer.Option("--wide", metavar="", help="Print ids and hashes whole, however wide the terminal is.")
]
_token_file: ContextVar[Path | None] = ContextVar("token_file", default=None)
"""`--token-file` of the command that runs."""


def path_to(collection: str, name: str, part: str = "") -> str:
    """Return the path of a thing that a user names, or of a part of it."""
    return f"{collection}/{quote(name, safe='')}{part and '/' + part}"


def add_common_options(app: typer.Typer) -> None:
    """Add `--token-file` and `--wide` to the commands that have `--url`, which is how they reach a service."""
    for command in app.registered_commands:
        if command.callback is not None and "url" in inspect.signature(command.callback).parameters:
            command.callback = _with_common_options(command.callback)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            add_common_options(group.typer_instance)


def _with_common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(command)
    def run(*, token_file: Path | None = None, wide: bool = False, **options: Any) -> Any:
        _token_file.set(token_file)
        if wide:
            widen()
        return command(**options)

    # Typer reads the options of a command from its signature, and resolves names where the command is defined.
    keyword = inspect.Parameter.KEYWORD_ONLY
    options = [
        inspect.Parameter("token_file", keyword, default=None, annotation=TokenFileOption),
        inspect.Parameter("wide", keyword, default=False, annotation=WideOption),
    ]
    signature = inspect.signature(command, eval_str=True)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), *options])  # type: ignore[attr-defined]
    return run


def connect(url: str | None) -> KVFerryClient:
    """Return a client for `--url`, with the token of `--token-file`.

    What is not given comes from the environment, `.env` or discovery.
    """
    from kvferry.app.settings.connection import find_connection

    connection = find_connection(url, token_file=_token_file.get())
    return _client(connection)


def connect_announced() -> KVFerryClient | None:
    """Return a client as `connect` does without `--url`, but None where no service is announced on this host."""
    from kvferry.app.settings.connection import find_connection

    connection = find_connection(token_file=_token_file.get())
    return _client(connection) if connection.unannounced_in is None else None


def _client(service: Connection) -> KVFerryClient:
    from kvferry.app.client import KVFerryClient

    if service.unannounced_in is not None:
        note(f"no service is announced in {service.unannounced_in}: using {service.url}")
    return KVFerryClient(service.url, service.token)


@contextmanager
def connect_ranks(url: str | None, engine: str | None) -> Iterator[list[KVFerryClient]]:
    """Return clients for all data-parallel ranks of one engine, found as by `connect`."""
    from kvferry.app.settings.connection import find_ranks

    with ExitStack() as clients:
        ranks = find_ranks(url, engine=engine, token_file=_token_file.get())
        yield [clients.enter_context(_client(one)) for one in ranks]


def read_problems(client: KVFerryClient) -> list[str]:
    """Return why the service is not ready, and what does less than it should, each with the word for it."""
    from kvferry.app.client import Refused

    try:
        answer = client.get("/readyz")
    except Refused as error:
        answer = error.problem
    problems = {"not ready": answer.get("reasons"), "degraded": answer.get("degraded")}
    return [f"{part}: {words(text)}" for part, texts in problems.items() for text in texts or []]


def connect_engine(engine_url: str | None, service: KVFerryClient, *, is_found: bool) -> KVFerryClient:
    """Return a client for the engine's own API, with KVFERRY_ENGINE_API_KEY; the admin token is not sent to another
    address. `is_found`: the service was found without `--url`.
    """
    from kvferry.app.client import KVFerryClient
    from kvferry.app.settings.connection import Connection, find_engine

    connection = find_engine(engine_url, Connection(service.url, service.token), is_found=is_found)
    return KVFerryClient(connection.url, connection.token)
