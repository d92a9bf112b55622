"""Parsers of single setting values; each raises `ValueError` with the rule that a value breaks.

A parser takes text (environment, `.env`) or the native type (TOML, JSON of an engine, a value parsed before). Types are
not converted: `True` is not a number, and `16.0` is not a whole number.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler, SecretStr
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from kvferry.app.settings.sources import expand_home
from kvferry.core.policy import POLICY_FIELDS, TIER_WAIT_RULE, UNLIMITED, TierWait

MAX_INT32 = 2**31 - 1
"""Limit of counts, far beyond every machine, so that sums and products of them fit into 64 bits."""
MAX_INT64 = 2**63 - 1
MAX_EXACT = 2**53 - 1
"""The largest whole number that every JSON parser reads exactly."""
SIZE_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    SIZE_UNITS[f"{_letter}B"] = 1000**_power
    SIZE_UNITS[f"{_letter}IB"] = 1024**_power
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_TOKEN = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True, slots=True)
class Parser:
    """A callable parser, and pydantic metadata of a type: `Annotated[int, whole(0, 65535)]`.

    Limits are those that the JSON Schema states; None for none.
    """

    parse: Callable[[Any], Any]
    minimum: float | None = None
    maximum: float | None = None

    def __call__(self, value: object) -> Any:
        return self.parse(value)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.parse, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        limits = {"minimum": self.minimum, "maximum": self.maximum}
        return handler(schema) | {name: limit for name, limit in limits.items() if limit is not None}


def whole(low: int, high: int = MAX_INT32) -> Parser:
    """Return a parser of whole numbers within limits."""

    def parse(value: object) -> int:
        number = _as_int(value)
        if number is None or not low <= number <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return number

    return Parser(parse, low, high)


def _as_int(value: object) -> int | None:
    if type(value) is int:
        return value
    if isinstance(value, str) and len(value) <= 20 and _WHOLE.fullmatch(value.strip()):
        return int(value)
    return None


def _as_float(value: object) -> float:
    """Return a number, or NaN for a value that is not a number."""
    try:
        return float(value) if isinstance(value, str) or type(value) in (int, float) else math.nan  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        return math.nan


def _number(low: float, high: float, what: str) -> Parser:
    def parse(value: object) -> float:
        number = _as_float(value)
        if not low <= number <= high:
            raise ValueError(f"must be {what} from {low:g} to {high:g}")
        return number

    return Parser(parse, low, high)


fraction = _number(0, 1, "a number")


def seconds(low: float, high: float) -> Parser:
    """Return a parser of seconds within limits."""
    return _number(low, high, "a number of seconds")


@Parser
def boolean(value: object) -> bool:
    """Parse true or false."""
    if type(value) is bool:
        return value
    text = value.strip().lower() if isinstance(value, str) else ""
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off"):
        return False
    raise ValueError("must be true or false")


def _size(value: object) -> int:
    rule = "must be a size such as 8GiB, 512MiB, 1.5GB or a whole number of bytes, 1 or more"
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        unit = SIZE_UNITS.get(match[2].upper()) if match else None
        if match is None or unit is None or (unit == 1 and "." in match[1]) or len(match[1]) > 20:
            raise ValueError(rule)
        whole_part, _, decimals = match[1].partition(".")
        number = int(whole_part + decimals) * unit // int(10 ** len(decimals))
    else:
        number = _as_int(value) or 0
    if not 1 <= number <= MAX_INT64:
        raise ValueError(rule)
    return number


size = Parser(_size, 1, MAX_EXACT)
"""Parses a number of bytes: `8GiB`, `512MiB`, `1.5GB`, or a plain whole number."""


def _size_cap(value: object) -> int | None:
    if value is None or (isinstance(value, str) and value.strip().lower() == UNLIMITED):
        return None
    try:
        return _size(value)
    except ValueError as error:
        raise ValueError(f"{error}, or {UNLIMITED}") from None


size_cap = Parser(_size_cap, 1, MAX_EXACT)
"""Parses a number of bytes as `size` does, or None for `unlimited`."""


def format_size(num_bytes: int) -> str:
    """Return a size in the largest unit that divides it, as it can be written in a setting."""
    for letter in reversed("KMGTP"):
        unit = SIZE_UNITS[f"{letter}IB"]
        if num_bytes and num_bytes % unit == 0:
            return f"{num_bytes // unit}{letter}iB"
    return str(num_bytes)


@Parser
def cap(value: object) -> int | None:
    """Parse a number of tokens, or None for `unlimited`."""
    if value is None or (isinstance(value, str) and value.strip().lower() == UNLIMITED):
        return None
    number = _as_int(value)
    if number is None or not 0 <= number <= MAX_INT64:
        raise ValueError(f"must be {UNLIMITED} or a whole number of tokens, 0 or more")
    return number


def choice(kind: type[StrEnum]) -> Parser:
    """Return a parser of the values of an enum, in upper or lower case."""
    *most, last = kind

    def parse(value: object) -> StrEnum:
        text = value.strip().lower() if isinstance(value, str) else ""
        if text not in list(kind):
            raise ValueError(f"must be {', '.join(most)} or {last}")
        return kind(text)

    return Parser(parse)


@Parser
def tier_wait(value: object) -> TierWait:
    """Parse the wait of requests for tiers."""
    if isinstance(value, TierWait):
        return value
    if not isinstance(value, str):
        raise ValueError(TIER_WAIT_RULE)
    return TierWait.parse(value.strip().lower())


@Parser
def word(value: object) -> str:
    """Parse text that is not blank."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError("must be text, and not blank")
    return value.strip()


def offered(names: Iterable[str]) -> Parser:
    """Return a parser of names that this version offers, of which later ones may offer more."""

    def parse(value: object) -> str:
        name: str = word(value)
        if name not in names:
            raise ValueError(f"this version offers only {', '.join(names)}")
        return name

    return Parser(parse)


@Parser
def host(value: object) -> str:
    """Parse an address or host name to listen on."""
    text = value.strip() if isinstance(value, str) else ""
    if not re.fullmatch(r"[A-Za-z0-9._:%-]+", text, re.ASCII) or (":" in text and _address(text) is None):
        raise ValueError("must be an address or a host name such as 127.0.0.1, ::1 or localhost")
    return text


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to `host`. Names other than localhost are not resolved."""
    if host.lower() == "localhost":
        return True
    address = _address(host)
    return address is not None and (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _matching(pattern: str, rule: str) -> Parser:
    def parse(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value, re.ASCII):
            raise ValueError(f"must be {rule}")
        return value

    return Parser(parse)


name = _matching(
    r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
    "1 to 64 letters, digits, '.', '_' or '-', and start with a letter or digit",
)
"""Parses a name that can be part of a file name."""

_PORT = r"(\*|0*([0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5]))"
zmq_address = _matching(
    rf"tcp://(\*|\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):{_PORT}|ipc:///[^\s]+",
    "a ZMQ address such as tcp://127.0.0.1:5557, tcp://*:5557 or ipc:///run/kvferry/events, with a port up to 65535",
)
"""Parses an address to listen on."""

topic = _matching(r"[\x20-\x7e]{1,512}", "1 to 512 printable ASCII characters")
"""Parses a topic of ZMQ messages."""

device = _matching(r"auto|cpu|cuda(:\d{1,2})?", "auto, cpu, cuda or cuda:<index>")
"""Parses the device that a model runs on."""


@Parser
def secret_token(value: object) -> SecretStr:
    """Parse a token that fits into an HTTP header."""
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    if not isinstance(text, str) or not _TOKEN.fullmatch(text):
        raise ValueError("must be printable ASCII without spaces, since it is sent in an HTTP header")
    return SecretStr(text)


@Parser
def database_url(value: object) -> SecretStr:
    """Parse the URL of a supported database."""
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    scheme, found, _ = text.strip().partition(":") if isinstance(text, str) else ("", "", "")
    if not found or scheme.partition("+")[0] not in ("sqlite", "postgresql"):
        raise ValueError(
            "must be a URL such as sqlite:////var/lib/kvferry/kvferry.db or postgresql://user:password@host/name"
        )
    return SecretStr(str(text).strip())


def _path(what: str) -> Parser:
    def parse(value: object) -> Path:
        if isinstance(value, Path):
            return value
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise ValueError(f"must be the path of {what}")
        return expand_home(value.strip()).absolute()

    return Parser(parse)


folder = _path("a folder")
"""Parses the path of a folder and makes it absolute; `~` is the home folder."""
file_path = _path("a file")
"""Parses the path of a file and makes it absolute; `~` is the home folder."""


@Parser
def policy_fields(value: object) -> tuple[str, ...]:
    """Parse names of policy fields: a list, JSON text of one, or names separated by commas."""
    rule = f"must be a list of some of {', '.join(POLICY_FIELDS)}"
    items = value
    if isinstance(value, str):
        is_json = value.lstrip().startswith("[")
        items = json_list(value, rule) if is_json else [item.strip() for item in value.split(",") if item.strip()]
    if not isinstance(items, (list, tuple)) or not all(
        isinstance(item, str) and item in POLICY_FIELDS for item in items
    ):
        raise ValueError(rule)
    return tuple(dict.fromkeys(items))


def json_list(value: str, rule: str) -> list[Any]:
    """Parse a JSON list. Raises `ValueError` with `rule`."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{rule} ({error})") from error
    if not isinstance(parsed, list):
        raise ValueError(rule)
    return parsed
