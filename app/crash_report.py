"""A line in the log for a process that a signal such as SIGBUS ends."""

from __future__ import annotations

import faulthandler
import io


def enable_crash_report() -> None:
    """Print every thread's stack to stderr on a fatal signal, unless the process has arranged that already."""
    if faulthandler.is_enabled():
        return
    try:
        faulthandler.enable()
    except (AttributeError, RuntimeError, ValueError, io.UnsupportedOperation):
        # The process has no stderr, or one without a file behind it.
        return
