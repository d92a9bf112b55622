"""A file system tier of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.tier_rig import Rig, file_rig


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def reopen(path: Path) -> Iterator[Callable[..., Rig]]:
    """Closes the tier of the folder, if one is open, and opens it with these settings; it is closed with the test."""
    rigs: list[Rig] = []

    def open_rig(**settings: Any) -> Rig:
        for rig in rigs:
            rig.close()
        rigs[:] = [file_rig(path, **settings)]
        return rigs[0]

    yield open_rig
    for rig in rigs:
        rig.close()


@pytest.fixture
def rig(reopen: Callable[..., Rig]) -> Rig:
    return reopen()
