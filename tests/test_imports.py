"""Imports that import-linter, which compares siblings only, does not see."""

from __future__ import annotations

import re
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]


def test_no_package_imports_from_its_own_contents() -> None:
    graph = grimp.build_graph("kvferry", cache_dir=None)
    own = [
        (module, package)
        for module in graph.modules
        for package in graph.find_modules_directly_imported_by(module)
        if module.startswith(f"{package}.")
    ]
    assert own, "`python -m kvferry.app.cli` asks its package"
    assert [pair for pair in own if graph.chain_exists(importer=pair[1], imported=pair[0])] == []


def test_fastapi_is_used_by_its_documented_modules_only() -> None:
    # Others change between releases, of which an installation without constraints.txt takes the newest.
    documented = {"concurrency", "exceptions", "openapi.utils", "responses", "routing"}
    sources = [path.read_text() for path in (ROOT / "app").rglob("*.py")]
    used = {name for text in sources for name in re.findall(r"^\s*from fastapi\.([\w.]+) import", text, re.MULTILINE)}
    assert used - documented == set()
