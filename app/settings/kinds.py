"""The words that settings with a choice of values may have."""

from __future__ import annotations

from enum import StrEnum


class Engine(StrEnum):
    """What runs in this process beside the admin API."""

    EMBEDDED = "embedded"
    NONE = "none"


class Dtype(StrEnum):
    """Precision of the embedded engine's model."""

    AUTO = "auto"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


class PoolKind(StrEnum):
    """What the host pool is made of."""

    PINNED = "pinned"
    SHM = "shm"
    FILE = "file"


class LogLevel(StrEnum):
    """The least that is logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    CRITICAL = "critical"


class LogFormat(StrEnum):
    """How a line of the log is written."""

    TEXT = "text"
    JSON = "json"
