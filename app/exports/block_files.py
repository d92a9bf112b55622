"""Block store of one export: a file for each block, which is written once and never dropped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kvferry.app.exports.places import PlaceFiles
from kvferry.app.logs import RateLimitedLogger
from kvferry.app.tiers.block_format import HEADER_BYTES, MAX_ORIGIN_BYTES, BadBlock, decode, encode, namespace_of
from kvferry.app.tiers.block_store import MISS, BlockResult, Outcome, StoreUnavailable
from kvferry.app.tiers.fs.folder import path_of
from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.tiers.base import TierCounts

_log = logging.getLogger(__name__)
T = TypeVar("T")


class ExportedBlocks:
    """An `kvferry.app.tiers.block_store.BlockStore`."""

    batch_blocks = 16

    def __init__(self, files: PlaceFiles, fingerprint: Mapping[str, object], *, may_hold_blocks: bool) -> None:
        """`may_hold_blocks` is whether there may be blocks already, which are not written again."""
        self.problem: str | None = None
        """Why the latest call failed; None if it did not."""
        self._files = files
        self._namespace = namespace_of(fingerprint)
        self._may_hold_blocks = may_hold_blocks
        self._seldom = RateLimitedLogger(_log)

    def probe(self) -> None:
        """See `BlockStore`."""
        self._call(lambda: self._files.find(["probe"]))

    def find_in_memory(self, keys: Sequence[Key]) -> None:
        """See `BlockStore`."""

    def find_many(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See `BlockStore`."""
        return self._call(lambda: self._files.find(self._names(keys)))

    def is_writable(self) -> bool:
        """See `BlockStore`."""
        return True

    def put_many(
        self, keys: Sequence[Key], data: Sequence[memoryview], origins: Sequence[RequestIdentity]
    ) -> Sequence[Outcome]:
        """See `BlockStore`."""
        names = self._names(keys)
        is_present = self._call(lambda: self._files.find(names)) if self._may_hold_blocks else [False] * len(keys)
        todo = {
            name: encode(self._namespace, key, content, origin)
            for name, key, content, origin, present in zip(names, keys, data, origins, is_present, strict=True)
            if not present
        }
        self._call(lambda: self._files.write(todo))
        return [Outcome.PRESENT if present else Outcome.STORED for present in is_present]

    def get_many(self, keys: Sequence[Key], into: Sequence[memoryview]) -> Sequence[BlockResult]:
        """See `BlockStore`."""
        limits = [HEADER_BYTES + len(one) + MAX_ORIGIN_BYTES for one in into]
        values = self._call(lambda: self._files.read(dict(zip(self._names(keys), limits, strict=True))))
        return [self._unpack(*one) for one in zip(keys, values, into, strict=True)]

    def drop(self, keys: Sequence[Key]) -> None:
        """Refuse: no reset reaches an export."""
        raise NotImplementedError

    def is_dropping(self, keys: Sequence[Key]) -> bool:
        """See `BlockStore`."""
        return False

    def reset(self, match: RequestFilter | None, stop: Callable[[], bool]) -> tuple[int, int]:
        """Refuse: no reset reaches an export."""
        raise NotImplementedError

    def maintain(self, stop: Callable[[], bool]) -> None:
        """See `BlockStore`. There is nothing to do."""

    def health(self) -> Sequence[str]:
        """See `BlockStore`."""
        return [] if self.problem is None else [self.problem]

    def size(self) -> TierCounts:
        """See `BlockStore`. It does not know."""
        return TierCounts()

    def close(self) -> None:
        """See `BlockStore`."""
        self._files.close()

    def _names(self, keys: Sequence[Key]) -> list[str]:
        return [path_of(f"blocks/{self._namespace.hex()}", key) for key in keys]

    def _call(self, call: Callable[[], T]) -> T:
        try:
            result = call()
        except StoreUnavailable as error:
            self.problem = error.text
            raise
        self.problem = None
        return result

    def _unpack(self, key: Key, value: bytes | memoryview | None, into: memoryview) -> BlockResult:
        if value is None:
            return MISS
        try:
            return BlockResult(Outcome.LOADED, *decode(self._namespace, key, value, len(into)))
        except BadBlock as error:
            self._seldom.log(logging.WARNING, "corrupt", "import: block %s is left out: %s", key.hex(), str(error))
            return BlockResult(Outcome.CORRUPT)
