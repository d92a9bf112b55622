"""Start of a process: progress for probes, and settings of the process itself."""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from kvferry.app.settings import Settings
from kvferry.app.settings.fields import TraceExport
from kvferry.core.errors import StartError
from kvferry.cuda_ops.pool.prepare import PoolPhase

if TYPE_CHECKING:
    from kvferry.app.telemetry.traces import Traces

_log = logging.getLogger(__name__)

LOG_EVERY_S = 5.0
_PHASES = {PoolPhase.TOUCH: "taken", PoolPhase.REGISTER: "pinned"}


class StartProgress:
    """The stage of a start, which began at `started_s` of the monotonic clock. Thread: any."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.started_s = time.monotonic()
        self._stage = "settings are read"
        self._clock = clock
        self._logged_s = clock()

    def note(self, stage: str) -> None:
        """Set the stage."""
        self._stage = stage

    def note_pool(self, phase: PoolPhase, done_bytes: int, total_bytes: int) -> None:
        """Set the stage to the progress of the pool's memory, and log it now and then: a large pool takes minutes."""
        self._stage = f"mapping the pool: {done_bytes:,} of {total_bytes:,} bytes {_PHASES[phase]}"
        now_s = self._clock()
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            _log.info("%s", self._stage)

    @property
    def reason(self) -> str:
        """Why the service is not ready."""
        return f"starting: {self._stage}"


def enable_crash_report() -> None:
    """Print every thread's stack to stderr on a fatal signal such as SIGBUS, unless the process does so already."""
    # The process may have no stderr, or one without a file behind it.
    with suppress(AttributeError, RuntimeError, ValueError, io.UnsupportedOperation):
        if not faulthandler.is_enabled():
            faulthandler.enable()


def load_traces(settings: Settings) -> type[Traces] | None:
    """Return the class of traces, None if they are off. Raises `StartError` if they cannot be made."""
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    if settings.traces is TraceExport.OFF or is_disabled:
        return None
    try:
        from kvferry.app.telemetry.traces import Traces, read_variables
    except ImportError as error:
        raise StartError(
            f"KVFERRY_TRACES={settings.traces}: {error.name} is not installed; pip install 'kvferry[otel]', or set "
            "KVFERRY_TRACES=off"
        ) from error
    except ValueError as error:
        raise StartError(f"OTEL_PROPAGATORS={os.environ.get('OTEL_PROPAGATORS')}: {error}") from error
    read_variables()
    return Traces
