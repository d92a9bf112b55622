"""Output of all commands: results on stdout, messages on stderr, exit codes."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from typing import Any, TypeVar

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

T = TypeVar("T")

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command early."""

_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SPAN_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_PIPE_WIDTH = 4096
"""Width of output that is not to a terminal: a row stays on one line, for `grep` and `cut`."""


def one_line(text: str) -> str:
    """Replace characters that would control a terminal or begin a new line."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


class _Output(Console):
    """A console that prints each text on one line, without control codes in it: many texts come from servers and
    clients.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Override: texts are cleaned, of tables and groups too."""
        return super().render(clean(renderable), options)


class _OwnLines:
    """Several lines made by kvferry, such as JSON."""

    def __init__(self, text: str) -> None:
        self._lines = text.removesuffix("\n").split("\n")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        """Yield the lines as they are, however long."""
        yield Segment("\n".join(map(one_line, self._lines)) + "\n")


def clean(cell: RenderableType) -> RenderableType:
    """Return a text without what `one_line` replaces; anything else unchanged."""
    if isinstance(cell, str):
        return one_line(cell)
    if isinstance(cell, Text) and not cell.plain.isprintable():
        cell = cell.copy()
        cell.plain = one_line(cell.plain)
    return cell


def new_console(**options: Any) -> Console:
    """Return a console without markup and emoji codes: many texts come from servers and clients."""
    return _Output(highlight=False, markup=False, emoji=False, **options)


out = new_console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH)
err = new_console(stderr=True)


SOURCES = {"device_hit": "device", "host_hit": "pool", "tier_hit": "tiers", "recomputed": "computed"}
"""What served prompt tokens, in the words of the glossary: tables and the dashboard use the same."""
COLORS = {"device_hit": "blue", "host_hit": "green", "tier_hit": "yellow", "recomputed": "bright_black"}
"""Colors of sources and of what belongs to them, those of the dashboard (`--device` and so on in its style.css)."""


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise `KeyboardInterrupt`, as Ctrl-C does. `nohup` has made SIGHUP ignored."""
    for number in INTERRUPTS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def run_async(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run what `work` returns on an event loop of its own; `INTERRUPTS` cancel it, and then raise `KeyboardInterrupt`.

    Raised where a signal other than Ctrl-C arrives, that could leave tasks which are never awaited.
    """
    import asyncio

    async def main() -> T:
        task = asyncio.create_task(work())
        for number in INTERRUPTS[1:]:
            # `nohup` has made SIGHUP ignored.
            if signal.getsignal(number) is not signal.SIG_IGN:
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        return await task

    try:
        return asyncio.run(main())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        end_on_signals()


class ExitCode(IntEnum):
    """Exit codes of commands."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3


class Failed(Exception):
    """A command cannot do its work; each line of the message is printed."""

    def __init__(self, message: str, code: ExitCode = ExitCode.REFUSED) -> None:
        self.code = code
        super().__init__(message)


def complain(message: str) -> None:
    """Print an error on stderr."""
    err.print(Text.assemble(("kvferry: ", "bold red"), message), soft_wrap=True)


def note(message: str) -> None:
    """Print a note on stderr."""
    err.print(Text(message, style="dim"), soft_wrap=True)


def confirm(effect: str, question: str, command: str) -> None:
    """Note what a command is about to do, and ask; raises `typer.Abort` for no. Refused without a terminal."""
    if not sys.stdin.isatty():
        raise typer.BadParameter(f"{effect}; confirm with --yes", param_hint=command)
    note(effect)
    typer.confirm(question, abort=True, err=True)


def widen() -> None:
    """Print tables as wide as their texts."""
    out.width = _PIPE_WIDTH


def print_lines(text: str, console: Console = out) -> None:
    """Print lines made by kvferry, on stdout by default."""
    console.print(_OwnLines(text), crop=False)


def print_json(value: object) -> None:
    """Print one indented JSON document on stdout."""
    # In ASCII: neither the encoding of the locale nor `one_line` changes a value.
    print_lines(json.dumps(value, indent=2))


def print_json_line(value: object) -> None:
    """Print one JSON document on one line, for streams."""
    print_lines(json.dumps(value))
    out.file.flush()


def words(value: object) -> str:
    """Format a JSON value as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value):
        value = json.dumps(value, ensure_ascii=False)
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or "none"
    if isinstance(value, Mapping):
        value = json.dumps(value, ensure_ascii=False)
    return one_line(str(value))


def as_written(name: str, value: object) -> str:
    """Format the value of a field as it is written in settings and files."""
    from kvferry.app.settings.types import format_size

    return format_size(value) if name.endswith("_bytes") and isinstance(value, int) else words(value)


def count(number: object) -> str:
    """Format a count with thousands separators."""
    return f"{number:,}" if isinstance(number, (int, float)) else words(number)


def size(num_bytes: float) -> str:
    """Format bytes in a readable unit."""
    number = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def duration(seconds: float) -> str:
    """Format a time span in its two largest units."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes}m" if hours < 48 else f"{hours // 24}d {hours % 24}h"


def percentage(part: float, whole: float) -> str:
    """Format a part as a percentage."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def shares(parts: Mapping[str, float]) -> str:
    """Format what each part has of the sum as a percentage."""
    return ", ".join(f"{percentage(part, sum(parts.values()))} {name}" for name, part in parts.items())


def moment(text: str | None) -> str | None:
    """Return an RFC 3339 time unchanged, and a span such as `15m` as the time that long ago."""
    if text is None:
        return None
    match = _SPAN.fullmatch(text.strip())
    try:
        if match:
            moment = datetime.now(UTC) - timedelta(seconds=float(match[1]) * _SPAN_UNITS_S[match[2]])
        else:
            moment = datetime.fromisoformat(text.strip())
            moment = moment.astimezone() if moment.tzinfo is None else moment
    except (ValueError, OverflowError):
        raise typer.BadParameter(f"{text!r}: must be a time or a span such as 15m, 2h or 1d") from None
    return moment.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def finite(number: float | None) -> float | None:
    """Return the number of an option; raises for those that are none, or infinite."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter(f"{number}: must be a finite number")
    return number
