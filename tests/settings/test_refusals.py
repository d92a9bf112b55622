"""Settings that kvferry refuses to start with, and how it says so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from kvferry.app.settings import BadSettings, Settings
from kvferry.app.telemetry.logs import SecretMask

Setenv = Callable[[str, str], None]


@pytest.fixture
def setenv(monkeypatch: pytest.MonkeyPatch) -> Setenv:
    return lambda name, value: monkeypatch.setenv(f"KVFERRY_{name}", value)


def refused(**given: Any) -> list[str]:
    with pytest.raises(BadSettings) as caught:
        Settings(**given)
    assert str(caught.value) == "\n".join(str(problem) for problem in caught.value.problems)
    return [str(problem) for problem in caught.value.problems]


def test_all_problems_are_reported_at_once(setenv: Setenv, clean_world: Path) -> None:
    setenv("POL_BYTES", "8GiB")
    setenv("BLOCK_SIZE", "0")
    setenv("HOST", "0.0.0.0")
    setenv("CONFIG", "c.toml")
    (clean_world / ".env").write_text("KVFERRY_POOL_KIND=disk\nKVFERRY_LOG_LEVEL=loud\n")
    (clean_world / "c.toml").write_text("dtype = 'float8'\nport_ = 1\n")
    assert sorted(refused(max_running=4096, pool_bites=1)) == sorted(
        [
            "KVFERRY_POL_BYTES=8GiB (environment variable): no such setting; did you mean KVFERRY_POOL_BYTES?",
            "KVFERRY_BLOCK_SIZE=0 (environment variable): must be a whole number from 1 to 1024",
            "KVFERRY_HOST=0.0.0.0 (environment variable): without a token the service listens on loopback only; "
            "set KVFERRY_ADMIN_TOKEN, or KVFERRY_HOST=127.0.0.1",
            "KVFERRY_POOL_KIND=disk (.env): must be 'pinned', 'shm' or 'file'",
            "KVFERRY_LOG_LEVEL=loud (.env): must be 'debug', 'info', 'warning', 'error' or 'critical'",
            "dtype=float8 (c.toml): must be 'auto', 'float16', 'bfloat16', 'float32' or 'float64'",
            "port_=1 (c.toml): no such setting; did you mean port?",
            "pool_bites=1 (given by the engine): no such setting; did you mean pool_bytes?",
            "KVFERRY_MAX_BATCHED_TOKENS=2048 (default): a step of 2048 tokens is too small for "
            "max_running=4096 requests",
        ]
    )


@pytest.mark.parametrize(
    ("spelled", "nearest"),
    [
        ("ADMINTOKEN", "KVFERRY_ADMIN_TOKEN"),
        ("ADMIN_TOKEN_FLE", "KVFERRY_ADMIN_TOKEN_FILE"),
        ("EVICTION_POLICIES", "KVFERRY_EVICTION_POLICY"),
        ("DATABSE_URL", "KVFERRY_DATABASE_URL"),
        ("URLS", "KVFERRY_URL"),
    ],
)
def test_unknown_names_suggest_the_nearest(spelled: str, nearest: str, setenv: Setenv) -> None:
    """LMCache#1244, LMCache#2854: an unknown setting was silently ignored."""
    setenv(spelled, "hunter2-hunter2")
    (problem,) = refused()
    assert f"did you mean {nearest}?" in problem
    assert "=*** (" in problem, "what may be a misspelled secret is not shown"


@pytest.mark.parametrize(
    ("spelled", "value"),
    [
        ("DSN", "postgresql://kv:hunter2@db/kv"),
        ("BEARER", "hunter2"),
        ("REDIS", "redis://:hunter2@cache/0"),
        ("TIER", '[{"type": "redis", "url": "redis://:hunter2@cache"}]'),
        ("URL", "http://kv:hunter2@host"),
        ("CONFIG_", '{"key": "hunter2"}'),
    ],
)
def test_unknown_name_with_a_possible_secret_is_masked(spelled: str, value: str, setenv: Setenv) -> None:
    setenv(f"{spelled}X", value)
    (problem,) = refused()
    assert problem.startswith(f"KVFERRY_{spelled}X=*** (environment variable): no such setting")


@pytest.mark.parametrize("value", ["8GiB", "1073741824", "0.25", "true", "eager", "pinned"])
def test_unknown_name_with_a_plain_value_shows_it(value: str, setenv: Setenv) -> None:
    setenv("XYZZY", value)
    assert refused() == [f"KVFERRY_XYZZY={value} (environment variable): no such setting"]


def test_a_name_like_nothing_else_suggests_nothing(setenv: Setenv) -> None:
    setenv("XYZZY", "1")
    assert refused() == ["KVFERRY_XYZZY=1 (environment variable): no such setting"]


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("port", ["65536", "-1", "1.5", "", "0x10", True, 1.0, None, [1]]),
        ("host", ["", "a b", "http://127.0.0.1", "127.0.0.1:80"]),
        ("engine_name", ["", "../x", ".x", "a/b", "x" * 65, 5]),
        ("engine", ["", "vllm", 1]),
        ("device", ["gpu", "cuda:", "cuda:x", "cuda:200", 0]),
        ("device_blocks", ["0", "many", False]),
        *[(name, [2**31, 2**63 - 1]) for name in ("device_blocks", "max_batched_tokens", "max_running", "max_waiting")],
        ("blocks_per_slot", ["0", 2**31]),
        *[
            (name, ["~no-such-user/x"])
            for name in ("config", "state_dir", "pool_path", "admin_token_file", "database_url_file")
        ],
        ("config", ["/" + "a" * 300]),
        ("tiers", ['[{"type": "fs", "path": "~no-such-user/x", "max_bytes": "1GiB"}]', "[" * 5000]),
        ("pool_bytes", ["0", "-1", "1.5", "8 Gib it", "GiB", "1e9", "9" * 30, 0, 1.5, True, "1XB"]),
        ("offload_prompt_only", ["maybe", "2", 1, 0, None, ""]),
        ("max_offload_tokens", ["-1", "1.5", "none", "", -1, True, 1.0, None]),
        ("request_fields", ["nothing", "store,nope", '["store"', "{}", ["store", 1], 5]),
        ("max_pinned_fraction", ["1.1", "-0.1", "nan", "inf", "half", True, None]),
        ("database_url", ["mysql://h/d", "kvferry.db", "", 5]),
        ("eviction_history_rows", ["-1", "1.5"]),
        ("tiers", ["{}", "[1]", "[", "fs", {"type": "fs"}]),
        ("admin_token", ["", " ", "two words", "ümlaut", "a,b,c", "a,a", ",", 12]),
        ("state_dir", ["", " ", 5]),
        ("model", ["", " ", 5]),
    ],
)
def test_values_that_do_not_validate(
    name: str, bad: list[Any], setenv: Setenv, monkeypatch: pytest.MonkeyPatch
) -> None:
    for value in bad:
        (problem,) = refused(**{name: value})
        assert problem.startswith(f"{name}=")
        assert "(given by the engine): " in problem
        if isinstance(value, str):
            with monkeypatch.context() as patch:
                patch.setenv(f"KVFERRY_{name.upper()}", value)
                (problem,) = refused()
            assert problem.startswith(f"KVFERRY_{name.upper()}=")


def test_unsupported_setting_refuses_to_start() -> None:
    (problem,) = refused(eviction_policy="fifo")
    assert "this version offers only lru, arc" in problem


def test_metrics_address_has_the_rules_of_the_host(setenv: Setenv) -> None:
    setenv("METRICS_PORT", "9")
    setenv("METRICS_HOST", "0.0.0.0")
    assert refused() == [
        "KVFERRY_METRICS_HOST=0.0.0.0 (environment variable): without a token the service listens on loopback only; "
        "set KVFERRY_ADMIN_TOKEN, or KVFERRY_METRICS_HOST=127.0.0.1"
    ]
    setenv("READ_TOKEN", "short")
    (problem,) = refused()
    assert "has 5 characters, and KVFERRY_METRICS_HOST=0.0.0.0 can be reached" in problem
    setenv("READ_TOKEN", "t" * 16)
    assert Settings().metrics_address == ("0.0.0.0", 9)
    assert Settings(metrics_host="::1").metrics_address == ("::1", 9)


def test_metrics_address_that_is_not_one_of_its_own_is_refused() -> None:
    (problem,) = refused(metrics_host="127.0.0.1")
    assert "is used only with KVFERRY_METRICS_PORT" in problem
    assert Settings(metrics_port=0, port=0).metrics_address == ("127.0.0.1", 0)
    assert Settings(metrics_port=8787, metrics_host="127.0.0.2").metrics_address == ("127.0.0.2", 8787)


def test_cross_checks_name_both_numbers() -> None:
    (problem,) = refused(max_batched_tokens=8, max_running=4)
    assert problem == (
        "max_batched_tokens=8 (given by the engine): a step of 8 tokens is less than a block of "
        "KVFERRY_BLOCK_SIZE=16 tokens"
    )
    (problem,) = refused(pool_path="/tmp/pool")
    assert "KVFERRY_POOL_KIND is pinned" in problem
    (problem,) = refused(pool_kind="file")
    assert "KVFERRY_POOL_PATH" in problem


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "kvferry.internal", "::ffff:10.0.0.1"])
def test_other_hosts_than_loopback_need_a_token(host: str) -> None:
    (problem,) = refused(host=host)
    assert problem.startswith(f"host={host} ")
    assert "set KVFERRY_ADMIN_TOKEN, or host=127.0.0.1" in problem
    assert Settings(host=host, admin_token="t" * 16).host == host
    assert Settings(host=host, read_token="t" * 16).host == host


@pytest.mark.parametrize("name", ["admin_token", "read_token"])
def test_short_tokens_when_others_can_reach_them_are_refused(name: str, setenv: Setenv) -> None:
    assert Settings(**{name: "t"}).host == "127.0.0.1"
    setenv("HOST", "0.0.0.0")
    setenv(name.upper(), "t" * 15)
    (problem,) = refused()
    assert problem == (
        f"KVFERRY_{name.upper()}=*** (environment variable): has 15 characters, and KVFERRY_HOST=0.0.0.0 can be "
        "reached from other machines; use at least 16, such as those that `openssl rand -hex 32` prints"
    )
    (problem,) = refused(**{name: "t" * 15}, host="::")
    assert problem.startswith(f"{name}=*** (given by the engine): has 15 characters, and host=:: can be reached")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost", "::ffff:127.0.0.1"])
def test_loopback_needs_no_token(host: str) -> None:
    assert Settings(host=host).host == host


def test_tokens_differ() -> None:
    (problem,) = refused(admin_token="same-token", read_token="same-token")
    assert problem.startswith("read_token=*** ")
    assert "same-token" not in problem


def test_token_and_its_file_at_once(setenv: Setenv, clean_world: Path) -> None:
    (clean_world / "t").write_text("from-file")
    setenv("ADMIN_TOKEN", "from-env")
    setenv("ADMIN_TOKEN_FILE", "t")
    (problem,) = refused()
    assert "is given twice" in problem
    assert "from-" not in problem


@pytest.mark.parametrize(
    ("content", "advice"),
    [(None, "there is no such file"), (b"", "the file is empty"), (b"\n", "the file is empty"), (b"\xff", "not UTF-8")],
)
def test_secret_files_that_hold_no_secret(
    content: bytes | None, advice: str, setenv: Setenv, clean_world: Path
) -> None:
    if content is not None:
        (clean_world / "token").write_bytes(content)
    setenv("ADMIN_TOKEN_FILE", "token")
    (problem,) = refused()
    assert problem.startswith("KVFERRY_ADMIN_TOKEN_FILE=token (environment variable): ")
    assert advice in problem


def test_only_secrets_are_read_from_files(setenv: Setenv) -> None:
    setenv("PORT_FILE", "x")
    assert Settings().port == 8787, "KVFERRY_PORT_* belongs to Kubernetes"
    setenv("HOST_FILE", "x")
    (problem,) = refused()
    assert problem.startswith("KVFERRY_HOST_FILE=x")


@pytest.mark.parametrize(
    ("content", "advice"),
    [
        (None, "there is no such file"),
        ("port = ", "is not TOML"),
        ("[pool]\nbytes = 1", "no such setting"),
        ("KVFERRY_PORT = 1", "did you mean port?"),
        ("config = 'other.toml'", "cannot name another"),
        ("port = '1'\nPORT = 2", "did you mean port?"),
    ],
)
def test_toml_file_when_invalid_is_refused(content: str | None, advice: str, setenv: Setenv, clean_world: Path) -> None:
    if content is not None:
        (clean_world / "c.toml").write_text(content)
    setenv("CONFIG", "c.toml")
    (problem,) = refused()
    assert advice in problem
    assert "c.toml" in problem


def test_broken_lines_of_env_file_are_ours_only_when_they_look_so(clean_world: Path) -> None:
    (clean_world / ".env").write_text("OTHER THING\nKVFERRY_PORT 9000\n")
    assert refused() == ["KVFERRY_PORT (.env): line 2 cannot be read; write NAME=value"]
    (clean_world / ".env").write_text("OTHER THING\n")
    assert Settings().port == 8787
    (clean_world / ".env").write_bytes(b"\xff\xfe")
    (problem,) = refused()
    assert problem.startswith(".env (.env): the file is not UTF-8")


def test_secrets_never_show(setenv: Setenv) -> None:
    setenv("ADMIN_TOKEN", "top-secret-token")
    setenv("DATABASE_URL", "postgresql://kv:pass-word@db/kv?sslpassword=more-secret&sslmode=require")
    settings = Settings()
    seen = repr(settings) + str(settings) + repr(settings.describe()) + settings.model_dump_json()
    for secret in ("top-secret-token", "pass-word", "more-secret"):
        assert secret not in seen
    views = {view.name: view for view in settings.describe()}
    assert views["admin_token"].value == "***"
    assert views["read_token"].value is None
    assert views["database_url"].value == "postgresql://kv:***@db/kv?sslpassword=***&sslmode=require"
    assert isinstance(settings.admin_token, SecretStr)
    assert "pass-word" in settings.resolved_database_url()


@pytest.mark.parametrize("password", ["pass-word", "pass/word", "pass#word", "pass?word", "pass@word", "p@ss/x@word"])
def test_database_url_with_any_password_is_masked(password: str, setenv: Setenv) -> None:
    setenv("DATABASE_URL", f"postgresql://kv:{password}@db:5432/kv?sslmode=require")
    settings = Settings()
    (shown,) = (view.value for view in settings.describe() if view.name == "database_url")
    assert shown == "postgresql://kv:***@db:5432/kv?sslmode=require"
    assert "word" not in SecretMask.of(settings).apply(f"no connection to kv:{password}")
    setenv("DATABASE_URL", f"mysql://kv:{password}@db/kv")
    (problem,) = refused()
    assert problem.startswith("KVFERRY_DATABASE_URL=mysql://kv:***@db/kv (environment variable): must be a URL")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://kv:pass-word/kv", "***"),
        ("postgresql://kv/x:pass-word@db/kv", "***"),
        ("postgresql://db/kv?password=pass-word&user=a@b", "postgresql://db/kv?password=***&user=a%40b"),
        ("postgresql://:pass-word@[::1]:5432/kv", "postgresql://:***@[::1]:5432/kv"),
        ("sqlite:////srv/a@b/kv.db", "sqlite:////srv/a@b/kv.db"),
        ("sqlite://", "sqlite://"),
        ("sqlite:pass-word", "***"),
    ],
)
def test_database_url_when_unclear_is_masked(url: str, shown: str, setenv: Setenv) -> None:
    setenv("DATABASE_URL", url)
    assert next(view.value for view in Settings().describe() if view.name == "database_url") == shown
