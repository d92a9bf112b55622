"""Revision of a model: the identity of its weights. KV that was computed with other weights must not be found."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import threading
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from kvferry.app.engines.digests import DigestCache, FileId, FileUnknown, opened

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
    return sorted(file for file in files if _is_there(file))


def _is_there(file: Path) -> bool:
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
    if os.path.exists(name):
        return None if content is None else content_revision(name, content, start)
    commit = getattr(config, "_commit_hash", None)
    return str(commit) if commit else None


def content_revision(name: str, content: ContentDigest, start: str) -> str | None:
    """Return the revision of local files; see `revision_of`."""
    if content.is_reading():
        _log.info("reading model files for their digest, which is then cached: %s", name)
    try:
        found = content.result()
    except FileUnknown as error:
        _log.warning("weights unknown, no later start finds the blocks of this one: model %s: %s", name, error)
        return f"start-{start}"
    return None if found is None else f"{_CONTENT_PREFIX}{found}"


def name_in_fingerprint(name: str, revision: str | None) -> str | None:
    """Return the name of a model, or None where its content identifies it: copies in other folders are the same."""
    return None if revision is not None and revision.startswith(_CONTENT_PREFIX) else name
