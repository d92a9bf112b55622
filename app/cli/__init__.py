"""Command line: `kvferry serve` runs the service, the other commands talk to a running one.

Commands import what they need when they run, so that `serve` handles signals from the start.
"""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    given = list(sys.argv[1:] if args is None else args)
    if sys.stdout is None:
        # The first file that is opened would get its number.
        print("kvferry: standard output is closed; redirect it, for example to /dev/null", file=sys.stderr)  # noqa: T201
        return 2
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # The locale's encoding may lack characters of tables and of names.
            stream.reconfigure(errors="replace")
    is_serving = given[:1] == ["serve"]
    if is_serving:
        # Until the server handles signals itself, one closes everything opened so far, in order.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.default_int_handler)
    try:
        from kvferry.app.cli.entry import run_command

        return run_command(given)
    except KeyboardInterrupt:
        # While it was still importing.
        return 0 if is_serving else 1
