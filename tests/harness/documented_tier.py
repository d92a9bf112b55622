"""The tier that `docs/tiers.md` shows in full, run as the text that is there."""

from __future__ import annotations

import re
import sqlite3
import textwrap
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from kvferry.core.keys import Key
from tests.harness.tier_rig import Rig, rig_of

PAGE = Path(__file__).parents[2] / "docs" / "tiers.md"


def documented_code() -> str:
    """Return the text of the package."""
    (found,) = re.findall(r"The tests run this text:\n\n((?:    .*\n|\n)+)", PAGE.read_text())
    return textwrap.dedent(found)


def documented_rig(path: Path, fingerprint: dict[str, object] | None = None, **settings: Any) -> Rig:
    """A tier of the documented type in a folder."""
    module = ModuleType("acme_tiers")
    exec(compile(documented_code(), str(PAGE), "exec", dont_inherit=True), module.__dict__)
    given = {"type": "acme", "name": "acme", "path": path, "max_bytes": 1 << 30} | settings
    entry = module.AcmeTier.Settings(**given)
    return rig_of(module.AcmeTier, entry, fingerprint)


class DocumentedBench:
    """The documented tier as a `StoreBench`: another connection locks the database, or spoils a row."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rig: Rig | None = None

    def open(self, fingerprint: dict[str, object] | None = None, **settings: Any) -> Rig:
        self.close()
        self._rig = documented_rig(self._path, fingerprint, **settings)
        return self._rig

    def hung(self) -> AbstractContextManager[None]:
        raise NotImplementedError("a locked database refuses calls before long")

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

    def close(self) -> None:
        if self._rig is not None:
            self._rig.close()

    @contextmanager
    def _other(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path / "blocks.db", timeout=30)) as database, database:
            yield database


@contextmanager
def documented_bench(path: Path, *, hangs: bool) -> Iterator[DocumentedBench]:
    with closing(DocumentedBench(path)) as bench:
        yield bench
