"""TIERS: how its entries are read, what refuses to start and how that is said, and tiers that others install."""

from __future__ import annotations

import json
import re
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest

from kvferry.app.settings import BadSettings, Settings
from kvferry.app.settings.docs import settings_markdown
from kvferry.app.settings.tiers import (
    BUILT_IN,
    GROUP,
    MAX_TIERS,
    ExpiringSettings,
    TierSettings,
    load_type,
    read_tiers,
)
from kvferry.app.tiers.block_store import TierRefused
from kvferry.app.tiers.fs import FileTier
from kvferry.app.tiers.opening import open_tiers
from kvferry.core.policy import Level
from tests.harness.documented_tier import EXAMPLE
from tests.harness.tier_rig import FINGERPRINT, WAIT_S
from tests.harness.tier_slots import SLOT_BYTES, SlotArray
from tests.harness.waiting import wait_until

ROOT = Path(__file__).parents[2]
GOOD = {"type": "fs", "path": "/data/kv", "max_bytes": "1GiB"}


def refused(*entries: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is what matters
        read_tiers(list(entries))
    return str(caught.value)


def test_an_entry_becomes_one_object_with_its_defaults() -> None:
    (entry,) = read_tiers([GOOD])
    assert isinstance(entry, FileTier.Settings)
    assert (entry.type, entry.name, entry.path, entry.max_bytes) == ("fs", "fs", Path("/data/kv"), 1 << 30)
    assert (entry.timeout_s, entry.threads, entry.queue_blocks, entry.level) == (10.0, 4, 1024, Level.BLOCK)
    assert entry.batch_bytes == 16 << 20
    assert read_tiers((entry,)) == (entry,), "what was read is read again unchanged"
    with pytest.raises(ValueError, match="frozen"):
        entry.max_bytes = 1


def test_tiers_as_text_are_read_as_json() -> None:
    text = json.dumps([GOOD | {"name": "disk", "timeout_s": "2.5", "threads": "8", "level": "Request"}])
    (entry,) = read_tiers(text)
    assert (entry.name, entry.timeout_s, entry.threads, entry.level) == ("disk", 2.5, 8, Level.REQUEST)
    assert read_tiers("[]") == ()


@pytest.mark.parametrize("value", ["", "{}", "[1]", "[", "fs", 5, None, {"type": "fs"}, [[]], "null"])
def test_tiers_when_not_a_list_of_objects_show_an_example(value: object) -> None:
    with pytest.raises(ValueError, match=r'must be a JSON list of objects such as \[\{"type": "fs"'):
        read_tiers(value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_bytes": "lots"}, "tier 1 (fs): max_bytes=lots must be a size such as 8GiB"),
        ({"max_bytes": None}, "max_bytes=null must be a size"),
        ({"path": ""}, 'path="" must be the path of a folder'),
        ({"threads": 0}, "threads=0 must be a whole number from 1 to 64"),
        ({"threads": True}, "threads=true must be a whole number"),
        ({"queue_blocks": -1}, "queue_blocks=-1 must be a whole number from 1 to 1000000"),
        ({"batch_bytes": 0}, "batch_bytes=0 must be a size"),
        ({"timeout_s": 0}, "timeout_s=0 must be a number from 0.01 to 3600"),
        ({"timeout_s": "nan"}, "timeout_s=nan must be a number from 0.01"),
        ({"timeout_s": True}, "timeout_s=true must be"),
        ({"timeout_s": 10**400}, "timeout_s=1000"),
        ({"level": "all"}, "level=all must be 'block' or 'request'"),
        ({"name": "host"}, "tier 1 (host): name=host must not be host, the name of the pool"),
        ({"name": "../up"}, "name=../up must be 1 to 64 letters"),
        ({"name": 5}, "name=5 must be a valid string"),
        ({"pth": "/x"}, "pth is no field of it; did you mean path?"),
        ({"xyzzy": "/x"}, "xyzzy is no field of it; it has type, name, max_bytes"),
        ({"type": "fss"}, "there is no type of tier called fss; did you mean fs?"),
        ({"type": "nfs"}, "there is no type of tier called nfs; did you mean fs?"),
    ],
)
def test_tier_field_when_invalid_is_named_with_its_value(change: dict[str, Any], words: str) -> None:
    assert words in refused(GOOD | change)


def test_all_problems_are_reported_at_once() -> None:
    told = refused({"type": "fs"}, GOOD | {"name": "a"}, {}, GOOD | {"name": "a", "path": "/other"})
    assert told == (
        "tier 1 (fs): max_bytes is missing; it is the limit of its size in bytes; path is missing; it is the folder "
        "of its files, which no other process uses unless shared is true; `{engine}` in it is the engine's name; "
        "tier 3: type is missing: "
        "it names the type of tier, such as fs; "
        "2 tiers are called a: give each a name of its own"
    )
    assert f"at most {MAX_TIERS} tiers" in refused(*[GOOD | {"name": f"t{n}"} for n in range(MAX_TIERS + 1)])


class Expiring:
    Settings = ExpiringSettings


@pytest.fixture
def expiring(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An entry of a type that can bound itself by age."""
    monkeypatch.setattr("kvferry.app.settings.tiers.load_type", lambda name: Expiring)
    return {"type": "far"}


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"max_bytes": "1GiB"}, (1 << 30, None)),
        ({"ttl_s": "3600"}, (None, 3600)),
        ({"max_bytes": 1, "ttl_s": 5}, (1, 5)),
    ],
)
def test_tier_is_bounded_by_bytes_or_age(expiring: dict[str, Any], bounds: dict[str, Any], expected: object) -> None:
    (entry,) = read_tiers([expiring | bounds])
    assert (entry.max_bytes, entry.ttl_s) == expected


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({}, "tier 1 (far): max_bytes and ttl_s are both missing: without one of them nothing bounds the tier"),
        ({"ttl_s": 0.5}, "ttl_s=0.5 must be a whole number from 1 to 31622400"),
        ({"ttl_s": None}, "ttl_s=null must be a whole number"),
    ],
)
def test_tier_without_a_bound_is_refused(expiring: dict[str, Any], bounds: dict[str, Any], words: str) -> None:
    assert words in refused(expiring | bounds)


def test_ttl_of_a_type_that_has_none_is_refused() -> None:
    assert "ttl_s is no field of it" in refused(GOOD | {"ttl_s": 5})


def test_built_in_tier_types_are_entry_points() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"][GROUP] == {point.name: point.value for point in BUILT_IN}


# --- tiers that others install ----------------------------------------------------------------------------------

_MODULE = """
from pydantic import SecretStr
from kvferry.app.settings.tiers import TierSettings
from kvferry.app.settings.types import Token
from kvferry.app.tiers.block_store import TierRefused
from tests.harness.dictionary_tier import DictionaryStore

class Good:
    class Settings(TierSettings):
        token: Token
        url: SecretStr = SecretStr("https://near")
    opened = []

    @staticmethod
    def open(settings, context):
        if settings.name == "refused":
            raise TierRefused(f"KVFERRY_TIERS: tier {settings.name}: no, thank you")
        if settings.name == "failing":
            raise ConnectionError("nobody listens")
        Good.opened.append(DictionaryStore(settings.max_bytes, fingerprint=context.fingerprint))
        return Good.opened[-1]

class NoOpen:
    Settings = Good.Settings

class NoSettings:
    Settings = dict
    open = Good.open
"""


def install(folder: Path, code: str, entry_points: str) -> Path:
    """Install a package of others with tiers in it, as a package manager would; return the folder to import from."""
    site = folder / "site"
    info = site / "acme_tiers-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "acme_tiers.py").write_text(code)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-tiers\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\n{entry_points}")
    return site


@pytest.fixture
def acme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An installed package of others."""
    points = (
        "acme = acme_tiers:Good\nnoopen = acme_tiers:NoOpen\nnosettings = acme_tiers:NoSettings\n"
        "nomodule = acme_absent:Tier\nnoname = acme_tiers:Absent\nfs = acme_tiers:Good\n"
    )
    monkeypatch.syspath_prepend(str(install(tmp_path, _MODULE, points)))
    import acme_tiers

    yield acme_tiers
    del sys.modules["acme_tiers"]


def test_documented_package_serves_as_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point and the setting of the page; what the tier does is tested with all others."""
    page = (ROOT / "docs" / "writing-a-tier.md").read_text()
    (point,) = re.findall(r'^    acme = "(.+)"$', page, re.MULTILINE)
    (setting,) = re.findall(r"KVFERRY_TIERS='(.+\"acme\".+)'", page)
    monkeypatch.syspath_prepend(str(install(tmp_path, EXAMPLE.read_text(), f"acme = {point}\n")))
    entries = read_tiers(setting.replace("/var/cache/acme", str(tmp_path / "acme")))
    tiers = open_tiers(entries, FINGERPRINT, SLOT_BYTES, SlotArray(1), lambda: None, engine="e")
    try:
        assert tiers["acme"].counts().max_bytes == 10 << 30
        assert not tiers["acme"].health()
    finally:
        tiers["acme"].close(WAIT_S)
        del sys.modules["acme_tiers"]


def entry_of(**fields: Any) -> dict[str, Any]:
    return {"type": "acme", "max_bytes": 1000, "token": "hunter2"} | fields


def test_tier_types_of_other_packages_come_from_entry_points(acme: Any) -> None:
    (entry,) = read_tiers([entry_of(name="far")])
    assert isinstance(entry, acme.Good.Settings)
    tiers = open_tiers([entry], FINGERPRINT, SLOT_BYTES, SlotArray(1), lambda: None, engine="e")
    assert list(tiers) == ["far"]
    (store,) = acme.Good.opened
    tiers["far"].close(WAIT_S)
    assert store.closed


def test_secrets_of_a_tier_never_show(acme: Any) -> None:
    (entry,) = read_tiers([entry_of(name="far")])
    assert entry.token.get_secret_value() == "hunter2"
    assert entry.shown()["token"] == "***"
    assert "hunter2" not in repr(entry) + str(entry) + json.dumps(entry.shown())
    assert "hunter2 and more" not in refused(entry_of(token="hunter2 and more"))


def test_addresses_of_built_in_tiers_show_and_those_of_others_do_not(acme: Any) -> None:
    for entry in (
        {"type": "redis", "url": "redis://cache:6379/1", "ttl_s": 60},
        {"type": "object", "url": "s3://bucket/kv", "endpoint": "https://store:9000", "ttl_s": 86400},
    ):
        (tier,) = read_tiers([entry])
        assert {name: tier.shown()[name] for name in entry} == entry
        assert "cache" not in repr(tier)
    (other,) = read_tiers([entry_of(name="far", url="https://far/hunter2")])
    assert other.shown()["url"] == "***"


def test_built_in_tier_types_cannot_be_replaced(acme: Any) -> None:
    assert load_type("fs") is FileTier


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("noopen", "the type noopen (acme_tiers:NoOpen) lacks the method open, which returns its store"),
        (
            "nosettings",
            "the type nosettings (acme_tiers:NoSettings) lacks the method open, which returns its store, or",
        ),
        ("nomodule", "the type nomodule (acme_absent:Tier) cannot be loaded: ModuleNotFoundError"),
        ("noname", "the type noname (acme_tiers:Absent) cannot be loaded: AttributeError"),
    ],
)
def test_tier_type_when_incomplete_is_refused_by_name(acme: Any, kind: str, words: str) -> None:
    assert words in refused(entry_of(type=kind))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("refused", "KVFERRY_TIERS: tier refused: no, thank you"),
        (
            "failing",
            "KVFERRY_TIERS: tier failing cannot be opened: ConnectionError: nobody listens; see its documentation",
        ),
    ],
)
def test_a_tier_that_cannot_be_opened_refuses_and_closes_the_ones_before(acme: Any, name: str, words: str) -> None:
    entries = read_tiers([entry_of(name="first"), entry_of(name=name)])
    with pytest.raises(TierRefused) as caught:
        open_tiers(entries, FINGERPRINT, SLOT_BYTES, SlotArray(1), lambda: None, engine="e")
    assert str(caught.value) == words
    assert [tier.closed for tier in acme.Good.opened] == [True]


def test_a_tier_that_opens_too_late_is_closed(acme: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    original = acme.Good.open

    def slow(settings: Any, context: Any) -> Any:
        gate.wait(WAIT_S)
        return original(settings, context)

    monkeypatch.setattr(acme.Good, "open", slow)
    (entry,) = read_tiers([entry_of(timeout_s=0.05)])
    with pytest.raises(TierRefused, match=r"tier acme did not open within timeout_s=0.05 s: see whether its disk"):
        open_tiers([entry], FINGERPRINT, SLOT_BYTES, SlotArray(1), lambda: None, engine="e")
    gate.set()
    wait_until(lambda: [tier.closed for tier in acme.Good.opened] == [True], "closed", WAIT_S)


def test_a_model_that_could_be_another_revision_gets_no_tier(acme: Any) -> None:
    """LMCache#4492: a changed model of the same name found old blocks."""
    (entry,) = read_tiers([entry_of()])
    with pytest.raises(TierRefused, match="the revision of the model is unknown"):
        open_tiers([entry], FINGERPRINT | {"revision": None}, SLOT_BYTES, SlotArray(1), lambda: None, engine="e")
    assert not acme.Good.opened
    assert open_tiers([], {"revision": None}, SLOT_BYTES, SlotArray(1), lambda: None, engine="e") == {}


# --- among the other settings -----------------------------------------------------------------------------------


def test_the_setting_and_where_it_came_from_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_TIERS", '[{"type": "fs", "max_bytes": "x", "path": "/data", "password": "hunter2"}]')
    with pytest.raises(BadSettings) as caught:
        Settings(_env_file=None)
    assert str(caught.value) == (
        "KVFERRY_TIERS=[...] (environment variable): tier 1 (fs): max_bytes=x must be a size such as 8GiB, 512MiB, "
        "1.5GB or a whole number of bytes, 1 or more; password is no field of it; it has type, name, max_bytes, "
        "timeout_s, level, when, threads, queue_blocks, batch_bytes, path, shared"
    )


def test_every_field_is_documented() -> None:
    page = (ROOT / "docs" / "tiers.md").read_text()
    for kind in (TierSettings, ExpiringSettings, FileTier.Settings):
        for name, field in kind.model_fields.items():
            assert field.description
            assert f"| `{name}` | " in page, f"{name} is not in docs/tiers.md"
    assert "](tiers.md)" in settings_markdown()
