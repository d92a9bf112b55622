"""`kvferry serve`: run the engine and its admin service in this process."""

from __future__ import annotations

import signal
from types import FrameType

from app.cli.console import ExitCode, complain


def serve() -> int:
    """Run the engine and the admin service until stopped.

    Everything is set by environment variables (KVFERRY_...), a .env file, or the TOML file that KVFERRY_CONFIG names.
    See `kvferry config check`.
    """
    from app.settings import Settings

    settings = Settings()
    # Before and after the server, which handles it itself, a signal must not keep engine and store from closing.
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        # Only now, since these import torch: a bad setting is told at once.
        from app.service import run
        from app.wiring import StartRefused

        try:
            return run(settings)
        except StartRefused as error:
            complain(str(error))
            return ExitCode.USAGE
    except KeyboardInterrupt:
        return ExitCode.OK


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
