"""What the commands that talk to a running service have in common: `--url`, `--json`, and the client."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from app.client import KVFerryClient

UrlOption = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Where the service is.",
        show_default="KVFERRY_URL, else the one found, else http://127.0.0.1:8787",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", metavar="", help="Print JSON, for programs.")]


def connect(url: str | None) -> KVFerryClient:
    """A client for `--url`, with the URL and token of the environment or `.env` where none is given."""
    from app.client import KVFerryClient
    from app.settings.connection import find_connection

    found = find_connection(url)
    return KVFerryClient(found.url, found.token)


def connect_engine(engine_url: str | None, service: KVFerryClient) -> KVFerryClient:
    """A client for the engine's own API, with KVFERRY_ENGINE_API_KEY; the service's token stays at its own address."""
    from app.client import KVFerryClient
    from app.settings.connection import Connection, find_engine

    found = find_engine(engine_url, Connection(service.url, service.token))
    return KVFerryClient(found.url, found.token or "")
