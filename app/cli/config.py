"""`kvferry config`: settings, local or of a running service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import ExitCode, as_written, complain, note, print_answer, print_lines
from kvferry.app.cli.policy import note_way_back, parse_fields
from kvferry.app.cli.remote import JsonOption, UrlOption, connect
from kvferry.app.cli.tables import show_items

app = typer.Typer(
    no_args_is_help=True, help="Settings: check them here, or show and change those of a running service."
)


@app.command("check")
def check(as_json: JsonOption = False) -> int:
    """Check the settings that `kvferry serve` would find here, and show them. Starts nothing.

    Also checks what they name: port, memory, folders, device, database, name, and the model's configuration; not its
    weights.
    """
    from kvferry.app.settings import Settings

    settings = Settings()
    # These imports are slow, so they follow the settings checks.
    from kvferry.app.serve.preflight import layout_problems, start_problems
    from kvferry.app.service.server import listen, listen_for_metrics
    from kvferry.app.tiers.opening import tier_notices
    from kvferry.core.errors import StartError

    problems = start_problems(settings)
    problems += [problem for problem in layout_problems(settings) if problem not in problems]
    try:
        with listen(settings.host, settings.port), listen_for_metrics(settings):
            pass
    except StartError as error:
        problems.insert(0, str(error))
    if problems:
        for problem in problems:
            complain(problem)
        return ExitCode.USAGE
    for notice in (*settings.notices, *tier_notices(settings.tiers)):
        note(notice)
    print_answer({view.name: asdict(view) for view in settings.describe()}, as_json, _print_settings)
    if not as_json:
        note("settings are valid")
    return ExitCode.OK


@app.command("show")
def show(url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show the settings of a running service, and where each comes from."""
    with connect(url) as client:
        print_answer(client.get("config"), as_json, _print_settings)


@app.command("set")
def change(
    settings: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE...", help="Such as pool_bytes=8GiB eviction_policy=arc.")
    ],
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change settings of a running service until its next start; null restores the value at start."""
    patch = {name.lower().removeprefix("kvferry_"): value for name, value in parse_fields(settings).items()}
    with connect(url) as client:
        answer = client.send("PATCH", "config", patch)
    print_answer({name: answer[name] for name in patch}, as_json, _print_settings)
    if not as_json:
        note_way_back("config", patch)


@app.command("docs")
def docs() -> None:
    """Print the documentation of every setting as Markdown; generates docs/settings.md."""
    from kvferry.app.settings.docs import settings_markdown

    print_lines(settings_markdown())


def _print_settings(views: Mapping[str, Any]) -> None:
    items = []
    for name, view in views.items():
        if isinstance(view, Mapping):
            place = view.get("place") or view.get("source")
            items.append({"setting": name.upper(), "value": as_written(name, view.get("value")), "from": place})
            if view.get("in_use") and view.get("value") == "auto":
                note(f"KVFERRY_{name.upper()}=auto: in use is {view['in_use']}")
            if view.get("shortfall"):
                note(f"KVFERRY_{name.upper()} differs from the requested value: {view['shortfall']}")
    show_items(items, "setting", "value", "from")
