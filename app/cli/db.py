"""`kvferry db`: the metadata database."""

from __future__ import annotations

import typer

from kvferry.app.cli.console import Failed
from kvferry.app.cli.remote import Answer, answers

app = typer.Typer(no_args_is_help=True, help="The metadata database.")


@app.command("upgrade")
@answers()
def upgrade() -> Answer:
    """Upgrade the configured database to this version's schema; create it if it is missing."""
    from kvferry.app.settings import Settings
    from kvferry.app.store import StoreError
    from kvferry.app.store import upgrade as upgrade_store

    try:
        done = upgrade_store(Settings().resolved_database_url())
    except StoreError as error:
        raise Failed(str(error)) from error
    return {"before": done.before, "after": done.after}
