"""Copy engines that are closed when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.harness.copy_rig import CopyRig


@pytest.fixture
def make_rig() -> Iterator[Callable[..., CopyRig]]:
    """Makes rigs, whose engines are closed when the test ends."""
    with ExitStack() as stack:

        def make(*args: Any, **options: Any) -> CopyRig:
            rig = CopyRig(*args, **options)
            stack.callback(rig.copies.close)
            return rig

        yield make


@pytest.fixture(params=["batches", "one by one"])
def rig(request: pytest.FixtureRequest, make_rig: Callable[..., CopyRig]) -> CopyRig:
    return make_rig(request.param)
