"""A toy engine's tiers: the reference tier, over slots that hold values instead of bytes, with results in any order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvferry.core.keys import Key
from kvferry.core.tiers.base import TierResetResult, TierResult
from tests.harness.reference_tier import ReferenceTier

if TYPE_CHECKING:
    from tests.harness.toy_engine import ToyEngine

_VALUE_BYTES = 9
TIMEOUT_S = 10.0


class ToyTier(ReferenceTier):
    """Besides what its base can do it is `shuffle`d, and notes among its `wrongs` whatever it is given of wrong bytes.

    `due` says of each job's number whether it may end at a poll, and `repeats` whether an earlier result comes again.
    """

    def __init__(self, engine: ToyEngine) -> None:
        super().__init__(self, lambda: engine.now_s, timeout_s=TIMEOUT_S)
        self.due: Callable[[int], bool] = lambda number: True
        self.shuffle: Callable[[int], int] = lambda count: 0
        self.repeats: Callable[[], bool] = lambda: False
        self._past: deque[TierResult | TierResetResult] = deque(maxlen=4)
        self._engine = engine

    def views(self, slot: int, num_bytes: int) -> Sequence:
        raise NotImplementedError("a toy's slots hold values")

    def poll(self) -> Sequence[TierResult | TierResetResult]:
        held = {number: job for number, job in self._open.items() if not self.due(number)}
        for number in held:
            del self._open[number]
        try:
            results = list(super().poll())
        finally:
            self._open.update(held)
        if len(results) > 1:
            results.insert(0, results.pop(self.shuffle(len(results))))
        past = list(self._past)
        self._past.extend(results)
        if past and self.repeats():
            self._engine.events["a tier's result came twice"] += 1
            results.insert(self.shuffle(len(results) + 1), past[self.shuffle(len(past))])
        return results

    def holds_right_bytes(self) -> bool:
        truth = self._engine.truth
        return all(content == _packed([truth.of(key)] * self._ranks) for key, (content, _) in self.blocks.items())

    @property
    def _ranks(self) -> int:
        return self._engine.copies.num_ranks

    def _read(self, key: Key, slot: int, num_bytes: int) -> bytes:
        group = self._engine.groups[key[-1]]
        if num_bytes != group.slot_bytes:
            self.wrongs.append(f"block {key.hex()} is said to have {num_bytes} bytes")
        rows = [host[slot][: group.slot_blocks] for host in self._engine.copies.host]
        if rows != [self._engine.truth.of(key)] * self._ranks:
            self.wrongs.append(f"slot {slot} is given as block {key.hex()} and holds something else")
        return _packed(rows)

    def _write(self, key: Key, slot: int, num_bytes: int, content: bytes | None) -> int:
        group = self._engine.groups[key[-1]]
        values = None if content is None else iter(_unpacked(content))
        for host in self._engine.copies.host:
            for part in range(group.slot_blocks):
                host[slot][part] = self._engine.device.junk.next() if values is None else next(values)
        return 0 if content is None or num_bytes != group.slot_bytes else len(content)


def _packed(rows: Sequence[Sequence[int]]) -> bytes:
    return b"".join(value.to_bytes(_VALUE_BYTES, "big", signed=True) for row in rows for value in row)


def _unpacked(content: bytes) -> list[int]:
    starts = range(0, len(content), _VALUE_BYTES)
    return [int.from_bytes(content[start : start + _VALUE_BYTES], "big", signed=True) for start in starts]
