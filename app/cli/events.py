"""`kvferry events`: live events of the cache."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from typing import Annotated, Any

import typer
from rich.text import Text

from kvferry.app.cli.console import ExitCode, Failed, count, out, print_json_line, words
from kvferry.app.cli.remote import JsonOption, Service, connected

HIDDEN = ("type", "time", "blocks", "hashes")


@connected
def events(
    service: Service,
    type_: Annotated[
        list[str] | None,
        typer.Option("--type", metavar="NAME", help="Only events of this type, such as evicted; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show events of the cache and changes by operators, one line per event, until Ctrl-C."""
    try:
        with closing(service.events("events", type=type_ or [])) as stream:
            for event in stream:
                if as_json:
                    print_json_line(event)
                else:
                    out.print(_line(event), soft_wrap=True)
    except KeyboardInterrupt:
        return
    raise Failed("stream ended by the server", ExitCode.UNREACHABLE)


def _line(event: Mapping[str, Any]) -> Text:
    """Format an event for people, without hashes."""
    time = words(event.get("time")).replace("T", " ").removesuffix("Z")
    parts = [f"{count(event['blocks'])} blocks"] if "blocks" in event else []
    parts += [f"{name}={words(value)}" for name, value in event.items() if name not in HIDDEN and value is not None]
    return Text.assemble((f"{time}  ", "dim"), f"{words(event.get('type')):<10}", " ".join(parts))
