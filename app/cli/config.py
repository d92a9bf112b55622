"""`kvferry config`: settings, local or of a running service."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvferry.app.cli.console import note, print_lines
from kvferry.app.cli.policy import note_way_back, parse_fields, show_sourced
from kvferry.app.cli.remote import Answer, Service, answers

app = typer.Typer(
    no_args_is_help=True, help="Settings: check them here, or show and change those of a running service."
)


def _print_settings(views: Mapping[str, Any]) -> None:
    show_sourced(views, str.upper)
    for name, view in views.items():
        if view.get("in_use") and view.get("value") == "auto":
            note(f"KVFERRY_{name.upper()}=auto: in use is {view['in_use']}")
        if view.get("shortfall"):
            note(f"KVFERRY_{name.upper()} differs from the requested value: {view['shortfall']}")


@app.command("check")
@answers(show=_print_settings)
def check() -> Answer:
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
        raise StartError("\n".join(problems))
    for notice in (*settings.notices, *tier_notices(settings.tiers), "settings are valid"):
        note(notice)
    return {view.name: asdict(view) for view in settings.describe()}


@app.command("show")
@answers(show=_print_settings)
def show(service: Service) -> Answer:
    """Show the settings of a running service, and where each comes from."""
    return service.get("config")


@app.command("set")
@answers(show=_print_settings)
def change(
    service: Service,
    settings: Annotated[
        list[str], typer.Argument(metavar="NAME=VALUE...", help="Such as pool_bytes=8GiB eviction_policy=arc.")
    ],
) -> Answer:
    """Change settings of a running service until its next start; null restores the value at start."""
    patch = {name.lower().removeprefix("kvferry_"): value for name, value in parse_fields(settings).items()}
    answer = service.send("PATCH", "config", patch)
    note_way_back("config", patch)
    return {name: answer[name] for name in patch}


@app.command("docs")
def docs() -> None:
    """Print the documentation of every setting as Markdown; generates docs/settings.md."""
    from kvferry.app.settings.docs import settings_markdown

    print_lines(settings_markdown())
