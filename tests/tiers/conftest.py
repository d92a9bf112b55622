"""A file system tier of a test's own, and tiers over a store in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from tests.harness.dictionary_tier import DictionaryStore
from tests.harness.tier_rig import Rig, file_rig, threaded_rig


@pytest.fixture
def store() -> DictionaryStore:
    return DictionaryStore()


@pytest.fixture
def open_rig(store: DictionaryStore) -> Iterator[Callable[..., Rig]]:
    """Opens tiers over the store, which are closed when the test ends."""
    with ExitStack() as stack:
        yield lambda **settings: stack.enter_context(closing(threaded_rig(store, **settings)))
        store.gate.set()


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
