"""A block store in a dictionary, like one on a server: its calls can be held up, fail, or end their thread."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kvferry.app.tiers.block_format import BadBlock, decode, encode, namespace_of
from kvferry.app.tiers.block_store import MISS, BlockResult, Outcome
from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.tiers.base import TierCounts
from tests.harness.waiting import DEADLINE_S


class DictionaryStore:
    """See `BlockStore`.

    `gate` is shut to hang its calls before they begin, `answer_gate` to hang those that have read or written,
    `put_gate` to hang those that are to write. While `removal_gate` is shut, no block is removed. `error` fails every
    call, each of `errors` one. `batches` are the lengths of all batches that were put or got.
    """

    def __init__(
        self,
        max_bytes: int = 1 << 40,
        batch_blocks: int = 1,
        fingerprint: Mapping[str, object] | None = None,
        blocks: OrderedDict[bytes, tuple[bytes, RequestIdentity]] | None = None,
    ) -> None:
        """`blocks` are those of an earlier store: the same server, as the next process finds it."""
        self.batch_blocks = batch_blocks
        self.batches: list[int] = []
        self.probes = 0
        self.probe_gate = threading.Event()
        self.probe_gate.set()
        self.errors: list[Exception] = []
        self.blocks = OrderedDict() if blocks is None else blocks
        self.namespace = namespace_of(fingerprint or {})
        self.gate = threading.Event()
        self.gate.set()
        self.answer_gate, self.put_gate, self.removal_gate = threading.Event(), threading.Event(), threading.Event()
        self.answer_gate.set()
        self.put_gate.set()
        self.removal_gate.set()
        self.putting = threading.Semaphore(0)
        self.entered, self.worked = threading.Semaphore(0), threading.Semaphore(0)
        self.error: BaseException | None = None
        self.closed = False
        self.overlapped = False
        self._num_inside = 0
        self.maintained = threading.Event()
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._evicted = 0

    def probe(self) -> None:
        """Fail like any other call; hangs while `probe_gate` is shut."""
        self.probe_gate.wait(60)
        self.probes += 1
        if self.error is not None:
            raise self.error

    def find_many(self, keys: Sequence[Key]) -> Sequence[bool]:
        with self._call(), self._lock:
            return [self.namespace + key in self.blocks for key in keys]

    def put_many(
        self, keys: Sequence[Key], data: Sequence[memoryview], origins: Sequence[RequestIdentity]
    ) -> Sequence[Outcome]:
        values = [
            b"".join(encode(self.namespace, key, one, origin))
            for key, one, origin in zip(keys, data, origins, strict=True)
        ]
        names = [self.namespace + key for key in keys]
        self.putting.release()
        self.put_gate.wait(DEADLINE_S)
        with self._call(len(keys)), self._lock:
            return [self._put(*block) for block in zip(names, values, origins, strict=True)]

    def get_many(self, keys: Sequence[Key], into: Sequence[memoryview]) -> Sequence[BlockResult]:
        with self._call(len(keys)), self._lock:
            return [self._get(*block) for block in zip(keys, into, strict=True)]

    def _put(self, name: bytes, value: bytes, origin: RequestIdentity) -> Outcome:
        if name in self.blocks:
            return Outcome.PRESENT
        while self.blocks and self._num_bytes() + len(value) > self._max_bytes:
            self.blocks.popitem(last=False)
            self._evicted += 1
        self.blocks[name] = (value, origin)
        return Outcome.STORED

    def _get(self, key: Key, into: memoryview) -> BlockResult:
        value, _ = self.blocks.get(self.namespace + key, (None, None))
        if value is None:
            return MISS
        try:
            return BlockResult(Outcome.LOADED, *decode(self.namespace, key, value, len(into)))
        except BadBlock:
            return BlockResult(Outcome.CORRUPT)

    def drop(self, keys: Sequence[Key]) -> None:
        if not self.removal_gate.is_set():
            raise OSError("the gate of removals is shut")
        with self._lock:
            for key in keys:
                self.blocks.pop(self.namespace + key, None)

    def reset(self, stop: Callable[[], bool]) -> tuple[int, int]:
        return self.drop_matching(RequestFilter(), stop)

    def drop_matching(self, match: RequestFilter, stop: Callable[[], bool]) -> tuple[int, int]:
        self.overlapped |= self._num_inside > 0
        with self._call(), self._lock:
            meant = [
                name
                for name, (_, origin) in self.blocks.items()
                if name.startswith(self.namespace) and match.matches(origin)
            ]
            return len(meant), sum(len(self.blocks.pop(name)[0]) for name in meant)

    def maintain(self, stop: Callable[[], bool]) -> None:
        self.maintained.set()

    def health(self) -> Sequence[str]:
        return []

    def size(self) -> TierCounts:
        with self._lock:
            return TierCounts(len(self.blocks), self._num_bytes(), self._max_bytes, evicted=self._evicted)

    def close(self) -> None:
        assert not self.closed, "a second close would close files that others have opened since"
        self.closed = True

    def _num_bytes(self) -> int:
        return sum(len(value) for value, _ in self.blocks.values())

    @contextmanager
    def _call(self, num_blocks: int = 0) -> Iterator[None]:
        """Wait at the gates, or raise `error`; counts as inside until the call ends."""
        with self._lock:
            self.batches += [num_blocks] if num_blocks else []
            self._num_inside += 1
        try:
            self.entered.release()
            if not self.gate.wait(DEADLINE_S):
                raise TimeoutError("the gate was not opened")
            if self.error is not None:
                raise self.error
            if self.errors:
                raise self.errors.pop()
            yield
            self.worked.release()
            self.answer_gate.wait(DEADLINE_S)
        finally:
            with self._lock:
                self._num_inside -= 1
