"""A tier that is obvious: blocks in a dictionary, jobs that end at a time of a clock that the test turns.

It can be slow, dead or lossy on command, moves bytes as late as it may (when a result is polled), and keeps a book of
whatever its caller does wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvferry.app.tiers.block_store import SlotBytes
from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.policy import Level
from kvferry.core.tiers.base import TierCounts, TierJob, TierResetResult, TierResult

FALLIBLE = ("look_up", "store", "load", "cancel", "poll")
"""Methods that a reference tier can be told to fail, and is used again afterwards."""


@dataclass
class _Open:
    kind: str
    keys: Sequence[Key]
    due_s: float
    started_s: float
    job: TierJob | None = None
    dropped: Sequence[bytes] = ()
    void: bool = False
    void_keys: set[Key] = field(default_factory=set)


class ReferenceTier:
    """See the module. `latency_s` is how long a job takes; `loses` answers whether a block is lost on its way."""

    def __init__(
        self, slots: SlotBytes, clock: Callable[[], float], *, max_blocks: int = 1 << 20, timeout_s: float = 10.0
    ) -> None:
        self.blocks: dict[Key, tuple[bytes, RequestIdentity]] = {}
        self.level = Level.BLOCK
        self.drops_matching = True
        self.latency_s = 0.0
        self.dead = self.is_unavailable = False
        self.raises: set[str] = set()
        self.loses: Callable[[Key], bool] = lambda key: False
        self.wrongs: list[str] = []
        self.closed = False
        self.timeout_s = timeout_s
        self._slots = slots
        self._clock = clock
        self._max_blocks = max_blocks
        self._open: dict[int, _Open] = {}
        self._numbers: set[int] = set()
        names = ("stored", "stored_bytes", "present", "loaded", "loaded_bytes", "missing", "failed", "evicted")
        self._counts = dict.fromkeys(names, 0)

    @property
    def touched_slots(self) -> set[int]:
        """The slots that open jobs may still read or write."""
        return {slot for job in self._open.values() if job.job is not None for slot in job.job.slots.tolist()}

    @property
    def num_open(self) -> int:
        """Jobs and resets that have not ended."""
        return len(self._open)

    def is_load(self, number: int) -> bool:
        return self._open[number].kind == "load"

    def look_up(self, number: int, keys: Sequence[Key]) -> None:
        self._maybe_raise("look_up")
        self._begin(number, "look_up", keys)

    def store(self, job: TierJob) -> None:
        self._maybe_raise("store")
        self._begin(job.number, "store", job.keys, job)
        if len(job.origins) != len(job):
            self.wrongs.append(f"store {job.number} has {len(job.origins)} origins for {len(job)} blocks")

    def load(self, job: TierJob) -> None:
        self._maybe_raise("load")
        self._begin(job.number, "load", job.keys, job)

    def cancel(self, number: int) -> None:
        self._maybe_raise("cancel")
        self._open.pop(number, None)

    def drop(self, number: int, keys: Sequence[Key]) -> None:
        self._maybe_raise("drop")
        for key in keys:
            self.blocks.pop(key, None)
        for job in self._open.values():
            job.void_keys.update(keys)
        self._begin(number, "reset", ())

    def reset(self, number: int, match: RequestFilter | None) -> None:
        self._maybe_raise("reset")
        is_whole = match is None or not self.drops_matching
        meant = [key for key, (_, origin) in self.blocks.items() if is_whole or match.matches(origin)]
        for job in self._open.values():
            job.void = True
        self._begin(number, "reset", ())
        self._open[number].dropped = [self.blocks.pop(key)[0] for key in meant]

    def poll(self) -> Sequence[TierResult | TierResetResult]:
        self._maybe_raise("poll")
        if self.dead:
            return []
        now_s = self._clock()
        # A clock that was set back makes what began in its future due.
        due = [number for number, job in self._open.items() if job.due_s <= now_s or now_s < job.started_s]
        return [self._end(number, self._open.pop(number)) for number in due]

    def health(self) -> Sequence[str]:
        return ["it is dead"] if self.dead else []

    def counts(self) -> TierCounts:
        num_bytes = sum(len(content) for content, _ in self.blocks.values())
        return TierCounts(
            blocks=len(self.blocks),
            bytes=num_bytes,
            max_bytes=1 << 40,
            unavailable=int(self.is_unavailable),
            **self._counts,
        )

    def shared_epoch(self) -> bytes:
        return b""

    def close(self, timeout_s: float) -> None:
        self._open.clear()
        self.closed = True

    def _begin(self, number: int, kind: str, keys: Sequence[Key], job: TierJob | None = None) -> None:
        if number in self._numbers:
            self.wrongs.append(f"number {number} is used twice")
        self._numbers.add(number)
        now_s = self._clock()
        self._open[number] = _Open(kind, list(keys), now_s + self.latency_s, now_s, job)
        if self.closed:
            self.wrongs.append(f"{kind} {number} is submitted after the end")
        if job is None:
            return
        if len(set(job.keys)) < len(job) or len(set(job.slots.tolist())) < len(job):
            self.wrongs.append(f"{kind} {number} names a key or a slot twice")

    def _end(self, number: int, job: _Open) -> TierResult | TierResetResult:
        if job.kind == "reset":
            return TierResetResult(number, len(job.dropped), sum(map(len, job.dropped)))
        ok = np.zeros(len(job.keys), dtype=np.bool_)
        origins: list[RequestIdentity | None] = [None] * len(job.keys) if job.kind == "load" else []
        num_bytes = 0
        for place, key in enumerate(job.keys):
            if job.void or key in job.void_keys:
                continue
            if job.job is None:
                ok[place] = key in self.blocks
                continue
            slot, size = int(job.job.slots[place]), int(job.job.num_bytes[place])
            if job.kind == "store":
                ok[place] = self._keep(key, self._read(key, slot, size), job.job.origins[place])
            else:
                ok[place] = self._bring(key, slot, size)
                origins[place] = self.blocks[key][1] if ok[place] else None
            num_bytes += size if ok[place] else 0
        return TierResult(number, ok, origins, num_bytes, self._clock() - job.started_s)

    def _keep(self, key: Key, content: bytes, origin: RequestIdentity) -> bool:
        if key in self.blocks:
            if self.blocks[key][0] != content:
                self.wrongs.append(f"block {key.hex()} comes with other bytes than before")
            self._counts["present"] += 1
            return True
        if self.loses(key):
            self._counts["failed"] += 1
            return False
        if len(self.blocks) >= self._max_blocks:
            del self.blocks[next(iter(self.blocks))]
            self._counts["evicted"] += 1
        self.blocks[key] = (content, origin)
        self._counts["stored"] += 1
        self._counts["stored_bytes"] += len(content)
        return True

    def _bring(self, key: Key, slot: int, num_bytes: int) -> bool:
        found = self.blocks.get(key)
        if found is None or self.loses(key):
            self._write(key, slot, num_bytes, None)
            self._counts["missing" if found is None else "failed"] += 1
            return False
        written = self._write(key, slot, num_bytes, found[0])
        if written != len(found[0]):
            self.wrongs.append(f"block {key.hex()} has {len(found[0])} bytes and is asked for as {written}")
        self._counts["loaded"] += 1
        self._counts["loaded_bytes"] += written
        return True

    def _read(self, key: Key, slot: int, num_bytes: int) -> bytes:
        """What a slot holds."""
        return b"".join(view.tobytes() for view in self._slots.views(slot, num_bytes))

    def _write(self, key: Key, slot: int, num_bytes: int, content: bytes | None) -> int:
        """Fill a slot, with anything where the block is lost, and say how much of it was right."""
        start = 0
        for view in self._slots.views(slot, num_bytes):
            view[:] = 0x55 if content is None else np.frombuffer(content, dtype=np.uint8)[start : start + len(view)]
            start += len(view)
        return start

    def _maybe_raise(self, method: str) -> None:
        if method in self.raises:
            raise RuntimeError(f"{method} was told to fail")
