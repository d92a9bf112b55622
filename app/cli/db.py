"""`kvferry db`: the metadata database."""

from __future__ import annotations

import typer

from kvferry.app.cli.console import ExitCode, complain, out, print_json
from kvferry.app.cli.remote import JsonOption

app = typer.Typer(no_args_is_help=True, help="The metadata database.")


@app.command("upgrade")
def upgrade(as_json: JsonOption = False) -> int:
    """Upgrade the configured database to this version's schema; create it if it is missing."""
    from kvferry.app.settings import Settings
    from kvferry.app.store import StoreError
    from kvferry.app.store import upgrade as upgrade_store

    settings = Settings()
    try:
        done = upgrade_store(settings.resolved_database_url())
    except StoreError as error:
        complain(str(error))
        return ExitCode.REFUSED
    if as_json:
        print_json({"before": done.before, "after": done.after})
    elif done.before == done.after:
        out.print(f"database is up to date: {done.after}")
    else:
        out.print(f"database upgraded: {done.before or 'empty'} to {done.after}")
    return ExitCode.OK
