"""The documentation of the settings is theirs: every one of them, with its default, and no other."""

from __future__ import annotations

from pathlib import Path

from kvferry.app.settings import Settings
from kvferry.app.settings.docs import default_words, settings_markdown

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"


def test_settings_page_matches_the_settings() -> None:
    assert PAGE.read_text() == settings_markdown(), "run: kvferry config docs > docs/settings.md"


def test_defaults_on_the_page_can_be_set_as_they_stand() -> None:
    given = {name: default_words(name).strip("`") for name in Settings.model_fields}
    given = {name: text for name, text in given.items() if text != "none" and name != "state_dir"}
    written = Settings(**given, _env_file=None)
    plain = Settings(_env_file=None)
    assert all(getattr(written, name) == getattr(plain, name) for name in given)
