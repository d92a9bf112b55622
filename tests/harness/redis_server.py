"""A Redis server for tests, from installed binaries, that can be stopped, killed and started; and tiers on it."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvferry.app.tiers.redis import RedisTier
from kvferry.core.keys import Key
from tests.harness.debian import installed
from tests.harness.server_process import ServerProcess, free_port
from tests.harness.tier_rig import Rig, StoreBench, rig_of
from tests.harness.tier_slots import changed
from tests.harness.waiting import wait_until

CLUSTER_S = 60.0


class RedisServer(ServerProcess):
    """A server on loopback, which keeps nothing on disk unless `options` change that."""

    def __init__(self, folder: Path, *options: str, maxmemory: str = "256mb", policy: str = "allkeys-lru") -> None:
        self.folder = folder
        self.options = ["--maxmemory", maxmemory, "--maxmemory-policy", policy, *options]
        super().__init__()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def client(self) -> redis.Redis:
        """A client without a password. Commands wait while the server is paused."""
        return redis.Redis(port=self.port, protocol=2)

    def command(self) -> Sequence[str]:
        return ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder),
                "--save", "", "--appendonly", "no", *self.options]  # fmt: skip

    def answers(self) -> bool:
        try:
            with redis.Redis(port=self.port, protocol=2, socket_timeout=1, retry=Retry(NoBackoff(), 0)) as client:
                return int(client.info("server")["process_id"]) == self.process.pid
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False


@contextmanager
def redis_server(folder: Path, *options: str, **limits: str) -> Iterator[RedisServer]:
    """A server of a test's own; skips where Redis is not installed."""
    installed("redis-server", "redis-server")
    server = RedisServer(folder, *options, **limits)
    try:
        yield server
    finally:
        server.kill()


@cache
def shared_server() -> RedisServer:
    """A server for all tests that only store and load; each uses a prefix of its own."""
    installed("redis-server", "redis-server")
    folder = Path(mkdtemp(prefix="kvferry-redis-"))
    server = RedisServer(folder)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(server.kill)
    return server


def redis_rig(
    server: RedisServer | str,
    fingerprint: dict[str, object] | None = None,
    num_slots: int = 16,
    **settings: Any,
) -> Rig:
    """A Redis tier, by default with a prefix of its own."""
    url = server if isinstance(server, str) else server.url
    given = {"type": "redis", "name": "redis", "url": url, "prefix": f"test-{uuid.uuid4().hex}", "threads": 3}
    entry = RedisTier.Settings(**given | settings)
    return rig_of(RedisTier, entry, fingerprint, num_slots)


class RedisBench(StoreBench):
    """The Redis tier as a `StoreBench`, on a server that is killed, and keeps its blocks on disk."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def make_rig(self, fingerprint: dict[str, object] | None, **settings: Any) -> Rig:
        return redis_rig(self._server, fingerprint, **{"prefix": "bench", **settings})

    @contextmanager
    def down(self) -> Iterator[None]:
        self._server.kill()
        try:
            yield
        finally:
            self._server.start()

    def spoil(self, key: Key) -> None:
        with closing(self._server.client) as client:
            (name,) = client.scan_iter(f"bench:*:b:*:{key.hex()}", count=10_000)
            client.set(name, changed(client.get(name)))


@contextmanager
def redis_bench(path: Path) -> Iterator[RedisBench]:
    options = ["--appendonly", "yes", "--appendfsync", "always"]
    with redis_server(path, *options) as server, closing(RedisBench(server)) as bench:
        yield bench


@contextmanager
def redis_cluster(folder: Path, num_replicas: int = 0) -> Iterator[list[RedisServer]]:
    """A cluster of three servers, each with so many replicas; skips where Redis is not installed."""
    installed("redis-server", "redis-server")
    servers: list[RedisServer] = []
    try:
        for number in range(3 * (1 + num_replicas)):
            own = folder / str(number)
            own.mkdir()
            # The port of the cluster's bus would otherwise be out of range for high ports.
            options = [
                "--cluster-enabled",
                "yes",
                "--cluster-port",
                str(free_port()),
                "--cluster-node-timeout",
                "2000",
            ]
            servers.append(RedisServer(own, *options))
        addresses = [f"127.0.0.1:{server.port}" for server in servers]
        # The command waits until the servers have met.
        command = ["redis-cli", "--cluster", "create", *addresses, "--cluster-replicas", str(num_replicas)]
        command.append("--cluster-yes")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=CLUSTER_S)
        wait_until(lambda: all(is_cluster_up(server) for server in servers), "the cluster", CLUSTER_S)
        yield servers
    finally:
        for server in servers:
            server.kill()


def is_cluster_up(server: RedisServer) -> bool:
    about: Any = server.client.execute_command("CLUSTER INFO")
    return "ok" in (about.get("cluster_state"), about.get(b"cluster_state"))
