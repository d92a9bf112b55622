"""What every command prints through: results on stdout, the rest on stderr, and the exit codes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

# No markup: much of what is printed are names that others chose.
out = Console(highlight=False, markup=False)
err = Console(stderr=True, highlight=False, markup=False)


class ExitCode(IntEnum):
    """How a command ends."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3


def complain(message: str) -> None:
    """Say what went wrong, in plain words on stderr."""
    err.print(Text.assemble(("kvferry: ", "bold red"), message), soft_wrap=True)


def note(message: str) -> None:
    """Say something on stderr that is no failure."""
    err.print(Text(message, style="dim"), soft_wrap=True)


def print_json(value: object) -> None:
    """One JSON document on stdout, indented for a person who looks at it anyway."""
    out.out(json.dumps(value, indent=2, ensure_ascii=False))


def print_json_line(value: object) -> None:
    """One JSON document on one line, for streams."""
    out.out(json.dumps(value, ensure_ascii=False))
    out.file.flush()


def new_table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """An empty table in the one style that commands use. `right` names the columns of numbers."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def words(value: object) -> str:
    """A JSON value in words."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ", ".join(str(item) for item in value) or "none"
    if isinstance(value, Mapping):
        value = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in str(value))


def count(number: object) -> str:
    """A count with its thousands apart."""
    return f"{number:,}" if isinstance(number, (int, float)) else words(number)


def size(num_bytes: float) -> str:
    """Bytes in the unit that reads best."""
    number = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def duration(seconds: float) -> str:
    """A time span in the two units that matter."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h {minutes}m" if hours < 48 else f"{hours // 24}d {hours % 24}h"


def share(part: float, whole: float) -> str:
    """A part as a percentage."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def sourced_rows(fields: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Name, value and source of each field of a policy answer."""
    return [
        (name, words(item["value"]), words(item.get("source")))
        for name, item in fields.items()
        if isinstance(item, Mapping) and "value" in item
    ]
