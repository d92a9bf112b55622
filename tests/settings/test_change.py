"""Changing settings while running, and describing them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.app.settings import BadSettings, Settings, Source
from kvferry.app.settings.fields import MUTABLE_NAMES, LogLevel
from kvferry.app.settings.live import LiveSettings

MUTABLE = {
    "log_level",
    "pool_bytes",
    "tenant_max_bytes",
    "auto_pause",
    "load_decision",
    "store_mode",
    "eviction_policy",
    "explain_bytes",
    "store_threshold",
    "max_pinned_fraction",
    "max_retain_s",
    "eviction_history_rows",
    "eviction_history_days",
    "what_if",
}


def test_exactly_these_may_change() -> None:
    assert set(MUTABLE_NAMES) == MUTABLE
    assert {view.name for view in Settings().describe() if view.mutable} == MUTABLE


def test_refused_change_leaves_the_values_of_later_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_POOL_BYTES", "4MiB")
    settings = Settings()
    with pytest.raises(BadSettings):
        settings.change({"pool_bytes": "many"})
    assert settings.change({"store_threshold": 2}).pool_bytes == 4 << 20


def test_a_change_is_a_new_value_with_its_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVFERRY_ADMIN_TOKEN", "keep-me")
    monkeypatch.setenv("KVFERRY_MAX_OFFLOAD_TOKENS", "unlimited")
    before = Settings(port=9000)
    after = before.change({"log_level": "debug", "max_pinned_fraction": 0.5})
    assert (after.log_level, after.max_pinned_fraction) == (LogLevel.DEBUG, 0.5)
    assert after.source("log_level") is Source.RUNTIME
    assert (after.port, after.source("port")) == (9000, Source.CONNECTOR)
    assert (after.admin_token, after.source("admin_token")) == (before.admin_token, Source.ENV)
    assert after.max_offload_tokens is None
    assert after.source("host") is Source.DEFAULT
    assert before.log_level is LogLevel.INFO
    again = after.change({"log_level": "error"})
    assert (again.log_level, again.max_pinned_fraction) == (LogLevel.ERROR, 0.5)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\n\n",
        "one\ntwo\nthree",
        "same\nsame",
        "with a blank",
        "read-token",
        "new-token\nread-token",
        "\x00",
        "ä",
        None,
    ],
    ids=["empty", "blank", "three", "twice", "blanks", "read", "both", "nul", "latin", "missing"],
)
def test_token_file_while_invalid_leaves_the_last_tokens(
    content: str | None, clean_world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, applied = clean_world / "admin", list[str | None]()
    file.write_text("old-token")
    monkeypatch.setenv("KVFERRY_ADMIN_TOKEN_FILE", str(file))
    monkeypatch.setenv("KVFERRY_READ_TOKEN", "read-token")
    settings = LiveSettings(Settings(), lambda new, names: applied.append(new.admin_token.get_secret_value()))
    if content is None:
        file.unlink()
    else:
        file.write_text(content)
    settings.reread_tokens()
    (text,) = settings.degraded()
    assert text.startswith("tokens in use are those read before: KVFERRY_")
    assert not any(secret in text for secret in ("old-token", "new-token", "read-token", "three", "with a blank"))
    assert applied == []
    file.write_text("new-token")
    settings.reread_tokens()
    assert (settings.degraded(), applied) == ([], ["new-token"])
