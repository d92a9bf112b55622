"""`kvferry serve`: run the engine and its admin service in this process."""

from __future__ import annotations

import gc
import logging
from contextlib import suppress

from kvferry import __version__

_log = logging.getLogger(__name__)


def serve() -> None:
    """Run the engine and the admin service until stopped.

    Configured by environment variables (KVFERRY_...), a .env file, or the TOML file that KVFERRY_CONFIG names. See
    `kvferry config check`.
    """
    # What a start makes stays, imports included: full collections would scan every object of PyTorch, for hundreds of
    # milliseconds.
    gc.disable()
    from kvferry.app.settings import Settings

    settings = Settings()
    from kvferry.app.telemetry.logs import start_logging

    with suppress(KeyboardInterrupt), start_logging(settings) as logs:
        _log.info("starting: kvferry %s, engine %s", __version__, settings.engine.value)
        # Imported late because it takes seconds: a bad setting is reported at once.
        from kvferry.app.serve.process import run

        run(settings, logs)
