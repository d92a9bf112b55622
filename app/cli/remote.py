"""Options and client of the commands that talk to a running service."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvferry.app.client import KVFerryClient

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
CursorOption = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Continue after a page: the next_cursor of its --json.")
]
TtlOption = Annotated[
    float | None, typer.Option("--ttl-s", metavar="SECONDS", help="Time until it expires.", show_default="3600")
]
JsonOption = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON.")]


def connect(url: str | None) -> KVFerryClient:
    """Return a client for `--url`; without it, URL and token come from the environment, `.env` or discovery."""
    from kvferry.app.client import KVFerryClient
    from kvferry.app.settings.connection import find_connection

    found = find_connection(url)
    return KVFerryClient(found.url, found.token)


@contextmanager
def connect_ranks(url: str | None, engine: str | None) -> Iterator[list[KVFerryClient]]:
    """Return clients for all data-parallel ranks of one engine, found as by `connect`."""
    from kvferry.app.client import KVFerryClient
    from kvferry.app.settings.connection import find_ranks

    with ExitStack() as clients:
        found = find_ranks(url, engine=engine)
        yield [clients.enter_context(KVFerryClient(one.url, one.token)) for one in found]


def connect_engine(engine_url: str | None, service: KVFerryClient) -> KVFerryClient:
    """Return a client for the engine's own API, with KVFERRY_ENGINE_API_KEY; the admin token is not sent to another
    address.
    """
    from kvferry.app.client import KVFerryClient
    from kvferry.app.settings.connection import Connection, find_engine

    found = find_engine(engine_url, Connection(service.url, service.token))
    return KVFerryClient(found.url, found.token or "")
