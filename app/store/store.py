"""The metadata store of one engine: its database, the journal behind the engine, what operators write, what is read."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvferry.app.store.database import Database
from kvferry.app.store.intents import Intents
from kvferry.app.store.journal import MAX_QUEUED_ROWS, Journal, JournalStats
from kvferry.app.store.kept_rows import KeptRows, read_kept_rows
from kvferry.app.store.name_claim import NameClaim
from kvferry.app.store.projection import DirtySource
from kvferry.app.store.queries import StoreReader
from kvferry.app.store.trim import HistoryLimits

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
        num_kept_slots: int = 0,
        on_replaced: Callable[[], None] | None = None,
        claim: NameClaim | None = None,
    ) -> None:
        """Open and migrate the database at `url`; `StoreError` if that fails.

        `num_kept_slots` are the slots of a pool that outlived its process; rows of other slots are deleted.

        `engine` names the rows, and `claim` is the process's claim of that name, which the caller closes. `pool_kind`
        is the setting KVFERRY_POOL_KIND. `on_replaced` is called on the journal's thread once another database had to
        be opened, to put overrides and rules into it again.
        """
        self.engine = engine
        self.database = Database(url)
        opened = self.database.open()
        if opened.before != opened.after:
            _log.info("database %s: schema %s, was %s", self.database.name, opened.after, opened.before or "not there")
        self.journal = Journal(
            self.database,
            engine,
            pool_kind,
            limits,
            max_queued_rows=max_queued_rows,
            num_kept_slots=num_kept_slots,
            on_replaced=on_replaced,
            claim=claim,
        )
        self.intents = Intents(self.database, engine)
        self.reader = StoreReader(self.database, engine)

    def kept_rows(self) -> KeptRows:
        """What the last process of this engine wrote of its slots. Raises `StoreUnavailable` and `ValueError`."""
        return read_kept_rows(self.database, self.engine)

    def start(self, source: DirtySource) -> None:
        """Begin to write behind `source`; also after the journal's thread died."""
        self.journal.start(source)

    def journal_stats(self) -> JournalStats:
        """How far history is behind."""
        return self.journal.stats()

    def health(self) -> list[str]:
        """Why the store does not work as it should, empty when it does. Never waits."""
        return self.journal.health()

    def degraded(self) -> list[str]:
        """What is amiss though the store works. Never waits."""
        return self.journal.degraded()

    def set_limits(self, limits: HistoryLimits) -> None:
        """Hold this engine's history to other limits."""
        self.journal.set_limits(limits)

    def close(self, timeout_s: float) -> bool:
        """Write what is left, within `timeout_s`, and close; False if something was not written."""
        reasons = self.journal.health()
        clean = self.journal.close(timeout_s)
        if not clean:
            _log.warning(
                "%d rows of history were not written within %.0f s, and rows of slots may be behind: %s",
                self.journal.stats().queued,
                timeout_s,
                "; ".join(reasons) or "the database is too slow",
            )
        self.database.close()
        return clean
