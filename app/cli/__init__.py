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
    if given[:1] == ["serve"]:
        return _serve(given)
    try:
        return _run(given)
    except KeyboardInterrupt:
        # While it was still importing.
        return 1


def _serve(args: list[str]) -> int:
    """Run `serve`. A signal before the server handles signals itself closes everything opened so far, in order."""
    from kvferry.app.service.stop_signals import is_stop_requested, stop_on_signals

    stop_on_signals((signal.SIGTERM, signal.SIGINT))
    try:
        code = _run(args)
    except KeyboardInterrupt:
        code = 0
    return 0 if is_stop_requested() else code


def _run(args: list[str]) -> int:
    from kvferry.app.cli.entry import run_command

    return run_command(args)
