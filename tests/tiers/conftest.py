"""A file system tier of a test's own, and short intervals of tiers with threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.app.tiers import threaded
from tests.harness.tier_rig import Rig, file_rig


@pytest.fixture(autouse=True)
def _short_intervals() -> Iterator[None]:
    """Housekeeping ten times as often: many tests wait for one or two rounds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threaded, "TEND_S", 0.1)
        yield


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
