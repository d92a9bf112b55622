"""The service: one process that serves the engine and its admin API until it is told to stop."""

from __future__ import annotations

import gc
import logging

from kvferry.app.crash_report import enable_crash_report
from kvferry.app.discovery import Announcement, announce_service
from kvferry.app.logs import start_logging
from kvferry.app.memory import return_large_allocations
from kvferry.app.preflight import start_problems
from kvferry.app.serving import listen, make_server, url_of
from kvferry.app.settings import Settings
from kvferry.app.starting import StartProgress, StartRefused, answering
from kvferry.app.wiring import Process

_log = logging.getLogger(__name__)


def run(settings: Settings) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code. Raises `StartRefused`."""
    enable_crash_report()
    return_large_allocations()
    with start_logging(settings) as logs:
        listener = listen(settings.host, settings.port)
        with listener:
            problems = start_problems(settings)
            if problems:
                raise StartRefused("\n".join(problems))
            progress = StartProgress()
            process: Process | None = None
            announcement: Announcement | None = None
            try:
                with answering(listener, progress):
                    process = Process(settings, logs, progress)
                    process.start()
                    server = make_server(process)
                announcement = announce_service(settings.state_dir, process.name, url_of(listener))
                _log.info("serving on %s: dashboard /ui/, API /docs", url_of(listener))
                # Else each full collection would scan every object of PyTorch: hundreds of milliseconds.
                gc.collect()
                gc.freeze()
                server.run(sockets=[listener])
            finally:
                if announcement is not None:
                    announcement.withdraw()
                if process is not None:
                    process.close()
            _log.info("stopped")
    return 0
