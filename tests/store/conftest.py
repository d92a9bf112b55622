from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a test's database is; nothing lies there yet."""
    return tmp_path / "state" / "kvferry.db"
