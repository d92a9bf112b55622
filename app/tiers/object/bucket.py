"""Requests to a bucket, bounded in number and time, on an event loop of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import wait
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

import obstore

from kvferry.app.common.threads import WatchedThread
from kvferry.app.tiers.block_store import StoreUnavailable
from kvferry.app.tiers.object.connection import CLIENT_ERRORS, connect, unavailable
from kvferry.app.tiers.object.settings import ObjectTierSettings
from kvferry.app.tiers.shared_values import SettingsRefused

if TYPE_CHECKING:
    from obstore import ListStream, ObjectMeta, UpdateVersion

PAGE_NAMES = 1000
_DELETE_NAMES = 100
T = TypeVar("T")

_RECHECK_S = 1.0
_CLOSE_S = 10.0


class Bucket:
    """A bucket, and an event loop on a thread of its own for its coroutines, which raise `StoreUnavailable`."""

    def __init__(self, settings: ObjectTierSettings) -> None:
        """Raises `StoreUnavailable`. No request is made."""
        self._client = connect(settings)
        self._timeout_s = settings.io_timeout_s
        self._limit = asyncio.Semaphore(settings.requests)
        self._has_bulk_delete = settings.scheme == "s3"
        self.has_plain_tags = False
        """Whether the server expects entity tags in conditions without the quotes that it sends them with."""
        self._loop = asyncio.new_event_loop()
        self.thread = WatchedThread(f"kvferry-tier-{settings.name}-io", self._loop.run_forever, "no request is made")
        self.thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for a coroutine, and start a dead thread again, on which the loop goes on. Thread: any other one."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        while not wait([future], _RECHECK_S).done:
            self.thread.start()
        return future.result()

    def close(self) -> None:
        """Stop the loop; no coroutine runs or follows. May be called again."""
        if self._loop.is_closed():
            return
        self.thread.start()
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self.thread.close(_CLOSE_S):
            self._loop.close()

    async def meta_of(self, name: str) -> ObjectMeta | None:
        """Return an object's metadata; None if it does not exist."""
        return await self._request(lambda: obstore.head_async(self._client, name))

    async def get(self, name: str, max_bytes: int) -> tuple[memoryview, UpdateVersion] | None:
        """Return an object, empty if it has more than `max_bytes`, and its version; None if it does not exist."""

        async def get() -> tuple[memoryview, UpdateVersion]:
            answer = await obstore.get_async(self._client, name)
            data = memoryview(await answer.bytes_async() if answer.meta["size"] <= max_bytes else b"")
            return data, version_of(answer.meta)

        return await self._request(get)

    async def put(self, name: str, pieces: Sequence[bytes | memoryview], *, is_new: bool = False) -> None:
        """Write an object in pieces, which are sent one after the other and never joined.

        If `is_new`, raises `ConditionFailed` where there is one. The client may read the pieces for a moment after a
        call that was canceled or failed.
        """
        await self._write(name, list(pieces), "create" if is_new else None)

    async def put_if(self, name: str, data: bytes, version: UpdateVersion | None) -> UpdateVersion:
        """Write an object if it still has this version, or does not exist if that is None; return the new version.

        Raises `ConditionFailed`.
        """
        if version is not None and self.has_plain_tags and version.get("e_tag"):
            version = {**version, "e_tag": (version["e_tag"] or "").strip('"')}
        return version_of(await self._write(name, [data], version or "create"))

    async def delete(self, names: Sequence[str]) -> None:
        """Remove objects, of which some may not exist."""
        size = _DELETE_NAMES if self._has_bulk_delete else 1
        batches = [list(names[start : start + size]) for start in range(0, len(names), size)]
        await gather(self._delete(some) for some in batches)

    async def discard(self, name: str) -> None:
        """Remove an object that was written as a test. If that fails, `Sweep` removes the object once it is old."""
        with suppress(StoreUnavailable):
            await self.delete([name])

    def listing_of(self, prefix: str) -> ListStream[Sequence[ObjectMeta]]:
        """Begin to list the objects below `prefix`; `next_page` returns them."""
        return obstore.list(self._client, prefix, chunk_size=PAGE_NAMES)

    async def next_page(self, listing: ListStream[Sequence[ObjectMeta]]) -> Sequence[ObjectMeta]:
        """Return the next objects of a listing, by one request; empty at its end."""

        async def turn() -> Sequence[ObjectMeta]:
            # The client's iterator cannot be awaited with a default.
            try:
                return await anext(listing)
            except StopAsyncIteration:
                return ()

        return await self._request(turn) or ()

    async def _delete(self, names: list[str]) -> None:
        await self._request(lambda: obstore.delete_async(self._client, names))

    async def _write(self, name: str, data: list[bytes | memoryview], mode: Any) -> Any:
        result = await self._request(
            lambda: obstore.put_async(self._client, name, data, mode=mode, use_multipart=False)
        )
        if result is None:
            raise SettingsRefused("the bucket does not exist; see url", is_transient=False)
        return result

    async def _request(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """Make a request within the limits; return None if its object does not exist."""
        async with self._limit:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await call()
            except FileNotFoundError as error:
                failure = unavailable(error)
                if isinstance(failure, SettingsRefused):
                    raise failure from None
                return None
            except CLIENT_ERRORS as error:
                raise unavailable(error) from None


async def gather(works: Iterable[Coroutine[Any, Any, T]], limit_s: float | None = None) -> list[T]:
    """Return the results of all coroutines; the first exception cancels the others and is raised.

    Raises `StoreUnavailable` if they take longer than `limit_s` together.
    """
    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    except TimeoutError as error:
        raise unavailable(error) from None
    return [task.result() for task in tasks]


def version_of(answer: Any) -> UpdateVersion:
    """Return the version in the client's answer to a write, or in an object's metadata."""
    version: UpdateVersion = {}
    for name in ("e_tag", "version"):
        if answer.get(name):
            version[name] = answer[name]
    return version
