"""The page that documents every setting, made from the settings themselves."""

from __future__ import annotations

from kvferry.app.settings.model import Settings
from kvferry.app.settings.offered import OFFERED
from kvferry.app.settings.view import Plain, plain, written

_HEAD = """\
# Settings

<!-- Made by `kvferry config docs`; a test compares. Change app/settings/fields.py instead. -->

Each setting is an environment variable with the prefix `KVFERRY_`. In the order of precedence, a value comes from

1. the engine that embeds kvferry (inside vLLM: `kv_connector_extra_config`), by lower-case name without prefix;
2. the environment;
3. a `.env` file in the working directory, by its `KVFERRY_` names; its other names belong to others. Values are taken
   as they are written: `${...}` stays. Not read inside vLLM;
4. the TOML file that `KVFERRY_CONFIG` names, by lower-case name without prefix;
5. the default.

`GET /admin/v1/config` and `kvferry config show` say for each setting which of these it was: `connector`, `env`, `file`
(for `.env` and TOML alike), `default`, or `runtime` for what was changed over HTTP since. `kvferry config check` says
what `kvferry serve` would find, and starts nothing.

An unknown name in any of these places, or a value that does not validate, refuses to start with exit code 2; every such
setting is named at once. A secret can be read from a file: `KVFERRY_ADMIN_TOKEN_FILE`, `KVFERRY_READ_TOKEN_FILE`,
`KVFERRY_ENGINE_API_KEY_FILE` and `KVFERRY_DATABASE_URL_FILE` name it. Sizes are whole numbers of bytes, or such as
`8GiB`, `512MiB` (powers of 1024) and `1.5GB` (powers of 1000). `KVFERRY_URL` is where the command line finds the
service; without it, the one that runs on this host with the same `STATE_DIR` is taken.

What Kubernetes injects for a service called kvferry (`KVFERRY_SERVICE_HOST`, `KVFERRY_PORT=tcp://...` and the like) is
ignored with one warning; `enableServiceLinks: false` in the pod is rid of it.

| setting | default | meaning |
| --- | --- | --- |
"""

_TAIL = """
Settings marked *live* may change while kvferry runs, by `PATCH /admin/v1/config`, until the next start. All others
need a restart.
"""

STATE_DIR_WORDS = "the platform's state folder"


def settings_markdown() -> str:
    """The whole page."""
    rows = [
        f"| `{name.upper()}` | {default_words(name)} | {_meaning(name, field.description or '')} |"
        for name, field in Settings.model_fields.items()
    ]
    return _HEAD + "\n".join(rows) + "\n" + _TAIL


def default_words(name: str) -> str:
    """A setting's default the way the page shows it."""
    if name == "state_dir":
        return STATE_DIR_WORDS
    value: Plain = plain(name, Settings.model_fields[name].get_default(call_default_factory=True, validated_data={}))
    text = written(name, value)
    return f"`{text}`" if text else "none"


def _meaning(name: str, description: str) -> str:
    notes = []
    if name in Settings.mutable_names():
        notes.append("*Live.*")
    if name in OFFERED:
        offered = ", ".join(f"`{written(name, plain(name, choice))}`" for choice in OFFERED[name])
        notes.append(f"This version offers {offered}.")
    return " ".join([description, *notes])
