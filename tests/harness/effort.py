"""How much the tests do: a share of the examples in the short suite, all of them in the long one (`TEST_LONG=1`)."""

from __future__ import annotations

import os

LONG = os.environ.get("TEST_LONG") == "1"
SHARE = 8


def examples(full: int) -> int:
    """The number of examples of a test that has `full` in the long suite."""
    return full if LONG else max(full // SHARE, min(full, 10))
