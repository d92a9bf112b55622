"""Stores that engines share, behind one interface: any number of tiers on one namespace, and the blocks that it has."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tests.harness.mooncake_server import mooncake_rig, shared_store
from tests.harness.object_server import object_rig, shared_object_server
from tests.harness.redis_server import redis_rig, shared_server
from tests.harness.tier_rig import Rig, file_rig


@dataclass
class Sharing:
    """Opens tiers with a common prefix or folder. `names` returns what the store has of their blocks."""

    open_rig: Callable[..., Rig]
    names: Callable[[], list[Any]]
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
        lambda: list(server.client.scan_iter(f"{prefix}:*:b:*", count=10_000)),
    )


def _object(path: Path, prefix: str) -> Sharing:
    server = shared_object_server()
    return Sharing(
        partial(object_rig, server.url, prefix), lambda: [name for name in server.names(prefix) if "/b/" in name]
    )


def _mooncake(path: Path, prefix: str) -> Sharing:
    master, _ = shared_store()
    return Sharing(
        partial(mooncake_rig, master, prefix=prefix),
        lambda: [name for name in master.names("/b/") if name.startswith(f"{prefix}/")],
    )


def _files(path: Path, prefix: str) -> Sharing:
    return Sharing(partial(file_rig, path, shared=True), lambda: list((path / "shared").glob("*/*-*/*/*")))


_KINDS = {"redis": _redis, "object": _object, "mooncake": _mooncake, "shared files": _files}
SHARING = tuple(_KINDS)
"""Every store of kvferry's that engines share. A new one is added here."""


def sharing_of(kind: str, folder: Path) -> Sharing:
    """Return a namespace of a test's own, on a server that tests share or in a new folder."""
    return _KINDS[kind](folder / "tier", f"test-{uuid.uuid4().hex}")
