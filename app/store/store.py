"""Metadata store of one engine, and the commands that open a database without an engine."""

from __future__ import annotations

import errno
import logging
import os

from kvferry.app.common.folders import can_hold_files, nearest_folder
from kvferry.app.store.database import DEFAULT_WAITS, Database, Waits, make_engine, masked, parse_url, sqlite_path
from kvferry.app.store.errors import raising_store_error
from kvferry.app.store.intents import StoreWriter
from kvferry.app.store.journal import MAX_QUEUED_ROWS, Journal
from kvferry.app.store.migrate import Upgrade, check_revision
from kvferry.app.store.name_claim import NameClaim
from kvferry.app.store.reader import StoreReader
from kvferry.app.store.retention import HistoryLimits
from kvferry.app.store.slot_rows import SlotColumns, read_slots
from kvferry.app.store.threads import StoreThreads
from kvferry.core.pool.inventory import Inventory

_log = logging.getLogger(__name__)


class MetadataStore:
    """The database of one engine with its journal, writer and reader. Opened once at start.

    After `start`, a failing database raises nothing but `DatabaseUnavailable`, and is reported by `degraded`.
    """

    def __init__(
        self,
        url: str,
        engine: str,
        pool_kind: str,
        limits: HistoryLimits | None = None,
        max_queued_rows: int = MAX_QUEUED_ROWS,
        num_recovered_slots: int = 0,
        claim: NameClaim | None = None,
        waits: Waits = DEFAULT_WAITS,
    ) -> None:
        """Open and migrate the database at `url`.

        Args:
            url: as in KVFERRY_DATABASE_URL.
            engine: the name in all rows.
            pool_kind: the setting KVFERRY_POOL_KIND.
            limits: of history; None for the defaults.
            max_queued_rows: bound of the journal's queue.
            num_recovered_slots: slots of a pool that outlived its process; rows of other slots are deleted.
            claim: this process's claim of the engine's name, which the caller closes.
            waits: time limits.

        Raises:
            StoreError: the database cannot be opened.
        """
        self.engine = engine
        self.database = Database(url, waits)
        opened = self.database.open()
        if opened.before != opened.after:
            _log.info(
                "database: schema upgraded from %s to %s: %s", opened.before or "none", opened.after, self.database.name
            )
        self.journal = Journal(
            self.database,
            engine,
            pool_kind,
            limits,
            num_recovered_slots=num_recovered_slots,
            max_queued_rows=max_queued_rows,
            claim=claim,
        )
        self.writer = StoreWriter(engine)
        self.reader = StoreReader(self.database, engine)
        self.threads = StoreThreads()

    def read_slots(self) -> SlotColumns:
        """Return the rows that the last process of this engine wrote. Raises `DatabaseUnavailable` and `ValueError`."""
        return read_slots(self.database, self.engine)

    def start(self, source: Inventory) -> None:
        """Start the journal, also after its thread died; `source` has the rows of slots."""
        self.journal.start(source)

    def degraded(self) -> list[str]:
        """Return what is wrong with the store. Never waits."""
        return self.journal.degraded()

    def set_limits(self, limits: HistoryLimits) -> None:
        """Apply other limits to this engine's history."""
        self.journal.set_limits(limits)

    def close(self, timeout_s: float) -> bool:
        """Write within `timeout_s` and close; return False if something was not written."""
        reasons = [*self.journal.thread.degraded(), *self.journal.degraded()]
        clean = self.journal.close(timeout_s)
        if not clean:
            _log.warning(
                "%d rows of history were not written within %.0f s, and rows of slots may be outdated: %s",
                self.journal.stats().queued,
                timeout_s,
                "; ".join(reasons) or "the database is too slow",
            )
        self.threads.close()
        self.database.close()
        return clean


def check_database(url: str) -> None:
    """Raise `StoreError` for a database that cannot be opened; create and change nothing."""
    parsed = parse_url(url)
    path = sqlite_path(parsed)
    with raising_store_error(masked(parsed)):
        if path is not None:
            folder = nearest_folder(path)
            if not (os.access(folder, os.W_OK) if folder == path else can_hold_files(folder)):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
            if folder != path:
                return
        engine = make_engine(parsed, DEFAULT_WAITS.open_s, read_only=True)
        try:
            with engine.connect() as connection:
                check_revision(connection)
        finally:
            engine.dispose()


def upgrade(url: str, waits: Waits = DEFAULT_WAITS) -> Upgrade:
    """Create a database or migrate it to this version's schema. Raises `StoreError`."""
    database = Database(url, waits)
    try:
        return database.open()
    finally:
        database.close()
