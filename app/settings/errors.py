"""Errors of settings: each message names the setting, its value, its origin and what to do. Masking of secrets."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode

from pydantic.fields import FieldInfo

from kvferry.app.common.call_errors import Conflict

PREFIX = "KVFERRY_"
MASK = "***"
MAX_SHOWN_CHARS = 80
SECRET_WORDS = re.compile(r"tok(?!e?ns)|salt|secret|pass|pwd|key|cred|url|auth", re.IGNORECASE)
"""Parts of names whose values are secret: of settings, of query parameters in URLs, and of fields in bodies."""
_PLAIN = re.compile(r"[+-]?[0-9.]{1,20} ?[A-Za-z]{0,3}|\w{0,6}")
# As SQLAlchemy reads it, a password may contain `/`, `?` and `#`; the last `@` ends it.
_URL = re.compile(
    r"(?P<scheme>[\w+]+://)"
    r"((?P<user>[^:/?#@]*)(?P<password>:.*)?@(?=[^@]*$))?"
    r"(?P<place>(\[[^]/?@]*\]|[^][:/?@]*)(:\d*)?(/[^?@]*|/[^?:]*)?)"
    r"(\?(?P<query>.*))?",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Problem:
    """An invalid setting. `name` is a setting (lower case) or an unknown name; `advice` omits the value."""

    name: str
    text: str
    advice: str

    def __str__(self) -> str:
        return self.text


# Not a `StartError`: pydantic turns a `ValueError` that is raised in a validation into its own error.
class BadSettings(Exception):
    """Invalid settings, with which kvferry does not start; `problems` has all of them."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class NeedsRestart(Conflict):
    """A change of settings that are fixed while kvferry runs."""

    slug, title = "restart-needed", "Needs a restart"

    def __init__(self, names: Sequence[str], mutable: Sequence[str]) -> None:
        self.extras = {"settings": list(names), "mutable": list(mutable)}
        super().__init__(f"{', '.join(names)} can only change with a restart; while running: {', '.join(mutable)}")


def is_secret_field(field: FieldInfo) -> bool:
    """Return whether a pydantic field holds a secret."""
    return "SecretStr" in str(field.annotation)


def advice_of(field: FieldInfo, message: str) -> str:
    """Return what a value of `field` must be, by its limits, else by a message of pydantic."""
    low, high = (
        next((limit for one in field.metadata if (limit := getattr(one, name, None)) is not None), None)
        for name in ("ge", "le")
    )
    if low is None or high is None:
        return message.removeprefix("Value error, ").replace("Input should", "must", 1)
    return f"must be a {'' if 'float' in str(field.annotation) else 'whole '}number from {low} to {high}"


def suggestion(name: str, known: Iterable[str], others: str) -> str:
    """Return the known name that is nearest to `name`; without one all of them, after the words `others`."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"{others} {', '.join(known)}"


def value_problem(
    name: str, spelled: str, value: object, label: str, advice: str, *, is_secret: bool = False
) -> Problem:
    """Return the problem of a value in the place `label`, in which the setting is `spelled`; None shows no value."""
    shown = "" if value is None else f"={_shown(name, value, is_secret)}"
    return Problem(name, f"{spelled}{shown} ({label}): {advice}", advice)


def unknown_problem(
    spelled: str, value: object, label: str, candidates: Mapping[str, str], secrets: Collection[str]
) -> Problem:
    """Return the problem of an unknown name, with the nearest known one. A possible secret value is masked.

    Any name may be a secret's, so that only numbers, sizes and short words are shown. `candidates` has the known names
    as they are spelled in that place.
    """
    plain = spelled.upper().removeprefix(PREFIX)
    near = difflib.get_close_matches(plain, [name.upper() for name in candidates], n=1, cutoff=0.5)
    is_secret = SECRET_WORDS.search(plain) or (near and near[0].lower() in secrets)
    advice = "no such setting"
    if near:
        advice += f"; did you mean {candidates[near[0].lower()]}?"
    shown = show(value)
    if is_secret or not _PLAIN.fullmatch(shown):
        shown = MASK
    name = spelled if spelled.isprintable() else show(spelled)
    return Problem(spelled, f"{name}={shown} ({label}): {advice}", advice)


def _shown(name: str, value: object, is_secret: bool) -> str:
    if name in ("database_url", "url") and "://" in str(value):
        return show(mask_url(str(value)))
    if name == "tiers":
        return "[...]"
    return MASK if is_secret or (name == "url" and "@" in str(value)) else show(value)


def show(value: object) -> str:
    """Return a value as one short line."""
    if isinstance(value, str):
        text = value if value.isprintable() and value.strip() == value and value else json.dumps(value)
    else:
        try:
            text = json.dumps(value, default=str)
        except (TypeError, ValueError):
            text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def mask_url(url: str) -> str:
    """Return a database URL with passwords masked, in its user part and in its query; a mask if that is unclear."""
    parts = _URL.fullmatch(url)
    if parts is None:
        return MASK
    user = "" if parts["user"] is None else f"{parts['user']}{':' + MASK if parts['password'] else ''}@"
    shown = parts["scheme"] + user + parts["place"]
    if not parts["query"]:
        return shown
    pairs = [
        (key, MASK if SECRET_WORDS.search(key) else value)
        for key, value in parse_qsl(parts["query"], keep_blank_values=True)
    ]
    return f"{shown}?{urlencode(pairs, safe='*/:', quote_via=quote)}"


def url_passwords(url: str) -> list[str]:
    """Return the passwords in a database URL, as written and decoded."""
    parts = _URL.fullmatch(url)
    if parts is None:
        return []
    passwords = [value for key, value in parse_qsl(parts["query"] or "") if SECRET_WORDS.search(key)]
    # SQLAlchemy ends a password at the first `@`, and takes the rest as the host, which messages then name.
    written = (parts["password"] or ":")[1:]
    passwords += [spelling for part in (written, *written.split("@")) for spelling in (part, unquote(part))]
    return list(dict.fromkeys(password for password in passwords if password))
