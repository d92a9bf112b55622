"""Types of settings and of fields of tiers: pydantic's, with the few rules that it does not have.

Text (environment, `.env`) is parsed; any other value (TOML, JSON) has the type itself: `True` is not a number.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    SecretStr,
    StringConstraints,
    TypeAdapter,
    WithJsonSchema,
)

from kvferry.core.policy import POLICY_FIELDS, TIER_WAIT_RULE, UNLIMITED, TierWait

MAX_INT32 = 2**31 - 1
"""Limit of counts, far beyond every machine, so that sums and products of them fit into 64 bits."""
MAX_INT64 = 2**63 - 1
MAX_EXACT = 2**53 - 1
"""The largest whole number that every JSON parser reads exactly."""
MAX_NUMBER_CHARS = 32
MAX_URL_CHARS = 1024
_SIZE = re.compile(r"(?P<whole>\d+)((\.(?P<decimals>\d+))?\s*(?P<unit>[KMGTP]I?)B|\s*B)?", re.ASCII | re.IGNORECASE)
_SIZE_RULE = "must be a size such as 8GiB, 512MiB, 1.5GB or a whole number of bytes, 1 or more"
_HOST = re.compile(r"[A-Za-z0-9._:%-]+", re.ASCII)


def _lower(value: object) -> object:
    return value.strip().lower() if isinstance(value, str) else value


AnyCase = BeforeValidator(_lower)
"""Reads the values of an enum in upper or lower case."""


def _text_or(rule: str, *types: type) -> BeforeValidator:
    """Accept text, which pydantic parses, and values that have one of `types`."""

    def check(value: object) -> object:
        is_text = isinstance(value, str) and len(value) <= MAX_NUMBER_CHARS
        if not is_text and type(value) not in types:
            raise ValueError(rule)
        return value

    return BeforeValidator(check)


WHOLE = _text_or("must be a whole number", int)
"""Stands after the limits of a whole number, which JSON Schema lacks otherwise; so does `NUMBER`."""
NUMBER = _text_or("must be a number", float, int)
Flag = Annotated[bool, _text_or("must be true or false", bool), AnyCase]


def parse_size(value: object) -> int:
    """Return a number of bytes, or raise `ValueError`."""
    # Not pydantic's `ByteSize`, which loses a byte of 2.01GB, and ignores what follows a size.
    number = value if type(value) is int else 0
    if isinstance(value, str) and len(value) <= MAX_NUMBER_CHARS and (size := _SIZE.fullmatch(value.strip())):
        whole, decimals, unit = size["whole"], size["decimals"] or "", (size["unit"] or "").upper()
        base = 1024 if unit.endswith("I") else 1000
        number = int(whole + decimals) * base ** " KMGTP".index(unit[:1] or " ") // 10 ** len(decimals)
    if not 1 <= number <= MAX_INT64:
        raise ValueError(_SIZE_RULE)
    return number


_SIZE_SCHEMA = WithJsonSchema({"type": "integer", "minimum": 1, "maximum": MAX_EXACT})
Size = Annotated[int, BeforeValidator(parse_size), _SIZE_SCHEMA]
"""A number of bytes: `8GiB`, `512MiB`, `1.5GB`, or a plain whole number."""


def _parse_size_or_zero(value: object) -> int:
    return 0 if value in (0, "0") and value is not False else parse_size(value)


SizeOrZero = Annotated[
    int, BeforeValidator(_parse_size_or_zero), WithJsonSchema({"type": "integer", "minimum": 0, "maximum": MAX_EXACT})
]


def parse_limit(value: object) -> int | str:
    """Return a tenant's limit as the API has it: a number of bytes, 0 too, or `unlimited`. Raises `ValueError`."""
    try:
        return UNLIMITED if value == UNLIMITED else _parse_size_or_zero(value)
    except ValueError as error:
        raise ValueError(f"{error}, or 0, or {UNLIMITED}") from None


def format_size(num_bytes: int) -> str:
    """Return a size in the largest unit that divides it, as it can be written in a setting."""
    for power, letter in reversed(list(enumerate("KMGTP", start=1))):
        if num_bytes and num_bytes % 1024**power == 0:
            return f"{num_bytes // 1024**power}{letter}iB"
    return str(num_bytes)


def _unlimited(read: Callable[[object], int], rule: str) -> Callable[[object], int | None]:
    """Return a function that reads `unlimited` as None, and other values by `read`."""

    def parse(value: object) -> int | None:
        if value is None or (isinstance(value, str) and value.strip().lower() == UNLIMITED):
            return None
        try:
            return read(value)
        except ValueError:
            raise ValueError(rule) from None

    return parse


_TOKENS = TypeAdapter(Annotated[int, Field(ge=0, le=MAX_INT64), WHOLE])
_CAP_RULE = f"must be {UNLIMITED} or a whole number of tokens, 0 or more"
Cap = Annotated[int | None, BeforeValidator(_unlimited(_TOKENS.validate_python, _CAP_RULE))]
"""A number of tokens, or None for `unlimited`."""
SizeCap = Annotated[
    Annotated[int, _SIZE_SCHEMA] | None, BeforeValidator(_unlimited(parse_size, f"{_SIZE_RULE}, or {UNLIMITED}"))
]
"""A number of bytes, or None for `unlimited`."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("must be printable text")
    return text


Word = Annotated[str, StringConstraints(strict=True, strip_whitespace=True, min_length=1), AfterValidator(_printable)]
"""Text that is not blank."""


def _matching(pattern: str, rule: str) -> AfterValidator:
    def check(text: str) -> str:
        if re.fullmatch(pattern, text, re.ASCII) is None:
            raise ValueError(f"must be {rule}")
        return text

    return AfterValidator(check)


Name = Annotated[
    str,
    _matching(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}",
        "1 to 64 letters, digits, '.', '_' or '-', and start with a letter or digit",
    ),
]
"""A name that can be part of a file name."""
Device = Annotated[str, _matching(r"auto|cpu|cuda(:\d{1,2})?", "auto, cpu, cuda or cuda:<index>")]
"""The device that a model runs on."""


def offered(names: Iterable[str]) -> AfterValidator:
    """Return a check of names that this version offers, of which later ones may offer more."""

    def check(name: str) -> str:
        if name not in names:
            raise ValueError(f"this version offers only {', '.join(names)}")
        return name

    return AfterValidator(check)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _host(text: str) -> str:
    if not _HOST.fullmatch(text) or (":" in text and _address(text) is None):
        raise ValueError("must be an address or a host name such as 127.0.0.1, ::1 or localhost")
    return text


Host = Annotated[Word, AfterValidator(_host)]
"""An address or host name to listen on."""


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to `host`. Names other than localhost are not resolved."""
    if host.lower() == "localhost":
        return True
    address = _address(host)
    return address is not None and (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _token(secret: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[\x21-\x7e]+", secret.get_secret_value()):
        raise ValueError("must be printable ASCII without spaces, since it is sent in an HTTP header")
    return secret


Token = Annotated[SecretStr, AfterValidator(_token)]
"""A token that fits into an HTTP header."""

MAX_TOKENS = 2
"""Tokens that are valid at once: an old one and its successor."""


def tokens_of(secret: SecretStr | None) -> tuple[str, ...]:
    """Return the tokens in a setting; none if it is not set."""
    return () if secret is None else tuple(secret.get_secret_value().split(","))


def _tokens(secret: SecretStr) -> SecretStr:
    tokens = [token for token in re.split(r"[,\r\n]", secret.get_secret_value()) if token]
    if not 1 <= len(tokens) <= MAX_TOKENS or len(set(tokens)) < len(tokens):
        raise ValueError(f"must be one token or {MAX_TOKENS} different ones, separated by a comma, in a file by lines")
    return SecretStr(",".join(_token(SecretStr(token)).get_secret_value() for token in tokens))


Tokens = Annotated[SecretStr, AfterValidator(_tokens)]
"""One or two tokens, separated by a comma once validated."""


def split_url(value: object, rule: str, no_credentials: str) -> SplitResult:
    """Return the parts of a URL that has a host, and neither user, password, query nor fragment.

    Raises `ValueError` with `rule`, or with `no_credentials` for one that may have credentials.
    """
    text = value.get_secret_value() if isinstance(value, SecretStr) else value
    if not isinstance(text, str) or len(text) > MAX_URL_CHARS or not text.isprintable():
        raise ValueError(rule)
    try:
        parts = urlsplit(text.strip())
        is_plain = parts.port != 0
        # As each connection does; fails for names with an empty part or one of more than 63 characters.
        (parts.hostname or "").encode("idna")
    except ValueError as error:
        raise ValueError(rule) from error
    if "@" in parts.netloc or parts.query:
        raise ValueError(no_credentials)
    if not is_plain or not parts.hostname or parts.fragment:
        raise ValueError(rule)
    return parts


def _database_url(secret: SecretStr) -> SecretStr:
    text = secret.get_secret_value().strip()
    scheme, colon, _ = text.partition(":")
    if not colon or scheme.partition("+")[0] not in ("sqlite", "postgresql"):
        raise ValueError(
            "must be a URL such as sqlite:////var/lib/kvferry/kvferry.db or postgresql://user:password@host/name"
        )
    return SecretStr(text)


DatabaseUrl = Annotated[SecretStr, AfterValidator(_database_url)]
"""The URL of a supported database."""


def expand_home(text: str) -> Path:
    """Return a path, with `~` replaced by a home folder. Raises `ValueError` if there is no such folder."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ValueError(f"there is no home folder for {Path(text).parts[0]}; write the whole path") from error


def _path(value: object, what: str) -> Path:
    if isinstance(value, Path):
        return value
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ValueError(f"must be the path of {what}")
    return expand_home(value.strip()).absolute()


FolderPath = Annotated[Path, BeforeValidator(partial(_path, what="a folder"))]
"""The absolute path of a folder; `~` is the home folder."""
FilePath = Annotated[Path, BeforeValidator(partial(_path, what="a file"))]
"""The absolute path of a file; `~` is the home folder."""


def _tier_wait(value: object) -> TierWait:
    if isinstance(value, TierWait):
        return value
    if not isinstance(value, str):
        raise ValueError(TIER_WAIT_RULE)
    return TierWait.parse(value.strip().lower())


Wait = Annotated[TierWait, BeforeValidator(_tier_wait)]
"""The wait of requests for tiers."""


def json_list(value: str, rule: str) -> list[Any]:
    """Parse a JSON list. Raises `ValueError` with `rule`."""
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{rule} ({error})") from error
    if not isinstance(parsed, list):
        raise ValueError(rule)
    return parsed


def _policy_fields(value: object) -> tuple[str, ...]:
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


PolicyFields = Annotated[tuple[str, ...], BeforeValidator(_policy_fields)]
"""Names of policy fields: a list, JSON text of one, or names separated by commas."""
