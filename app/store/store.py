"""The metadata store of one engine: its database, the journal behind the engine, what operators write, what is read."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from app.store.database import Database
from app.store.intents import Intents
from app.store.journal import MAX_QUEUED_ROWS, Journal, JournalStats
from app.store.projection import DirtySource
from app.store.queries import StoreReader
from app.store.records import AuditEntry, OverrideRecord
from app.store.trim import HistoryLimits

_log = logging.getLogger(__name__)


class Store:
    """Opened once at start; `journal` is the manager's sink.

    After `start`, no failure of the database gets out of it but as `StoreUnavailable`, and as a reason in `health`.
    """

    def __init__(
        self,
        url: str,
        engine: str,
        pool_kind: str,
        limits: HistoryLimits | None = None,
        max_queued_rows: int = MAX_QUEUED_ROWS,
        on_replaced: Callable[[], None] | None = None,
    ) -> None:
        """Open and migrate the database at `url`; `StoreError` if that fails.

        `engine` is the setting ENGINE_NAME and `pool_kind` POOL_KIND. `on_replaced` is called on the journal's thread
        once another database had to be opened, to put overrides and rules into it again.
        """
        self.engine = engine
        self.database = Database(url)
        opened = self.database.open()
        if opened.before != opened.after:
            _log.info("database %s: schema %s, was %s", self.database.name, opened.after, opened.before or "not there")
        self.journal = Journal(
            self.database, engine, pool_kind, limits, max_queued_rows=max_queued_rows, on_replaced=on_replaced
        )
        self.intents = Intents(self.database, engine)
        self.reader = StoreReader(self.database, engine)

    def start(self, source: DirtySource) -> None:
        """Begin to write behind `source`; also after the journal's thread died."""
        self.journal.start(source)

    def journal_stats(self) -> JournalStats:
        """How far history is behind."""
        return self.journal.stats()

    def health(self) -> list[str]:
        """Why the store does not work as it should, empty when it does. Never waits."""
        return self.journal.health()

    def set_limits(self, limits: HistoryLimits) -> None:
        """Hold this engine's history to other limits."""
        self.journal.set_limits(limits)

    def close(self, timeout_s: float) -> bool:
        """Write what is left, within `timeout_s`, and close; False if something was not written."""
        clean = self.journal.close(timeout_s)
        self.database.close()
        return clean

    # --- what the admin API writes; lists are read from `reader`. All may raise `StoreUnavailable`, in bounded time --

    def begin_audit(self, entry: AuditEntry) -> int:
        """Record a call that is about to change something; the number it got."""
        return self.intents.begin_audit(entry)

    def end_audit(self, audit_id: int, status: int, outcome: str) -> bool:
        """Say how a recorded call ended; False if its record is not there any more."""
        return self.intents.end_audit(audit_id, status, outcome)

    def save_override(self, request_id: str, policy: Mapping[str, Any], now_s: float, expires_s: float) -> None:
        """Keep what was set for a request id across restarts."""
        self.intents.save_override(request_id, policy, now_s, expires_s)

    def delete_override(self, request_id: str) -> bool:
        """Forget what was set for a request id; False if nothing was."""
        return self.intents.delete_override(request_id)

    def load_overrides(self, now_s: float) -> list[OverrideRecord]:
        """Overrides that still hold."""
        return self.reader.load_overrides(now_s)
