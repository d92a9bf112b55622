"""Masking of known secret values in text that is logged or recorded."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from urllib.parse import quote, quote_plus

from pydantic import BaseModel, SecretStr

from kvferry.app.settings import Settings
from kvferry.app.settings.problems import MASK, url_passwords

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
        # The longest first, so that a secret that contains another one leaves no rest.
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
        # Base64 spells three bytes with four characters, so that the text before a secret shifts its spelling. The
        # characters that hold bits of what stands before or after it are left out.
        encoded = base64.b64encode(bytes(before) + content).decode()
        first = (before * 8 + 5) // 6
        last = (before + len(content)) * 8 // 6
        if last - first >= MIN_ENCODED_CHARS:
            yield encoded[first:last]
            yield encoded[first:last].replace("+", "-").replace("/", "_")


def _any_case_escapes(pattern: str) -> str:
    """Let the hexadecimal digits of percent escapes match in either case."""
    return re.sub(r"%[0-9A-F]{2}", lambda escape: f"(?i:{escape[0]})", pattern)
