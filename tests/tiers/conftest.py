"""A file system tier of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.tier_rig import Rig, file_rig


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def rig(path: Path) -> Iterator[Rig]:
    made = file_rig(path)
    yield made
    made.close()
