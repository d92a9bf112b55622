"""A Redis server for tests, from installed binaries, that can be stopped, killed and started; and tiers on it."""

from __future__ import annotations

import atexit
import shutil
import signal
import socket
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from kvferry.app.tiers.redis import RedisTier
from kvferry.core.tiers.base import TierContext
from tests.harness.tier_rig import FINGERPRINT, Rig
from tests.harness.tier_slots import SLOT_BYTES, SlotArray
from tests.harness.waiting import wait_until

START_S = 60.0
NUM_TRIES = 5


def skip_without_redis() -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("no Redis: install Debian's package redis-server")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class RedisServer:
    """A server on loopback, which keeps nothing on disk unless `options` change that."""

    def __init__(self, folder: Path, *options: str, maxmemory: str = "256mb", policy: str = "allkeys-lru") -> None:
        self.folder = folder
        self.options = ["--maxmemory", maxmemory, "--maxmemory-policy", policy, *options]
        for attempt in range(NUM_TRIES):
            self.port = free_port()
            try:
                self.start()
                break
            except RuntimeError:
                # Another process took the port.
                if attempt == NUM_TRIES - 1:
                    raise

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def client(self) -> redis.Redis:
        """A client without a password. Commands wait while the server is paused."""
        return redis.Redis(port=self.port, protocol=2)

    def start(self) -> None:
        self.process = subprocess.Popen(
            ["redis-server", "--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder),
             "--save", "", "--appendonly", "no", *self.options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        wait_until(self._has_started, "the Redis server", START_S)

    def _has_started(self) -> bool:
        if self.process.poll() is not None:
            raise RuntimeError(f"redis-server ended with {self.process.returncode}")
        try:
            with redis.Redis(port=self.port, protocol=2, socket_timeout=1, retry=Retry(NoBackoff(), 0)) as client:
                return int(client.info("server")["process_id"]) == self.process.pid
        except redis.AuthenticationError:
            return True
        except redis.RedisError:
            return False

    def pause(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def redis_server(folder: Path, *options: str, **limits: str) -> Iterator[RedisServer]:
    """A server of a test's own; skips where Redis is not installed."""
    skip_without_redis()
    server = RedisServer(folder, *options, **limits)
    try:
        yield server
    finally:
        server.kill()


@cache
def shared_server() -> RedisServer:
    """A server for all tests that only store and load; each uses a prefix of its own."""
    skip_without_redis()
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
    slots = SlotArray(num_slots)

    def make(context: TierContext) -> RedisTier:
        return RedisTier(
            entry, TierContext("redis", fingerprint or FINGERPRINT, SLOT_BYTES, slots, context.on_finished)
        )

    return Rig(slots, make, lambda: None)


@contextmanager
def paused(server: RedisServer) -> Iterator[None]:
    """The server does not answer meanwhile."""
    server.pause()
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            server.resume()


@contextmanager
def redis_cluster(folder: Path, num_replicas: int = 0) -> Iterator[list[RedisServer]]:
    """A cluster of three servers, each with so many replicas; skips where Redis is not installed."""
    skip_without_redis()
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
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=START_S)
        wait_until(lambda: all(is_cluster_up(server) for server in servers), "the cluster", START_S)
        yield servers
    finally:
        for server in servers:
            server.kill()


def is_cluster_up(server: RedisServer) -> bool:
    about: Any = server.client.execute_command("CLUSTER INFO")
    return "ok" in (about.get("cluster_state"), about.get(b"cluster_state"))
