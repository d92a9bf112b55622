"""Journal: a queue of events, and a thread that writes history and slots to the database.

Appending never waits. History beyond the bound of the queue is dropped and counted; changes of slots are never dropped.
A failed step is reported by `degraded`, logged at most once a minute, and tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvferry.app.logs import RateLimitedLogger
from kvferry.app.store.database import Database
from kvferry.app.store.errors import diagnose
from kvferry.app.store.history import HistoryQueue
from kvferry.app.store.name_claim import NameClaim
from kvferry.app.store.retention import HistoryLimits, HistoryTrimmer
from kvferry.app.store.schema import ENGINES, upsert
from kvferry.app.store.slot_rows import SlotProjection
from kvferry.core.counters import counter, gauge
from kvferry.core.errors import Failure, FailureCause
from kvferry.core.pool.events import CacheEvent, EvictionBatch, RegretBatch, ResetEvent
from kvferry.core.pool.inventory import Inventory

_log = logging.getLogger(__name__)

MAX_QUEUED_ROWS = 100_000
INTERVAL_S = 0.5
PROBE_INTERVAL_S = 1.0
SEEN_INTERVAL_S = 60.0
MAX_BACKOFF_S = 2.0
STUCK_S = 30.0
LOG_INTERVAL_S = 60.0


@dataclass(frozen=True, slots=True)
class JournalStats:
    """How far history is behind."""

    queued: int = gauge("History rows waiting to be written", "journal_queued")
    written: int = counter("History rows written", "journal_written")
    dropped: int = counter("History rows dropped because the database was too slow or gone", "journal_dropped")
    lag_s: float = gauge("Age of the oldest history row not yet written", "journal_lag_seconds", default=0.0)


class Journal:
    """Queue of evictions, resets and regrets, and a thread that writes them."""

    def __init__(
        self,
        database: Database,
        engine: str,
        pool_kind: str,
        limits: HistoryLimits | None = None,
        num_recovered_slots: int = 0,
        max_queued_rows: int = MAX_QUEUED_ROWS,
        claim: NameClaim | None = None,
    ) -> None:
        """Write rows of `engine`, whose name `claim` reserves for this process; see `MetadataStore`."""
        self._database = database
        self._engine = engine
        self._pool_kind = pool_kind
        self._limits = limits or HistoryLimits()
        self._claim = claim
        self._clock = time.time
        self._history = HistoryQueue(engine, max_queued_rows)
        self._projection = SlotProjection(engine, num_recovered_slots)
        self._trimmer = HistoryTrimmer(engine, self._limits)
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._round_done = threading.Condition()
        self._clean_rounds = 0
        self._started_at_s = 0.0
        self._seen_s = float("-inf")
        self._claimed_s = float("-inf")
        self._name_conflict: str | None = None
        self._round_started_s = 0.0
        self._failures: dict[str, Failure] = {}
        self._seldom = RateLimitedLogger(_log, interval_s=LOG_INTERVAL_S)
        self._logged: set[str] = set()
        self.num_failures = 0

    def append(self, event: CacheEvent) -> None:
        """Queue an eviction, a reset or a regret, or drop and count it. Requires: manager lock held."""
        if isinstance(event, EvictionBatch):
            self._history.append(event, len(event.rows.slots))
        elif isinstance(event, RegretBatch):
            self._history.append(event, len(event.keys))
        elif isinstance(event, ResetEvent):
            # The rows of older epochs are deleted even if the queue is full.
            self._projection.drop_before(event.epoch)
            self._history.append(event, 1)

    def set_limits(self, limits: HistoryLimits) -> None:
        """Apply other limits of history soon. Thread: any."""
        self._limits = limits
        self._trimmer.set_limits(limits)
        self._seen_s = float("-inf")

    def start(self, source: Inventory) -> None:
        """Start the thread, or start it again if it died."""
        if self.is_alive():
            return
        self._started_at_s = self._clock()
        self._round_started_s = time.monotonic()
        self._closing.clear()
        self._thread = threading.Thread(target=self._run, args=(source,), name="kvferry-journal", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Write within `timeout_s` and end the thread; return False if something was not written."""
        deadline_s = time.monotonic() + timeout_s
        clean = self.flush(timeout_s)
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            # The thread ends with the process even if a transaction hangs.
            self._thread.join(max(0.0, deadline_s - time.monotonic()) + self._database.busy_timeout_s)
        return clean and not self._history.queued_rows

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything appended or dirty before this call is written; return False after `timeout_s`."""
        if not self.is_alive():
            return not self._history.queued_rows
        with self._round_done:
            # The current round may have begun before the last append; the one after it has not.
            wanted = self._clean_rounds + 2
            deadline_s = time.monotonic() + timeout_s
            while self._clean_rounds < wanted:
                self._wake.set()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self.is_alive() or self._is_replaced():
                    return False
                self._round_done.wait(min(left_s, INTERVAL_S))
        return True

    def _is_replaced(self) -> bool:
        return any(failure.cause is FailureCause.GONE for failure in list(self._failures.values()))

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def stats(self) -> JournalStats:
        """Return how far history is behind."""
        queued = self._history.queued_rows
        oldest_s = self._history.oldest_s() if queued else None
        return JournalStats(
            queued=queued,
            written=self._history.written_rows,
            dropped=self._history.dropped_rows + self._history.rejected_rows,
            lag_s=0.0 if oldest_s is None else max(0.0, time.monotonic() - oldest_s),
        )

    def degraded(self) -> list[str]:
        """Return why rows are not written, or are mixed with those of another process. Never waits."""
        if not self.is_alive():
            return ["the journal's thread does not run: history and slots are not written"]
        now_s = time.monotonic()
        since_s: dict[str, float] = {}
        for name, failure in list(self._failures.items()):
            text = failure.text
            if failure.cause is FailureCause.INTERNAL:
                text = f"the journal failed at {name}: {text}"
            since_s[text] = min(failure.since_s, since_s.get(text, now_s))
        reasons = [f"{text} (for {now_s - start_s:.0f} s)" for text, start_s in since_s.items()]
        if now_s - self._round_started_s > STUCK_S:
            reasons.append(f"the journal: one write has taken {now_s - self._round_started_s:.0f} s")
        conflict = self._name_conflict
        if conflict is not None:
            reasons.append(conflict)
        return reasons

    def _run(self, source: Inventory) -> None:
        backoff_s = INTERVAL_S
        while not self._closing.is_set():
            more, failed = self._round(source)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S) if failed else INTERVAL_S
            if not more and not failed:
                with self._round_done:
                    self._clean_rounds += 1
                    self._round_done.notify_all()
            if failed:
                # Neither a flush nor a full queue shortens the pause.
                self._closing.wait(backoff_s)
            elif not more and self._wake.wait(INTERVAL_S):
                self._wake.clear()

    def _round(self, source: Inventory) -> tuple[bool, bool]:
        """Run every step once; return whether more work waits, and whether a step failed."""
        self._round_started_s = time.monotonic()
        steps: tuple[tuple[str, Callable[[], bool | None]], ...] = (
            ("connection", self._database.check),
            ("engine name", self._keep_name),
            ("registration", self._register),
            ("history", lambda: self._history.step(self._database)),
            ("slots", lambda: self._projection.step(self._database, source)),
            ("trimming", self._trim),
            ("probe", self._probe),
        )
        more = failed = False
        for name, step in steps:
            try:
                more |= bool(step())
            except Exception as error:  # noqa: BLE001  the journal must outlive every error
                failed = True
                failure = diagnose(error, self._database.name)
                self._record_failure(name, failure, error)
                if failure.cause not in (FailureCause.FULL, FailureCause.INTERNAL):
                    if failure.cause not in (FailureCause.LOCKED, FailureCause.GONE):
                        # A connection that was opened read-only, or lost its server, does not recover.
                        self._database.drop_connections()
                    break
            else:
                self._failures.pop(name, None)
                if name in self._logged:
                    self._logged.discard(name)
                    _log.info("journal: step works again: %s", name)
        return more, failed

    def _register(self) -> None:
        now_s = self._clock()
        if time.monotonic() - self._seen_s < SEEN_INTERVAL_S:
            return
        row = {
            "name": self._engine,
            "pool_kind": self._pool_kind,
            "epoch": self._projection.epoch,
            "started_at": self._started_at_s,
            "seen_at": now_s,
            "eviction_rows": self._limits.eviction_rows,
            "eviction_days": self._limits.eviction_days,
        }
        with self._database.write() as connection:
            upsert(connection, ENGINES, [row])
        self._seen_s = time.monotonic()

    def _keep_name(self) -> None:
        """Keep the claim of the engine's name, which may be lost with the database and taken by another process."""
        if self._claim is None or time.monotonic() - self._claimed_s < PROBE_INTERVAL_S:
            return
        conflict: str | None = None
        if not self._claim.keep():
            conflict = (
                f"KVFERRY_ENGINE_NAME={self._engine}: another process ({self._claim.holder()}) writes to "
                f"{self._database.name} under this name, so that their rows are mixed; give one of them another name"
            )
            if self._name_conflict is None:
                _log.warning("journal: %s", conflict)
        self._name_conflict = conflict
        self._claimed_s = time.monotonic()

    def _trim(self) -> bool:
        return self._trimmer.step(self._database, self._clock(), self._history.written_rows)

    def _probe(self) -> None:
        """Take the write lock when there was nothing to write, to notice a database that cannot be written."""
        if time.monotonic() - self._database.written_s > PROBE_INTERVAL_S:
            with self._database.write():
                pass

    def _record_failure(self, name: str, failure: Failure, error: Exception) -> None:
        self.num_failures += 1
        known = self._failures.get(name)
        self._failures[name] = replace(failure, since_s=known.since_s if known else time.monotonic())
        trace = error if failure.cause is FailureCause.INTERNAL else None
        message = "journal: step failed, will retry: %s: %s"
        key = f"{name}: {failure.cause}"
        if self._seldom.log(logging.WARNING, key, message, name, failure.text, exc_info=trace):
            self._logged.add(name)
