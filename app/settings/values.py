"""How single values are read: one reader a kind of value, each saying what would be right when it is not.

A reader takes text (environment, `.env`) or the native type (TOML, an engine's JSON, a value already read) and raises
ValueError with the rule. Nothing is guessed: `True` is not a number, and `16.0` is not whole.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from kvferry.core.policy import POLICY_FIELDS, UNLIMITED

Reader = Callable[[Any], Any]

MAX_INT64 = 2**63 - 1
MAX_EXACT = 2**53 - 1
"""The largest whole number that every reader of JSON has exactly."""
SIZE_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    SIZE_UNITS[f"{_letter}B"] = 1000**_power
    SIZE_UNITS[f"{_letter}IB"] = 1024**_power
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", re.ASCII)
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?", re.ASCII)
_TOKEN = re.compile(r"[\x21-\x7e]+")


def whole(low: int, high: int = MAX_INT64) -> Reader:
    """A whole number within bounds."""
    bounds = f"of {low} or more" if high == MAX_INT64 else f"from {low} to {high}"
    rule = f"must be a whole number {bounds}"

    def read(value: object) -> int:
        number = _as_int(value)
        if number is None or not low <= number <= high:
            raise ValueError(rule)
        return number

    return read


def _as_int(value: object) -> int | None:
    if type(value) is int:
        return value
    if isinstance(value, str) and len(value) <= 20 and _WHOLE.fullmatch(value.strip()):
        return int(value)
    return None


def _as_float(value: object) -> float:
    """A number, or not-a-number for what is none."""
    try:
        return float(value) if isinstance(value, str) or type(value) in (int, float) else math.nan  # type: ignore[arg-type]
    except (ValueError, OverflowError):
        return math.nan


def fraction(value: object) -> float:
    """A number from 0 to 1."""
    number = _as_float(value)
    if not 0 <= number <= 1:
        raise ValueError("must be a number from 0 to 1")
    return number


def seconds(low: float, high: float) -> Reader:
    """A number of seconds within bounds."""
    rule = f"must be a number of seconds from {low:g} to {high:g}"

    def read(value: object) -> float:
        number = _as_float(value)
        if not low <= number <= high:
            raise ValueError(rule)
        return number

    return read


def truth(value: object) -> bool:
    """True or false."""
    if type(value) is bool:
        return value
    word = value.strip().lower() if isinstance(value, str) else ""
    if word in ("true", "1", "yes", "on"):
        return True
    if word in ("false", "0", "no", "off"):
        return False
    raise ValueError("must be true or false")


def size(value: object) -> int:
    """A number of bytes: `8GiB`, `512MiB`, `1.5GB`, or a plain whole number."""
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


def format_size(num_bytes: int) -> str:
    """A size in the largest unit that divides it, the way it would be written in a setting."""
    for letter in reversed("KMGTP"):
        unit = SIZE_UNITS[f"{letter}IB"]
        if num_bytes and num_bytes % unit == 0:
            return f"{num_bytes // unit}{letter}iB"
    return str(num_bytes)


def cap(value: object) -> int | None:
    """A number of tokens, or None for `unlimited`."""
    if value is None or (isinstance(value, str) and value.strip().lower() == UNLIMITED):
        return None
    number = _as_int(value)
    if number is None or not 0 <= number <= MAX_INT64:
        raise ValueError(f"must be {UNLIMITED} or a whole number of tokens, 0 or more")
    return number


def choice(kind: type[StrEnum]) -> Reader:
    """One of the words of an enum, in any case."""
    rule = f"must be {_either(kind)}"

    def read(value: object) -> StrEnum:
        word = value.strip().lower() if isinstance(value, str) else ""
        if word not in list(kind):
            raise ValueError(rule)
        return kind(word)

    return read


def word(value: object) -> str:
    """Some text that is not blank."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError("must be text, and not blank")
    return value.strip()


def host(value: object) -> str:
    """An address or host name to listen on."""
    text = value.strip() if isinstance(value, str) else ""
    if not re.fullmatch(r"[A-Za-z0-9._:%-]+", text, re.ASCII) or (":" in text and not _is_address(text)):
        raise ValueError("must be an address or a host name such as 127.0.0.1, ::1 or localhost")
    return text


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def is_loopback(text: str) -> bool:
    """Whether only this machine can reach what listens on this host. Names other than localhost are not looked up."""
    if text.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def name(value: object) -> str:
    """A name that may stand in a file name."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise ValueError("must be 1 to 64 letters, digits, '.', '_' or '-', and start with a letter or digit")
    return value


def device(value: object) -> str:
    """Where a model runs."""
    if not isinstance(value, str) or not _DEVICE.fullmatch(value):
        raise ValueError("must be auto, cpu, cuda or cuda:<index>")
    return value


def secret_token(value: object) -> SecretStr:
    """A token that fits into an HTTP header."""
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    if not isinstance(text, str) or not _TOKEN.fullmatch(text):
        raise ValueError("must be printable ASCII without spaces, since it travels in an HTTP header")
    return SecretStr(text)


def database_url(value: object) -> SecretStr:
    """The URL of a database that kvferry can use."""
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    scheme, found, _ = text.strip().partition(":") if isinstance(text, str) else ("", "", "")
    if not found or scheme.partition("+")[0] not in ("sqlite", "postgresql"):
        raise ValueError(
            "must be a URL such as sqlite:////var/lib/kvferry/kvferry.db or postgresql://user:password@host/name"
        )
    return SecretStr(str(text).strip())


def folder(value: object) -> Path:
    """A folder, made absolute; `~` is the home folder."""
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError("must be the path of a folder")
    return Path(value.strip()).expanduser().absolute()


def policy_fields(value: object) -> tuple[str, ...]:
    """Names of policy fields: a list, JSON text of one, or names between commas."""
    rule = f"must be a list of some of {', '.join(POLICY_FIELDS)}"
    items = _items(value, rule)
    if not all(isinstance(item, str) and item in POLICY_FIELDS for item in items):
        raise ValueError(rule)
    return tuple(dict.fromkeys(items))


def _items(value: object, rule: str) -> Iterable[Any]:
    if isinstance(value, (list, tuple)):
        return value
    if not isinstance(value, str):
        raise ValueError(rule)
    if not value.lstrip().startswith("["):
        return [item.strip() for item in value.split(",") if item.strip()]
    return json_list(value, rule)


def json_list(value: str, rule: str) -> list[Any]:
    """A list written as JSON; `rule` says what would be right."""
    try:
        parsed = json.loads(value)
    except ValueError as error:
        raise ValueError(f"{rule} ({error})") from error
    if not isinstance(parsed, list):
        raise ValueError(rule)
    return parsed


def _either(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} or {last}" if most else last
