"""Schema migrations, run from code alone: no configuration file, no current folder."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, func, select

# `app` and `migrations` are installed side by side; a folder of that name elsewhere on the path must not win.
_SCRIPTS = Path(__file__).resolve().parents[2] / "migrations"

# Alembic keeps the current migration in a global variable.
_one_at_a_time = threading.Lock()
OTHERS_S = 300
"""Longest time that a start waits for the migrations of another process."""
_LOCK_NUMBER = 0x6B76666572727900
"""Arbitrary number of the advisory lock in PostgreSQL."""


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Revisions of the schema before (None: no schema) and after."""

    before: str | None
    after: str | None


def migrate(engine: Engine) -> Upgrade:
    """Upgrade the schema to this version in one transaction. Raises `CommandError` for a newer schema."""
    with _one_at_a_time, engine.begin() as connection:
        _lock_out_others(connection)
        config = alembic_config(connection)
        before = _revision(connection)
        if before != ScriptDirectory.from_config(config).get_current_head():
            command.upgrade(config, "head")
        return Upgrade(before, _revision(connection))


def check_revision(connection: Connection) -> None:
    """Raise `CommandError` for a schema newer than this version's; change nothing."""
    revision = _revision(connection)
    if revision is not None:
        ScriptDirectory.from_config(alembic_config(connection)).get_revision(revision)


def _lock_out_others(connection: Connection) -> None:
    """Wait for other migrations until the transaction ends. SQLite's transaction is exclusive anyway."""
    if connection.dialect.name == "postgresql":
        given = connection.scalar(select(func.current_setting("lock_timeout")))
        # Another engine that started at the same time may be creating an index of a large table.
        connection.execute(select(func.set_config("lock_timeout", f"{OTHERS_S}s", True)))
        connection.execute(select(func.pg_advisory_xact_lock(_LOCK_NUMBER)))
        connection.execute(select(func.set_config("lock_timeout", given, True)))


def alembic_config(connection: Connection) -> Config:
    """Return what Alembic's commands need to work on a connection."""
    config = Config()
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()
