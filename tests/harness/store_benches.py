"""Stores with the faults that tests give them, behind one interface: every store passes the same behaviour tests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

from kvferry.core.keys import Key, RequestIdentity
from tests.harness.dictionary_tier import DictionaryStore
from tests.harness.documented_tier import DocumentedBench
from tests.harness.mooncake_server import MooncakeBench
from tests.harness.mounts import frozen
from tests.harness.object_server import object_bench
from tests.harness.redis_server import redis_bench
from tests.harness.tier_rig import FINGERPRINT, Rig, StoreBench, file_rig, threaded_rig
from tests.harness.tier_slots import changed


class DictionaryBench(StoreBench):
    """The store of a dictionary, in batches of up to four blocks."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, tuple[bytes, RequestIdentity]] = OrderedDict()
        self._store = DictionaryStore()

    def make_rig(self, fingerprint: dict[str, object] | None, max_bytes: int = 1 << 30, **settings: Any) -> Rig:
        self._store = DictionaryStore(max_bytes, 4, fingerprint or FINGERPRINT, self._blocks)
        return threaded_rig(self._store, **settings)

    @contextmanager
    def hung(self) -> Iterator[None]:
        self._store.gate.clear()
        try:
            yield
        finally:
            self._store.gate.set()

    @contextmanager
    def down(self) -> Iterator[None]:
        self._store.error = ConnectionError("kv://:secret@server refuses")
        try:
            yield
        finally:
            self._store.error = None

    def spoil(self, key: Key) -> None:
        value, origin = self._blocks[self._store.namespace + key]
        self._blocks[self._store.namespace + key] = (changed(value), origin)


class FileBench(StoreBench):
    """The file system tier in a folder; with `shared`, as one of the engines that use it."""

    def __init__(self, path: Path, **given: Any) -> None:
        self._path = path
        self._given = given

    def make_rig(self, fingerprint: dict[str, object] | None, max_bytes: int = 32 << 20, **settings: Any) -> Rig:
        return file_rig(self._path / "tier", max_bytes, fingerprint=fingerprint, **self._given, **settings)

    def hung(self) -> AbstractContextManager[None]:
        return frozen(self._path)

    @contextmanager
    def down(self) -> Iterator[None]:
        """The folder is away, as if it were unmounted."""
        (self._path / "tier").rename(self._path / "away")
        try:
            yield
        finally:
            (self._path / "away").rename(self._path / "tier")

    def spoil(self, key: Key) -> None:
        (file,) = (self._path / "tier").rglob(key.hex())
        file.write_bytes(changed(file.read_bytes()))


STORE_BENCHES: dict[str, Callable[[Path], AbstractContextManager[StoreBench]]] = {
    "dictionary": lambda path: closing(DictionaryBench()),
    "files": lambda path: closing(FileBench(path)),
    "shared files": lambda path: closing(FileBench(path, shared=True)),
    "documented": lambda path: closing(DocumentedBench(path)),
    "redis": redis_bench,
    "object": object_bench,
    "mooncake": lambda path: closing(MooncakeBench()),
}
"""Every store that kvferry has, and the one that its documentation shows.

A new one is added here, with servers and faults as real as they can be made.
"""

SERVER_BENCHES = {"redis", "object", "mooncake"}
"""Stores with servers, which take time to start, and limit blocks by age or by their memory, not by `max_bytes`."""
