from __future__ import annotations

import pytest

from tests.harness.toy_engine import ToyEngine


@pytest.fixture
def engine() -> ToyEngine:
    return ToyEngine(num_slots=64, num_blocks=64)
