"""SHA-256 digests of whole files, cached in the state folder by path and file identity.

The hash is cryptographic, because equal digests let one model load another model's KV blocks. The cache is an
optimization: a missing, damaged or unreadable entry is computed again.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

_log = logging.getLogger(__name__)

MAX_ENTRIES = 1000
"""Cached digests; the oldest are deleted beyond it."""
_FOLDER = "digests"
_CHUNK_BYTES = 1 << 20
_LOCK_SUFFIX = ".lock"
_FINE_SETTLE_NS = 50_000_000
_COARSE_SETTLE_NS = 2_100_000_000
_SECOND_NS = 1_000_000_000


class FileUnknown(Exception):
    """The content of a file is unknown: unreadable, or changed while it was read. The message names the file."""


class FileId(NamedTuple):
    """Identity of a file's content: any change of the content changes one of these fields."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileId:
        """Read the identity from a status."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def is_settled(self) -> bool:
        """Return whether a later change would get another ctime. False also for a ctime in the future."""
        return time.time_ns() - self.ctime_ns >= _settle_ns(self)


class DigestCache:
    """Digests of files, stored in `STATE_DIR/digests`, one small file for each. Safe for threads and processes."""

    def __init__(self, state_dir: Path | None) -> None:
        """Store digests in `state_dir`; None stores nothing."""
        self._folder = None if state_dir is None else state_dir / _FOLDER
        self._has_warned = False

    def digest(self, path: Path, is_stopped: Callable[[], bool] = lambda: False) -> str:
        """Return the hex SHA-256 of a file's content, which is read unless it is cached. Raises `FileUnknown`."""
        # A link is cached under its target: links of several hub snapshots share one file.
        real = os.path.realpath(path)
        with opened(path) as (fd, found):
            cached = self._cached(real, found)
            if cached is not None:
                return cached
            with self._locked(real):
                # Another process may have computed it while this one waited for the lock.
                cached = self._cached(real, found)
                if cached is not None:
                    return cached
                computed = _hash(fd, path, is_stopped)
                if FileId.of(os.fstat(fd)) != found:
                    raise FileUnknown(f"{path.name} changed while it was read")
                if found.is_settled:
                    self._keep(real, found, computed)
                return computed

    def _entry(self, folder: Path, real: str) -> Path:
        # Hashed, so that neither long paths nor the names of models show in the state folder.
        return folder / hashlib.sha256(os.fsencode(real)).hexdigest()[:32]

    def _cached(self, real: str, found: FileId) -> str | None:
        if self._folder is None:
            return None
        entry = self._entry(self._folder, real)
        try:
            kept = json.loads(entry.read_bytes())
            digest = str(kept["digest"])
            if kept["check"] != _check(found, digest):
                return None
            os.utime(entry)
            return digest
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _keep(self, real: str, found: FileId, digest: str) -> None:
        if self._folder is None:
            return
        try:
            handle, temporary = tempfile.mkstemp(dir=self._folder, prefix=".")
            try:
                with os.fdopen(handle, "w") as file:
                    json.dump({"digest": digest, "check": _check(found, digest)}, file)
                os.replace(temporary, self._entry(self._folder, real))
            except BaseException:
                os.unlink(temporary)
                raise
            self._trim(self._folder)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning(
                    "STATE_DIR=%s: digests of model files cannot be cached, every start reads the files: %s; make it "
                    "writable",
                    self._folder.parent,
                    error.strerror,
                )

    def _trim(self, folder: Path) -> None:
        """Delete the oldest entries beyond `MAX_ENTRIES`, with their locks, and files that a dead process left."""
        found: list[tuple[int, str]] = []
        for entry in os.scandir(folder):
            # Another process may trim at the same time.
            with suppress(FileNotFoundError):
                found.append((entry.stat().st_mtime_ns, entry.path))
        # An entry has a lock beside it.
        for _, path in sorted(found)[: max(len(found) - 2 * MAX_ENTRIES, 0)]:
            with suppress(FileNotFoundError):
                os.unlink(path)

    @contextmanager
    def _locked(self, real: str) -> Iterator[None]:
        """Exclude other processes that compute the same digest, so that only one reads the file.

        Only an optimization: without the lock the file is read more than once.
        """
        if self._folder is None:
            yield
            return
        handle = None
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = self._entry(self._folder, real).with_suffix(_LOCK_SUFFIX)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            _log.debug("digests are computed without a lock: %s", error)
        try:
            yield
        finally:
            if handle is not None:
                os.close(handle)


@contextmanager
def opened(path: Path) -> Iterator[tuple[int, FileId]]:
    """Open a regular file for reading, and determine its identity. Raises `FileUnknown`.

    The file is opened even for the identity alone: network file systems serve `stat` from a cache, but `open` from the
    server.
    """
    try:
        # Opening a named pipe in the place of a file must not block.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise FileUnknown(f"{path.name} cannot be read: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise FileUnknown(f"{path.name} is not a regular file")
        found = FileId.of(status)
        age_ns = time.time_ns() - found.ctime_ns
        if 0 <= age_ns < _settle_ns(found):
            time.sleep((_settle_ns(found) - age_ns) / _SECOND_NS)
            found = FileId.of(os.fstat(fd))
        yield fd, found
    except OSError as error:
        raise FileUnknown(f"{path.name} cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


def _settle_ns(found: FileId) -> int:
    """Return the age of a ctime after which a change gets another one: a few clock ticks, or 2 s for whole seconds."""
    return _FINE_SETTLE_NS if found.ctime_ns % _SECOND_NS else _COARSE_SETTLE_NS


def _check(found: FileId, digest: str) -> str:
    """Return the checksum of an entry, over the identity it is for. Device numbers may change at a reboot and are left
    out.
    """
    return hashlib.sha256(json.dumps([*found[1:], digest]).encode()).hexdigest()


def _hash(fd: int, path: Path, is_stopped: Callable[[], bool]) -> str:
    """Hash a file in chunks; both the read and the hash release the GIL."""
    digest, chunk, offset = hashlib.sha256(), bytearray(_CHUNK_BYTES), 0
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)
    while num_read := os.preadv(fd, [chunk], offset):
        digest.update(memoryview(chunk)[:num_read])
        offset += num_read
        if is_stopped():
            raise FileUnknown(f"{path.name} was not read to its end: stopped")
    return digest.hexdigest()
