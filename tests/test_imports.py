"""No file imports itself through others: what import-linter, which compares siblings only, leaves to see to."""

from __future__ import annotations

import grimp


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
