"""The audit trail: who tried to change what, from where, and what came of it, written around every mutating call.

A call that changes something is written down before it is applied, and its outcome after. While the database is gone
such a call answers 503 and changes nothing, except what an operator needs in an emergency (reset, dropping and pinning
blocks): that is applied all the same, and its record goes to the log. Calls refused before they got that far are
written down too, as far as the database lets us.
"""

from __future__ import annotations

import difflib
import json
import logging
import math
import re
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from fastapi import Depends, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.app.api.auth import TokenName
from kvferry.app.api.offthread import StoreThreads
from kvferry.app.api.problems import Problem
from kvferry.app.masking import SecretMask
from kvferry.app.settings import Settings
from kvferry.app.settings.problems import MASK
from kvferry.app.store import AuditEntry, Store, StoreUnavailable
from kvferry.app.tenants import is_digest_glob

AUDITED_PREFIX = "/admin/"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
MAX_PATH_CHARS = 1000
MAX_WHAT_CHARS = 4000
MAX_DEPTH = 8
MAX_UNKNOWN_PER_MINUTE = 120

_SECRET = re.compile(r"token(?!s)|salt|secret|passw|pwd|credential|api_?key|_url|authorization", re.IGNORECASE)
_SECRETS = (*Settings.names().secrets, "cache_salt")
_LONGEST_NAME = 100
_LIKENESS = 0.75
"""What is misspelled is as secret: so alike to a secret's name, by difflib's ratio."""
NO_SECRETS = SecretMask(())
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Record:
    """One call's entry in the making; `row_id` is None until it is written, `trouble` is why it could not be."""

    scope: Scope
    started_s: float
    row_id: int | None = None
    trouble: Exception | None = None

    def entry(self, mask: SecretMask) -> AuditEntry:
        """What is known of the call so far, with known secret values masked."""
        state = self.scope["state"]
        client = self.scope.get("client")
        return AuditEntry(
            time_s=self.started_s,
            token=str(state.get("token", TokenName.NONE)),
            client=client[0] if client else "",
            request_id=mask.apply(state["request_id"]),
            method=mask.apply(self.scope["method"]),
            path=mask.apply(self.scope["path"])[:MAX_PATH_CHARS],
            what=describe_body(state.get("body", b""), mask),
        )


def describe_body(body: bytes, mask: SecretMask = NO_SECRETS) -> dict[str, Any] | None:
    """What a call's body said, for people to read later: bounded, and without secrets. None without a body."""
    if not body:
        return None
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        # It may hold anything, a misplaced secret too.
        return {"unreadable_bytes": len(body)}
    if not isinstance(parsed, dict) or len(body) > MAX_WHAT_CHARS:
        return {"too_large_bytes" if isinstance(parsed, dict) else "unreadable_bytes": len(body)}
    return {_text(name, mask): _plain(name, value, mask, depth=1) for name, value in parsed.items()}


@lru_cache(maxsize=256)
def _is_secret(name: str) -> bool:
    # A list's name is looked at with each of its items.
    return _SECRET.search(name) is not None or bool(
        difflib.get_close_matches(name.lower()[:_LONGEST_NAME], _SECRETS, n=1, cutoff=_LIKENESS)
    )


def _plain(name: str, value: Any, mask: SecretMask, depth: int) -> Any:
    """A JSON value that every database takes, with secrets masked by the name they go under, and by value."""
    if _is_secret(name):
        return MASK
    if depth > MAX_DEPTH:
        return "..."
    if isinstance(value, dict):
        return {_text(inner, mask): _plain(inner, item, mask, depth + 1) for inner, item in value.items()}
    if isinstance(value, list):
        return [_plain(name, item, mask, depth + 1) for item in value]
    if isinstance(value, str):
        # A tenant is named by its digest; whatever else stands there may be the secret itself.
        return MASK if name == "tenant" and not is_digest_glob(value) else _text(value, mask)
    if isinstance(value, (int, float)):
        # NaN and infinities, which Python's reader takes and no JSON column does, and numbers beyond all columns.
        finite = math.isfinite(value) if isinstance(value, float) else abs(value) < 2**63
        text = mask.apply(repr(value))
        return value if finite and text == repr(value) else text
    return value


def _text(text: str, mask: SecretMask) -> str:
    return mask.apply(text).replace("\0", "\ufffd").encode("utf-8", "replace").decode("utf-8")


class AuditTrail:
    """Writes records. The database's own limits bound how long that takes, and so do ours."""

    def __init__(self, store: Store, mask: SecretMask) -> None:
        self._intents = store.intents
        self._mask = mask
        self._threads = StoreThreads(max_threads=4, timeout_s=5.0)
        self._minute = 0
        self._unknown_callers = 0

    async def begin(self, record: Record) -> None:
        """Write down that a call is about to be applied. Raises `StoreUnavailable` or a 503 problem."""
        try:
            record.row_id = await self._threads.run(self._intents.begin_audit, record.entry(self._mask))
        except (StoreUnavailable, Problem) as exc:
            record.trouble = exc
            raise

    async def end(self, record: Record, status: int) -> None:
        """Write down what came of a call. What the database does not take is logged instead, and nothing is raised."""
        outcome = outcome_of(status)
        if record.row_id is None and not self._wanted(record):
            return
        if record.trouble is not None:
            # The database kept its caller waiting once already.
            _log_record(record.entry(self._mask), status, outcome, record.trouble)
            return
        try:
            if record.row_id is None or not await self._threads.run(
                self._intents.end_audit, record.row_id, status, outcome
            ):
                entry = replace(record.entry(self._mask), status=status, outcome=outcome)
                await self._threads.run(self._intents.begin_audit, entry)
        except (StoreUnavailable, Problem) as exc:
            _log_record(record.entry(self._mask), status, outcome, exc)

    def _wanted(self, record: Record) -> bool:
        """Whether a refused call is kept: strangers must not be able to fill the table."""
        if record.scope["state"].get("authorized", False):
            return True
        minute = int(record.started_s // 60)
        if minute != self._minute:
            self._minute, self._unknown_callers = minute, 0
        self._unknown_callers += 1
        return self._unknown_callers <= MAX_UNKNOWN_PER_MINUTE


def outcome_of(status: int) -> str:
    """A status in one word: `applied`, `refused`, or `failed`."""
    if status < 400:
        return "applied"
    return "refused" if status < 500 else "failed"


def _log_record(entry: AuditEntry, status: int, outcome: str, trouble: Exception) -> None:
    _log.warning(
        "audit record not in the database (%s): %s %s by token %s from %s, request %s, body %s: %d %s",
        trouble,
        entry.method,
        entry.path,
        entry.token,
        entry.client,
        entry.request_id,
        json.dumps(entry.what),
        status,
        outcome,
    )


class Audit:
    """ASGI middleware that writes the outcome of every mutating admin call before its answer leaves."""

    def __init__(self, app: ASGIApp, trail: AuditTrail) -> None:
        self._app = app
        self._trail = trail

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in SAFE_METHODS or not scope["path"].startswith(AUDITED_PREFIX):
            await self._app(scope, receive, send)
            return
        record = Record(scope, time.time())
        scope["state"]["audit"] = (self._trail, record)
        ended = False

        async def send_when_written(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start" and not ended:
                ended = True
                await self._trail.end(record, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_when_written)
        except Exception:
            if not ended:
                await self._trail.end(record, 500)
            raise


async def _write_ahead(request: Request) -> None:
    trail, record = request.state.audit
    await trail.begin(record)


async def _write_after(request: Request) -> None:
    """Nothing to do before: the middleware writes the record once the call is through."""


WRITE_AHEAD = Depends(_write_ahead)
"""For routes that change intent (policies, overrides, settings): not applied unless it can be written down first."""
EMERGENCY = Depends(_write_after)
"""For routes that must work without the database: reset, and dropping and pinning blocks."""
