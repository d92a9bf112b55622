from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.postgres import new_database, own_server
from tests.harness.stores import Where


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test's SQLite database is; nothing lies there yet."""
    return tmp_path / "state" / "kvferry.db"


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """A server to make databases on. Skips, saying so, where there is none."""
    given = os.environ.get("TEST_POSTGRES_URL")
    if given:
        yield given
        return
    with own_server() as server:
        yield server.url


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.long)])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Where]:
    """An empty database of each kind."""
    if request.param == "sqlite":
        yield tmp_path / "state" / "kvferry.db"
        return
    with new_database(request.getfixturevalue("postgres_url")) as url:
        yield url
