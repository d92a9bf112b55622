"""Tier type `redis`: a block store in Redis, shared by all engines with the same fingerprint.

    <prefix>:<namespace>:epoch              the epoch, see `kvferry.app.tiers.shared_epoch`
    <prefix>:<namespace>:b:<epoch>:<key>    one block, see `kvferry.app.tiers.block_format`

The namespace is a digest of the fingerprint. Every call reads the epoch in the server after its last command, and
discards its results if it has changed: no block of an earlier epoch is served, and a block that was stored under an
earlier epoch is never found. See docs/tier-guarantees.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis

from kvferry.app.settings.tiers import TierSettings
from kvferry.app.tiers.block_store import BlockResult, Outcome, StoreUnavailable, TierContext, interrupt_if
from kvferry.app.tiers.redis.connection import (
    CLIENT_ERRORS,
    Client,
    Command,
    Pieces,
    connect,
    primaries,
    run_pipeline,
    unavailable,
)
from kvferry.app.tiers.redis.settings import RedisTierSettings
from kvferry.app.tiers.shared_epoch import Epoch
from kvferry.app.tiers.shared_values import SettingsRefused, ValueStore, check_block_bytes
from kvferry.core.keys import Key, RequestIdentity

BATCH_BYTES = 4 << 20
MAX_BATCH_BLOCKS = 32
MAX_VALUE_BYTES = 512 << 20
"""The longest value of Redis, unless its proto-max-bulk-len was raised."""
_SCAN_COUNT = 1000
_SCANS_PER_SECOND = 50


class RedisTier:
    """Blocks as values in a Redis server or cluster, which engines with the same fingerprint share."""

    Settings = RedisTierSettings

    @staticmethod
    def open(settings: RedisTierSettings, context: TierContext) -> RedisStore:
        """Return a store that is not connected yet. Raises `TierRefused`."""
        RedisTier.check(settings, context.slot_bytes)
        return RedisStore(settings, context)

    @staticmethod
    def check(settings: TierSettings, slot_bytes: int | None) -> None:
        """Raise `TierRefused` for blocks that are too long for Redis."""
        check_block_bytes(settings, slot_bytes, MAX_VALUE_BYTES, "a value of Redis")


class RedisStore(ValueStore):
    """An `kvferry.app.tiers.block_store.BlockStore`."""

    full = "the server is full and evicts nothing; raise maxmemory, or set an allkeys maxmemory-policy"

    def __init__(self, settings: RedisTierSettings, context: TierContext) -> None:
        """`probe` connects. Blocks are of up to `context.slot_bytes`."""
        super().__init__(context)
        self.batch_blocks = max(1, min(MAX_BATCH_BLOCKS, BATCH_BYTES // context.slot_bytes))
        self._settings = settings
        self._prefix = f"{settings.prefix}:{self._namespace.hex()}:".encode()
        self._client: Client | None = None
        self._problem: str | None = None
        """Why nothing is stored."""
        self._evicts_epoch = False
        self._sweep: Iterator[list[bytes]] | None = None

    # --- calls of the server ------------------------------------------------------------------------------------

    def _probe(self) -> None:
        """See `ValueStore`. Later, blocks of a server that nothing bounds any more are loaded, and none is stored."""
        if not self._connect() and self._is_first_probe:
            advice = "set maxmemory and an allkeys maxmemory-policy in the server, or ttl_s"
            raise SettingsRefused(f"{_UNBOUNDED}; {advice}", is_transient=False)

    def find_many(self, keys: Sequence[Key]) -> Sequence[bool]:
        """See `BlockStore`."""
        epoch = self._epoch.latest
        found, read = self._run([("EXISTS", name) for name in self._names(epoch, keys)])
        _raise_first(found)
        return [bool(one) and read == epoch for one in found]

    def put_many(
        self, keys: Sequence[Key], data: Sequence[memoryview], origins: Sequence[RequestIdentity]
    ) -> Sequence[Outcome]:
        """See `BlockStore`."""
        if self._problem is not None or self._is_full():
            return [Outcome.DROPPED] * len(keys)
        epoch = self._epoch.latest
        names = self._names(epoch, keys)
        expiry = () if self._settings.ttl_s is None else ("PX", int(self._settings.ttl_s * 1000))
        values = [Pieces(value) for value in self._encode(epoch, keys, data, origins)]
        results, ended = self._run([("SET", name, value, *expiry) for name, value in zip(names, values, strict=True)])
        if ended != epoch:
            self._unlink(names)
            return [Outcome.DROPPED] * len(keys)
        refused = [result for result in results if isinstance(result, Exception)]
        _raise_first([error for error in refused if not isinstance(error, redis.OutOfMemoryError)])
        if refused:
            self._set_full()
        outcomes = [Outcome.STORED if result is True else Outcome.DROPPED for result in results]
        self._count_stored(values, outcomes)
        return outcomes

    def get_many(self, keys: Sequence[Key], into: Sequence[memoryview]) -> Sequence[BlockResult]:
        """See `BlockStore`."""
        epoch = self._epoch.latest
        values, read = self._run([("GET", name) for name in self._names(epoch, keys)])
        _raise_first([value for value in values if not _is_wrong_type(value)])
        return self._decode(epoch, read, keys, values, into)

    def drop(self, keys: Sequence[Key]) -> None:
        """See `BlockStore`."""
        # Read after the drop: blocks of a later epoch were stored after it.
        _, epoch = self._run([])
        self._count_removed(self._unlink(self._names(epoch, keys)))

    def maintain(self, stop: Callable[[], bool]) -> None:
        """See `BlockStore`."""
        try:
            refusal = self._test_write()
            if refusal is not None and refusal.needs_probe:
                raise refusal
            self._check_memory(refusal)
            for _ in range(_SCANS_PER_SECOND if self._sweep is not None else 0):
                if not self._sweep_some():
                    break
                interrupt_if(stop)
        except CLIENT_ERRORS as error:
            raise unavailable(error) from None

    def health(self) -> Sequence[str]:
        """See `BlockStore`."""
        texts = [] if self._problem is None else [f"{self._problem}; new blocks are not kept"]
        return [*texts, *[_EVICTS_EPOCH] * self._evicts_epoch, *super().health()]

    def read_epoch(self) -> tuple[bytes, None]:
        """See `EpochStore`."""
        (answer,) = run_pipeline(self._connected(), [("GET", self._epoch_key)])
        return self._epoch_of(answer), None

    def replace_epoch(self, version: None, name: bytes) -> bool:
        """See `EpochStore`. Replaces any epoch.

        The client repeats no command. One that the server carries out late begins an epoch without blocks, whose number
        shows other engines that a later epoch was lost.
        """
        _raise_first(run_pipeline(self._connected(), [("SET", self._epoch_key, name)]))
        return True

    def close(self) -> None:
        """See `BlockStore`."""
        if self._client is not None:
            self._client.close()

    # --- inside -------------------------------------------------------------------------------------------------

    def _connect(self) -> bool:
        """Connect, and test reading and writing; return whether something bounds the tier."""
        try:
            # Anew after a failure: a failover may have put other servers at the address or into the cluster.
            previous, self._client = self._client, connect(self._settings, self._client)
            if previous is not None:
                # Calls in progress fail, as those before them did.
                previous.close()
            is_bounded = self._check_memory()
        except CLIENT_ERRORS as error:
            raise unavailable(error) from None
        refusal = self._test_write()
        if refusal is not None:
            raise refusal
        return is_bounded

    def _test_write(self) -> StoreUnavailable | None:
        """Write to the server, and read the epoch; return why it refuses the write, unless it is full."""
        (written,), _ = self._run([("SET", self._prefix + b"probe", b"", "EX", 60)])
        is_refused = isinstance(written, Exception) and not isinstance(written, redis.OutOfMemoryError)
        return unavailable(written) if is_refused else None

    def _names(self, epoch: Epoch, keys: Sequence[Key]) -> list[bytes]:
        prefix = self._blocks_of(epoch)
        return [prefix + key.hex().encode() for key in keys]

    def _blocks_of(self, epoch: Epoch) -> bytes:
        return b"%sb:%s:" % (self._prefix, epoch.name)

    @property
    def _epoch_key(self) -> bytes:
        return self._prefix + b"epoch"

    def _connected(self) -> Client:
        if self._client is None:
            raise unavailable(redis.ConnectionError())
        return self._client

    def _run(self, commands: Sequence[Command]) -> tuple[list[Any], Epoch]:
        """Run commands; return their results, and the epoch in the server at some time after the last of them."""
        client = self._connected()
        look = ("GET", self._epoch_key)
        if self._settings.cluster and commands:
            # Commands for different servers have no order.
            results = run_pipeline(client, commands)
            (read,) = run_pipeline(client, [look])
        else:
            *results, read = run_pipeline(client, [*commands, look])
        return results, self._epoch.confirm(self._epoch_of(read), self)

    def _epoch_of(self, result: Any) -> bytes:
        """Return the name of the epoch that the server has, empty for none, and for a key that holds no string."""
        if _is_wrong_type(result):
            return b""
        _raise_first([result])
        return bytes(result or b"")

    def _on_epoch(self) -> None:
        """Count the blocks of a new epoch, and delete those of earlier ones."""
        super()._on_epoch()
        self._sweep = self._scan()

    def _begin_epoch(self) -> None:
        """See `ValueStore`."""
        self._epoch.begin(self)

    def _remove_everything(self, stop: Callable[[], bool]) -> None:
        """See `ValueStore`."""
        _raise_first(run_pipeline(self._connected(), [("DEL", self._epoch_key)]))
        for names in self._scan():
            interrupt_if(stop)
            self._unlink(names)

    def _unlink(self, names: Sequence[bytes]) -> int:
        """Remove values from the server, whose memory it frees on a thread of its own; return how many there were."""
        if not names:
            return 0
        results = run_pipeline(self._connected(), [("UNLINK", name) for name in names])
        _raise_first(results)
        return sum(results)

    # --- all values ---------------------------------------------------------------------------------------------

    def _scan(self) -> Iterator[list[bytes]]:
        """Yield names of this namespace's blocks, in any epoch, after each call of a server. Raises `CLIENT_ERRORS`."""
        for client in primaries(self._connected()):
            cursor = 0
            while True:
                page: Any = client.scan(cursor, match=self._prefix + b"b:*", count=_SCAN_COUNT)
                cursor, names = page
                yield names
                if not cursor:
                    break

    def _sweep_some(self) -> bool:
        """Remove some blocks of earlier epochs; return False after the last ones."""
        try:
            names = next(self._sweep or iter(()), None)
        except (*CLIENT_ERRORS, StoreUnavailable):
            self._sweep = self._scan()
            raise
        if names is None:
            self._sweep = None
            return False
        epoch = self._epoch.latest
        current = self._blocks_of(epoch)
        old = [name for name in names if not name.startswith(current)]
        # The epoch is read after the names: all that are of another one are of an earlier one.
        if old and self._run([])[1] == epoch:
            self._unlink(old)
        return True

    # --- the server ---------------------------------------------------------------------------------------------

    def _check_memory(self, refusal: StoreUnavailable | None = None) -> bool:
        """Read the limits of the servers' memory, and return whether something bounds the tier.

        `refusal` is why the server refuses writes, if it does.
        """
        infos = [client.info("memory") for client in primaries(self._connected())]
        limits = [int(info.get("maxmemory", 0)) for info in infos]
        self._max_bytes = sum(limits)
        is_bounded = self._settings.ttl_s is not None or all(limits)
        self._problem = _UNBOUNDED if not is_bounded else refusal.text if refusal else None
        self._evicts_epoch = any(info.get("maxmemory_policy") == "allkeys-random" for info in infos)
        return is_bounded


_UNBOUNDED = "neither ttl_s nor the server's maxmemory bounds it"
_EVICTS_EPOCH = (
    "the server's maxmemory-policy=allkeys-random evicts the epoch of the namespace too, and with it all blocks; set "
    "allkeys-lru or allkeys-lfu"
)


def _raise_first(results: Sequence[Any]) -> None:
    """Raise `StoreUnavailable` for the first exception among results of commands."""
    for result in results:
        if isinstance(result, Exception):
            raise unavailable(result) from None


def _is_wrong_type(result: Any) -> bool:
    """Return whether a command failed because its key holds no string."""
    return isinstance(result, redis.ResponseError) and str(result).startswith("WRONGTYPE")
