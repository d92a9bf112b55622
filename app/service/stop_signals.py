"""Signals that stop a process while it starts.

Python drops an exception that a signal's handler raises within a finalizer, such as `__del__`. So the handler also
records the stop, and the start checks for one at each of its stages.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from types import FrameType

_is_requested = False


def stop_on_signals(numbers: Iterable[signal.Signals]) -> None:
    """Let these signals raise `KeyboardInterrupt`, where they arrive and in each later `check_stop`."""
    for number in numbers:
        signal.signal(number, _stop)


def is_stop_requested() -> bool:
    """Return whether one of the signals has arrived."""
    return _is_requested


def check_stop() -> None:
    """Raise `KeyboardInterrupt` if one of the signals has arrived."""
    if _is_requested:
        raise KeyboardInterrupt


def _stop(signum: int, frame: FrameType | None) -> None:
    global _is_requested
    _is_requested = True
    raise KeyboardInterrupt
