"""The documentation of the settings is theirs: every one of them, with its default, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from kvferry.app.settings import Settings
from kvferry.app.settings.docs import default_words, settings_markdown

PAGE = Path(__file__).parents[2] / "docs" / "settings.md"

CONTRACT = {
    "HOST": "`127.0.0.1`",
    "PORT": "`8787`",
    "ADMIN_TOKEN": "none",
    "READ_TOKEN": "none",
    "ENGINE_NAME": "none",
    "ENGINE": "`embedded`",
    "MODEL": "`tiny`",
    "DEVICE": "`auto`",
    "DTYPE": "`auto`",
    "DEVICE_BLOCKS": "`512`",
    "BLOCK_SIZE": "`16`",
    "MAX_BATCHED_TOKENS": "`2048`",
    "MAX_RUNNING": "`8`",
    "MAX_WAITING": "`2048`",
    "MAX_WAIT_S": "`2`",
    "POOL_BYTES": "`1GiB`",
    "POOL_KIND": "`pinned`",
    "POOL_PATH": "none",
    "BLOCKS_PER_SLOT": "`1`",
    "KERNEL_BELOW_BYTES": "none",
    "STORE_MODE": "`eager`",
    "EVICTION_POLICY": "`lru`",
    "OFFLOAD_PROMPT_ONLY": "`true`",
    "MAX_OFFLOAD_TOKENS": "`unlimited`",
    "MAX_LOAD_TOKENS": "`unlimited`",
    "OFFLOAD_LEVEL": "`block`",
    "REQUEST_FIELDS": "`offload_prompt_only,max_offload_tokens,store,load`",
    "LOAD_DECISION": "`auto`",
    "STORE_THRESHOLD": "`1`",
    "MAX_PINNED_FRACTION": "`0.25`",
    "ENGINE_API_KEY": "none",
    "DATABASE_URL": "`sqlite:///{STATE_DIR}/kvferry.db`",
    "STATE_DIR": "the platform's state folder",
    "EVICTION_HISTORY_ROWS": "`1000000`",
    "EVICTION_HISTORY_DAYS": "`30`",
    "TIERS": "`[]`",
    "LOG_LEVEL": "`info`",
    "LOG_FORMAT": "`text`",
}


def test_the_page_is_what_the_settings_say() -> None:
    assert PAGE.read_text() == settings_markdown(), "run: kvferry config docs > docs/settings.md"


def test_the_page_has_every_setting_of_the_contract_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*?) \| ", PAGE.read_text(), re.MULTILINE))
    assert rows == CONTRACT


def test_defaults_on_the_page_can_be_set_as_they_stand() -> None:
    given = {name: default_words(name).strip("`") for name in Settings.model_fields}
    given = {name: text for name, text in given.items() if text != "none" and name != "state_dir"}
    written = Settings(**given, _env_file=None)
    plain = Settings(_env_file=None)
    assert all(getattr(written, name) == getattr(plain, name) for name in given)
