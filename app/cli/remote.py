"""Options and client of the commands that talk to a running service, and how their answers are printed."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias
from urllib.parse import quote

import typer

from kvferry.app.cli.console import ExitCode, finite, moment, note, print_json, widen, words
from kvferry.app.cli.tables import Json, show_answer

if TYPE_CHECKING:
    from kvferry.app.client import KVFerryClient
    from kvferry.app.settings.connection import Connection

Command = Callable[..., Any]
Service: TypeAlias = "KVFerryClient"
"""The client of a service, which commands import when they run."""

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
SinceOption = Annotated[
    str | None,
    typer.Option(callback=moment, metavar="WHEN", help="From this time on, or within the last 15m, 2h, 1d."),
]
TierOption = Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only this tier; may be repeated.")]
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


@dataclass(frozen=True, slots=True)
class Result:
    """An answer that a command prints in another way than usual, or with another exit code."""

    answer: Json
    show: Callable[[Any], object] | None = None
    code: ExitCode = ExitCode.OK


Answer = Json | Result


def answers(
    *columns: str,
    spare: Sequence[str] = (),
    empty: str = "nothing to show",
    show: Callable[[Any], object] | None = None,
) -> Callable[[Command], Command]:
    """Add `--json` to a command, and print what it returns: as JSON, or for people by `show` or `show_answer`.

    A command with the parameter `service` or `url` is also `connected`.
    """

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(*, as_json: bool = False, **options: Any) -> ExitCode:
            answer = command(**options)
            if answer is None:
                return ExitCode.OK
            result = answer if isinstance(answer, Result) else Result(answer)
            if as_json:
                print_json(result.answer)
            elif shown := result.show or show:
                shown(result.answer)
            else:
                show_answer(result.answer, *columns, spare=spare, empty=empty)
            return result.code

        return _with_options(run, command, {"as_json": (JsonOption, False)})

    return lambda command: connected(decorate(command)) if _names(command) & {"service", "url"} else decorate(command)


def connected(command: Command) -> Command:
    """Add `--url`, `--token-file` and `--wide` to a command, connect, and pass the client as its parameter `service`.

    With a parameter `url` instead it connects itself.
    """
    names = _names(command)

    @functools.wraps(command)
    def run(*, url: str | None = None, token_file: Path | None = None, wide: bool = False, **options: Any) -> Any:
        _token_file.set(token_file)
        if wide:
            widen()
        if "service" not in names:
            return command(url=url, **options)
        with connect(url) as service:
            return command(service=service, **options)

    options = {"url": (UrlOption, None), "token_file": (TokenFileOption, None), "wide": (WideOption, False)}
    return _with_options(run, command, options, hidden="service")


def _names(command: Command) -> set[str]:
    return set(inspect.signature(command).parameters)


def _with_options(
    run: Command, command: Command, options: Mapping[str, tuple[Any, Any]], hidden: str | None = None
) -> Command:
    """Give `run` the parameters that Typer reads: those of `command`, and options by name, with type and default."""
    parameters = dict(inspect.signature(command, eval_str=True).parameters)
    for name, (type_, default) in options.items():
        added = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=type_)
        parameters.setdefault(name, added)
    parameters.pop(hidden or "", None)
    run.__signature__ = inspect.Signature(list(parameters.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in parameters.items()}
    return run


def connect(url: str | None) -> Service:
    """Return a client for `--url`, with the token of `--token-file`.

    What is not given comes from the environment, `.env` or discovery.
    """
    return _client(find(url))


def find(url: str | None) -> Connection:
    """Return where `connect` connects to."""
    from kvferry.app.settings.connection import find_connection

    return find_connection(url, token_file=_token_file.get())


def _client(service: Connection) -> Service:
    from kvferry.app.client import KVFerryClient

    if service.unannounced_in is not None:
        note(f"no service is announced in {service.unannounced_in}: using {service.url}")
    return KVFerryClient(service.url, service.token)


@contextmanager
def connect_ranks(url: str | None, engine: str | None) -> Iterator[list[Service]]:
    """Return clients for all data-parallel ranks of one engine, found as by `connect`."""
    from kvferry.app.settings.connection import find_ranks

    with ExitStack() as clients:
        ranks = find_ranks(url, engine=engine, token_file=_token_file.get())
        yield [clients.enter_context(_client(one)) for one in ranks]


def read_ready(client: Service) -> Json:
    """Return what `/readyz` answers, ready or not."""
    from kvferry.app.client import Refused

    try:
        return client.get("/readyz")
    except Refused as error:
        return error.problem


def read_problems(client: Service) -> list[str]:
    """Return why the service is not ready, and what does less than it should, each with the word for it."""
    answer = read_ready(client)
    problems = {"not ready": answer.get("reasons"), "degraded": answer.get("degraded")}
    return [f"{part}: {words(text)}" for part, texts in problems.items() for text in texts or []]


def connect_engine(engine_url: str | None, service: Service, *, is_found: bool) -> Service:
    """Return a client for the engine's own API, with KVFERRY_ENGINE_API_KEY; the admin token is not sent to another
    address. `is_found`: the service was found without `--url`.
    """
    from kvferry.app.client import KVFerryClient
    from kvferry.app.settings.connection import Connection, find_engine

    connection = find_engine(engine_url, Connection(service.url, service.token), is_found=is_found)
    return KVFerryClient(connection.url, connection.token)
