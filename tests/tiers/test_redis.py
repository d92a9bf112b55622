"""A Redis tier: several engines on one server, and servers that die, hang, fill, forget and refuse."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import redis

from kvferry.app.settings.tiers import read_tiers
from kvferry.app.tiers.block_store import MISS, Outcome, TierContext, TierRefused
from kvferry.app.tiers.redis import RedisTier
from kvferry.app.tiers.redis.connection import Pieces, _accept_pieces
from kvferry.app.tiers.redis.store import RedisStore
from kvferry.core.keys import RequestFilter
from tests.harness.certificates import make_certificate
from tests.harness.redis_server import (
    RedisServer,
    redis_cluster,
    redis_rig,
    redis_server,
    shared_server,
)
from tests.harness.server_process import free_port
from tests.harness.sharing import Sharing, sharing_of
from tests.harness.tier_rig import FINGERPRINT, SHORT, WAIT_S, Rig
from tests.harness.tier_slots import LARGE, ORIGIN, changed, keys_of
from tests.harness.waiting import wait_until


@pytest.fixture
def rig_of(tmp_path: Path) -> Iterator[Sharing]:
    """Opens tiers on the shared server that share a prefix; they are closed with the test."""
    with closing(sharing_of("redis", tmp_path)) as sharing:
        yield sharing


def names_of(rig: Rig, server: RedisServer | None = None) -> list[bytes]:
    """The names of all values of a rig's namespace that are blocks."""
    pattern = rig.tier._store._prefix + b"b:*"
    return sorted((server or shared_server()).client.scan_iter(pattern, count=10_000))


# --- several engines ------------------------------------------------------------------------------------------------


def test_server_that_lost_its_epoch_serves_no_earlier_block(
    rig_of: Callable[..., Rig], caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(range(3))
    rig = rig_of()
    rig.store(keys)
    client = shared_server().client
    client.delete(rig.tier._store._epoch_key)
    # It refuses writes.
    client.config_set("min-replicas-to-write", 1)
    try:
        assert rig.load(keys) == [False] * 3
    finally:
        client.config_set("min-replicas-to-write", 0)
    assert rig.load(keys) == [False] * 3
    wait_until(lambda: rig.serves(keys), "blocks of the new epoch")
    assert caplog.text.count("starts empty: the server has no epoch of its namespace") == 1


# --- values ---------------------------------------------------------------------------------------------------------


def test_value_of_another_type_is_a_miss_and_is_removed(rig_of: Callable[..., Rig]) -> None:
    keys = keys_of([3, 4])
    rig, client = rig_of(), shared_server().client
    rig.store(keys)
    good, bad = names_of(rig)
    client.delete(bad)
    client.rpush(bad, "x")
    assert rig.load(keys) == [True, False]
    assert rig.counts().corrupt == 1
    wait_until(lambda: names_of(rig) == [good], "it is removed", WAIT_S)
    assert rig.serves(keys)


def test_epoch_of_another_type_is_replaced(rig_of: Callable[..., Rig]) -> None:
    keys, client, rig = keys_of(range(3)), shared_server().client, rig_of()
    rig.store(keys)
    epoch = rig.tier._store._epoch_key
    client.delete(epoch)
    client.rpush(epoch, b"1")
    assert rig.load(keys) == [False] * 3
    assert rig.serves(keys)
    assert rig_of().load(keys) == [True] * 3


def test_block_dropped_before_a_reset_is_noticed_is_removed(rig_of: Callable[..., Rig]) -> None:
    # Stores without threads, so that the first one reads the new epoch after it has dropped the key.
    key, block, into = keys_of([1])[0], memoryview(bytes(64)), memoryview(bytearray(64))
    settings = RedisTier.Settings(
        type="redis", name="redis", url=shared_server().url, prefix=f"test-{uuid.uuid4().hex}"
    )
    context = TierContext("redis", FINGERPRINT, 64)
    with closing(RedisStore(settings, context)) as first, closing(RedisStore(settings, context)) as second:
        first.probe()
        second.probe()
        assert first.put_many([key], [block], [ORIGIN]) == [Outcome.STORED]
        second.reset(lambda: False)
        assert second.put_many([key], [block], [ORIGIN]) == [Outcome.STORED]
        first.drop([key])
        assert second.get_many([key], [into]) == [MISS]


def test_block_dropped_while_the_server_is_down_is_removed(tmp_path: Path) -> None:
    keys = keys_of(range(4))
    with redis_server(tmp_path) as server:
        with closing(redis_rig(server, prefix="down", **SHORT)) as rig:
            rig.store(keys)
            server.client.save()
        server.kill()
        # An engine that knows no epoch yet.
        with closing(redis_rig(server, prefix="down", **SHORT)) as rig:
            rig.drop(keys[:1])
            server.start()
            rig.wait_healthy()
            wait_until(lambda: len(names_of(rig, server)) == 3, "removed", WAIT_S)
            assert rig.load(keys) == [False, True, True, True]


def test_ttl_limits_the_age_of_every_value(tmp_path: Path) -> None:
    with redis_server(tmp_path, maxmemory="0") as server, closing(redis_rig(server, ttl_s=1000)) as rig:
        assert rig.serves(keys_of(range(4)))
        ages = [server.client.ttl(name) for name in names_of(rig, server)]
        assert len(ages) == 4
        assert all(0 < age <= 1000 for age in ages)
        assert rig.counts().max_bytes == 0


def test_value_in_pieces_is_sent_as_one_and_not_copied() -> None:
    data = memoryview(bytes(range(256)) * 100)
    value = (b"head", data, b"", data[:5], b"tail")
    connection = redis.Connection()
    expected = connection.pack_commands([("SET", b"a name", b"".join(value), "PX", 1000), ("GET", "x")])
    _accept_pieces(connection)
    chunks = connection.pack_commands([("SET", b"a name", Pieces(value), "PX", 1000), ("GET", "x")])
    assert b"".join(chunks) == b"".join(expected)
    assert any(chunk is data for chunk in chunks)


# --- servers --------------------------------------------------------------------------------------------------------


def test_full_server_that_evicts_nothing_degrades_and_serves(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path, maxmemory="12mb", policy="noeviction") as server,
        closing(redis_rig(server, num_slots=32)) as rig,
    ):
        keys = keys_of(LARGE[:32])
        stored = [key for key in keys if rig.store([key]) == [True]]
        assert 0 < len(stored) < len(keys)
        rig.wait_for_reason("the server is full and evicts nothing")
        assert rig.load(stored) == [True] * len(stored)
        counts = rig.counts()
        assert (counts.dropped, counts.failed) == (len(keys) - len(stored), 0)
        assert counts.unavailable == 0
        server.client.config_set("maxmemory", "64mb")
        rig.wait_healthy()
        assert rig.serves(keys)


def test_reset_of_a_full_server_that_evicts_nothing_drops_all(tmp_path: Path) -> None:
    with (
        redis_server(tmp_path, maxmemory="12mb", policy="noeviction") as server,
        closing(redis_rig(server, num_slots=32, prefix="full")) as rig,
        closing(redis_rig(server, num_slots=32, prefix="full")) as other,
    ):
        keys = keys_of(LARGE[:32])
        stored = [key for key in keys if rig.store([key]) == [True]]
        assert 0 < len(stored) < len(keys)
        server.client.config_set("maxmemory", 1 << 20)
        assert other.load(stored) == [True] * len(stored)
        other.reset()
        for one in (rig, other):
            assert one.find(stored) == one.load(stored) == [False] * len(stored)
        assert not names_of(rig, server)
        server.client.config_set("maxmemory", "12mb")
        wait_until(lambda: rig.serves(stored[:1]), "serves", WAIT_S)
        wait_until(lambda: other.load(stored[:1]) == [True], "serves", WAIT_S)


@pytest.mark.parametrize(("policy", "given"), [("allkeys-lru", {}), ("volatile-lru", {"ttl_s": 1000})])
def test_full_server_that_evicts_keeps_some_blocks(tmp_path: Path, policy: str, given: dict[str, int]) -> None:
    with (
        redis_server(tmp_path, maxmemory="12mb", policy=policy) as server,
        closing(redis_rig(server, num_slots=32, **given)) as rig,
    ):
        keys = keys_of(LARGE[:32])
        stored = [rig.store([key]) == [True] for key in keys]
        # The epoch of the namespace has no age limit, and may be evicted with "allkeys" only.
        assert all(stored) or policy == "allkeys-lru"
        wait_until(lambda: rig.serves(keys[:1]), "serves", WAIT_S)
        assert not all(rig.load(keys))
        counts = rig.counts()
        assert (counts.corrupt, counts.failed, counts.unavailable) == (0, 0, 0)
        assert not rig.health()


def test_server_that_nothing_bounds_is_refused(tmp_path: Path) -> None:
    with redis_server(tmp_path, maxmemory="0") as server:
        with pytest.raises(TierRefused, match="tier redis: neither ttl_s nor the server's maxmemory bounds it; set"):
            redis_rig(server)
        server.client.config_set("maxmemory", "64mb")
        with closing(redis_rig(server)) as rig:
            server.client.config_set("maxmemory", "0")
            rig.wait_for_reason("neither ttl_s nor the server's maxmemory bounds it; new blocks are not kept")
            assert rig.store(keys_of([1])) == [False]


def test_wrong_password_refuses_start_and_later_degrades(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    password, secrets = tmp_path / "password", ("first-secret", "second-secret")
    password.write_text("wrong-secret\n")
    with redis_server(tmp_path, "--requirepass", secrets[0]) as server:
        with pytest.raises(TierRefused, match="the server refuses the credentials; see username and password_file"):
            redis_rig(server, password_file=password)
        with pytest.raises(TierRefused, match="the server refuses the credentials"):
            redis_rig(server)
        with pytest.raises(TierRefused, match="password_file cannot be read"):
            redis_rig(server, password_file=tmp_path / "missing")
        password.write_text(f"{secrets[0]}\n")
        with closing(redis_rig(server, password_file=password, **SHORT)) as rig:
            keys = keys_of(range(3))
            assert rig.serves(keys)
            server.kill()
            server.options[-1] = secrets[1]
            server.start()
            wait_until(lambda: not any(rig.find(keys)) and bool(rig.health()), "noticed", WAIT_S)
            rig.wait_for_reason("the server refuses the credentials; see username and password_file")
            password.write_text(secrets[1])
            rig.wait_healthy(keys)
            assert rig.serves(keys)
    assert not any(secret in caplog.text for secret in (*secrets, "wrong-secret"))


def test_server_that_refuses_writes_is_reported_and_used_again(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    keys = keys_of(range(3))
    with redis_server(folder) as server, closing(redis_rig(server)) as rig, closing(server.client) as client:
        assert rig.serves(keys)
        client.config_set("maxmemory-policy", "allkeys-random")
        rig.wait_for_reason("allkeys-random evicts the epoch of the namespace too")
        client.config_set("maxmemory-policy", "allkeys-lru")
        rig.wait_healthy()
        folder.rmdir()
        client.config_set("save", "3600 1")
        client.bgsave()
        rig.wait_for_reason("the server cannot save its data, and refuses writes; see its log; new blocks are not kept")
        assert rig.load(keys) == [True] * 3
        client.config_set("save", "")
        rig.wait_healthy()
        # A failover to another server: its address leads there, and earlier connections do not.
        earlier = {one["id"] for one in client.client_list()} - {str(client.client_id())}
        client.replicaof("127.0.0.1", free_port())
        rig.wait_for_reason("the server is a read-only replica; no block is kept or found")
        assert rig.load(keys) == [False] * 3
        client.replicaof("NO", "ONE")
        rig.wait_healthy()
        assert rig.serves(keys)
        wait_until(lambda: earlier.isdisjoint(one["id"] for one in client.client_list()), "no old connection", WAIT_S)


def test_tls_verifies_the_server(tmp_path: Path) -> None:
    key, cert = make_certificate(tmp_path)
    tls = ["--tls-cert-file", str(cert), "--tls-key-file", str(key), "--tls-ca-cert-file", str(cert)]
    port = free_port()
    with redis_server(tmp_path, "--tls-port", str(port), *tls, "--tls-auth-clients", "optional") as server:
        url = f"rediss://127.0.0.1:{port}"
        with closing(redis_rig(url, ca_file=cert, cert_file=cert, key_file=key)) as rig:
            assert rig.serves(keys_of(range(4)))
        for wrong in ({"url": url}, {"url": url.replace("127.0.0.1", "localhost"), "ca_file": cert}):
            with pytest.raises(TierRefused, match="TLS with the server failed; see url, ca_file, cert_file, key_file"):
                redis_rig(server, **wrong)


def test_user_without_permission_is_refused(tmp_path: Path) -> None:
    password = tmp_path / "password"
    password.write_text("secret-word")
    with redis_server(tmp_path) as server:
        server.client.execute_command("ACL", "SETUSER", "reader", "on", ">secret-word", "~*", "+@read", "+info")
        with pytest.raises(TierRefused, match="does not permit the user a command that the tier needs"):
            redis_rig(server, username="reader", password_file=password)


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "redis://:hunter2@db:6379"}, "url=*** must not contain a user or password"),
        ({"url": "redis://user:hunter2@db"}, "put the password into a file that password_file names"),
        ({"url": "http://db"}, "url=*** must be redis://HOST:PORT or rediss://HOST:PORT"),
        ({"url": "redis://db:6379?password=hunter2"}, "url=*** must not contain a user or password"),
        ({"url": "redis://db:99999"}, "must be redis://"),
        ({"url": "redis:///0"}, "must be redis://"),
        ({"url": "redis://db/x"}, "must be redis://"),
        ({"url": 5}, "must be redis://"),
        ({"url": f"redis://{64 * 'a'}"}, "must be redis://"),
        ({"url": "redis://a..b"}, "must be redis://"),
        ({"url": f"redis://db/{5000 * '9'}"}, "must be redis://"),
        ({"url": "redis://db/1", "cluster": True}, "a cluster has only database 0"),
        ({"max_bytes": "1GiB"}, "max_bytes cannot be enforced in a server that others write to"),
        ({"username": "me"}, "username needs password_file"),
        ({"ca_file": "/ca.pem"}, "ca_file, cert_file and key_file need a url that begins with rediss://"),
        ({"url": "rediss://db", "key_file": "/key.pem"}, "key_file needs cert_file"),
        ({"prefix": "a*"}, "prefix=a* must be 1 to 64 letters"),
        ({"password": "hunter2"}, "password is no field of it; did you mean password_file?"),
    ],
)
def test_wrong_settings_are_refused_without_passwords(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match="tier 1") as caught:
        read_tiers([{"type": "redis", "url": "redis://db"} | change])
    assert words in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_block_longer_than_a_value_is_refused() -> None:
    (entry,) = read_tiers([{"type": "redis", "url": "redis://db"}])
    RedisTier.check(entry, 500 << 20)
    with pytest.raises(TierRefused, match="longer than a value of Redis can be"):
        RedisTier.check(entry, 512 << 20)


# --- clusters -------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_cluster_spreads_blocks_and_holds_resets(tmp_path: Path) -> None:
    with redis_cluster(tmp_path) as servers:
        given = {"cluster": True, "prefix": "cluster", **SHORT}
        with closing(redis_rig(servers[0], **given)) as rig, closing(redis_rig(servers[2], **given)) as other:
            keys = keys_of(range(16))
            assert rig.store(keys) == [True] * 16
            assert all(names_of(rig, server) for server in servers)
            num_first = len(names_of(rig, servers[0]))
            with closing(redis_rig(servers[1], **given)) as cold:
                assert cold.load(keys) == [True] * 16
            with closing(servers[0].client) as client:
                name = names_of(rig, servers[0])[0]
                client.set(name, changed(client.get(name)))
            assert other.load(keys).count(True) == 15
            assert other.counts().corrupt == 1
            wait_until(lambda: len(names_of(rig, servers[0])) == num_first - 1, "it is removed", WAIT_S)
            assert other.serves(keys)
            other.reset(RequestFilter(request="r1"))
            assert rig.find(keys) == [False] * 16
            assert rig.serves(keys)
            other.reset()
            assert rig.find(keys) == rig.load(keys) == [False] * 16
            assert other.serves(keys)
            assert rig.load(keys) == [True] * 16
            assert rig.counts().max_bytes == 3 * (256 << 20)
            # Without replicas the cluster is incomplete until the server is back.
            numbers = rig.submit_load(keys[:8]), rig.submit_store(keys_of(LARGE[:8]), first_slot=8)
            servers[1].kill()
            for number in numbers:
                rig.wait(number)
            wait_until(lambda: not all(rig.load(keys)) and bool(rig.health()), "noticed", WAIT_S)
            servers[1].start()
            rig.wait_healthy()
            wait_until(lambda: rig.serves(keys), "serves again", WAIT_S)
            assert rig.counts().corrupt == 0


def test_server_outside_a_cluster_leaves_a_tier_of_a_cluster_unused(rig_of: Callable[..., Rig]) -> None:
    rig = rig_of(cluster=True)
    rig.wait_for_reason("the cluster cannot be reached, or the server is in none")
    assert rig.store(keys_of([1])) == [False]
