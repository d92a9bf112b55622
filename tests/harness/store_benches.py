"""Stores with the faults that tests give them, behind one interface: every store passes the same behaviour tests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from kvferry.core.keys import Key, RequestIdentity
from tests.harness.dictionary_tier import DictionaryStore
from tests.harness.documented_tier import documented_bench
from tests.harness.mooncake_server import mooncake_bench
from tests.harness.mounts import disk, frozen
from tests.harness.object_server import object_bench
from tests.harness.redis_server import redis_bench
from tests.harness.tier_rig import FINGERPRINT, Rig, file_rig, threaded_rig
from tests.harness.tier_slots import changed


class StoreBench(Protocol):
    """A store, and the tiers of it that a test opens one after the other, as processes do."""

    def open(self, fingerprint: dict[str, object] | None = None, **settings: Any) -> Rig:
        """Close the tier that is open, if any, and open one with these settings."""

    def hung(self) -> AbstractContextManager[None]:
        """Calls that store blocks hang meanwhile."""

    def down(self) -> AbstractContextManager[None]:
        """Every call fails meanwhile. The blocks are back afterwards."""

    def spoil(self, key: Key) -> None:
        """Change a byte of a stored block."""

    def close(self) -> None:
        """Close the open tier."""


class DictionaryBench:
    """The store of a dictionary, in batches of up to four blocks."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[bytes, tuple[bytes, RequestIdentity]] = OrderedDict()
        self._store = DictionaryStore()
        self._rig: Rig | None = None

    def open(self, fingerprint: dict[str, object] | None = None, max_bytes: int = 1 << 30, **settings: Any) -> Rig:
        self.close()
        self._store = DictionaryStore(max_bytes, 4, fingerprint or FINGERPRINT, self._blocks)
        self._rig = threaded_rig(self._store, **settings)
        return self._rig

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

    def close(self) -> None:
        if self._rig is not None:
            self._rig.close()


class FileBench:
    """The file system tier in a folder; with `shared`, as one of the engines that use it."""

    def __init__(self, path: Path, **given: Any) -> None:
        self._path = path
        self._given = given
        self._rig: Rig | None = None

    def open(self, fingerprint: dict[str, object] | None = None, max_bytes: int = 32 << 20, **settings: Any) -> Rig:
        self.close()
        self._rig = file_rig(self._path / "tier", max_bytes, fingerprint=fingerprint, **self._given, **settings)
        return self._rig

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

    def close(self) -> None:
        if self._rig is not None:
            self._rig.close()


@contextmanager
def dictionary_bench(path: Path, *, hangs: bool) -> Iterator[StoreBench]:
    with closing(DictionaryBench()) as bench:
        yield bench


@contextmanager
def file_bench(path: Path, *, hangs: bool, **given: Any) -> Iterator[StoreBench]:
    """A folder, on a disk of its own if it is to hang: skipped where a test may not make one."""
    if not hangs:
        with closing(FileBench(path, **given)) as bench:
            yield bench
        return
    with disk(path / "disk") as mount, closing(FileBench(mount, **given)) as bench:
        yield bench


STORE_BENCHES: dict[str, Callable[..., AbstractContextManager[StoreBench]]] = {
    "dictionary": dictionary_bench,
    "files": file_bench,
    "shared files": partial(file_bench, shared=True),
    "documented": documented_bench,
    "redis": redis_bench,
    "object": object_bench,
    "mooncake": mooncake_bench,
}
"""Every store that kvferry has, and the one that its documentation shows.

A new one is added here, with servers and faults as real as they can be made.
"""

EXPIRING_BENCHES = {"redis", "object", "mooncake"}
"""Stores that are limited by age, or by the memory of their servers, and not by `max_bytes`."""
LONG_BENCHES = {"redis", "object", "mooncake"}
"""Stores with servers, which take time to start."""
