"""Clients that were told no URL find the service that runs on this host."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from platformdirs import user_state_path

from kvferry.app.common.discovery import announce_service, find_services
from kvferry.app.settings import BadSettings
from kvferry.app.settings.connection import LOCAL_URL, find_connection, find_ranks
from tests.harness.commands import run_script


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(tmp_path / "state"))
    return tmp_path / "state"


def test_discovery_finds_the_service_until_it_withdraws(state: Path) -> None:
    nothing = find_connection()
    assert (nothing.url, nothing.unannounced_in) == (LOCAL_URL, state)
    withdraw = announce_service(state, "one", "http://127.0.0.1:1234")
    found = find_connection()
    assert (found.url, found.unannounced_in) == ("http://127.0.0.1:1234", None)
    withdraw()
    assert find_connection().url == LOCAL_URL


def test_service_with_another_state_folder_is_found_where_none_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No service that runs on this machine is found.
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "default"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    withdraw = announce_service(tmp_path / "other", "one", "http://127.0.0.1:1234")
    assert find_connection().url == "http://127.0.0.1:1234"
    # Not a rank of the same engine.
    withdraw_same = announce_service(tmp_path / "third", "two", "http://127.0.0.1:5", "one")
    with pytest.raises(BadSettings, match=r"several services.*127.0.0.1:1234 .one.*127.0.0.1:5 .two"):
        find_connection()
    # The one with the default state folder comes first.
    withdraw_default = announce_service(user_state_path("kvferry"), "mine", "http://127.0.0.1:6")
    assert find_connection().url == "http://127.0.0.1:6"
    monkeypatch.setenv("KVFERRY_STATE_DIR", str(tmp_path / "nothing"))
    assert find_connection().url == LOCAL_URL
    for one in (withdraw, withdraw_same, withdraw_default):
        one()
    assert list((tmp_path / "run").rglob("*.json")) == []


def test_announcement_removes_those_of_processes_that_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    run_script(
        "import sys; from pathlib import Path; from kvferry.app.common.discovery import announce_service\n"
        "announce_service(Path(sys.argv[1]), 'gone', 'http://127.0.0.1:1')",
        tmp_path / "state",
    )
    (left,) = (tmp_path / "run").rglob("*.json")
    (tmp_path / "run" / "kvferry" / "services" / "noise.json").touch()
    announce_service(tmp_path / "state", "one", "http://127.0.0.1:2")
    assert not left.exists()


def test_withdraw_keeps_a_newer_announcement_of_the_same_name(state: Path) -> None:
    withdraw_first = announce_service(state, "one", "http://127.0.0.1:1")
    withdraw_second = announce_service(state, "one", "http://127.0.0.1:2")
    withdraw_first()
    assert find_connection().url == "http://127.0.0.1:2"
    withdraw_second()
    withdraw_second()
    assert find_connection().url == LOCAL_URL


def test_announcement_when_the_state_folder_is_unwritable_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "services").write_text("in the way")
    announce_service(tmp_path, "one", "http://127.0.0.1:1")()
    assert f"KVFERRY_STATE_DIR={tmp_path}: clients will need --url" in caplog.text
    assert find_services(tmp_path) == []


@pytest.mark.parametrize("before", [None, 0o755, 0o777])
def test_discovery_folder_when_announcing_is_for_the_owner_only(state: Path, before: int | None) -> None:
    folder = state / "services"
    if before is not None:
        folder.mkdir(parents=True)
        folder.chmod(before)
    announce_service(state, "one", "http://127.0.0.1:1")
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "one.json").stat().st_mode & 0o777 == 0o600


def test_discovery_folder_when_others_can_write_is_not_read(state: Path) -> None:
    announce_service(state, "one", "http://127.0.0.1:1")
    (state / "services").chmod(0o722)
    assert find_services(state) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_discovery_folder_when_another_users_is_not_used(state: Path, caplog: pytest.LogCaptureFixture) -> None:
    announce_service(state, "one", "http://127.0.0.1:1")
    os.chown(state / "services", 12345, -1)
    assert find_services(state) == []
    announce_service(state, "two", "http://127.0.0.1:2")
    assert "belongs to another user (12345)" in caplog.text
    assert not (state / "services" / "two.json").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folder_of_all_services_when_another_users_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "default"))
    folder = tmp_path / f"kvferry-{os.geteuid()}"
    folder.mkdir(mode=0o777)
    os.chown(folder, 12345, -1)
    announce_service(tmp_path / "state", "one", "http://127.0.0.1:1")
    assert list(folder.iterdir()) == []
    # What its owner can put there, at any time between two looks at it.
    announce_service(folder, "evil", "http://127.0.0.1:6666")
    assert (folder / "services" / "evil.json").exists()
    assert find_connection().url == LOCAL_URL


def test_folder_of_all_services_is_private_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "default"))
    before = os.umask(0o002)
    try:
        announce_service(tmp_path / "state", "one", "http://127.0.0.1:1")
    finally:
        os.umask(before)
    assert find_connection().url == "http://127.0.0.1:1"


def test_a_discovery_file_that_cannot_be_put_in_its_place_leaves_nothing(state: Path) -> None:
    in_the_way = state / "services" / "one.json"
    in_the_way.mkdir(parents=True)
    announce_service(state, "one", "http://127.0.0.1:1")()
    assert list((state / "services").iterdir()) == [in_the_way]


def test_a_url_that_is_given_is_taken_whatever_was_found(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    announce_service(state, "one", "http://127.0.0.1:1234")
    assert find_connection("http://127.0.0.1:5").url == "http://127.0.0.1:5"
    monkeypatch.setenv("KVFERRY_URL", "http://127.0.0.1:6")
    assert find_connection().url == "http://127.0.0.1:6"


def test_of_several_services_none_is_guessed(state: Path) -> None:
    announce_service(state, "one", "http://127.0.0.1:1")
    announce_service(state, "two", "http://127.0.0.1:2")
    with pytest.raises(BadSettings, match=r"several services.*127.0.0.1:1 .one.*127.0.0.1:2 .two"):
        find_connection()


def test_ranks_of_one_engine_are_found_together_and_in_order(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in (10, 0, 2):
        announce_service(state, f"one-dp{rank}", f"http://127.0.0.1:{rank + 1}", "one")
    assert [found.url for found in find_ranks()] == [f"http://127.0.0.1:{port}" for port in (1, 3, 11)]
    with pytest.raises(BadSettings, match=r"3 data-parallel ranks; choose one with --url.*:1, .*:3, .*:11"):
        find_connection()
    announce_service(state, "two", "http://127.0.0.1:20")
    with pytest.raises(BadSettings, match=r"several services.*KVFERRY_ENGINE_NAME"):
        find_ranks()
    assert [found.url for found in find_ranks(engine="two")] == ["http://127.0.0.1:20"]
    with pytest.raises(BadSettings, match=r"no engine named three.*two"):
        find_ranks(engine="three")
    monkeypatch.setenv("KVFERRY_ENGINE_NAME", "one")
    assert len(find_ranks()) == 3


def test_discovery_ignores_announcements_of_killed_processes(state: Path) -> None:
    run_script(
        "import sys; from pathlib import Path; from kvferry.app.common.discovery import announce_service\n"
        "announce_service(Path(sys.argv[1]), 'gone', 'http://127.0.0.1:1')",
        state,
    )
    path = state / "services" / "gone.json"
    assert path.exists()
    assert find_services(state) == []
    # Nor does a process that has got the number of the one that is gone.
    announce_service(state, "one", "http://127.0.0.1:2")
    mine = json.loads((state / "services" / "one.json").read_text())
    path.write_text(json.dumps({**mine, "name": "gone", "started_s": mine["started_s"] - 100}))
    assert [service.name for service in find_services(state)] == ["one"]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"name": 1}', '{"name": "a", "url": "b", "pid": "c", "started_s": 1}']
)
def test_files_that_cannot_be_read_are_passed_over(state: Path, content: str) -> None:
    (state / "services").mkdir(parents=True)
    (state / "services" / "broken.json").write_text(content)
    assert find_services(state) == []


@pytest.mark.parametrize(
    "file",
    [
        {".env": "KVFERRY_URL=http://127.0.0.1:1"},
        {".env": "KVFERRY_STATE_DIR=other"},
        {".env": "KVFERRY_CONFIG=c.toml", "c.toml": "url = 'http://127.0.0.1:1'"},
    ],
    ids=["url", "state", "config"],
)
@pytest.mark.parametrize("has_token_file", [False, True])
def test_token_is_not_sent_to_where_only_an_env_file_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: dict[str, str], has_token_file: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in file.items():
        (tmp_path / name).write_text(text + "\n")
    given = {}
    if has_token_file:
        given["token_file"] = tmp_path / "token"
        given["token_file"].write_text("the-admin-token")
    assert find_connection().token is None
    if not has_token_file:
        monkeypatch.setenv("KVFERRY_ADMIN_TOKEN", "the-admin-token")
    with pytest.raises(BadSettings, match=r"the token is from elsewhere, .* give --url") as caught:
        find_connection(**given)
    assert "the-admin-token" not in str(caught.value)
    assert find_connection("http://127.0.0.1:1", **given).token == "the-admin-token"
    monkeypatch.setenv("KVFERRY_URL", "http://127.0.0.1:1")
    assert find_connection(**given).token == "the-admin-token"
    monkeypatch.delenv("KVFERRY_URL")
    monkeypatch.delenv("KVFERRY_ADMIN_TOKEN", raising=False)
    with (tmp_path / ".env").open("a") as env_file:
        env_file.write("KVFERRY_ADMIN_TOKEN=its-own-token\n")
    assert find_connection().token == "its-own-token"


def test_token_and_config_from_the_environment_go_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.toml").write_text("url = 'http://127.0.0.1:1'\n")
    monkeypatch.setenv("KVFERRY_CONFIG", str(tmp_path / "c.toml"))
    monkeypatch.setenv("KVFERRY_ADMIN_TOKEN", "the-admin-token")
    assert find_connection().token == "the-admin-token"
