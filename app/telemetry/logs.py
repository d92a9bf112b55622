"""Logging that does not block its callers: a thread writes records from a bounded queue, with secrets masked.

When the thread cannot keep up (a full disk, a pipe that is not read), records are dropped and counted.
"""

from __future__ import annotations

import base64
import json
import logging
import queue
import re
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from logging.handlers import QueueHandler, QueueListener
from traceback import TracebackException
from typing import IO, Self
from urllib.parse import quote, quote_plus

from pydantic import BaseModel, SecretStr

from kvferry.app.settings import Settings
from kvferry.app.settings.errors import MASK, url_passwords
from kvferry.app.settings.fields import LogFormat, LogLevel

MIN_SECRET_CHARS = 4
"""Shorter values occur in ordinary text by chance, and are not masked."""
MIN_ENCODED_CHARS = 8
_ESCAPED = "surrogateescape"


class SecretMask:
    """Replaces secret values, also percent-encoded, base64-encoded or JSON-escaped."""

    def __init__(self, secrets: Iterable[str]) -> None:
        spellings = {
            spelling for secret in secrets if len(secret) >= MIN_SECRET_CHARS for spelling in _spellings(secret)
        }
        # The longest first, so that a secret that contains another one is masked completely.
        alternatives = "|".join(re.escape(spelling) for spelling in sorted(spellings, key=len, reverse=True))
        self._pattern = re.compile(_any_case_escapes(alternatives)) if alternatives else None

    @staticmethod
    def of(settings: Settings) -> SecretMask:
        """Return a mask of every secret value in `settings`: tokens, keys, and passwords in database URLs."""
        secrets = [
            value.get_secret_value()
            for name in type(settings).model_fields
            if name != "database_url"
            for value in _secret_values(getattr(settings, name))
        ]
        return SecretMask([*secrets, *url_passwords(settings.database_url.get_secret_value())])

    def apply(self, text: str) -> str:
        """Return `text` with each secret value replaced."""
        return text if self._pattern is None else self._pattern.sub(MASK, text)


def _secret_values(value: object) -> Iterator[SecretStr]:
    if isinstance(value, SecretStr):
        yield value
    elif isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from _secret_values(getattr(value, name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _secret_values(item)


def _spellings(secret: str) -> Iterator[str]:
    yield secret
    yield quote(secret, safe="", errors=_ESCAPED)
    yield quote(secret, errors=_ESCAPED)
    yield quote_plus(secret, errors=_ESCAPED)
    yield json.dumps(secret)[1:-1]
    yield json.dumps(secret, ensure_ascii=False)[1:-1]
    content = secret.encode("utf-8", _ESCAPED)
    for before in range(3):
        # Base64 encodes three bytes as four characters, so the bytes before a secret change its encoding. Characters
        # that include bits of neighbouring bytes are left out.
        encoded = base64.b64encode(bytes(before) + content).decode()
        first = (before * 8 + 5) // 6
        last = (before + len(content)) * 8 // 6
        if last - first >= MIN_ENCODED_CHARS:
            yield encoded[first:last]
            yield encoded[first:last].replace("+", "-").replace("/", "_")


def _any_case_escapes(pattern: str) -> str:
    """Let the hexadecimal digits of percent escapes match in either case."""
    return re.sub(r"%[0-9A-F]{2}", lambda escape: f"(?i:{escape[0]})", pattern)


class RateLimitedLogger:
    """Logs a message once per key and interval, with the number of suppressed ones. Bounded. Thread: any."""

    def __init__(
        self,
        logger: logging.Logger,
        *,
        interval_s: float = 60.0,
        max_keys: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logger = logger
        self._interval_s = interval_s
        self._max_keys = max_keys
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: OrderedDict[str, tuple[float, int]] = OrderedDict()

    def log(self, level: int, key: str, message: str, *args: object, exc_info: BaseException | None = None) -> bool:
        """Log unless this key was logged within the interval; return whether it was logged."""
        now_s = self._clock()
        with self._lock:
            last_s, missed = self._seen.get(key, (-float("inf"), 0))
            if now_s - last_s < self._interval_s:
                self._seen[key] = (last_s, missed + 1)
                return False
            self._seen[key] = (now_s, 0)
            self._seen.move_to_end(key)
            if len(self._seen) > self._max_keys:
                self._seen.popitem(last=False)
        if missed:
            message, args = message + " (%d more since the last time)", (*args, missed)
        self._logger.log(level, message, *args, exc_info=exc_info)
        return True


QUEUE_RECORDS = 10_000
OWN_LOGGERS = ("kvferry",)
CHATTY_LOGGERS = ("alembic",)
"""Libraries that log every step at INFO; only their warnings are logged."""
SPILLING_LOGGERS = ("sse_starlette",)
"""Libraries that log users' text at DEBUG."""
UVICORN_LOGGERS = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")

_TEXT_LINE = "%(asctime)s %(levelname)-8s %(name)s: %(message)s"
_PLAIN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message", "taskName"}


class _UtcFormatter(logging.Formatter):
    """One line per record, with the time in RFC 3339."""

    converter = time.gmtime  # type: ignore[assignment]  # a builtin function, which is not bound
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"


class JsonFormatter(_UtcFormatter):
    """One JSON object per line; `extra` of a record becomes fields."""

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_text:
            fields["exception"] = record.exc_text
        extra = {name: value for name, value in vars(record).items() if name not in _PLAIN_ATTRIBUTES}
        return json.dumps(extra | fields, default=str, ensure_ascii=False)


class BoundedQueueHandler(QueueHandler):
    """Queues records without waiting; records that do not fit are counted in `dropped`."""

    queue: queue.Queue[logging.LogRecord]
    dropped = 0

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        """Return a copy with the message as text, and without the caller's objects."""
        ready = copy(record)
        ready.msg, ready.args = record.getMessage(), None
        if record.exc_info and not record.exc_text:
            _, error, trace = record.exc_info
            if error is not None:
                # The writing thread reads the source files: the caller may be the engine thread.
                ready.exc_trace = TracebackException(type(error), error, trace, lookup_lines=False)
        ready.exc_info = None
        return ready

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


class MaskingStreamHandler(logging.StreamHandler[IO[str]]):
    """Writes records to a stream with secrets masked, and the number of records dropped before them."""

    def __init__(self, stream: IO[str], mask: SecretMask, source: BoundedQueueHandler) -> None:
        super().__init__(stream)
        self.mask = mask
        self._source = source
        self._num_reported = 0

    def format(self, record: logging.LogRecord) -> str:
        trace = vars(record).pop("exc_trace", None)
        if trace is not None:
            record.exc_text = "".join(trace.format()).rstrip("\n")
        return self.mask.apply(super().format(record))

    def emit(self, record: logging.LogRecord) -> None:
        dropped = self._source.dropped
        if dropped > self._num_reported:
            text = f"dropped {dropped - self._num_reported} log records that arrived faster than they could be written"
            lost = {"name": __name__, "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
            self._num_reported = dropped
            super().emit(logging.makeLogRecord(lost))
        super().emit(record)


class LogPipe:
    """Logging as set up by `start_logging`, until closed. A context manager.

    It handles all loggers of a process, or with `own_loggers_only` those of kvferry and uvicorn, in an engine's
    process. uvicorn needs `log_config=None`, or it replaces the handlers.
    """

    def __init__(self, settings: Settings, *, stream: IO[str] | None = None, own_loggers_only: bool = False) -> None:
        records: queue.Queue[logging.LogRecord] = queue.Queue(QUEUE_RECORDS)
        self._entrance = BoundedQueueHandler(records)
        writer = MaskingStreamHandler(stream or sys.stderr, SecretMask.of(settings), self._entrance)
        self._writer = writer
        writer.setFormatter(JsonFormatter() if settings.log_format is LogFormat.JSON else _UtcFormatter(_TEXT_LINE))
        self._listener = QueueListener(records, writer)
        names = [*OWN_LOGGERS, *UVICORN_LOGGERS] if own_loggers_only else [None, *UVICORN_LOGGERS]
        self._loggers = [logging.getLogger(name) for name in names]
        self._before = [(logger, logger.handlers[:], logger.propagate, logger.level) for logger in self._loggers]
        children = set(UVICORN_LOGGERS[1:]) if own_loggers_only else set(UVICORN_LOGGERS)
        for logger in self._loggers:
            logger.handlers = [] if logger.name in children else [self._entrance]
            logger.propagate = logger.name in children
        self.set_level(settings.log_level)
        self._listener.start()

    @property
    def dropped(self) -> int:
        """Records dropped because the queue was full."""
        return self._entrance.dropped

    def configure(self, settings: Settings) -> None:
        """Apply settings that have changed: the lowest level that is logged, and the secrets that are masked."""
        self._writer.mask = SecretMask.of(settings)
        self.set_level(settings.log_level)

    def set_level(self, level: LogLevel) -> None:
        """Change the lowest level that is logged."""
        for logger in self._loggers:
            logger.setLevel(level.value.upper())
        for name in CHATTY_LOGGERS:
            logging.getLogger(name).setLevel("DEBUG" if level is LogLevel.DEBUG else "WARNING")
        for name in SPILLING_LOGGERS:
            logging.getLogger(name).setLevel("WARNING")

    def close(self) -> None:
        """Write queued records, and restore logging as it was. May be called again."""
        before, self._before = self._before, []
        for logger, handlers, propagate, level in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
        if before:
            self._listener.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def start_logging(settings: Settings, *, stream: IO[str] | None = None, own_loggers_only: bool = False) -> LogPipe:
    """Set up logging by the settings, and log their notices."""
    pipe = LogPipe(settings, stream=stream, own_loggers_only=own_loggers_only)
    for notice in settings.notices:
        logging.getLogger(__name__).warning("%s", notice)
    return pipe
