"""Mooncake's master for tests, a node that gives it memory, and tiers on them."""

from __future__ import annotations

import atexit
import shutil
import sys
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest

from kvferry.app.tiers.mooncake.store import missing_packages
from kvferry.core.keys import Key
from tests.harness.debian import skip_without
from tests.harness.server_process import ServerProcess, free_port, paused
from tests.harness.tier_rig import SHORT, Rig, StoreBench, rig_of
from tests.harness.tier_slots import changed
from tests.harness.waiting import DEADLINE_S, wait_until

NODE_BYTES = 256 << 20
LOST_S = 60
"""Seconds after which the master forgets a client with its memory: one that a busy machine does not run is not dead."""
SOON_LOST_S = 3
"""The same, for tests in which a client dies."""
LEASE_MS = 10_000
"""How long a client may take to read an object that it looked up: one that a busy machine does not run takes a second.

Less than the tier's last removal of old blocks, in 15 seconds, which leaves out those with a lease.
"""


def program() -> Path:
    """The master's program; skips where Mooncake Store is not installed."""
    for package in ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine"):
        with suppress(PackageNotFoundError):
            found = Path(str(distribution(package).locate_file("mooncake/mooncake_master")))
            packages = missing_packages()
            skip_without(" ".join(packages), not packages)
            return found
    pytest.skip("no Mooncake Store: pip install 'kvferry[mooncake]'")


class MooncakeMaster(ServerProcess):
    """A master on loopback, which forgets everything when it ends."""

    def __init__(self, lost_s: int = LOST_S) -> None:
        program()
        self.lost_s = lost_s
        self.metrics_port = free_port()
        super().__init__()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        return [str(program()), "--rpc_address=127.0.0.1", f"--rpc_port={self.port}", "--metrics_host=127.0.0.1",
                f"--metrics_port={self.metrics_port}", f"--client_ttl={self.lost_s}",
                f"--default_kv_lease_ttl={LEASE_MS}"]  # fmt: skip

    def answers(self) -> bool:
        try:
            self.names()
        except OSError:
            return False
        return True

    def names(self, words: str = "") -> list[str]:
        """The names of all objects, or of those that have this in it."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/get_all_keys", timeout=DEADLINE_S) as answer:
            return sorted(name for name in answer.read().decode().split() if words in name)


class MooncakeNode(ServerProcess):
    """A process that gives memory to a store, as hosts without an engine do."""

    _PROGRAM = """
import sys, threading
from mooncake.store import MooncakeDistributedStore
client = MooncakeDistributedStore()
if client.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 0, "tcp", "", sys.argv[1]):
    sys.exit(1)
open(sys.argv[3], "w").close()
threading.Event().wait()
"""

    def __init__(self, master: MooncakeMaster, folder: Path, num_bytes: int = NODE_BYTES) -> None:
        self._master = master
        self._num_bytes = num_bytes
        self._started = folder / f"node-{uuid.uuid4().hex}"
        super().__init__()

    def command(self) -> Sequence[str]:
        self._started.unlink(missing_ok=True)
        return [sys.executable, "-c", self._PROGRAM, self._master.address, str(self._num_bytes), str(self._started)]

    def answers(self) -> bool:
        return self._started.exists()


class Objects:
    """Reads and changes objects behind a tier's back."""

    def __init__(self, master: MooncakeMaster) -> None:
        from kvferry.app.tiers.mooncake.client import MooncakeClient
        from kvferry.app.tiers.mooncake.settings import MooncakeTierSettings

        self._master = master
        settings = MooncakeTierSettings(type="mooncake", name="objects", master=master.address)
        self._client = MooncakeClient(settings, 1, 1 << 20)
        self._client.start()

    def get(self, name: str) -> bytes:
        with self._client.lane() as lane:
            (length,) = lane.get([name], [(0, len(lane.view))])
            assert length >= 0, (name, length)
            return bytes(lane.view[:length])

    def put(self, name: str, value: bytes, *, pinned: bool = False) -> None:
        """Store an object that does not exist."""
        with self._client.lane() as lane:
            lane.view[: len(value)] = value
            assert lane.put([name], [(0, len(value))], 1, pinned=pinned) == [0]

    def replace(self, name: str, value: bytes) -> None:
        """Store an object, which may exist."""
        if name in self._master.names(name):
            self.remove(name)
        self.put(name, value)

    def remove(self, *names: str) -> None:
        with self._client.lane() as lane:
            assert lane.remove(names) == [0] * len(names)

    def close(self) -> None:
        self._client.close()


@cache
def shared_store() -> tuple[MooncakeMaster, Objects]:
    """A master with a node, and its objects, for all tests that only store and load; each uses a prefix of its own."""
    # A node is not lost while a test pauses the master.
    master = MooncakeMaster(lost_s=600)
    atexit.register(master.kill)
    folder = Path(mkdtemp(prefix="kvferry-mooncake-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    node = MooncakeNode(master, folder)
    atexit.register(node.kill)
    objects = Objects(master)
    atexit.register(objects.close)
    return master, objects


@contextmanager
def mooncake_store(
    folder: Path, num_bytes: int = NODE_BYTES, lost_s: int = LOST_S
) -> Iterator[tuple[MooncakeMaster, MooncakeNode]]:
    """A master and a node of a test's own."""
    master = MooncakeMaster(lost_s)
    try:
        node = MooncakeNode(master, folder, num_bytes)
        try:
            yield master, node
        finally:
            node.kill()
    finally:
        master.kill()


def mooncake_rig(
    master: MooncakeMaster | str,
    fingerprint: dict[str, object] | None = None,
    num_slots: int = 16,
    *,
    is_up: bool = True,
    **settings: Any,
) -> Rig:
    """A Mooncake tier, by default with a prefix of its own, once it uses the store if that is up."""
    program()
    from kvferry.app.tiers.mooncake import MooncakeTier

    address = master if isinstance(master, str) else master.address
    given: dict[str, Any] = {"type": "mooncake", "name": "mooncake", "master": address, "threads": 3}
    given |= {"prefix": f"test-{uuid.uuid4().hex}", "io_timeout_s": 30.0, "timeout_s": DEADLINE_S}
    entry = MooncakeTier.Settings(**given | settings)
    rig = rig_of(MooncakeTier, entry, fingerprint, num_slots)
    if is_up:
        wait_until(lambda: not rig.tier.counts().unavailable, "the store is used", DEADLINE_S)
    return rig


class MooncakeBench(StoreBench):
    """The Mooncake tier as a `StoreBench`: the master does not answer while it is down."""

    def __init__(self) -> None:
        self._master, self._objects = shared_store()
        self._prefix = f"bench-{uuid.uuid4().hex}"

    def make_rig(self, fingerprint: dict[str, object] | None, **settings: Any) -> Rig:
        return mooncake_rig(self._master, fingerprint, prefix=self._prefix, **SHORT | settings)

    def down(self) -> AbstractContextManager[None]:
        return paused(self._master)

    def spoil(self, key: Key) -> None:
        (name,) = [name for name in self._master.names(key.hex()) if name.startswith(self._prefix)]
        self._objects.replace(name, changed(self._objects.get(name)))
