"""`kvferry get`: any answer of the API."""

from __future__ import annotations

from typing import Annotated

import typer

from kvferry.app.cli.remote import Answer, Service, answers

_STREAMS = ("/events", "/stream")


@answers()
def get(
    service: Service,
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH", help="Such as /admin/v1/slots/map, or evictions?limit=5, which is below /admin/v1/."
        ),
    ],
) -> Answer:
    """Show what the API answers to GET; its paths are listed under /docs of the service."""
    if path.partition("?")[0].endswith(_STREAMS):
        raise typer.BadParameter(
            f"{path!r}: is a stream, which does not end; use kvferry events or kvferry stats --watch",
            param_hint="PATH",
        )
    return service.get(path)
