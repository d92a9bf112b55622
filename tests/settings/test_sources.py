"""Where values come from, and which place wins."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from pathlib import Path

import pytest

from kvferry.app.settings import BadSettings, Settings, Source

PLACES = ("connector", "env", ".env", "toml")


def write(places: Collection[str], monkeypatch: pytest.MonkeyPatch, folder: Path) -> Settings:
    """Give max_running a value in each of these places, 2 in the strongest one to 5 in the weakest."""
    value = dict(zip(PLACES, (2, 3, 4, 5), strict=True))
    if "env" in places:
        monkeypatch.setenv("KVFERRY_MAX_RUNNING", str(value["env"]))
    if ".env" in places:
        (folder / ".env").write_text(f"OTHER=1\nexport KVFERRY_MAX_RUNNING={value['.env']}\n")
    if "toml" in places:
        (folder / "kvferry.toml").write_text(f"max_running = {value['toml']}\n")
        monkeypatch.setenv("KVFERRY_CONFIG", str(folder / "kvferry.toml"))
    given = {"max_running": value["connector"]} if "connector" in places else {}
    return Settings(**given)


@pytest.mark.parametrize("places", [c for n in range(5) for c in itertools.combinations(PLACES, n)], ids=str)
def test_the_strongest_place_wins(places: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, clean_world: Path) -> None:
    settings = write(places, monkeypatch, clean_world)
    order = {
        "connector": (2, Source.CONNECTOR),
        "env": (3, Source.ENV),
        ".env": (4, Source.FILE),
        "toml": (5, Source.FILE),
    }
    expected = next((order[place] for place in PLACES if place in places), (8, Source.DEFAULT))
    assert (settings.max_running, settings.source("max_running")) == expected
    assert settings.source("port") is Source.DEFAULT


def test_env_file_is_left_out_on_request(clean_world: Path) -> None:
    (clean_world / ".env").write_text("KVFERRY_PORT=9000\n")
    assert Settings().port == 9000
    assert Settings(_env_file=None).port == 8787


def test_env_file_values_are_taken_as_written(clean_world: Path) -> None:
    (clean_world / ".env").write_text("KVFERRY_ADMIN_TOKEN='a${HOME}b'\nKVFERRY_MODEL=\"two words\"  # why\n")
    settings = Settings()
    assert settings.admin_token is not None
    assert settings.admin_token.get_secret_value() == "a${HOME}b"
    assert settings.model == "two words"


def test_a_folder_called_dot_env_is_no_settings_file(clean_world: Path) -> None:
    (clean_world / ".env").mkdir()
    assert Settings().port == 8787


def test_config_may_be_named_in_env_file_and_by_the_connector(clean_world: Path) -> None:
    (clean_world / "a.toml").write_text("port = 1000\n")
    (clean_world / "b.toml").write_text("port = 2000\n")
    (clean_world / ".env").write_text("KVFERRY_CONFIG=a.toml\n")
    assert Settings().port == 1000
    assert Settings(config=str(clean_world / "b.toml")).port == 2000


def test_toml_takes_native_types(monkeypatch: pytest.MonkeyPatch, clean_world: Path) -> None:
    (clean_world / "c.toml").write_text(
        'pool_bytes = "2GiB"\nmax_offload_tokens = 0\noffload_prompt_only = false\nmax_pinned_fraction = 0.5\n'
        'request_fields = ["store", "load"]\ntiers = []\nurl = "http://127.0.0.1:1"\n'
    )
    monkeypatch.setenv("KVFERRY_CONFIG", "c.toml")
    settings = Settings()
    assert settings.pool_bytes == 2 << 30
    assert settings.max_offload_tokens == 0
    assert settings.offload_prompt_only is False
    assert settings.request_fields == ("store", "load")
    policy = settings.request_policy()
    assert (policy.offload_prompt_only, policy.max_offload_tokens) == (False, 0)
    assert settings.request_policy_sources() == {
        "offload_prompt_only": "file",
        "max_offload_tokens": "file",
        "level": "default",
        "max_load_tokens": "default",
        "tier_wait": "default",
        "retain_s": "default",
    }


def test_secrets_come_from_files(monkeypatch: pytest.MonkeyPatch, clean_world: Path) -> None:
    (clean_world / "admin").write_text("s3cret-admin-token\n")
    (clean_world / "url").write_text("postgresql://u:pw@db/kv\n")
    monkeypatch.setenv("KVFERRY_ADMIN_TOKEN_FILE", str(clean_world / "admin"))
    settings = Settings(database_url_file=str(clean_world / "url"), host="0.0.0.0")
    assert settings.admin_token is not None
    assert settings.admin_token.get_secret_value() == "s3cret-admin-token"
    assert settings.resolved_database_url() == "postgresql://u:pw@db/kv"
    assert settings.source("admin_token") is Source.ENV
    assert settings.source("database_url") is Source.CONNECTOR


def test_database_url_holds_the_state_folder(clean_world: Path) -> None:
    assert Settings(state_dir="state").resolved_database_url() == f"sqlite:///{clean_world}/state/kvferry.db"


def test_kubernetes_noise_is_ignored_with_one_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    noise = {
        "KVFERRY_SERVICE_HOST": "10.0.0.1",
        "KVFERRY_SERVICE_PORT": "8787",
        "KVFERRY_SERVICE_PORT_HTTP": "8787",
        "KVFERRY_PORT": "tcp://10.0.0.1:8787",
        "KVFERRY_PORT_8787_TCP": "tcp://10.0.0.1:8787",
        "KVFERRY_PORT_8787_TCP_ADDR": "10.0.0.1",
        "KVFERRY_METRICS_SERVICE_HOST": "10.0.0.2",
        "KVFERRY_METRICS_PORT": "tcp://10.0.0.2:9",
        "KVFERRY_METRICS_PORT_9_TCP_PROTO": "tcp",
    }
    for name, value in noise.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert settings.port == 8787
    assert settings.source("port") is Source.DEFAULT
    (notice,) = settings.notices
    assert "enableServiceLinks: false" in notice
    assert all(name in notice for name in noise)
    assert Settings(port=9).port == 9


def test_kubernetes_noise_does_not_hide_a_port_of_ones_own(monkeypatch: pytest.MonkeyPatch, clean_world: Path) -> None:
    monkeypatch.setenv("KVFERRY_PORT", "tcp://10.0.0.1:8787")
    (clean_world / ".env").write_text("KVFERRY_PORT=9001\n")
    assert Settings().port == 9001


def test_without_noise_there_is_no_notice() -> None:
    assert Settings().notices == ()


def test_a_name_is_upper_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("kvferry_port", "9000")
    with pytest.raises(
        BadSettings, match=r"kvferry_port=9000 \(environment variable\): .* did you mean KVFERRY_PORT\?"
    ):
        Settings()


def test_validating_a_mapping_reads_the_other_places_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_PORT", "9000")
    for settings in (Settings.model_validate({}), Settings.model_validate({"max_running": 2})):
        assert (settings.port, settings.source("port")) == (9000, Source.ENV)
    assert Settings.model_validate(settings) is settings
    with pytest.raises(BadSettings, match="did you mean port"):
        Settings.model_validate({"prt": 1})


def test_message_when_the_engine_gave_a_setting_names_it_as_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_POOL_PATH", "/p")
    settings = Settings(pool_kind="file", _env_file=None)
    message = "KVFERRY_POOL_KIND=file: KVFERRY_POOL_PATH=/p is full; KVFERRY_POOL_BYTES, KVFERRY_POOL_KINDLY"
    assert settings.as_written(message) == (
        "pool_kind=file: KVFERRY_POOL_PATH=/p is full; KVFERRY_POOL_BYTES, KVFERRY_POOL_KINDLY"
    )
