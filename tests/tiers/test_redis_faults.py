"""Redis while it changes: a cluster that moves its slots or fails over, and certificates that expire."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import redis

from tests.harness.certificates import make_certificate
from tests.harness.redis_server import RedisServer, is_cluster_up, redis_cluster, redis_rig, redis_server
from tests.harness.server_process import free_port
from tests.harness.tier_rig import SHORT, WAIT_S, Rig
from tests.harness.tier_slots import keys_of
from tests.harness.waiting import wait_until

# The third server holds the epoch of this prefix. `rigs` gives its address to the second tier.
CLUSTER = {"cluster": True, "prefix": "cluster2", **SHORT}
KEYS = keys_of(range(16))


def node_id(server: RedisServer) -> str:
    return str(server.client.execute_command("CLUSTER MYID").decode())


def holds_epoch(server: RedisServer) -> bool:
    return any(server.client.scan_iter("cluster2:*:epoch", count=10_000))


@contextmanager
def rigs(servers: list[RedisServer]) -> Iterator[tuple[Rig, Rig]]:
    """Tiers of two engines that share a namespace."""
    first, second = (redis_rig(server, **CLUSTER) for server in (servers[0], servers[2]))
    with closing(first), closing(second):
        yield first, second


@pytest.mark.long
def test_cluster_that_moves_its_slots_keeps_blocks_and_resets(tmp_path: Path) -> None:
    with redis_cluster(tmp_path) as servers, rigs(servers) as (rig, other):
        assert rig.serves(KEYS)
        assert other.load(KEYS) == [True] * 16
        # Most slots of a server go to another one, the one with the epoch among them, and as many come back.
        source = next(server for server in servers if holds_epoch(server))
        target = next(server for server in servers if server is not source)
        source_lost_epoch = False
        for start, end in ((source, target), (target, source)):
            wait_until(lambda: agrees(servers[0]), "the servers agree", WAIT_S)
            log = tmp_path / "reshard.log"
            moving = reshard(start, end, log)
            while moving.poll() is None:
                # Found or not, stored or not, while slots move; loaded bytes are compared by the rig.
                rig.store(KEYS)
                other.load(KEYS)
                rig.reset()
                assert rig.load(KEYS) == [False] * 16
                assert not any(other.load(KEYS))
            source_lost_epoch |= not holds_epoch(source)
            assert moving.returncode == 0, log.read_text()[-1000:]
        assert source_lost_epoch
        for one in (rig, other):
            one.wait_healthy()
            wait_until(lambda: one.serves(KEYS), "serves", WAIT_S)  # noqa: B023
        assert rig.counts().corrupt == other.counts().corrupt == 0


def agrees(server: RedisServer) -> bool:
    """Whether the servers of a cluster have the same view of its slots."""
    words = ["redis-cli", "--cluster", "check", f"127.0.0.1:{server.port}"]
    return subprocess.run(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def reshard(source: RedisServer, target: RedisServer, log: Path) -> subprocess.Popen[bytes]:
    """Move slots from one server to another, with the blocks in them."""
    words = ["redis-cli", "--cluster", "reshard", f"127.0.0.1:{source.port}", "--cluster-from", node_id(source)]
    words += ["--cluster-to", node_id(target), "--cluster-slots", "5400", "--cluster-yes"]
    with log.open("wb") as out:
        return subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT)


@pytest.mark.long
def test_cluster_that_fails_over_serves_again_and_keeps_resets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with redis_cluster(tmp_path, num_replicas=1) as servers, rigs(servers) as (rig, other):
        assert rig.serves(KEYS)
        assert other.load(KEYS) == [True] * 16
        rig.reset()
        assert rig.store(KEYS[:8]) == [True] * 8
        dead = next(server for server in servers if holds_epoch(server) and is_primary(server))
        # What a replica has not got before the failure is lost, which no client can see.
        for server in servers:
            if is_primary(server):
                with closing(server.client) as client:
                    assert client.execute_command("WAIT", 1, int(WAIT_S * 1000)) >= 0
        wait_until(lambda: sum(map(holds_epoch, servers)) == 2, "the replica has the epoch", WAIT_S)
        dead.kill()
        left = [server for server in servers if server is not dead]
        wait_until(lambda: all(map(is_cluster_up, left)) and has_three(left), "the failover", WAIT_S)
        for one in (rig, other):
            one.wait_healthy()
            assert not any(one.load(KEYS[8:]))
        for one in (rig, other):
            wait_until(lambda: one.serves(KEYS), "serves", WAIT_S)  # noqa: B023
            assert one.counts().corrupt == 0
        dead.start()
        rig.reset()
        assert rig.find(KEYS) == [False] * 16
        wait_until(lambda: other.serves(KEYS), "serves", WAIT_S)
    assert "Traceback" not in caplog.text
    assert not any(str(server.port) in caplog.text for server in servers)


def is_primary(server: RedisServer) -> bool:
    return server.client.info("replication")["role"] == "master"


def has_three(servers: list[RedisServer]) -> bool:
    return sum(map(is_primary, servers)) == 3


@pytest.mark.long
def test_certificate_that_expires_ends_service_until_it_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    key, good = make_certificate(tmp_path)
    _, expired = make_certificate(tmp_path, "expired", days=-1)
    password = tmp_path / "password"
    password.write_text("secret-word")
    port = free_port()
    tls = ["--tls-cert-file", str(good), "--tls-key-file", str(key), "--tls-ca-cert-file", str(good)]
    options = ["--tls-port", str(port), *tls, "--tls-auth-clients", "no", "--requirepass", "secret-word"]
    with (
        redis_server(tmp_path, *options) as server,
        closing(redis.Redis(port=server.port, password="secret-word")) as client,
        closing(redis_rig(f"rediss://127.0.0.1:{port}", ca_file=good, password_file=password, **SHORT)) as rig,
    ):
        assert rig.serves(KEYS)
        client.config_set("tls-cert-file", str(expired))
        client.client_kill_filter(_type="normal", skipme=True)
        wait_until(lambda: not any(rig.load(KEYS)) and bool(rig.health()), "noticed", WAIT_S)
        text = "TLS with the server failed; see url, ca_file, cert_file, key_file; no block is kept or found"
        wait_until(lambda: text in rig.health(), text, WAIT_S)
        assert rig.store(KEYS) == rig.find(KEYS) == [False] * 16
        client.config_set("tls-cert-file", str(good))
        rig.wait_healthy()
        assert all(rig.load(KEYS))
    assert "not used until a probe succeeds: TLS with the server failed" in caplog.text
    assert not any(word in caplog.text for word in ("secret-word", str(port), str(tmp_path), "Traceback"))
