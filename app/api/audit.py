"""Audit of mutating admin calls: caller, body and outcome.

A call that writes to the database is recorded in the same transaction: without the database it is answered with 503
and changes nothing. A call that changes this process alone is recorded when it has ended, a reset that waits for
transfers also as its wait begins. Operators need them in an emergency, so that they work without the database, and
their record is logged. Refused calls are recorded too, while the database answers, by the names of their fields.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from sqlalchemy import Connection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvferry.app.api.auth import NO_TOKEN
from kvferry.app.operations.policy_json import is_digest_glob
from kvferry.app.settings.errors import MASK, SECRET_WORDS
from kvferry.app.settings.live import LiveSettings
from kvferry.app.store import AuditEntry, Change, DatabaseUnavailable, MetadataStore, database_only
from kvferry.app.store.database import clean
from kvferry.app.telemetry.logs import SecretMask

T = TypeVar("T")

AUDITED_PREFIX = "/admin/"
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
PREFETCH_PATH = "/admin/v1/prefetch"
SAFE_PATHS = frozenset({"/admin/v1/rules/test", "/admin/v1/lookup", PREFETCH_PATH})
"""Paths whose calls change nothing, or are recorded by `PrefetchAudit`."""
MAX_PATH_CHARS = 1000
MAX_WHAT_CHARS = 4000
MAX_UNKNOWN_PER_MINUTE = 120
CHANGE_TIMEOUT_S = 10.0
RECORD_TIMEOUT_S = 5.0

NO_SECRETS = SecretMask(())
_log = logging.getLogger(__name__)


def describe_body(body: bytes, is_applied: bool, mask: SecretMask = NO_SECRETS) -> dict[str, Any] | None:
    """Return a body's fields with secrets masked; None without a body.

    Of a call that is not applied only the names are shown, since a secret may be where none is expected.
    """
    if not body:
        return None
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        return {"unreadable_bytes": len(body)}
    if len(body) > MAX_WHAT_CHARS:
        return {"too_large_bytes": len(body)}
    if not is_applied:
        return {clean(mask.apply(name)): MASK for name in parsed}
    return {mask.apply(name): _masked(name, value, mask) for name, value in parsed.items()}


def _masked(name: str, value: Any, mask: SecretMask) -> Any:
    """Return a JSON value with secrets masked by name and by value."""
    if name == "endpoint" or SECRET_WORDS.search(name):
        return MASK
    if isinstance(value, dict):
        return {mask.apply(inner): _masked(inner, item, mask) for inner, item in value.items()}
    if isinstance(value, list):
        return [_masked(name, item, mask) for item in value]
    if isinstance(value, str):
        # Anything but a digest under `tenant` may be the secret itself.
        return MASK if name == "tenant" and not is_digest_glob(value) else mask.apply(value)
    # Databases do not accept NaN and infinities as JSON.
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def outcome_of(status: int) -> str:
    """Return `applied`, `refused`, or `failed` for a status."""
    if status < 400:
        return "applied"
    return "refused" if status < 500 else "failed"


class LoggedOnly:
    """Records since the start that the database did not accept, and that are in the log only. Thread: event loop."""

    def __init__(self) -> None:
        self.count = 0
        self.since_s: float | None = None

    def note(self, time_s: float) -> None:
        """Count a record of a call that began at `time_s`."""
        self.count += 1
        self.since_s = time_s if self.since_s is None else min(self.since_s, time_s)


class Audit:
    """ASGI middleware that records the outcome of every mutating admin call before its response is sent."""

    def __init__(self, app: ASGIApp, store: MetadataStore, settings: LiveSettings, logged_only: LoggedOnly) -> None:
        """Mask the secrets in `settings`."""
        self._app = app
        self.settings = settings
        self.logged_only = logged_only
        self.store = store
        self._minute = 0
        self._unknown_callers = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_audited = (
            scope["type"] == "http"
            and scope["method"] not in SAFE_METHODS
            and scope["path"].startswith(AUDITED_PREFIX)
            and (scope["method"] != "POST" or scope["path"] not in SAFE_PATHS)
        )
        if not is_audited:
            await self._app(scope, receive, send)
            return
        record = scope["state"]["audit"] = AuditedCall(self, scope)
        ended = False

        async def send_when_recorded(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start" and not ended:
                ended = True
                await self._end(record, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, send_when_recorded)
        except Exception:
            if not ended:
                await self._end(record, 500)
            raise

    async def _end(self, record: AuditedCall, status: int) -> None:
        if record.row_id is not None or self._is_kept(record):
            await record.end(status)

    def _is_kept(self, record: AuditedCall) -> bool:
        """Return whether a refused call is recorded: callers without a token must not be able to fill the table."""
        if record.scope["state"].get("authorized", False):
            return True
        minute = int(record.started_s // 60)
        if minute != self._minute:
            self._minute, self._unknown_callers = minute, 0
        self._unknown_callers += 1
        return self._unknown_callers <= MAX_UNKNOWN_PER_MINUTE


class AuditedCall:
    """A mutating call and its record. `row_id` is None until that is written.

    `applied_status` is the status of its route's response if the call is applied. A dry run sets `is_dry_run`.
    """

    def __init__(self, audit: Audit, scope: Scope) -> None:
        self.scope = scope
        self.started_s = time.time()
        self.row_id: int | None = None
        self.applied_status = 200
        self.is_dry_run = False
        self._audit = audit
        self._written_status: int | None = None

    async def try_begin(self) -> None:
        """Record that the call is under way; without the database that is logged when it has ended."""
        with suppress(DatabaseUnavailable):
            self.row_id = await self._write(partial(self._audit.store.writer.begin_audit, self._entry()))

    async def apply(self, change: Change[T]) -> T:
        """Commit a change, whose transaction records the call as applied. Raises `DatabaseUnavailable`."""
        store, status = self._audit.store, self.applied_status
        entry = self._entry(status)

        def recorded(connection: Connection) -> Callable[[], T]:
            apply = change(connection)
            row_id = store.writer.begin_audit(entry, connection)

            def finish() -> T:
                # Not before the commit: the id of a row that was rolled back is used again.
                self.row_id, self._written_status = row_id, status
                return apply()

            return finish

        return await store.database.change(recorded, CHANGE_TIMEOUT_S)

    async def end(self, status: int) -> None:
        """Record the outcome, or log the record if the database does not accept it."""
        if self._written_status == status:
            return
        writer, row_id, entry = self._audit.store.writer, self.row_id, self._entry(status)

        def write(connection: Connection) -> None:
            if row_id is None or not writer.end_audit(row_id, entry, connection):
                writer.begin_audit(entry, connection)

        try:
            await self._write(write)
        except DatabaseUnavailable as exc:
            _log.warning("audit record not in the database (%s): %s", exc, json.dumps(asdict(entry)))
            self._audit.logged_only.note(self.started_s)

    async def _write(self, statements: Callable[[Connection], T]) -> T:
        return await self._audit.store.database.change(database_only(statements), RECORD_TIMEOUT_S)

    def _entry(self, status: int | None = None) -> AuditEntry:
        """Return the record with secret values masked; without a status the call is under way."""
        mask, state = SecretMask.of(self._audit.settings.current), self.scope["state"]
        client = self.scope.get("client")
        # No other query changes what a call does, and a client may send secrets in one.
        query = "?dry_run=true" if self.is_dry_run else ""
        return AuditEntry(
            time_s=self.started_s,
            token=str(state.get("token", NO_TOKEN)),
            client=client[0] if client else "",
            request_id=mask.apply(state["request_id"]),
            method=mask.apply(self.scope["method"]),
            path=mask.apply(self.scope["path"] + query)[:MAX_PATH_CHARS],
            what=describe_body(state.get("body", b""), status is not None and status < 400, mask),
            status=status,
            outcome=None if status is None else outcome_of(status),
        )


@dataclass(slots=True)
class _Prefetched:
    """Prefetches of one token and client address since `time_s`."""

    time_s: float
    num_calls: int = 0
    num_blocks: int = 0


class PrefetchAudit:
    """Records of prefetches: routers call often, so one record a minute sums up those of one token and address.

    Thread: any.
    """

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._sums: dict[tuple[str, str], _Prefetched] = {}

    def record(self, request: Request, num_blocks: int) -> None:
        """Count a prefetch."""
        client = request.client.host if request.client is not None else ""
        caller = (str(request.scope["state"].get("token", NO_TOKEN)), client)
        self._add(caller, time.time(), 1, num_blocks)

    def flush(self, min_age_s: float = 60.0) -> None:
        """Write the records of sums that began this long ago; those that the database does not accept are kept."""
        now_s = time.time()
        with self._lock:
            due = [(caller, one) for caller, one in self._sums.items() if not 0 <= now_s - one.time_s < min_age_s]
            for caller, _ in due:
                del self._sums[caller]
        if not due:
            return

        def write(connection: Connection) -> None:
            for caller, one in due:
                what = {"calls": one.num_calls, "blocks": one.num_blocks}
                entry = AuditEntry(one.time_s, *caller, "", "POST", PREFETCH_PATH, what, 202, outcome_of(202))
                self._store.writer.begin_audit(entry, connection)

        try:
            self._store.database.write(write, RECORD_TIMEOUT_S)
        except DatabaseUnavailable:
            for caller, one in due:
                self._add(caller, one.time_s, one.num_calls, one.num_blocks)

    def _add(self, caller: tuple[str, str], time_s: float, num_calls: int, num_blocks: int) -> None:
        with self._lock:
            if caller not in self._sums and len(self._sums) >= MAX_UNKNOWN_PER_MINUTE:
                caller = (caller[0], "")
            summed = self._sums.setdefault(caller, _Prefetched(time_s))
            summed.time_s = min(summed.time_s, time_s)
            summed.num_calls += num_calls
            summed.num_blocks += num_blocks


def _audited_call(request: Request) -> AuditedCall:
    call: AuditedCall = request.state.audit
    call.applied_status = request.scope["route"].status_code or 200
    return call


Audited = Annotated[AuditedCall, Depends(_audited_call)]
"""For routes that write to the database, where `apply` writes the record in the same transaction, or that wait."""
