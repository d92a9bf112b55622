"""What can be wrong with settings, in words that name the setting, its value, its origin and the remedy."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from kvferry.app.settings.origin import PREFIX, Given

MASK = "***"
MAX_SHOWN_CHARS = 80
_SECRET_WORDS = re.compile(r"TOK|SECRET|PASS|PWD|KEY|CRED|URL|AUTH", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Problem:
    """One bad setting. `name` is the setting (lower case) or the unknown name; `advice` says what would be right."""

    name: str
    text: str
    advice: str

    def __str__(self) -> str:
        return self.text


class BadSettings(Exception):
    """Settings that kvferry refuses to start with: every one of them, not the first only."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class NeedsRestart(Exception):
    """Settings that cannot change while kvferry runs."""

    def __init__(self, names: Iterable[str], mutable: Iterable[str]) -> None:
        self.names = tuple(names)
        self.mutable = tuple(mutable)
        super().__init__(
            f"{', '.join(self.names)} can only change with a restart; while running: {', '.join(self.mutable)}"
        )


def value_problem(name: str, given: Given, advice: str, *, secret: bool) -> Problem:
    """A known setting whose value will not do."""
    value = "" if given.value is None else f"={_shown(name, given.value, secret)}"
    return Problem(name, f"{given.spelled}{value} ({given.place.label}): {advice}", advice)


def unknown_problem(given: Given, known: Iterable[str], secrets: Iterable[str]) -> Problem:
    """A name that is no setting, with the nearest that is. A value that may be a misspelled secret is not shown."""
    plain = given.spelled.upper().removeprefix(PREFIX)
    near = difflib.get_close_matches(plain, [name.upper() for name in known], n=1, cutoff=0.5)
    secret = _SECRET_WORDS.search(plain) or (near and near[0].lower() in set(secrets))
    spelled = given.spelled if given.spelled.isprintable() else show(given.spelled)
    advice = "no such setting"
    if near:
        advice += f"; did you mean {given.place.spell(near[0].lower())}?"
    return Problem(
        given.spelled,
        f"{spelled}={MASK if secret else show(given.value)} ({given.place.label}): {advice}",
        advice,
    )


def _shown(name: str, value: object, secret: bool) -> str:
    if name in ("database_url", "url") and "://" in str(value):
        return show(mask_url(str(value)))
    if name == "tiers":
        return "[...]"
    return MASK if secret else show(value)


def show(value: object) -> str:
    """A value on one short line."""
    if isinstance(value, str):
        text = value if value.isprintable() and value.strip() == value and value else json.dumps(value)
    else:
        try:
            text = json.dumps(value, default=str)
        except (TypeError, ValueError):
            text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else text[: MAX_SHOWN_CHARS - 3] + "..."


def mask_url(url: str) -> str:
    """A database URL without its password, wherever the password stands in it."""
    try:
        parts = urlsplit(url)
        netloc = parts.netloc
        if "@" in netloc:
            user, _, host = netloc.rpartition("@")
            name, colon, _ = user.partition(":")
            netloc = f"{name}{colon and ':' + MASK}@{host}"
        query = urlencode(
            [
                (key, MASK if _SECRET_WORDS.search(key) else value)
                for key, value in parse_qsl(parts.query, keep_blank_values=True)
            ],
            safe="*/:",
            quote_via=quote,
        )
        if not parts.netloc:
            return urlunsplit(parts._replace(query=query)) if query else url
        return urlunsplit(parts._replace(netloc=netloc, query=query))
    except ValueError:
        return MASK


def url_passwords(url: str) -> list[str]:
    """The passwords that stand in a database URL, as written and decoded."""
    try:
        parts = urlsplit(url)
        found = [value for key, value in parse_qsl(parts.query) if _SECRET_WORDS.search(key)]
        user = parts.netloc.rpartition("@")[0]
    except ValueError:
        return []
    if ":" in user:
        written = user.partition(":")[2]
        found += [written, unquote(written)]
    return list(dict.fromkeys(password for password in found if password))
