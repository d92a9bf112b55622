"""The command line: `kvferry serve` runs the service, the rest talks to a running one."""

from app.cli.entry import main

__all__ = ["main"]
