"""The table of known failures names tests that exist, and each failure's threads stand in a test's docstring."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/pitfalls.md"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| what happened", "| ---"))
]


@lru_cache
def docstrings(path: Path) -> dict[str, str]:
    """What each test of a module says of itself."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    return {function.name: ast.get_docstring(function) or "" for function in functions}


def test_the_page_is_not_empty() -> None:
    assert len(ROWS) > 35


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1])
def test_row_names_existing_tests_with_its_sources(row: list[str]) -> None:
    _, where, rule, tests = row
    assert rule
    said = ""
    for cell in tests.split("<br>"):
        named = re.fullmatch(r"`(tests/\S+\.py)::(test_\w+)`", cell)
        if named is None:
            assert cell.startswith("not yet, "), f"{cell!r} is neither a test nor says what is missing"
            continue
        path, name = named.groups()
        known = docstrings(ROOT / path)
        assert name in known, f"{path} has no {name}"
        said += known[name] + "\n"
    missing = [source for source in where.split(", ") if source not in said]
    assert not missing or tests.startswith("not yet, "), f"no test of its own says that it is about {missing}"
