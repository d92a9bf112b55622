"""Logging that never makes its caller wait: records go into a bounded queue, and a thread of their own writes them.

When that thread cannot keep up (a full disk, a pipe that nobody reads), records are dropped and counted. Known secrets
are masked in whatever is written.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from copy import copy
from datetime import UTC, datetime
from logging.handlers import QueueHandler, QueueListener
from types import TracebackType
from typing import IO, Self

from kvferry.app.masking import SecretMask
from kvferry.app.settings import Settings
from kvferry.app.settings.kinds import LogFormat, LogLevel

QUEUE_RECORDS = 10_000
OWN_LOGGERS = ("kvferry",)
CHATTY_LOGGERS = ("alembic",)
"""Libraries whose every step is INFO to them; only their warnings are news to an operator."""
SPILLING_LOGGERS = ("sse_starlette",)
"""Libraries that log what they carry, users' text among it, where they may debug."""
UVICORN_LOGGERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")

_BARE = logging.Formatter()
_PLAIN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


def _rfc3339(created_s: float) -> str:
    return datetime.fromtimestamp(created_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextFormatter(logging.Formatter):
    """One line a record, for people."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_rfc3339(record.created)} {record.levelname:<8} {record.name}: {record.getMessage()}"
        return f"{line}\n{record.exc_text}" if record.exc_text else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line, for programs; what was passed as `extra` becomes fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": _rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_text:
            fields["exception"] = record.exc_text
        extra = {name: value for name, value in vars(record).items() if name not in _PLAIN_ATTRIBUTES}
        return json.dumps(extra | fields, default=str, ensure_ascii=False)


class BoundedQueueHandler(QueueHandler):
    """Hands records over without ever waiting; those that do not fit are counted in `dropped`."""

    queue: queue.Queue[logging.LogRecord]
    dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """A copy with its message and traceback as text, since the writer must not touch the caller's objects."""
        ready = copy(record)
        ready.msg, ready.args = record.getMessage(), None
        if record.exc_info and not record.exc_text:
            ready.exc_text = _BARE.formatException(record.exc_info)
        ready.exc_info = None
        return ready

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class MaskingStreamHandler(logging.StreamHandler[IO[str]]):
    """Writes records to a stream, known secrets masked, and says how many were dropped before them."""

    def __init__(self, stream: IO[str], mask: SecretMask, source: BoundedQueueHandler) -> None:
        super().__init__(stream)
        self._mask = mask
        self._source = source
        self._told = 0

    def format(self, record: logging.LogRecord) -> str:
        return self._mask.apply(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        dropped = self._source.dropped
        if dropped > self._told:
            lost = logging.makeLogRecord(
                {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING"}
                | {"msg": f"dropped {dropped - self._told} log records, which came faster than they could be written"}
            )
            self._told = dropped
            super().emit(lost)
        super().emit(record)


class LogPipe:
    """Logging as set up by `start_logging`, until closed. A context manager.

    In a process of its own every logger goes through it; as a `guest` in an engine's process only kvferry's and
    uvicorn's do. Run uvicorn with `log_config=None`, or it sets up its own.
    """

    def __init__(self, settings: Settings, *, stream: IO[str] | None = None, guest: bool = False) -> None:
        records: queue.Queue[logging.LogRecord] = queue.Queue(QUEUE_RECORDS)
        self._entrance = BoundedQueueHandler(records)
        writer = MaskingStreamHandler(stream or sys.stderr, SecretMask.of(settings), self._entrance)
        writer.setFormatter(JsonFormatter() if settings.log_format is LogFormat.JSON else TextFormatter())
        self._listener = QueueListener(records, writer)
        names = [*OWN_LOGGERS, *UVICORN_LOGGERS] if guest else [None, *UVICORN_LOGGERS]
        self._loggers = [logging.getLogger(name) for name in names]
        self._before = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in self._loggers]
        children = set(UVICORN_LOGGERS[1:]) if guest else set(UVICORN_LOGGERS)
        for logger in self._loggers:
            logger.handlers = [] if logger.name in children else [self._entrance]
            logger.propagate = logger.name in children
        self.set_level(settings.log_level)
        self._listener.start()
        self._closing = threading.Lock()
        self._closed = False

    @property
    def dropped(self) -> int:
        """Records that were lost since they came too fast."""
        return self._entrance.dropped

    def set_level(self, level: LogLevel) -> None:
        """Change the least that is logged, now."""
        for logger in self._loggers:
            logger.setLevel(level.value.upper())
        for name in CHATTY_LOGGERS:
            logging.getLogger(name).setLevel("DEBUG" if level is LogLevel.DEBUG else "WARNING")
        for name in SPILLING_LOGGERS:
            logging.getLogger(name).setLevel("WARNING")

    def close(self) -> None:
        """Write what is queued, and put logging back as it was. May be called again."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        for logger, handlers, propagate, level in self._before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
        self._listener.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def start_logging(settings: Settings, *, stream: IO[str] | None = None, guest: bool = False) -> LogPipe:
    """Set logging up as the settings say, and log their notices."""
    pipe = LogPipe(settings, stream=stream, guest=guest)
    for notice in settings.notices:
        logging.getLogger(__name__).warning("%s", notice)
    return pipe
