"""How much the tests do: a share of the examples in the short suite, all of them in the long one (`TEST_LONG=1`).

And how much the code does that they call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

LONG = os.environ.get("TEST_LONG") == "1"
SHARE = 8


def examples(full: int) -> int:
    """The number of examples of a test that has `full` in the long suite."""
    return full if LONG else max(full // SHARE, min(full, 10))


def num_lines_run(work: Callable[[], object]) -> int:
    """Number of lines of Python that `work` executes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count
