"""Block store in a Mooncake Store, shared by all engines with the same fingerprint.

    <prefix>/<namespace>/epoch, <prefix>/<namespace>/state/...    the state, see `kvferry.app.tiers.mooncake.state`
    <prefix>/<namespace>/b/<epoch>/<key>                          one block, see `kvferry.app.tiers.shared_block`

The namespace is a digest of the fingerprint; epoch and filters are those of `kvferry.app.tiers.shared_state`. Every
call that finds or loads blocks reads the state after its last access to one, and discards its results if the epoch has
changed. Objects cannot be listed, so that a reset by match removes none: blocks that it concerns are misses, and are
removed when they are found. See "The Mooncake tier" in docs/tiers.md.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from kvferry.app.tiers.block_format import BadBlock, unpack_origin
from kvferry.app.tiers.block_store import BlockResult, Outcome, interrupt_if
from kvferry.app.tiers.mooncake.client import (
    ABSENT,
    NO_SPACE,
    SCRATCH_BYTES,
    TOO_LONG,
    Lane,
    MooncakeClient,
    SettingsRefused,
)
from kvferry.app.tiers.mooncake.settings import MooncakeTierSettings
from kvferry.app.tiers.mooncake.state import NoSpace, StateObjects
from kvferry.app.tiers.shared_block import HEAD_BYTES, OVERHEAD_BYTES, read_head
from kvferry.app.tiers.shared_state import SharedState, pack_filter
from kvferry.app.tiers.shared_values import ValueStore
from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.tiers.base import TierContext, TierRefused

_log = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
MAX_BATCH_BLOCKS = 32
FULL_S = 5.0
"""Seconds for which a store that had no space for a block is reported as full."""
MAX_OWN_BLOCKS = 1 << 18
"""Blocks of this engine whose requests it remembers, so that a reset by match can remove them."""
_REMOVED_AT_ONCE = 1000
_SWEEPS_S = (0.0, 2.0, 15.0)
"""Seconds after a reset at which earlier blocks are removed: again when leases of the time before have ended."""
_TEST = b"kvferry"


class MooncakeStore(ValueStore):
    """An `kvferry.app.tiers.block_store.BlockStore`."""

    def __init__(self, settings: MooncakeTierSettings, context: TierContext) -> None:
        """`probe` starts the client. Blocks are of up to `context.slot_bytes`."""
        super().__init__(context)
        slot_bytes = context.slot_bytes
        self.batch_blocks = max(1, min(MAX_BATCH_BLOCKS, BATCH_BYTES // slot_bytes))
        self._replicas = settings.replicas
        self._folder = f"{settings.prefix}/{self._values.namespace.hex()}"
        self._client = MooncakeClient(settings, settings.threads + 1, self.batch_blocks * (slot_bytes + OVERHEAD_BYTES))
        self._state = StateObjects(self._folder, self._name, self._begin_epoch)
        self._own: OrderedDict[Key, tuple[RequestIdentity, int]] = OrderedDict()
        """Origins and lengths of the blocks that this engine has stored last."""
        self._changing_own = threading.Lock()
        self._full_until_s = 0.0
        self._sweeps_s: list[float] = []
        """When to remove blocks of earlier epochs."""

    # --- what answers at once -----------------------------------------------------------------------------------

    def is_writable(self) -> bool:
        """See `BlockStore`. A full store evicts blocks as soon as one finds no space."""
        return True

    def health(self) -> Sequence[str]:
        """See `BlockStore`."""
        is_full = time.monotonic() < self._full_until_s
        return (["the store has no space for new blocks"] if is_full else []) + self._sharing_problems

    def shared_epoch(self) -> bytes:
        """See `SharedStore`."""
        return self._state.latest.epoch

    # --- calls of the client ------------------------------------------------------------------------------------

    def probe(self) -> None:
        """See `BlockStore`. Only the first call refuses settings: later the store has changed, not they."""
        may_refuse, self._may_refuse = self._may_refuse, False
        try:
            self._client.start()
        except SettingsRefused as refusal:
            if may_refuse:
                raise TierRefused(f"KVFERRY_TIERS: tier {self._name}: {refusal.text}") from None
            raise
        with self._client.lane() as lane:
            self._test(lane)
            self._state.read(lane)

    def find_many(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See `BlockStore`."""
        with self._client.lane() as lane:
            begun = self._state.latest
            found = self._find(lane, begun, keys)
            read = self._state.read(lane)
            if read.epoch == begun.epoch and read.items != begun.items:
                # A reset by match has come since the last call.
                found = self._find(lane, read, keys)
                begun, read = read, self._state.read(lane)
            if read.items != begun.items:
                return [False] * len(keys)
            return self._values.find(begun, read, keys, found)

    def put_many(
        self, keys: Sequence[Key], data: Sequence[memoryview], origins: Sequence[RequestIdentity]
    ) -> Sequence[Outcome]:
        """See `BlockStore`. Sends only blocks that are missing.

        Reads the state before it writes, and not again: a reset by match that comes later concerns what is written with
        the number of this state, and a block that is written under an epoch that has ended is never found.
        """
        with self._values.dropped.storing(keys), self._client.lane() as lane:
            state = self._state.read(lane)
            found = self._find(lane, state, keys, removes=True)
            outcomes, todo = self._values.plan_put(state, state, keys, found)
            if todo:
                stored = self._put(
                    lane, state, [keys[i] for i in todo], [data[i] for i in todo], [origins[i] for i in todo]
                )
                for i, outcome in zip(todo, stored, strict=True):
                    outcomes[i] = outcome
        return [
            Outcome.DROPPED if key in self._values.dropped else one for key, one in zip(keys, outcomes, strict=True)
        ]

    def get_many(self, keys: Sequence[Key], into: Sequence[memoryview]) -> Sequence[BlockResult]:
        """See `BlockStore`. Objects that do not verify, or that a reset by match concerns, are removed."""
        with self._client.lane() as lane:
            begun = self._state.latest
            spans = list(_spans([len(one) + OVERHEAD_BYTES for one in into]))
            codes = lane.get(self._names(begun, keys), spans)
            # After the last access to a block.
            read = self._state.read(lane)
            # One that is longer than it can be is no block.
            values = [
                lane.view[start : start + max(code, 0)] if code >= 0 or code == TOO_LONG else None
                for code, (start, _) in zip(codes, spans, strict=True)
            ]
            # The client may write to the lane again after a call that took too long.
            results, bad = self._values.load(begun, read, keys, values, into, copies=True)
            self._remove(lane, begun, bad)
        return [
            BlockResult(Outcome.FAILED) if code < 0 and code not in ABSENT and code != TOO_LONG else result
            for code, result in zip(codes, results, strict=True)
        ]

    def reset(self, match: RequestFilter | None, stop: Callable[[], bool]) -> tuple[int, int]:
        """See `BlockStore`. Once it is in the store, a reset holds for all engines.

        Returns what this engine had stored, and may have been evicted, or for a reset by match has been removed.
        """
        with self._client.lane() as lane:
            if match is not None:
                try:
                    state = self._state.append(lane, pack_filter(match))
                    if state is not None:
                        return self._remove_matching(lane, state, match)
                    _log.warning("tier %s: after too many resets by match, this one drops all blocks", self._name)
                except NoSpace:
                    _log.warning("tier %s: a reset by match drops all blocks: the store is full", self._name)
            dropped = self._values.size
            self._state.replace_epoch(lane)
        now_s = time.monotonic()
        self._sweeps_s = [now_s + pause_s for pause_s in _SWEEPS_S]
        return dropped

    def maintain(self, stop: Callable[[], bool]) -> None:
        """See `BlockStore`."""
        with self._client.lane() as lane:
            self._state.read(lane)
            for keys in self._values.dropped.removals(_REMOVED_AT_ONCE):
                # Read after the drop: blocks of a later epoch were stored after it.
                self._remove(lane, self._state.read(lane), keys)
                interrupt_if(stop)
            if self._sweeps_s and time.monotonic() >= self._sweeps_s[0]:
                epoch = self._state.read(lane).epoch.decode()
                self._sweeps_s.pop(0)
                # Of the characters of a name only the dot has a meaning in regular expressions.
                lane.remove_matching(f"^{self._folder.replace('.', '[.]')}/b/(?!{epoch}/)")

    def close(self) -> None:
        """See `BlockStore`."""
        self._client.close()

    # --- inside -------------------------------------------------------------------------------------------------

    def _names(self, state: SharedState, keys: Sequence[Key]) -> list[str]:
        prefix = f"{self._folder}/b/{state.epoch.decode()}/"
        return [prefix + key.hex() for key in keys]

    def _begin_epoch(self) -> None:
        """Forget what this engine had stored under the epoch before."""
        self._values.begin_epoch()
        with self._changing_own:
            self._own.clear()

    def _test(self, lane: Lane) -> None:
        """Store and load an object. Raises `StoreUnavailable`."""
        name = f"{self._folder}/test/{secrets.token_hex(8)}"
        lane.view[: len(_TEST)] = _TEST
        (code,) = lane.put([name], [(0, len(_TEST))], 1, pinned=False)
        if code == NO_SPACE:
            # Blocks can be loaded all the same.
            self._set_full()
            return
        lane.get([name], [(0, len(_TEST))])
        lane.remove([name])

    def _find(self, lane: Lane, state: SharedState, keys: Sequence[Key], *, removes: bool = False) -> list[bool]:
        """Return which blocks exist that no reset by match of a state concerns; may remove the others."""
        names = self._names(state, keys)
        found = lane.exists(names)
        if state.filters:
            existing = [name for name, one in zip(names, found, strict=True) if one]
            bad = set(self._find_reset(lane, state, existing))
            if removes:
                lane.remove(list(bad))
            found = [one and name not in bad for name, one in zip(names, found, strict=True)]
        return found

    def _find_reset(self, lane: Lane, state: SharedState, names: Sequence[str]) -> Iterator[str]:
        """Yield the names of blocks that resets by match concern, or that cannot be read."""
        heads = _read_parts(lane, names, [0] * len(names), [HEAD_BYTES] * len(names))
        earlier: list[tuple[str, int, int, int]] = []
        for name, head in zip(names, heads, strict=True):
            try:
                # The length of an object is not known here, and is verified when it is loaded.
                number, start, length = read_head(head, None)
            except BadBlock:
                yield name
                continue
            if number > len(state.filters):
                yield name
            elif number < len(state.filters):
                earlier.append((name, number, start, length))
        lengths = [length for *_, length in earlier]
        packed = _read_parts(lane, [name for name, *_ in earlier], [start for *_, start, _ in earlier], lengths)
        for (name, number, *_), one in zip(earlier, packed, strict=True):
            try:
                is_reset = one is None or state.is_reset(number, unpack_origin(one))
            except BadBlock:
                is_reset = True
            if is_reset:
                yield name

    def _put(
        self,
        lane: Lane,
        state: SharedState,
        keys: Sequence[Key],
        data: Sequence[memoryview],
        origins: Sequence[RequestIdentity],
    ) -> list[Outcome]:
        """Store blocks; return their outcomes."""
        values = [self._values.pack(state, *one) for one in zip(keys, data, origins, strict=True)]
        sizes = [sum(map(len, value)) for value in values]
        spans = list(_spans(sizes))
        # By numpy, which releases the interpreter's lock while it copies.
        buffer = np.frombuffer(lane.view, dtype=np.uint8)
        for value, (start, _) in zip(values, spans, strict=True):
            for piece in filter(len, value):
                np.copyto(buffer[start : start + len(piece)], np.frombuffer(piece, dtype=np.uint8))
                start += len(piece)
        codes = lane.put(self._names(state, keys), spans, self._replicas, pinned=False)
        if NO_SPACE in codes:
            self._set_full()
        else:
            self._full_until_s = 0.0
        stored = [i for i, code in enumerate(codes) if code == 0]
        self._values.count(len(stored), sum(sizes[i] for i in stored))
        with self._changing_own:
            for i in stored:
                self._own[keys[i]] = origins[i], sizes[i]
            while len(self._own) > MAX_OWN_BLOCKS:
                self._own.popitem(last=False)
        known = {0: Outcome.STORED, NO_SPACE: Outcome.DROPPED}
        return [known.get(code, Outcome.FAILED) for code in codes]

    def _set_full(self) -> None:
        if time.monotonic() >= self._full_until_s:
            _log.warning("tier %s: the store has no space for new blocks", self._name)
        self._full_until_s = time.monotonic() + FULL_S

    def _remove(self, lane: Lane, state: SharedState, keys: Sequence[Key]) -> None:
        """Remove blocks."""
        self._values.uncount(lane.remove(self._names(state, keys)).count(0))
        with self._changing_own:
            for key in keys:
                self._own.pop(key, None)

    def _remove_matching(self, lane: Lane, state: SharedState, match: RequestFilter) -> tuple[int, int]:
        """Remove the blocks of this engine that a reset by match concerns; return their number and bytes."""
        with self._changing_own:
            found = [(key, size) for key, (origin, size) in self._own.items() if match.matches(origin)]
            for key, _ in found:
                del self._own[key]
        removed: list[int] = []
        for first in range(0, len(found), _REMOVED_AT_ONCE):
            some = found[first : first + _REMOVED_AT_ONCE]
            codes = lane.remove(self._names(state, [key for key, _ in some]))
            removed += [size for (_, size), code in zip(some, codes, strict=True) if code == 0]
        self._values.count(-len(removed), -sum(removed))
        return len(removed), sum(removed)


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield places in a lane for values of these sizes, one after the other: starts and lengths."""
    start = SCRATCH_BYTES
    for size in sizes:
        yield start, size
        start += size


def _read_parts(
    lane: Lane, names: Sequence[str], sources: Sequence[int], sizes: Sequence[int]
) -> Iterator[bytes | None]:
    """Yield parts of objects, in as few calls as their sizes allow; None for those that cannot be read."""
    first = 0
    while first < len(names):
        end, length = first + 1, sizes[first]
        while end < len(names) and length + sizes[end] <= len(lane.view) - SCRATCH_BYTES:
            length += sizes[end]
            end += 1
        spans = list(_spans(sizes[first:end]))
        codes = lane.get_parts(names[first:end], sources[first:end], spans)
        for code, (start, size) in zip(codes, spans, strict=True):
            yield bytes(lane.view[start : start + size]) if code == size else None
        first = end
