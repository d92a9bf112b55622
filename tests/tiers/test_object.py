"""An object tier: several engines on one bucket, and servers that die, hang, fill, forget, refuse and misunderstand."""

from __future__ import annotations

import http.client
import json
import logging
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvferry.app.settings.tiers import read_tiers
from kvferry.app.tiers.block_store import TierRefused
from kvferry.app.tiers.object import ObjectTier
from kvferry.core.keys import Key
from tests.harness.certificates import make_certificate
from tests.harness.object_server import (
    BUCKET,
    SECRET,
    Answer,
    Broken,
    Call,
    Fault,
    ObjectServer,
    Proxy,
    error_of,
    free_address,
    has_no_space,
    object_proxy,
    object_rig,
    object_server,
    shared_object_server,
)
from tests.harness.tier_rig import FINGERPRINT, SHORT, WAIT_S, Rig
from tests.harness.tier_slots import LARGE, keys_of, length_of
from tests.harness.waiting import wait_until


class Engines:
    """Tiers on the shared server that share a prefix."""

    def __init__(self, proxy: Proxy, prefix: str) -> None:
        self.server = shared_object_server()
        self.proxy = proxy
        self.prefix = prefix
        self.rigs: list[Rig] = []

    def __call__(self, **settings: Any) -> Rig:
        self.rigs.append(object_rig(self.proxy.url, self.prefix, **settings))
        return self.rigs[-1]

    def names(self, part: str = "/b/") -> list[str]:
        return [name for name in self.server.names(self.prefix) if part in name]

    @property
    def epoch(self) -> str:
        (name,) = [name for name in self.server.names(self.prefix) if name.endswith("/epoch")]
        return name

    def requests(self, work: Callable[[], object]) -> Counter[str]:
        """The requests that some work makes, housekeeping's left out."""
        start = len(self.proxy.calls)
        work()
        calls = [call for call in self.proxy.calls[start:] if not call.path.endswith("/sweep")]
        return Counter(f"{call.method} {'epoch' if call.path.endswith('/epoch') else 'block'}" for call in calls)


@pytest.fixture
def engines(request: pytest.FixtureRequest) -> Iterator[Engines]:
    with object_proxy(shared_object_server()) as proxy:
        made = Engines(proxy, f"t{abs(hash(request.node.nodeid)):x}-{id(proxy):x}")
        yield made
        proxy.fault = None
        for rig in made.rigs:
            rig.close()


def wait_until_serves(rig: Rig, keys: list[Key]) -> None:
    """A block that did not verify cannot be stored before it has been removed."""
    wait_until(lambda: rig.serves(keys), "serves", WAIT_S)


# --- several engines ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_block_that_another_engine_stored_is_not_sent_again(engines: Engines) -> None:
    keys = keys_of(range(4))
    first, second = engines(), engines()
    first.store(keys)
    assert engines.requests(lambda: second.store(keys)) == {"HEAD block": 4, "GET epoch": 2}
    assert (second.counts().stored, second.counts().present) == (0, 4)


@pytest.mark.long
def test_block_behind_a_missing_one_is_not_replaced(engines: Engines) -> None:
    keys = keys_of(range(4))
    first, second = engines(), engines()
    first.store(keys[2:])
    before = {name: engines.server.read(name) for name in engines.names()}
    assert second.store(keys) == [True] * 4
    assert (second.counts().stored, second.counts().present) == (2, 2)
    assert second.counts().stored_bytes == sum(length_of(key) for key in keys[:2])
    assert before.items() <= {name: engines.server.read(name) for name in engines.names()}.items()
    assert second.counts().blocks == 2


@pytest.mark.long
def test_calls_make_as_many_requests_as_documented(engines: Engines) -> None:
    keys = keys_of(range(4))
    rig = engines()
    assert engines.requests(lambda: rig.store(keys)) == {"HEAD block": 1, "PUT block": 4, "GET epoch": 1}
    assert engines.requests(lambda: rig.find(keys)) == {"HEAD block": 4, "GET epoch": 1}
    assert engines.requests(lambda: rig.load(keys)) == {"GET block": 4, "GET epoch": 1}
    for call in engines.proxy.calls:
        if call.path.endswith("/epoch") and call.method == "PUT":
            assert call.condition is not None, "the epoch is never written without a condition"


@pytest.mark.long
def test_reset_holds_whose_epoch_vanishes_before_it_is_written(
    engines: Engines, caplog: pytest.LogCaptureFixture
) -> None:
    keys = keys_of(range(3))
    rig = engines()
    wait_until_serves(rig, keys)
    epoch, deleted = engines.epoch, []

    def delete_once(call: Call, ask: Callable[[], Answer]) -> Answer:
        if call.method == "PUT" and call.path.endswith("/epoch") and not deleted:
            deleted.append(epoch)
            engines.server.delete(epoch)
            # As S3 answers a write that expects an object; moto fails its condition.
            return error_of(404, "NoSuchKey")(call, ask)
        return ask()

    with engines.proxy.faulty(delete_once):
        rig.reset()
    assert deleted
    assert rig.find(keys) == rig.load(keys) == [False] * 3
    wait_until_serves(rig, keys)
    assert "a reset failed" not in caplog.text


# --- objects --------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_ttl_removes_old_blocks_of_all_namespaces_and_nothing_else(engines: Engines) -> None:
    other = engines(fingerprint=FINGERPRINT | {"model": "gone"})
    other.store(keys_of(range(3)))
    other.close()
    engines.server.write(f"{engines.prefix}/notes.txt", b"of another program")
    rigs = [engines(ttl_s=2), engines(ttl_s=2)]
    assert rigs[0].store(keys_of(range(4))) == [True] * 4
    wait_until(lambda: not engines.names(), "all blocks are gone", WAIT_S)
    assert engines.names("notes.txt")
    assert len(engines.names("/epoch")) == 2
    assert rigs[1].find(keys_of(range(4))) == [False] * 4
    assert rigs[1].serves(keys_of(range(4)))


# --- servers --------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_event_loop_goes_on_after_its_thread_died(caplog: pytest.LogCaptureFixture) -> None:
    with closing(object_rig(free_address(), is_up=False, **SHORT)) as rig:
        rig.wait_for_reason("the server cannot be reached")
        # Its next call is that of the housekeeping.
        rig.tier._store._bucket._loop.call_soon_threadsafe(sys.exit)
        rig.wait_for_reason("the thread kvferry-tier-object-io died")
        num_failed = rig.tier._breaker._num_failed
        wait_until(lambda: rig.tier._breaker._num_failed > num_failed, "its store is probed", WAIT_S)
    assert "thread died and is started again: kvferry-tier-object-io" in caplog.text


@pytest.mark.long
def test_answer_that_breaks_off_is_repeated_and_never_served(engines: Engines) -> None:
    rig = engines()
    keys = keys_of(LARGE[:2])
    rig.store(keys)
    broken: list[str] = []

    def break_first(call: Call, ask: Callable[[], Answer]) -> Answer:
        answer = ask()
        if call.method == "GET" and "/b/" in call.path and call.path not in broken:
            broken.append(call.path)
            answer.num_sent = len(answer.body) // 2
        return answer

    with engines.proxy.faulty(break_first):
        assert rig.load(keys) == [True] * 2
    assert len(broken) == 2
    assert rig.counts().retries > 0
    assert rig.counts().corrupt == 0


@pytest.mark.long
def test_lost_answer_to_a_reset_does_not_undo_it(engines: Engines) -> None:
    first, second = engines(**SHORT), engines()
    keys = keys_of(range(3))
    wait_until_serves(first, keys)
    lost: list[int] = []

    def lose(call: Call, ask: Callable[[], Answer]) -> Answer:
        answer = ask()
        if call.method == "PUT" and call.path.endswith("/epoch") and answer.status == 200 and not lost:
            lost.append(1)
            raise Broken
        return answer

    with engines.proxy.faulty(lose):
        first.reset()
    assert lost
    assert second.find(keys) == first.find(keys) == [False] * 3
    wait_until_serves(first, keys)


@pytest.mark.long
def test_full_store_degrades_serves_and_is_used_again(engines: Engines) -> None:
    rig = engines()
    keys, new = keys_of(range(4)), keys_of(range(10, 14))
    rig.store(keys)
    with engines.proxy.faulty(has_no_space):
        assert rig.store(new) == [False] * 4
        rig.wait_for_reason("the store is full; new blocks are not kept")
        assert rig.load(keys) == [True] * 4
        counts = rig.counts()
        assert (counts.dropped, counts.failed, counts.unavailable) == (4, 0, 0)
        # Blocks that are there are found by a new engine too.
        assert engines().load(keys) == [True] * 4
    rig.wait_healthy()
    assert rig.serves(new)


@pytest.mark.long
def test_reset_of_a_full_store_drops_everything(engines: Engines) -> None:
    rig, other = engines(), engines()
    keys = keys_of(range(4))
    rig.store(keys)
    with engines.proxy.faulty(has_no_space):
        number = next(rig.numbers)
        rig.tier.reset(number, None)
        wait_until(lambda: not engines.names(), "deleted", WAIT_S)
        assert other.find(keys) == [False] * 4
    wait_until(lambda: rig.has(number), "the reset", WAIT_S)
    assert rig.find(keys) == other.find(keys) == [False] * 4
    # A write that failed stays a reason until one works.
    wait_until_serves(rig, keys_of(range(8, 12)))
    for one in (rig, other):
        one.wait_healthy(keys)
        assert one.find(keys) == [False] * 4
    wait_until_serves(rig, keys)


REASONS = [
    (503, "SlowDown", "the server is overloaded or has failed"),
    (500, "InternalError", "the server is overloaded or has failed"),
    (403, "AccessDenied", "the server does not permit the credentials an operation that the tier needs"),
    (400, "AccessDenied", "the server does not permit the credentials an operation that the tier needs"),
    (403, "InvalidAccessKeyId", "the server refuses the credentials; see credentials_file"),
    (404, "NoSuchBucket", "the bucket does not exist; see url"),
    (301, "PermanentRedirect", "the bucket is in another region; see region and endpoint"),
    (400, "SomethingNew", "the server refused a request"),
]


@pytest.mark.long
@pytest.mark.parametrize(("status", "code", "reason"), REASONS)
def test_errors_of_the_server_show_as_fixed_texts(
    engines: Engines, caplog: pytest.LogCaptureFixture, status: int, code: str, reason: str
) -> None:
    rig = engines(**SHORT)
    keys = keys_of(range(2))
    wait_until_serves(rig, keys)
    with engines.proxy.faulty(error_of(status, code)):
        wait_until(lambda: not any(rig.load(keys)) and bool(rig.health()), "noticed", WAIT_S)
        rig.wait_for_reason(reason)
        shown = " ".join(rig.health())
    # A call that failed stays a reason for a minute, or until one works.
    wait_until_serves(rig, keys)
    rig.wait_healthy()
    for secret in (engines.prefix, BUCKET, code, SECRET, "127.0.0.1"):
        assert secret not in shown + caplog.text
    assert "Traceback" not in caplog.text


# --- conditions -----------------------------------------------------------------------------------------------------


def ignoring(name: str) -> Fault:
    """A fault: the server ignores a condition of writes."""

    def fault(call: Call, ask: Callable[[], Answer]) -> Answer:
        if call.method == "PUT" and call.condition == name:
            del call.headers[name]
        return ask()

    return fault


def plain_tags(call: Call, ask: Callable[[], Answer]) -> Answer:
    """A fault: the server compares tags without quotes, as Ceph 16 does, though it sends them with quotes."""
    if call.method == "PUT" and call.condition == "if-match":
        tag = call.headers["if-match"]
        call.headers["if-match"] = '"none"' if tag.startswith('"') else f'"{tag}"'
    return ask()


def never_matching(call: Call, ask: Callable[[], Answer]) -> Answer:
    """A fault: the server refuses every write under If-Match."""
    return Answer(412) if call.condition == "if-match" else ask()


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (ignoring("if-none-match"), "the server ignores If-None-Match: *, without which resets would not hold"),
        (ignoring("if-match"), "the server ignores If-Match, without which resets would not hold"),
        (never_matching, "the server refuses If-Match with the tag of the object, without which resets"),
    ],
)
def test_server_that_gets_conditions_wrong_is_refused(engines: Engines, fault: Fault, words: str) -> None:
    engines.proxy.fault = fault
    with pytest.raises(TierRefused, match="KVFERRY_TIERS: tier object: the server") as caught:
        engines()
    assert words in str(caught.value)
    assert not engines.names("test"), "what was written as a test is removed"


@pytest.mark.long
def test_server_that_wants_plain_tags_holds_resets(engines: Engines) -> None:
    engines.proxy.fault = plain_tags
    first, second = engines(), engines()
    keys = keys_of(range(4))
    assert first.serves(keys)
    assert first.reset().dropped_blocks == 4
    assert second.find(keys) == second.load(keys) == [False] * 4
    assert second.serves(keys)


# --- credentials ----------------------------------------------------------------------------------------------------


def write_credentials(path: Path, key_id: str, secret: str) -> Path:
    path.write_text(f"[default]\naws_access_key_id={key_id}\naws_secret_access_key={secret}\n")
    return path


def make_user(server: ObjectServer, name: str, *actions: str) -> tuple[str, str]:
    """Create a user that may do something with the bucket; return its credentials."""
    import boto3

    iam = boto3.client(
        "iam", endpoint_url=server.url, region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    iam.create_user(UserName=name)
    allowed = {"Effect": "Allow", "Action": list(actions), "Resource": "*"}
    document = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
    iam.put_user_policy(UserName=name, PolicyName="p", PolicyDocument=document)
    key = iam.create_access_key(UserName=name)["AccessKey"]
    return key["AccessKeyId"], key["SecretAccessKey"]


def require_signatures(server: ObjectServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/moto-api/reset-auth", b"0")
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.long
def test_wrong_credentials_refuse_start_and_later_degrade(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    path = tmp_path / "credentials"
    with object_server() as server:
        owner, reader = make_user(server, "owner", "s3:*"), make_user(server, "reader", "s3:GetObject", "s3:ListBucket")
        require_signatures(server)
        for wrong in ((owner[0], "wrong-secret"), ("AKIAWRONGWRONGWRONG1", owner[1])):
            write_credentials(path, *wrong)
            with pytest.raises(TierRefused, match="the server refuses the credentials; see credentials_file"):
                object_rig(server.url, credentials_file=path)
        write_credentials(path, *reader)
        with pytest.raises(TierRefused, match="the server does not permit the credentials an operation"):
            object_rig(server.url, credentials_file=path)
        write_credentials(path, *owner)
        with closing(object_rig(server.url, credentials_file=path, **SHORT)) as rig:
            keys = keys_of(range(3))
            wait_until_serves(rig, keys)
            write_credentials(path, owner[0], "wrong-secret")
            rig.wait_unavailable(keys)
            rig.wait_for_reason("the server refuses the credentials; see credentials_file")
            path.unlink()
            rig.wait_for_reason("credentials_file cannot be read, or has no such profile")
            write_credentials(path, *owner)
            rig.wait_healthy(keys)
            assert rig.load(keys) == [True] * 3
    assert not any(secret in caplog.text for secret in (owner[0], owner[1], "wrong-secret"))


@pytest.mark.long
def test_missing_bucket_or_profile_refuses_start() -> None:
    url = shared_object_server().url
    with pytest.raises(TierRefused, match="the bucket does not exist; see url"):
        object_rig(url.replace("127.0.0.1", "localhost"), url="s3://missing-bucket/x")
    with pytest.raises(TierRefused, match="credentials_file cannot be read, or has no such profile"):
        object_rig(url, profile="other")
    with pytest.raises(TierRefused, match="credentials_file cannot be read"):
        object_rig(url, credentials_file=Path("/nowhere/credentials"))
    with pytest.raises(TierRefused, match="ca_file cannot be read"):
        object_rig(url, ca_file=Path("/nowhere/ca.pem"))


@pytest.mark.long
def test_credentials_of_the_environment_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with object_server() as server:
        key_id, secret = make_user(server, "owner", "s3:*")
        require_signatures(server)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key_id)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
        # An entry cannot say that there is no file, only leave it out.
        (entry,) = read_tiers(
            [
                {
                    "type": "object",
                    "url": f"s3://{BUCKET}/env",
                    "endpoint": server.url,
                    "region": "us-east-1",
                    "ttl_s": 60,
                }
            ]
        )
        assert entry.credentials_file is None
        with closing(object_rig(server.url, url=entry.url, credentials_file=entry.credentials_file)) as rig:
            wait_until_serves(rig, keys_of(range(2)))


@pytest.mark.long
def test_tls_verifies_the_server(tmp_path: Path) -> None:
    key, cert = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with object_proxy(shared_object_server(), context) as proxy:
        with closing(object_rig(proxy.url, ca_file=cert)) as rig:
            wait_until_serves(rig, keys_of(range(4)))
        with pytest.raises(TierRefused, match="TLS with the server failed; see endpoint and ca_file"):
            object_rig(proxy.url)


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"url": "s3://key:hunter2@blocks/x"}, "url=*** must not contain credentials"),
        ({"url": "az://blocks/x?sig=hunter2"}, "put them into a file that credentials_file names"),
        ({"url": "https://blocks/x"}, "url=*** must be s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://"),
        ({"url": "s3:///x"}, "must be s3://"),
        ({"url": "s3://blocks/a/../b"}, "with letters, digits, and . _ - in the parts of PREFIX"),
        ({"url": "s3://blocks/a b"}, "with letters, digits"),
        ({"url": 5}, "must be s3://"),
        ({"endpoint": "https://key:hunter2@host"}, "endpoint=*** must not contain credentials"),
        ({"endpoint": "ftp://host"}, "must be https://HOST or http://HOST"),
        ({"max_bytes": "1GiB"}, "max_bytes cannot be enforced in a bucket that others write to"),
        ({"ttl_s": None}, "ttl_s is missing: without it nothing bounds the tier"),
        ({"url": "az://blocks"}, "needs account, the name of the storage account"),
        ({"account": "me"}, "account is for az:// only"),
        ({"url": "gs://blocks", "region": "eu"}, "region and profile are for s3:// only"),
        ({"profile": "other"}, "profile needs credentials_file"),
        ({"requests": 0}, "requests=0 must be a whole number from 1 to 1024"),
        ({"secret_access_key": "hunter2"}, "secret_access_key is no field of it"),
    ],
)
def test_wrong_settings_are_refused_without_credentials(change: dict[str, object], words: str) -> None:
    entry = {"type": "object", "url": "s3://blocks", "ttl_s": 60} | change
    with pytest.raises(ValueError, match="tier 1") as caught:
        read_tiers([{name: value for name, value in entry.items() if value is not None}])
    assert words in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_url_gives_bucket_and_prefix() -> None:
    for url, expected in {
        "s3://blocks": ("s3", "blocks", "kvferry"),
        "gs://blocks/": ("gs", "blocks", "kvferry"),
        "s3://my.blocks/a/b-c/": ("s3", "my.blocks", "a/b-c"),
    }.items():
        (entry,) = read_tiers([{"type": "object", "url": url, "ttl_s": 60}])
        assert isinstance(entry, ObjectTier.Settings)
        assert (entry.scheme, entry.bucket, entry.prefix) == expected


def test_unreachable_server_of_azure_degrades(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The client of Azure, with a key from a file; there is no server of Azure here."""
    path = tmp_path / "credentials"
    path.write_text("c2VjcmV0LWtleQ==\n")
    given: dict[str, Any] = {"url": "az://blocks", "account": "me", "region": None, "credentials_file": path}
    with closing(object_rig(free_address(), is_up=False, **given, **SHORT)) as rig:
        rig.wait_for_reason("the server cannot be reached")
        assert rig.store(keys_of([1])) == [False]
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("content", ["hunter2", "{}", '{"type": "service_account", "private_key": "hunter2"}', ""])
def test_file_without_credentials_of_gcs_refuses_start(tmp_path: Path, content: str) -> None:
    path = tmp_path / "credentials"
    path.write_text(content)
    words = "tier object: credentials_file has no credentials of Google: name the JSON file of a service account"
    with pytest.raises(TierRefused, match=words) as caught:
        object_rig(free_address(), is_up=False, url="gs://blocks", region=None, credentials_file=path)
    assert "hunter2" not in str(caught.value)


def test_missing_default_credentials_of_gcs_refuse_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/credentials")
    with pytest.raises(TierRefused, match="the credentials of the environment cannot be used; see credentials_file"):
        object_rig(free_address(), is_up=False, url="gs://blocks", region=None, credentials_file=None)


def test_block_longer_than_an_object_is_refused() -> None:
    (entry,) = read_tiers([{"type": "object", "url": "s3://blocks", "ttl_s": 60}])
    ObjectTier.check(entry, 5 << 30 >> 1)
    with pytest.raises(TierRefused, match="longer than an object can be"):
        ObjectTier.check(entry, 5 << 30)
