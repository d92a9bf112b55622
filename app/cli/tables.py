"""Tables and listings of JSON answers, made from the names of their fields."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from operator import gt, ne
from typing import Any

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvferry.app.cli.console import SOURCES, clean, count, duration, note, out, size, words

PADDING = 2
"""Spaces between the columns of a table."""
WORD_CHARS, NAME_CHARS = 16, 9
"""Words of up to so many characters, such as digests, stay whole; of longer ones, ids, so many are shown at least."""
MAX_LISTED = 20
"""Items of a list within a value that are shown."""
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
_UNIT = re.compile("(_s|seconds|bytes|rate|fraction|share)$")
_LABELS = SOURCES | {"host_tokens": "pool tokens", "recomputed_tokens": "computed tokens"}
_NO_SEPARATORS = ("port", "pid", "seed", "used_by")
"""Fields with numbers that are no amounts."""

Json = Mapping[str, Any]
Values = list[tuple[str, str]]
Lists = list[tuple[str, Sequence[Json]]]


def show_answer(answer: Json, *columns: str, spare: Sequence[str] = (), empty: str = "nothing to show") -> None:
    """Print an answer of the service for people: a page as a table, anything else as a listing.

    Args:
        answer: The object that the API answered.
        columns: Fields of a page's items that make its table, in this order; a part of a field is named `field.part`.
            Without them, all fields are shown. Fields without a value in any item are left out.
        spare: Those of the columns that are left out, one after the other, where the table does not fit the output.
        empty: What is noted for a page without items.
    """
    name, items = _page_of(answer)
    if name is None:
        _print_listing(answer)
        return
    rest = {} if columns else {field: value for field, value in answer.items() if field not in (name, "next_cursor")}
    _print_listing(rest)
    if items:
        show_items(items, *columns, spare=spare)
    else:
        note(empty)
    if answer.get("next_cursor") is not None:
        note(f"there are more: raise the limit, or continue with cursor {words(answer['next_cursor'])}")


def show_items(items: Sequence[Json], *columns: str, spare: Sequence[str] = ()) -> None:
    """Print objects as a table, see `show_answer`."""
    out.print(items_table(items, *columns, spare=spare))


def items_table(items: Sequence[Json], *columns: str, spare: Sequence[str] = ()) -> RenderableType:
    """Return objects as a table, see `show_answer`; one below the other if their table does not fit the output."""
    paths = columns or tuple(dict.fromkeys(path for item in items for path in item))
    values = [[_part(item, path) if columns else item.get(path) for path in paths] for item in items]
    shown = [at for at in range(len(paths)) if not at or any(row[at] is not None for row in values)]
    # Only the columns are paths; a field of an answer may have a dot in its name.
    fields = [path.rpartition(".")[2] if columns else path for path in paths]
    names = [label(fields[at]) for at in shown]
    right = [all(_is_amount(row[at]) for row in values) for at in shown]
    rows = [[cell(fields[at], row[at]) for at in shown] for row in values]
    table = fitted_table(rows, *names, right=right)
    if table is not None:
        return table
    if spare:
        return items_table(items, *(path for path in columns if path != spare[0]), spare=spare[1:])
    return Group(*(part for row in rows for part in (_listing(zip(names, row, strict=True)), Text())))


def _page_of(answer: Json) -> tuple[str | None, Sequence[Json]]:
    """Return the list of objects that the answer is about and its field, which is None if there is no such list."""
    if "columns" in answer and "rows" in answer:
        return "rows", [dict(zip(answer["columns"], row, strict=True)) for row in answer["rows"]]
    if isinstance(answer.get("items"), list):
        return "items", answer["items"]
    return None, ()


def _print_listing(answer: Json) -> None:
    """Print one value a line, and the lists of objects among them as tables."""
    values, lists = _flat(answer)
    if values:
        out.print(_listing(values))
    for name, items in lists:
        out.print()
        out.print(Text(name, "bold"))
        show_items(items)


def _listing(values: Iterable[tuple[str, str]]) -> Table:
    """Return names and values, one a line."""
    return table_of([*values], "", "", right=[False, False])


def _flat(answer: Json, prefix: str = "", unit: str = "") -> tuple[Values, Lists]:
    """Return the values of an object and of those in it, with their names, and its lists of objects."""
    values: Values = []
    lists: Lists = []
    for field, value in answer.items():
        name = f"{prefix}{label(field)}"
        if isinstance(value, Mapping) and value and not _is_sourced(value):
            # The fields of `first_token_s` are seconds.
            more_values, more_lists = _flat(value, f"{name} ", field if _UNIT.search(field) else "")
            values += more_values
            lists += more_lists
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            lists.append((name, value))
        else:
            values.append((name, cell(field if _UNIT.search(field) else unit or field, value)))
    return values, lists


def _part(item: Json, path: str) -> Any:
    value: Any = item
    for name in path.split("."):
        # In an answer of the service, a missing field raises an error that says what may be wrong.
        value = value[name]
    return value


def _is_amount(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _is_sourced(value: Json) -> bool:
    return "value" in value and not isinstance(value["value"], Mapping)


def label(name: str) -> str:
    """Return the name of a field in words. Seconds have their unit at the value."""
    if name in _LABELS:
        return _LABELS[name]
    for unit in ("_per_s", "_s"):
        name = name.removesuffix(unit)
    return name.removeprefix("num_").replace("_", " ")


def cell(name: str, value: Any) -> str:
    """Format the value of a field; its unit follows from the field's name."""
    if isinstance(value, bool) or value is None:
        return words(value)
    if isinstance(value, (int, float)):
        return _amount(name, value)
    if isinstance(value, Mapping):
        return _pairs(name, value)
    if isinstance(value, list):
        shown = [cell(name, item) for item in islice(value, MAX_LISTED)]
        more = [f"... ({count(len(value))} in all)"] * (len(value) > MAX_LISTED)
        return ", ".join(shown + more) or "-"
    text = str(value)
    return text.replace("T", " ")[:19] if _TIME.fullmatch(text) else words(text)


def _amount(name: str, value: float) -> str:
    if name.endswith("_per_s"):
        return f"{value:,.0f}/s"
    if name.endswith(("_s", "seconds")):
        return duration(value)
    if name.endswith("bytes") or name == "size":
        return size(value)
    if name.endswith(("rate", "fraction", "share")):
        return f"{100 * value:.1f}%"
    if name.endswith(_NO_SEPARATORS):
        return str(value)
    return count(round(value, 3))


def _pairs(name: str, value: Json) -> str:
    """Format an object within a row: a span, a value with its source, or its fields."""
    if value.keys() == {"min", "max"}:
        least, most = ("" if end is None else str(end) for end in (value["min"], value["max"]))
        return least if least == most else f"{least}..{most}"
    if _is_sourced(value):
        source = value.get("place") or value.get("source")
        return cell(name, value["value"]) + (f" ({words(source)})" if source else "")
    shown = []
    for field, part in value.items():
        if part is not None:
            text = cell(field, part)
            # A unit stays with its number where the text is wrapped.
            if _is_amount(part):
                text = text.replace(" ", "")
            elif isinstance(part, Mapping) and "=" in text:
                text = f"({text})"
            shown.append(f"{words(field)}={text}")
    return " ".join(shown) or "-"


def new_table(*columns: str, right: Sequence[bool]) -> Table:
    """Return an empty table in the common style; no header where all names are empty.

    Args:
        columns: The names in the header.
        right: For each column, whether it has numbers.
    """
    table = Table(box=None, header_style="dim", show_header=any(columns), pad_edge=False, padding=(0, PADDING, 0, 0))
    table.caption_justify = "left"
    for column, is_right in zip(columns, right, strict=True):
        table.add_column(column, justify="right" if is_right else "left", overflow="fold")
    return table


def fitted_table(rows: Sequence[Sequence[str | Text]], *columns: str, right: Sequence[bool]) -> Table | None:
    """Return a table that fits the output, see `new_table`; None if a number or a name would be broken."""
    cells = [[clean(text) for text in row] for row in rows]
    available = out.width - PADDING * (len(columns) - 1)
    texts = [[name, *(str(row[at]) for row in cells)] for at, name in enumerate(columns)]
    widths = _widths(texts, right, available)
    if widths is None:
        return None
    table = new_table(*columns, right=right)
    for column, width in zip(table.columns, widths, strict=True):
        column.width = width
    for row in cells:
        fitted = [_fit(text, width) for text, width in zip(row, widths, strict=True)]
        table.add_row(*fitted)
        if any(map(ne, map(str, fitted), map(str, row))):
            table.caption = "--wide shows what is cut"
    return table


def table_of(rows: Sequence[Sequence[str | Text]], *columns: str, right: Sequence[bool]) -> Table:
    """Return `fitted_table`, or if it does not fit, a table that is wrapped anywhere."""
    table = fitted_table(rows, *columns, right=right)
    if table is None:
        table = new_table(*columns, right=right)
        for row in rows:
            table.add_row(*row)
    return table


def _widths(texts: Sequence[Sequence[str]], is_right: Sequence[bool], available: int) -> list[int] | None:
    """Return widths of columns that fit: text is wrapped, then ids are cut; numbers stay with their units."""

    def longest(column: Sequence[str]) -> int:
        return max((cell_len(word) for text in column for word in text.split()), default=0)

    widths = [max(map(cell_len, column)) for column in texts]
    wrapped = [
        max(longest(column[:1]), *map(cell_len, column[1:]), 0) if right else longest(column)
        for column, right in zip(texts, is_right, strict=True)
    ]
    cut = [
        least if right or least <= WORD_CHARS else max(NAME_CHARS, longest(column[:1]))
        for least, column, right in zip(wrapped, texts, is_right, strict=True)
    ]
    for leasts in (wrapped, cut):
        while sum(widths) > available and any(map(gt, widths, leasts)):
            widest = max((at for at, width in enumerate(widths) if width > leasts[at]), key=widths.__getitem__)
            widths[widest] -= 1
    return widths if sum(widths) <= available else None


def _fit(text: RenderableType, width: int) -> RenderableType:
    """Return a text with ids and hashes cut in the middle that do not fit, but with whole paths, URLs and values."""
    if not isinstance(text, (str, Text)) or cell_len(str(text)) <= width:
        return text
    fitted = " ".join(
        word if cell_len(word) <= max(width, WORD_CHARS) or "/" in word or "=" in word else _cut(word, width)
        for word in str(text).split(" ")
    )
    return Text(fitted, text.style) if isinstance(text, Text) else fitted


def _cut(word: str, width: int) -> str:
    end = (width - 1) // 2
    return f"{word[: width - 1 - end]}…{word[len(word) - end :]}"
