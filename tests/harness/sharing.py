"""Stores that engines share, behind one interface: any number of tiers on one namespace, and the blocks that it has."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from kvferry.app.tiers import block_format
from kvferry.app.tiers.block_format import HEADER_BYTES, shared_namespace_of
from tests.harness.mooncake_server import mooncake_rig, mooncake_store, shared_store
from tests.harness.object_server import object_rig, object_server, shared_object_server
from tests.harness.redis_server import redis_rig, redis_server, shared_server
from tests.harness.server_process import ServerProcess
from tests.harness.tier_rig import FINGERPRINT, SHORT, Rig, file_rig


@dataclass
class Sharing:
    """Opens tiers with a common prefix or folder.

    `names` returns what the store has of their blocks, in the order of keys, and `epochs` what it has of the epoch of
    their namespaces. `read` returns the value of a name, `write` replaces it, and `remove` deletes it.
    """

    open_rig: Callable[..., Rig]
    names: Callable[[], list[Any]]
    epochs: Callable[[], list[Any]]
    read: Callable[[Any], Any]
    write: Callable[[Any, bytes], Any]
    remove: Callable[[Any], Any]
    rigs: list[Rig] = field(default_factory=list)

    def __call__(self, **settings: Any) -> Rig:
        self.rigs.append(self.open_rig(**settings))
        return self.rigs[-1]

    def close(self) -> None:
        """Close all tiers."""
        for rig in self.rigs:
            rig.close()


def _redis(path: Path, prefix: str) -> Sharing:
    server = shared_server()
    return Sharing(
        partial(redis_rig, server, prefix=prefix),
        lambda: sorted(server.client.scan_iter(f"{prefix}:*:b:*", count=10_000)),
        lambda: list(server.client.scan_iter(f"{prefix}:*:epoch", count=10_000)),
        server.client.get,
        server.client.set,
        server.client.delete,
    )


def _object(path: Path, prefix: str) -> Sharing:
    server = shared_object_server()
    return Sharing(
        partial(object_rig, server.url, prefix),
        lambda: [name for name in server.names(prefix) if "/b/" in name],
        lambda: [name for name in server.names(prefix) if name.endswith("/epoch")],
        server.read,
        server.write,
        server.delete,
    )


def _mooncake(path: Path, prefix: str) -> Sharing:
    master, objects = shared_store()
    return Sharing(
        partial(mooncake_rig, master, prefix=prefix),
        lambda: [name for name in master.names("/b/") if name.startswith(f"{prefix}/")],
        lambda: [name for name in master.names("/epoch") if name.startswith(f"{prefix}/")],
        objects.get,
        objects.replace,
        objects.remove,
    )


def _files(path: Path, prefix: str) -> Sharing:
    def write(file: Path, value: bytes) -> None:
        is_written = False
        while not is_written:
            file.parent.mkdir(parents=True, exist_ok=True)
            # Housekeeping deletes an empty folder of an earlier epoch.
            with suppress(FileNotFoundError):
                is_written = bool(file.write_bytes(value)) or not value

    return Sharing(
        partial(file_rig, path, shared=True),
        lambda: sorted([*(path / "shared").glob("*/*-*/*/*"), *(path / "tmp").glob("*")]),
        lambda: list((path / "shared").glob("*/epoch")),
        Path.read_bytes,
        write,
        Path.unlink,
    )


def forged(name: object, value: bytes, packed: bytes) -> bytes:
    """The stored value of a name with another origin and a valid checksum, as a program that may write can make it."""
    (epoch,) = re.findall(r"[0-9a-f]+-[0-9a-f]{16}", os.fsdecode(name))
    (key,) = re.findall(r"[0-9a-f]+$", os.fsdecode(name))
    magic, reserved, _, num_bytes, _ = block_format._HEADER.unpack(value[:HEADER_BYTES])
    data = memoryview(value)[HEADER_BYTES : HEADER_BYTES + num_bytes]
    seed = shared_namespace_of(FINGERPRINT) + epoch.encode()
    checksum = block_format._checksum(seed, bytes.fromhex(key), data, packed)
    return block_format._HEADER.pack(magic, reserved, len(packed), num_bytes, checksum) + data + packed


_KINDS = {"redis": _redis, "object": _object, "mooncake": _mooncake, "shared files": _files}
SHARING = tuple(_KINDS)
"""Every store of kvferry's that engines share. A new one is added here."""


def sharing_of(kind: str, folder: Path) -> Sharing:
    """Return a namespace of a test's own, on a server that tests share or in a new folder."""
    return _KINDS[kind](folder / "tier", f"test-{uuid.uuid4().hex}")


@contextmanager
def _own_redis(folder: Path) -> Iterator[tuple[ServerProcess, Rig]]:
    with redis_server(folder) as server, closing(redis_rig(server, **SHORT)) as rig:
        yield server, rig


@contextmanager
def _own_object(folder: Path) -> Iterator[tuple[ServerProcess, Rig]]:
    with object_server() as server, closing(object_rig(server.url, **SHORT)) as rig:
        yield server, rig


@contextmanager
def _own_mooncake(folder: Path) -> Iterator[tuple[ServerProcess, Rig]]:
    with mooncake_store(folder) as (master, _), closing(mooncake_rig(master, **SHORT)) as rig:
        yield master, rig


OWN_SERVERS = {"redis": _own_redis, "object": _own_object, "mooncake": _own_mooncake}
"""A server of a test's own for each store that has one, and a tier on it with short time limits."""
