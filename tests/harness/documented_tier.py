"""The tier of the documentation's example package."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from kvferry.core.keys import Key
from tests.harness.tier_rig import Rig, StoreBench, rig_of

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "acme_tiers.py"


def documented_rig(path: Path, fingerprint: dict[str, object] | None = None, **settings: Any) -> Rig:
    """A tier of the documented type in a folder."""
    module = ModuleType("acme_tiers")
    exec(compile(EXAMPLE.read_text(), str(EXAMPLE), "exec", dont_inherit=True), module.__dict__)
    given = {"type": "acme", "name": "acme", "path": path, "max_bytes": 1 << 30} | settings
    entry = module.AcmeTier.Settings(**given)
    return rig_of(module.AcmeTier, entry, fingerprint)


class DocumentedBench(StoreBench):
    """The documented tier as a `StoreBench`: another connection locks the database, or spoils a row."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def make_rig(self, fingerprint: dict[str, object] | None, **settings: Any) -> Rig:
        return documented_rig(self._path, fingerprint, **settings)

    @contextmanager
    def down(self) -> Iterator[None]:
        with self._other() as database:
            database.execute("ALTER TABLE blocks RENAME TO away")
        try:
            yield
        finally:
            with self._other() as database:
                database.execute("ALTER TABLE away RENAME TO blocks")

    def spoil(self, key: Key) -> None:
        with self._other() as database:
            (name, value), *_ = database.execute("SELECT name, value FROM blocks WHERE substr(name, 9) = ?", [key])
            database.execute("UPDATE blocks SET value = ? WHERE name = ?", [value[:-1] + b"#", name])

    @contextmanager
    def _other(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path / "blocks.db", timeout=30)) as database, database:
            yield database
