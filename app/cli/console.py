"""Output of all commands: results on stdout, messages on stderr, exit codes."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from enum import IntEnum
from operator import gt
from types import FrameType
from typing import Any, TypeVar

import typer
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

T = TypeVar("T")

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command early."""

_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_SPAN_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
PADDING = 2
"""Spaces between the columns of a table."""
WORD_CHARS, NAME_CHARS = 12, 9
"""Words of up to so many characters, such as dates, stay whole; of longer ones, ids, so many are shown at least."""
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
        return super().render(_clean(renderable), options)


class _OwnLines:
    """Several lines made by kvferry, such as JSON."""

    def __init__(self, text: str) -> None:
        self._lines = text.removesuffix("\n").split("\n")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterable[Segment]:
        """Yield the lines as they are, however long."""
        yield Segment("\n".join(map(one_line, self._lines)) + "\n")


def _clean(cell: RenderableType) -> RenderableType:
    """Return a text without what `one_line` replaces; anything else unchanged."""
    if isinstance(cell, str):
        return one_line(cell)
    if isinstance(cell, Text) and not cell.plain.isprintable():
        cell = cell.copy()
        cell.plain = one_line(cell.plain)
    return cell


# No markup and no emoji codes, for the same reason.
out = _Output(
    highlight=False,
    markup=False,
    emoji=False,
    width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH,
)
err = _Output(stderr=True, highlight=False, markup=False, emoji=False)


SOURCES = {"device_hit": "device", "host_hit": "pool", "tier_hit": "tiers", "recomputed": "computed"}
"""What served prompt tokens, in the words of the glossary: tables and the dashboard use the same."""


def end_on_signals() -> None:
    """Let SIGTERM and SIGHUP raise `KeyboardInterrupt`, as Ctrl-C does. `nohup` has made SIGHUP ignored."""
    for number in INTERRUPTS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def run_async(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run what `work` returns on an event loop of its own, like `asyncio.run`.

    Ctrl-C, and each of `INTERRUPTS` that has a handler, cancels it, and the end raises `KeyboardInterrupt`. Raised
    where the signal arrives, it could leave half an event loop, whose destructor prints a traceback.
    """
    import asyncio

    interrupted = False
    task: asyncio.Task[T] | None = None

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        if task is not None and not task.done():
            task.get_loop().call_soon_threadsafe(task.cancel)

    async def main() -> T:
        nonlocal task
        task = asyncio.current_task()
        if interrupted:
            raise asyncio.CancelledError
        return await work()

    handlers = {number: signal.getsignal(number) for number in INTERRUPTS}
    try:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, interrupt)
        with asyncio.Runner() as runner:
            result = runner.run(main())
    except asyncio.CancelledError:
        if not interrupted:
            raise
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if interrupted:
        raise KeyboardInterrupt
    return result


class ExitCode(IntEnum):
    """Exit codes of commands."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3


def complain(message: str) -> None:
    """Print an error on stderr."""
    err.print(Text.assemble(("kvferry: ", "bold red"), message), soft_wrap=True)


def note(message: str) -> None:
    """Print a note on stderr."""
    err.print(Text(message, style="dim"), soft_wrap=True)


def widen() -> None:
    """Print tables as wide as their texts."""
    out.width = _PIPE_WIDTH


def note_more(answer: Mapping[str, Any]) -> None:
    """Note how to see the rest, if a page is not the last one."""
    if answer["next_cursor"] is not None:
        note("there are more; raise --limit, or continue with --cursor and the next_cursor of --json")


def print_lines(text: str, console: Console = out) -> None:
    """Print lines made by kvferry, on stdout by default."""
    console.print(_OwnLines(text), crop=False)


def print_json(value: object) -> None:
    """Print one indented JSON document on stdout."""
    # In ASCII: neither the encoding of the locale nor `one_line` changes a value.
    print_lines(json.dumps(value, indent=2))


def print_answer(answer: Any, as_json: bool, render: Callable[[Any], object]) -> None:
    """Print an answer of the service as JSON, or as `render` prints it for people."""
    if as_json:
        print_json(answer)
    else:
        render(answer)


def print_json_line(value: object) -> None:
    """Print one JSON document on one line, for streams."""
    print_lines(json.dumps(value))
    out.file.flush()


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return an empty table in the common style. `right` names the columns with numbers."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, PADDING, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def fitted_table(
    rows: Iterable[Sequence[str | Text]], *columns: str, right: tuple[str, ...] = (), header: bool = True
) -> Table:
    """Return a table that fits the output; columns with an empty name have no header."""
    cells = [[_clean(cell) for cell in row] for row in rows]
    available = out.width - PADDING * (len(columns) - 1)
    texts = [[name, *(str(row[at]) for row in cells)] for at, name in enumerate(columns)]
    widths = _widths(texts, [name in right for name in columns], available)
    table = new_table(*columns, right=right)
    table.show_header = header and any(columns)
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    for row in cells:
        table.add_row(*(_fit(cell, width) for cell, width in zip(row, widths, strict=True)))
    return table


def print_table(
    rows: Iterable[Sequence[str | Text]], *columns: str, right: tuple[str, ...] = (), header: bool = True
) -> None:
    """Print a table; see `fitted_table`."""
    out.print(fitted_table(rows, *columns, right=right, header=header))


def _widths(texts: Sequence[Sequence[str]], is_right: Sequence[bool], available: int) -> list[int]:
    """Return widths of columns that fit: text is wrapped, then ids are cut; numbers stay with their units."""

    def longest(column: Sequence[str]) -> int:
        return max(cell_len(word) for text in column for word in text.split() or [""])

    widths = [max(map(cell_len, column)) for column in texts]
    wrapped = [
        width if right else longest(column) for column, right, width in zip(texts, is_right, widths, strict=True)
    ]
    cut = [
        least if right or least <= WORD_CHARS else max(NAME_CHARS, longest(column[:1]))
        for least, column, right in zip(wrapped, texts, is_right, strict=True)
    ]
    for leasts in (wrapped, cut, [1] * len(widths)):
        while sum(widths) > available and any(map(gt, widths, leasts)):
            widest = max((at for at, width in enumerate(widths) if width > leasts[at]), key=widths.__getitem__)
            widths[widest] -= 1
    return widths


def _fit(cell: RenderableType, width: int) -> RenderableType:
    """Return a text with ids and hashes cut in the middle that do not fit, but with whole paths and URLs."""
    if not isinstance(cell, (str, Text)) or cell_len(str(cell)) <= width:
        return cell
    text = " ".join(
        word if cell_len(word) <= max(width, WORD_CHARS) or "/" in word else _cut(word, width)
        for word in str(cell).split(" ")
    )
    return Text(text, cell.style) if isinstance(cell, Text) else text


def _cut(word: str, width: int) -> str:
    end = (width - 1) // 2
    return f"{word[: width - 1 - end]}…{word[len(word) - end :]}"


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


def unreadable(item: Mapping[str, Any]) -> str:
    """Return what is shown for a row of the database that was changed by hand to values that cannot be read."""
    return f"row {item['id']} is unreadable: {words(item['unreadable'])}"


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
