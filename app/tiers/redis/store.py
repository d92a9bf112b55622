"""Block store in Redis, shared by all engines with the same fingerprint.

    <prefix>:<namespace>:state              list: the epoch, then one filter for each reset by match in that epoch
    <prefix>:<namespace>:b:<epoch>:<key>    one block, see `kvferry.app.tiers.shared_block`

The namespace is a digest of the fingerprint, the epoch a number and a random id, which each whole reset replaces. Every
call reads the state in the server after its last command, and discards its results if the epoch has changed: no block
of an earlier epoch is served, and a block that was stored under an earlier epoch is never found. The length of the list
numbers the resets by match. A value contains the number at which its store began, and is a miss if a later filter
matches its origin. See "Resets" in docs/tiers.md.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any

import redis

from kvferry.app.tiers.block_format import BadBlock, unpack_origin
from kvferry.app.tiers.block_store import BlockResult, Outcome, StoreUnavailable, interrupt_if
from kvferry.app.tiers.redis.connection import (
    AccessDenied,
    Client,
    ClientError,
    Command,
    Pieces,
    ServerFull,
    connect,
    disconnect_idle,
    primaries,
    run_pipeline,
    unavailable,
)
from kvferry.app.tiers.redis.settings import RedisTierSettings
from kvferry.app.tiers.shared_block import HEAD_BYTES, read_head
from kvferry.app.tiers.shared_state import MAX_RESETS_BY_MATCH, SharedState, pack_filter
from kvferry.app.tiers.shared_values import ValueStore
from kvferry.core.keys import Key, RequestFilter, RequestIdentity
from kvferry.core.tiers.base import TierContext, TierRefused

_log = logging.getLogger(__name__)

BATCH_BYTES = 4 << 20
MAX_BATCH_BLOCKS = 32
_SCAN_COUNT = 1000
_SCANS_PER_SECOND = 50
_UNLINK_NAMES = 1000


class RedisStore(ValueStore):
    """An `kvferry.app.tiers.block_store.BlockStore`."""

    def __init__(self, settings: RedisTierSettings, context: TierContext) -> None:
        """`probe` connects. Blocks are of up to `context.slot_bytes`."""
        super().__init__(context)
        self.batch_blocks = max(1, min(MAX_BATCH_BLOCKS, BATCH_BYTES // context.slot_bytes))
        self._settings = settings
        self._prefix = f"{settings.prefix}:{self._values.namespace.hex()}:".encode()
        self._client: Client | None = None
        self._changing = threading.Lock()
        """Held while the state is compared with the server's, including the calls for that."""
        self._state = SharedState()
        self._resetting: tuple[RequestFilter, SharedState] | None = None
        """A reset by match that is in the server, and the state with it; its blocks are being removed."""
        self._problem: str | None = None
        """Why nothing is stored."""
        self._evicts_state = False
        self._sweep: Iterator[list[bytes]] | None = None

    # --- what answers at once -----------------------------------------------------------------------------------

    def is_writable(self) -> bool:
        """See `BlockStore`."""
        return self._problem is None

    def health(self) -> Sequence[str]:
        """See `BlockStore`."""
        texts = [] if self._problem is None else [f"{self._problem}; new blocks are not kept"]
        return texts + [_EVICTS_STATE] * self._evicts_state + self._sharing_problems

    def shared_epoch(self) -> bytes:
        """See `SharedStore`."""
        return self._state.epoch

    # --- calls of the server ------------------------------------------------------------------------------------

    def probe(self) -> None:
        """See `BlockStore`. Only the first call refuses settings: later the server has changed, not they."""
        may_refuse, self._may_refuse = self._may_refuse, False
        try:
            is_bounded = self._connect()
        except AccessDenied as denied:
            if may_refuse:
                raise TierRefused(f"KVFERRY_TIERS: tier {self._name}: {denied.text}") from None
            raise
        if may_refuse and not is_bounded:
            raise TierRefused(
                f"KVFERRY_TIERS: tier {self._name}: {_UNBOUNDED}; set maxmemory and an allkeys maxmemory-policy in the "
                "server, or ttl_s"
            )

    def find_many(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See `BlockStore`."""
        state = self._state
        names = self._names(state, keys)
        found, read = self._run([("EXISTS", name) for name in names])
        _raise_first(found)
        return self._values.find(state, read, keys, list(map(bool, found)))

    def put_many(
        self, keys: Sequence[Key], data: Sequence[memoryview], origins: Sequence[RequestIdentity]
    ) -> Sequence[Outcome]:
        """See `BlockStore`. Sends only blocks that are missing."""
        with self._values.dropped.storing(keys):
            return self._put_missing(keys, data, origins)

    def _put_missing(
        self, keys: Sequence[Key], data: Sequence[memoryview], origins: Sequence[RequestIdentity]
    ) -> list[Outcome]:
        state = self._state
        names = self._names(state, keys)
        found, begun = self._run([("EXISTS", name) for name in names])
        _raise_first(found)
        is_there = list(map(bool, found))
        if begun.filters and begun.epoch == state.epoch:
            # A value that a reset by match concerns, and that is not removed yet, is replaced.
            reset = {name for name, _ in self._find_reset(list(compress(names, is_there)), begun)}
            is_there = [one and name not in reset for name, one in zip(names, is_there, strict=True)]
        outcomes, todo = self._values.plan_put(state, begun, keys, is_there)
        if not todo:
            return outcomes
        expiry = () if self._settings.ttl_s is None else ("PX", int(self._settings.ttl_s * 1000))
        values = [Pieces(self._values.pack(begun, keys[i], data[i], origins[i])) for i in todo]
        results, ended = self._run([("SET", names[i], value, *expiry) for i, value in zip(todo, values, strict=True)])
        if ended.epoch != state.epoch:
            self._unlink([names[i] for i in todo])
            return [Outcome.DROPPED] * len(keys)
        # A reset by match since `begun` makes its blocks misses, also those that it did not see in the server yet.
        late = [i for i in todo if ended.is_reset(len(begun.filters), origins[i])]
        self._unlink([names[i] for i in late])
        refused = [result for result in results if isinstance(result, Exception)]
        _raise_first([error for error in refused if not isinstance(error, redis.OutOfMemoryError)])
        if refused:
            self._problem = _FULL
        stored = [
            (i, sum(map(len, value)))
            for i, value, result in zip(todo, values, results, strict=True)
            if result is True and i not in late
        ]
        for i, _ in stored:
            outcomes[i] = Outcome.STORED
        self._values.count(len(stored), sum(num_bytes for _, num_bytes in stored))
        return outcomes

    def get_many(self, keys: Sequence[Key], into: Sequence[memoryview]) -> Sequence[BlockResult]:
        """See `BlockStore`. Values that do not verify are removed."""
        state = self._state
        names = self._names(state, keys)
        values, read = self._run([("GET", name) for name in names])
        _raise_first([value for value in values if not _is_wrong_type(value)])
        results, bad = self._values.load(state, read, keys, values, into)
        self._values.uncount(self._unlink(self._names(state, bad)))
        return results

    def reset(self, match: RequestFilter | None, stop: Callable[[], bool]) -> tuple[int, int]:
        """See `BlockStore`. Once it is in the server, a reset holds for all engines."""
        if match is None:
            return self._replace_epoch(stop)
        if self._resetting is None or self._resetting[0] != match:
            try:
                state = self._record_reset(match)
            except ServerFull:
                _log.warning("tier %s: a reset by match drops all blocks: the server is full", self._name)
                state = None
            if state is None:
                return self._replace_epoch(stop)
            self._resetting = (match, state)
        count, num_bytes = self._unlink_reset(self._resetting[1], stop)
        self._resetting = None
        self._values.count(-count, -num_bytes)
        return count, num_bytes

    def maintain(self, stop: Callable[[], bool]) -> None:
        """See `BlockStore`."""
        try:
            refusal = self._test_write()
            if refusal is not None and refusal.needs_probe:
                raise refusal
            self._check_memory(refusal)
            for keys in self._values.dropped.removals(_UNLINK_NAMES):
                # Read after the drop: blocks of a later epoch were stored after it.
                _, state = self._run([])
                self._values.uncount(self._unlink(self._names(state, keys)))
                interrupt_if(stop)
            for _ in range(_SCANS_PER_SECOND if self._sweep is not None else 0):
                if not self._sweep_some():
                    break
                interrupt_if(stop)
        except ClientError as error:
            raise unavailable(error) from None

    def close(self) -> None:
        """See `BlockStore`."""
        if self._client is not None:
            self._client.close()

    # --- inside -------------------------------------------------------------------------------------------------

    def _connect(self) -> bool:
        """Connect, and test reading and writing; return whether something bounds the tier."""
        try:
            # Anew after a failure: a failover may have put other servers at the address or into the cluster.
            previous, self._client = self._client, connect(self._settings)
            if previous is not None:
                disconnect_idle(previous)
            is_bounded = self._check_memory()
        except ClientError as error:
            raise unavailable(error) from None
        refusal = self._test_write()
        if refusal is not None:
            raise refusal
        return is_bounded

    def _test_write(self) -> StoreUnavailable | None:
        """Write to the server, and read the state; return why it refuses the write, unless it is full."""
        (written,), _ = self._run([("SET", self._prefix + b"probe", b"", "EX", 60)])
        is_refused = isinstance(written, Exception) and not isinstance(written, redis.OutOfMemoryError)
        return unavailable(written) if is_refused else None

    def _names(self, state: SharedState, keys: Sequence[Key]) -> list[bytes]:
        prefix = self._blocks_of(state.epoch)
        return [prefix + key.hex().encode() for key in keys]

    def _blocks_of(self, epoch: bytes) -> bytes:
        return b"%sb:%s:" % (self._prefix, epoch)

    def _connected(self) -> Client:
        if self._client is None:
            raise unavailable(redis.ConnectionError())
        return self._client

    def _run(self, commands: Sequence[Command]) -> tuple[list[Any], SharedState]:
        """Run commands; return their results, and the state in the server at some time after the last of them."""
        client = self._connected()
        look = self._commands_for_state()
        if self._settings.cluster and commands:
            # Commands for different servers have no order.
            results = run_pipeline(client, commands)
            read = run_pipeline(client, look)
        else:
            both = run_pipeline(client, [*commands, *look])
            results, read = both[: len(commands)], both[len(commands) :]
        self._check_state(read)
        state = self._state
        if not state.epoch or _read_state(read) != (state.epoch, len(state.filters), state.last):
            state = self._follow()
        return results, state

    def _check_state(self, results: Sequence[Any]) -> None:
        """Raise `StoreUnavailable` unless the commands for the state succeeded."""
        if any(map(_is_wrong_type, results)):
            raise StoreUnavailable(
                f"the key {self._prefix.decode()}state is not the list with the state of the namespace; remove it, or "
                "choose another prefix",
                is_transient=False,
            )
        _raise_first(results)

    def _commands_for_state(self) -> list[Command]:
        name = self._prefix + b"state"
        return [("LINDEX", name, 0), ("LLEN", name), ("LINDEX", name, -1)]

    def _follow(self) -> SharedState:
        """Adopt the state in the server. Begins a new epoch if the server has none, or has lost its latest writes."""
        with self._changing:
            # Read again: since the caller's reading, another thread may have adopted a later state.
            answers = run_pipeline(self._connected(), [("LRANGE", self._prefix + b"state", 0, -1)])
            self._check_state(answers)
            state = SharedState.of(answers[0])
            loss = state.find_loss(self._state)
            if loss is not None:
                return self._begin_epoch(loss)
            self._adopt(state)
            return state

    def _adopt(self, state: SharedState) -> None:
        """Use a state from now on. Requires: `_changing` held."""
        known, self._state = self._state, state
        if known.epoch == state.epoch:
            return
        if known.epoch:
            _log.info("tier %s: its namespace was reset", self._name)
        self._values.begin_epoch()
        self._sweep = self._scan()

    def _begin_epoch(self, reason: str | None) -> SharedState:
        """Replace the epoch in the server. Requires: `_changing` held."""
        state = self._state.next_epoch()
        name = self._prefix + b"state"
        try:
            with self._connected().pipeline(transaction=True) as pipeline:
                pipeline.execute_command("DEL", name)
                pipeline.execute_command("RPUSH", name, state.epoch)
                pipeline.execute()
        except ClientError as error:
            raise unavailable(error) from None
        if reason is not None and self._state.epoch:
            _log.warning("tier %s: starts empty: %s", self._name, reason)
        self._adopt(state)
        return state

    def _replace_epoch(self, stop: Callable[[], bool]) -> tuple[int, int]:
        """Begin a new epoch and return the blocks and bytes that this engine had stored in the old one."""
        self._resetting = None
        dropped = self._values.size
        try:
            self._run([])
            with self._changing:
                self._begin_epoch(None)
        except ServerFull:
            # A full server accepts deletions. Without a state no block is served before a new epoch has begun.
            _raise_first(run_pipeline(self._connected(), [("DEL", self._prefix + b"state")]))
            for names in self._scan():
                interrupt_if(stop)
                self._unlink(names)
        return dropped

    def _record_reset(self, match: RequestFilter) -> SharedState | None:
        """Append a filter to the state in the server; return the state with it, or None if it has to be replaced."""
        _, state = self._run([])
        if len(state.filters) >= MAX_RESETS_BY_MATCH:
            _log.warning("tier %s: after %d resets by match, this one drops all blocks", self._name, len(state.filters))
            return None
        (length,), state = self._run([("RPUSHX", self._prefix + b"state", pack_filter(match))])
        _raise_first([length])
        return state if length else None

    def _unlink(self, names: Sequence[bytes]) -> int:
        """Remove values from the server, whose memory it frees on a thread of its own; return how many there were."""
        if not names:
            return 0
        results = run_pipeline(self._connected(), [("UNLINK", name) for name in names])
        _raise_first(results)
        return sum(results)

    # --- all values ---------------------------------------------------------------------------------------------

    def _scan(self) -> Iterator[list[bytes]]:
        """Yield names of blocks of this namespace, in any epoch, after each call of a server. Raises `ClientError`."""
        for client in primaries(self._connected()):
            cursor = 0
            while True:
                found: Any = client.scan(cursor, match=self._prefix + b"b:*", count=_SCAN_COUNT)
                cursor, names = found
                yield names
                if not cursor:
                    break

    def _sweep_some(self) -> bool:
        """Remove some blocks of earlier epochs; return False after the last ones."""
        try:
            names = next(self._sweep or iter(()), None)
        except (*ClientError, StoreUnavailable):
            self._sweep = self._scan()
            raise
        if names is None:
            self._sweep = None
            return False
        state = self._state
        current = self._blocks_of(state.epoch)
        old = [name for name in names if not name.startswith(current)]
        # The epoch is read after the names: all that are of another one are of an earlier one.
        if old and self._run([])[1].epoch == state.epoch:
            self._unlink(old)
        return True

    def _unlink_reset(self, state: SharedState, stop: Callable[[], bool]) -> tuple[int, int]:
        """Remove the blocks that resets by match of a state concern; return their number and bytes."""
        count = num_bytes = 0
        current = self._blocks_of(state.epoch)
        try:
            for found in self._scan():
                interrupt_if(stop)
                names = [name for name in found if name.startswith(current)]
                meant = self._find_reset(names, state)
                self._unlink([name for name, _ in meant])
                count += len(meant)
                num_bytes += sum(length for _, length in meant)
        except ClientError as error:
            raise unavailable(error) from None
        return count, num_bytes

    def _find_reset(self, names: Sequence[bytes], state: SharedState) -> list[tuple[bytes, int]]:
        """Return names and lengths of values that resets by match of a state concern, or that cannot be read."""
        heads = self._answers([("GETRANGE", name, 0, HEAD_BYTES - 1) for name in names])
        lengths = [length if isinstance(length, int) else 0 for length in self._answers([("STRLEN", n) for n in names])]
        meant: list[tuple[bytes, int]] = []
        earlier: list[tuple[bytes, int, int]] = []
        commands: list[Command] = []
        for name, head, length in zip(names, heads, lengths, strict=True):
            try:
                number, start, origin_bytes = read_head(head, length)
            except BadBlock:
                if head != b"":
                    meant.append((name, length))
                continue
            # One with a higher number was stored under a later state.
            if number < len(state.filters):
                earlier.append((name, length, number))
                commands.append(("GETRANGE", name, start, start + max(origin_bytes, 1) - 1))
        for (name, length, number), packed in zip(earlier, self._answers(commands), strict=True):
            try:
                origin = unpack_origin(packed)
            except (BadBlock, TypeError):
                origin = None
            if state.is_reset(number, origin):
                meant.append((name, length))
        return meant

    def _answers(self, commands: Sequence[Command]) -> list[Any]:
        """Return results of commands, with exceptions for values that are no strings."""
        if not commands:
            return []
        results = run_pipeline(self._connected(), commands)
        _raise_first([result for result in results if not _is_wrong_type(result)])
        return results

    # --- the server ---------------------------------------------------------------------------------------------

    def _check_memory(self, refusal: StoreUnavailable | None = None) -> bool:
        """Read limits and use of the servers' memory, and return whether something bounds the tier.

        `refusal` is why the server refuses writes, if it does.
        """
        infos = [client.info("memory") for client in primaries(self._connected())]
        has_ttl = self._settings.ttl_s is not None
        limits = [int(info.get("maxmemory", 0)) for info in infos]
        self._max_bytes = sum(limits)
        is_full = any(
            0 < limit <= int(info.get("used_memory", 0)) and not _evicts(str(info.get("maxmemory_policy", "")), has_ttl)
            for limit, info in zip(limits, infos, strict=True)
        )
        is_bounded = has_ttl or all(limits)
        self._problem = _UNBOUNDED if not is_bounded else _FULL if is_full else refusal.text if refusal else None
        self._evicts_state = any(info.get("maxmemory_policy") == "allkeys-random" for info in infos)
        return is_bounded


_UNBOUNDED = "neither ttl_s nor the server's maxmemory bounds it"
_EVICTS_STATE = (
    "the server's maxmemory-policy=allkeys-random evicts the state of the namespace too, and with it all blocks; set "
    "allkeys-lru or allkeys-lfu"
)
_FULL = "the server is full and evicts nothing; raise maxmemory, or set an allkeys maxmemory-policy"


def _evicts(policy: str, has_ttl: bool) -> bool:
    """Return whether a server with this policy makes room by evicting blocks of the tier."""
    return policy.startswith("allkeys") or (policy.startswith("volatile") and has_ttl)


def _read_state(results: Sequence[Any]) -> tuple[bytes, int, bytes]:
    """Return epoch, number of resets by match and last item of a namespace's state; an empty epoch for no state."""
    epoch, length, last = results
    return epoch or b"", max(length - 1, 0), last or b""


def _raise_first(results: Sequence[Any]) -> None:
    """Raise `StoreUnavailable` for the first exception among results of commands."""
    for result in results:
        if isinstance(result, Exception):
            raise unavailable(result) from None


def _is_wrong_type(result: Any) -> bool:
    """Return whether a command failed because its key holds no string."""
    return isinstance(result, redis.ResponseError) and str(result).startswith("WRONGTYPE")
