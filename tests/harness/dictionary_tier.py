"""A block store in a dictionary, whose calls a test can hold up, fail, or end their thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvferry.app.tiers.block_store import Outcome
from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.tiers.base import TierCounts


class DictionaryStore:
    """See `BlockStore`. It answers no `find_in_memory`, as a server elsewhere would not.

    `gate` is shut to hang its calls.
    """

    def __init__(self, max_bytes: int = 1 << 40) -> None:
        self.blocks: OrderedDict[Key, tuple[bytes, RequestIdentity]] = OrderedDict()
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.error: BaseException | None = None
        self.closed = False
        self.overlapped = False
        self._num_inside = 0
        self.timed_out = False
        self.tended = threading.Event()
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._evicted = 0

    def find_in_memory(self, keys: Sequence[Key]) -> None:
        return None

    def is_writable(self) -> bool:
        return True

    def find(self, keys: Sequence[Key]) -> Sequence[bool]:
        with self._call(), self._lock:
            return [key in self.blocks for key in keys]

    def put(self, key: Key, data: memoryview, origin: RequestIdentity) -> Outcome:
        content = bytes(data)
        with self._call(), self._lock:
            if key in self.blocks:
                return Outcome.PRESENT
            while self.blocks and self._num_bytes() + len(content) > self._max_bytes:
                self.blocks.popitem(last=False)
                self._evicted += 1
            self.blocks[key] = (content, origin)
            return Outcome.STORED

    def get(self, key: Key, into: memoryview) -> tuple[Outcome, RequestIdentity | None]:
        with self._call(), self._lock:
            found = self.blocks.get(key)
        if found is None:
            return Outcome.MISSING, None
        into[:] = found[0]
        return Outcome.LOADED, found[1]

    def drop(self, keys: Sequence[Key]) -> None:
        with self._lock:
            for key in keys:
                self.blocks.pop(key, None)

    def reset(self, match: RequestFilter | None, stop: Callable[[], bool]) -> tuple[int, int]:
        self.overlapped |= self._num_inside > 0
        with self._call(), self._lock:
            meant = [key for key, (_, origin) in self.blocks.items() if match is None or match.matches(origin)]
            return len(meant), sum(len(self.blocks.pop(key)[0]) for key in meant)

    def maintain(self, stop: Callable[[], bool]) -> None:
        self.tended.set()

    def health(self) -> Sequence[str]:
        return []

    def size(self) -> TierCounts:
        with self._lock:
            return TierCounts(len(self.blocks), self._num_bytes(), self._max_bytes, evicted=self._evicted)

    def close(self) -> None:
        self.closed = True

    def _num_bytes(self) -> int:
        return sum(len(content) for content, _ in self.blocks.values())

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Wait at the gate, or raise `error`; counts as inside until the call ends."""
        with self._lock:
            self._num_inside += 1
        try:
            self.entered.release()
            if not self.gate.wait(60):
                self.timed_out = True
                raise TimeoutError("the gate was not opened")
            if self.error is not None:
                raise self.error
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
