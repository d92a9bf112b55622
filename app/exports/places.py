"""Places of exports: a folder below a configured one, or a bucket of an object store, and the files in them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvferry.app.settings.tiers import read_fields, shown_fields
from kvferry.app.tiers.block_format import BadBlock
from kvferry.app.tiers.block_store import StoreUnavailable
from kvferry.app.tiers.fs.folder import Folder, FolderInUse, diagnose
from kvferry.app.tiers.fs.format import read_part, write_pieces

Pieces = Sequence[bytes | memoryview]
_MAX_PATH_CHARS = 1000


class PlaceInUse(Exception):
    """Another export writes to the folder; the message says what to do."""


class PlaceFiles(Protocol):
    """Files of one export, which exist completely or not at all. Thread: any. Calls may block.

    Names have slashes between their parts. Calls raise `StoreUnavailable` with a constant text.
    """

    def find(self, names: Sequence[str]) -> Sequence[bool]:
        """Return which files exist."""

    def write(self, files: Mapping[str, Pieces]) -> None:
        """Write files, in place of earlier ones."""

    def read(self, max_bytes: Mapping[str, int]) -> Sequence[bytes | memoryview | None]:
        """Return files, by name the most that each may have; None for one that does not exist, or is longer."""

    def close(self) -> None:
        """Release all resources. No other call runs or follows."""


class Place(Protocol):
    """A place of exports, as a call names it."""

    def shown(self) -> dict[str, Any]:
        """Return it as JSON, with secrets masked."""

    def open(self, *, for_writing: bool) -> PlaceFiles:
        """Open it. Raises `PlaceInUse`, `StoreUnavailable`, and `FileNotFoundError` for a folder to be read."""


def _path(value: object) -> Path:
    """Parse a path, which may be relative."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip() or not value.isprintable() or len(value) > _MAX_PATH_CHARS:
        raise ValueError("must be the path of a folder")
    return Path(value.strip())


class FolderPlace(BaseModel):
    """A folder, with the fields that a call may give."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False)

    type: Literal["fs"]
    path: Annotated[Path, BeforeValidator(_path)] = Field(
        description="folder, relative to KVFERRY_EXPORT_PATH or below it"
    )

    def below(self, root: Path) -> FolderPlace:
        """Return the place with its whole path. Raises `ValueError` unless that is below `root`."""
        path, top = Path(os.path.realpath(root / self.path)), Path(os.path.realpath(root))
        if top not in path.parents:
            raise ValueError(
                f"path={self.path} is not below {top}: name a folder in it, or set KVFERRY_EXPORT_PATH to another"
            )
        return self.model_copy(update={"path": path})

    def shown(self) -> dict[str, Any]:
        """See `Place`."""
        return shown_fields(self)

    def open(self, *, for_writing: bool) -> PlaceFiles:
        """See `Place`."""
        try:
            return FolderFiles(Folder(self.path, is_read_only=not for_writing), is_own=for_writing)
        except FolderInUse:
            raise PlaceInUse(f"{self.path} is being written by another process, or used as a tier") from None
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _unavailable(error) from error


def read_place(given: Mapping[str, Any], root: Path) -> Place:
    """Parse a place; folders must be below `root`. Raises `ValueError`."""
    kind = given.get("type")
    if kind == "fs":
        return read_fields(FolderPlace, given).below(root)
    if kind != "object":
        raise ValueError("type must be fs, for a folder, or object, for a bucket")
    try:
        from kvferry.app.exports.buckets import BucketPlace
    except ImportError as error:
        raise ValueError(f"type=object cannot be used: {error}") from None
    return read_fields(BucketPlace, given)


class FolderFiles:
    """`PlaceFiles` in a folder."""

    def __init__(self, folder: Folder, *, is_own: bool) -> None:
        """`is_own` is whether this process may change it. Raises `OSError`."""
        self._folder = folder
        if is_own:
            folder.sweep(lambda entry, error: None)

    def find(self, names: Sequence[str]) -> Sequence[bool]:
        """See `PlaceFiles`."""
        try:
            return [self._folder.status(name) is not None for name in names]
        except OSError as error:
            raise _unavailable(error) from error

    def write(self, files: Mapping[str, Pieces]) -> None:
        """See `PlaceFiles`."""
        try:
            for name, pieces in files.items():
                self._folder.write(name, lambda fd, pieces=pieces: write_pieces(fd, pieces))  # type: ignore[misc]
        except OSError as error:
            raise _unavailable(error) from error

    def read(self, max_bytes: Mapping[str, int]) -> Sequence[bytes | memoryview | None]:
        """See `PlaceFiles`."""
        try:
            return [self._read(name, limit) for name, limit in max_bytes.items()]
        except OSError as error:
            raise _unavailable(error) from error

    def close(self) -> None:
        """See `PlaceFiles`."""
        self._folder.close()

    def _read(self, name: str, max_bytes: int) -> bytes | None:
        status = self._folder.status(name)
        if status is None or status.st_size > max_bytes:
            return None
        with suppress(BadBlock, FileNotFoundError):
            fd = self._folder.open(name)
            try:
                return read_part(fd, 0, status.st_size)
            finally:
                os.close(fd)
        return None


def _unavailable(error: OSError) -> StoreUnavailable:
    return StoreUnavailable(diagnose(error).text, is_transient=False)
