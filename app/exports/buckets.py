"""Exports in a bucket of an object store. Imported only where its client is installed."""

from __future__ import annotations

from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from kvferry.app.settings.tiers import shown_fields
from kvferry.app.tiers.object.bucket import Bucket, EventLoop, gather
from kvferry.app.tiers.object.settings import BucketSettings

T = TypeVar("T")


class BucketPlace(BucketSettings):
    """A bucket, with the fields that a call may give: those of a tier of type `object` that are about the bucket."""

    type: Literal["object"]

    def shown(self) -> dict[str, Any]:
        """See `Place`."""
        return shown_fields(self)

    def open(self, *, for_writing: bool) -> BucketFiles:
        """See `Place`. Makes no request."""
        return BucketFiles(self)


class BucketFiles:
    """A `kvferry.app.exports.places.PlaceFiles` below a prefix."""

    def __init__(self, place: BucketPlace) -> None:
        """Raises `StoreUnavailable` if a file of the settings cannot be read."""
        self._prefix = place.prefix
        self._bucket = Bucket(place)
        self._loop = EventLoop("export")

    def find(self, names: Sequence[str]) -> Sequence[bool]:
        """See `PlaceFiles`."""
        return [size is not None for size in self._run(self._bucket.size_of(self._name(name)) for name in names)]

    def write(self, files: Mapping[str, Sequence[bytes | memoryview]]) -> None:
        """See `PlaceFiles`."""
        self._run(self._bucket.put(self._name(name), pieces) for name, pieces in files.items())

    def read(self, max_bytes: Mapping[str, int]) -> Sequence[bytes | memoryview | None]:
        """See `PlaceFiles`."""
        found = self._run(self._bucket.get(self._name(name), limit) for name, limit in max_bytes.items())
        # The bucket returns an object that is too long without its bytes.
        return [one or None for one in found]

    def close(self) -> None:
        """See `PlaceFiles`."""
        self._loop.close()

    def _name(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _run(self, works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        return self._loop.run(gather(list(works)))
