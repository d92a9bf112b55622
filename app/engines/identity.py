"""Identity of an engine and its model: default name, revision of the weights, and digests of their files."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from kvferry.app.common.folders import replace_file
from kvferry.cuda_ops.pool.backing import open_own_file

_CHARS = 40
_NAME_DIGITS = 8


def name_of_engine(model: str, fingerprint: Mapping[str, object]) -> str:
    """Return the model's name, made readable, with a digest of everything that changes the meaning of its bytes."""
    text = json.dumps(fingerprint, sort_keys=True, default=str)
    short = "".join(char if char.isalnum() else "-" for char in model.rstrip("/").rsplit("/", 1)[-1])
    return f"{short[:_CHARS]}-{hashlib.sha256(text.encode()).hexdigest()[:_NAME_DIGITS]}"


def is_missing_folder(model: str) -> bool:
    """Return whether a model's name is the path of a missing folder, which would be taken for a hub id."""
    return model.startswith(("/", "./", "../", "~")) and not os.path.isdir(model)


_log = logging.getLogger(__name__)

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
CONFIG_SUFFIXES = (".json", ".py")
"""Besides configuration, code that comes with a model."""
_INDEX_SUFFIX = ".index.json"
_MAX_THREADS = 8
_DIGITS = 32
_CONTENT_PREFIX = "files-"


def model_files(path: Path) -> list[Path]:
    """List the files that determine what a model in a folder computes, or the one file that it is. Raises `OSError`.

    Subfolders often hold other checkpoints; they count only if an index names shards in them, or if the folder itself
    holds no weights.
    """
    if not path.is_dir():
        return [path] if path.is_file() else []
    files = {file for file in path.iterdir() if file.suffix in WEIGHT_SUFFIXES + CONFIG_SUFFIXES}
    if not any(file.suffix in WEIGHT_SUFFIXES for file in files):
        files |= {file for file in path.rglob("*") if file.suffix in WEIGHT_SUFFIXES + CONFIG_SUFFIXES}
    for index in [file for file in files if file.name.endswith(_INDEX_SUFFIX)]:
        files |= {index.parent / name for name in _shards(index)}
    return sorted(file for file in files if _is_loadable(file))


def _is_loadable(file: Path) -> bool:
    """Return False for folders, dangling links, and missing shards named by an index: none can be loaded."""
    try:
        return not stat.S_ISDIR(file.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _shards(index: Path) -> set[str]:
    try:
        return {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # Not an index: it is hashed, or reported as unreadable, like any other file.
        return set()


class ContentDigest:
    """Digest of the contents of a model's files, computed on threads of its own while the model loads.

    Only names within the folder and contents count, so that identical copies elsewhere have the same digest.
    """

    def __init__(self, path: Path, cache: DigestCache) -> None:
        """Record the files' identities before loading, and start to read them."""
        self._path = path
        self._before: dict[Path, FileId] = {}
        self._found: dict[Path, str] = {}
        self._problem: FileUnknown | None = None
        self._stopped = threading.Event()
        try:
            self._before = _identify(path)
        except FileUnknown as error:
            self._problem = error
        # The largest first, so that no single thread finishes long after the others.
        todo = deque(sorted(self._before, key=lambda file: -self._before[file].size_bytes))
        self._threads = [
            threading.Thread(target=self._read, args=(todo, cache), name="kvferry-digest", daemon=True)
            for _ in range(min(len(todo), len(os.sched_getaffinity(0)), _MAX_THREADS))
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop reading."""
        self._stopped.set()

    def is_reading(self) -> bool:
        """Return whether `result` would wait."""
        return any(thread.is_alive() for thread in self._threads)

    def refuse(self, reason: str) -> None:
        """Make `result` raise, because the files are not those that were loaded."""
        self._problem = FileUnknown(reason)

    def result(self) -> str | None:
        """Wait for the digest; None without files. Called once the model is loaded.

        Raises:
            FileUnknown: the files cannot be read, or changed since before loading.
        """
        for thread in self._threads:
            thread.join()
        if self._problem is not None:
            raise self._problem
        if _identify(self._path) != self._before:
            raise FileUnknown("files changed while the model was loaded")
        if not self._before:
            return None
        root = self._path if self._path.is_dir() else self._path.parent
        names = {file: os.path.relpath(file, root) for file in self._found}
        if not self._path.is_dir():
            # A model that is one file may have another name elsewhere.
            names = dict.fromkeys(names, "")
        lines = sorted((names[file], digest) for file, digest in self._found.items())
        return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:_DIGITS]

    def newest_change_s(self) -> float:
        """Return the Unix time of the last change to the files, or to folders and links above them, before loading."""
        times_ns = [found.ctime_ns for found in self._before.values()]
        for place in (self._path, *self._before):
            links = [link for link in (place, *place.parents) if link.is_symlink()]
            times_ns += [os.lstat(link).st_ctime_ns for link in links]
        if self._path.is_dir():
            # Renaming a folder changes its own time, and not those of the files in it.
            times_ns.append(os.stat(self._path).st_ctime_ns)
        return max(times_ns, default=0) / 1e9

    def _read(self, todo: deque[Path], cache: DigestCache) -> None:
        while self._problem is None:
            try:
                file = todo.popleft()
            except IndexError:
                return
            try:
                self._found[file] = cache.digest(file, self._stopped.is_set)
            except FileUnknown as error:
                self._problem = error


def _identify(path: Path) -> dict[Path, FileId]:
    try:
        files = model_files(path)
    except OSError as error:
        raise FileUnknown(f"{path.name} cannot be read: {error.strerror}") from error
    found: dict[Path, FileId] = {}
    for file in files:
        with opened(file) as (_, identity):
            found[file] = identity
    return found


def digest_of_files(path: Path, cache: DigestCache) -> str | None:
    """Return the content digest of a folder's model files, or of one file; None without files.

    Raises `FileUnknown`.
    """
    with ContentDigest(path, cache) as content:
        return content.result()


def revision_of(name: str, content: ContentDigest | None, config: Any, start: str) -> str | None:
    """Return the revision of a loaded model: for local files their content digest, else the hub's commit.

    Args:
        content: Digest of the local files; None where it is not needed.
        start: Distinct for every start of an engine. It stands in for files whose content is unknown, so that blocks
            of this start are found by no other.

    Returns:
        None where the weights are not known, or their content is not needed.
    """
    if not os.path.exists(name):
        commit = getattr(config, "_commit_hash", None)
        return str(commit) if commit else None
    if content is None:
        return None
    if content.is_reading():
        _log.info("reading model files for their digest, which is then cached: %s", name)
    try:
        digest = content.result()
    except FileUnknown as error:
        _log.warning("weights unknown, no later start finds the blocks of this one: model %s: %s", name, error)
        return f"start-{start}"
    return None if digest is None else f"{_CONTENT_PREFIX}{digest}"


def name_in_fingerprint(name: str, revision: str | None) -> str | None:
    """Return the name of a model, or None where its content identifies it: copies in other folders are the same."""
    return None if revision is not None and revision.startswith(_CONTENT_PREFIX) else name


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
        with opened(path) as (fd, found):
            # A link is cached under its target: links of several hub snapshots share one file.
            real = os.path.realpath(path)
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
                    self._save(real, found, computed)
                return computed

    def _entry(self, folder: Path, real: str) -> Path:
        # Hashed, so that neither long paths nor the names of models show in the state folder.
        return folder / hashlib.sha256(os.fsencode(real)).hexdigest()[:32]

    def _cached(self, real: str, found: FileId) -> str | None:
        if self._folder is None:
            return None
        entry = self._entry(self._folder, real)
        try:
            with os.fdopen(open_own_file(entry, os.O_RDONLY), "rb") as file:
                kept = json.load(file)
                digest = str(kept["digest"])
                if kept["check"] != _check(found, digest):
                    return None
                os.utime(file.fileno())
            return digest
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _save(self, real: str, found: FileId, digest: str) -> None:
        if self._folder is None:
            return
        try:
            entry = {"digest": digest, "check": _check(found, digest)}
            replace_file(self._entry(self._folder, real), json.dumps(entry))
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
        files: list[tuple[int, str]] = []
        for entry in os.scandir(folder):
            # Another process may trim at the same time.
            with suppress(FileNotFoundError):
                files.append((entry.stat().st_mtime_ns, entry.path))
        # An entry has a lock beside it.
        for _, path in sorted(files)[: max(len(files) - 2 * MAX_ENTRIES, 0)]:
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
            handle = open_own_file(lock, os.O_RDWR | os.O_CREAT)
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
