"""Journal: a queue of events, and a thread that writes history, slots and heartbeat to the database.

It writes once a second, in one transaction, and goes on at once while more rows wait than one transaction takes.
Appending never waits. History beyond the bound of the queue is dropped and counted; changes of slots are not. Rows that
the database rejects are dropped and counted.
A failed step is reported by `degraded`, logged at most once a minute, and tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from sqlalchemy import Connection

from kvferry.app.common.threads import WatchedThread
from kvferry.app.store.database import Database
from kvferry.app.store.engine_rows import Registration
from kvferry.app.store.errors import diagnose, explain
from kvferry.app.store.history import HistoryQueue
from kvferry.app.store.name_claim import NameClaim
from kvferry.app.store.retention import HistoryLimits, HistoryTrimmer
from kvferry.app.store.slot_rows import SlotProjection, WrittenSlots
from kvferry.app.telemetry.history import Row as StatsRow
from kvferry.app.telemetry.logs import RateLimitedLogger
from kvferry.core.counters import counter, gauge
from kvferry.core.errors import Failure, FailureCause
from kvferry.core.pool.events import CacheEvent, EvictionBatch, RegretBatch, ResetEvent
from kvferry.core.pool.inventory import Inventory

_log = logging.getLogger(__name__)

MAX_QUEUED_ROWS = 100_000
SLOW_WRITE_S = 10.0
LOG_INTERVAL_S = 60.0

_Step = tuple[str, Callable[[], bool | None]]
"""Name of a step for logs and `/readyz`, and its call, which returns whether more work waits."""


@dataclass(frozen=True, slots=True)
class JournalStats:
    """How far history is behind."""

    queued: int = gauge("History rows waiting to be written", "journal_queued")
    written: int = counter("History rows written", "journal_written")
    dropped: int = counter(
        "History rows dropped because the database was too slow or gone, and rows of slots that it rejected",
        "journal_dropped",
    )
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
        self._database, self._waits = database, database.waits
        self._engine = engine
        self._claim = claim
        self._clock = time.time
        self._history = HistoryQueue(engine, max_queued_rows)
        self._projection = SlotProjection(engine, num_recovered_slots)
        self._trimmer = HistoryTrimmer(engine, limits or HistoryLimits())
        self._registration = Registration(engine, pool_kind, limits or HistoryLimits())
        self._source: Inventory | None = None
        self.thread = WatchedThread("kvferry-journal", self._run, "history and slots are not written")
        self._wake = threading.Event()
        self._round_done = threading.Condition()
        self._clean_rounds = 0
        self._claimed_s = float("-inf")
        self._name_conflict: str | None = None
        self._round_started_s = 0.0
        self._round_took_s = 0.0
        self._failures: dict[str, Failure] = {}
        self._limited_log = RateLimitedLogger(_log, interval_s=LOG_INTERVAL_S)
        self._logged: set[str] = set()
        self.num_failures = 0

    def append(self, event: CacheEvent | StatsRow) -> None:
        """Queue an eviction, a reset, a regret or a row of stats, or drop and count it. Requires: manager lock held."""
        if isinstance(event, EvictionBatch):
            self._history.append(event, len(event.rows.slots))
        elif isinstance(event, StatsRow):
            self._history.append(event, 1)
        elif isinstance(event, RegretBatch):
            self._history.append(event, len(event.keys))
        elif isinstance(event, ResetEvent):
            # The rows of older epochs are deleted even if the queue is full.
            self._projection.drop_before(event.epoch)
            self._history.append(event, 1)

    def set_limits(self, limits: HistoryLimits) -> None:
        """Apply other limits of history soon. Thread: any."""
        self._trimmer.set_limits(limits)
        self._registration.set_limits(limits)

    def start(self, source: Inventory) -> None:
        """Start the thread, or start it again if it died; see `MetadataStore`."""
        self._source = source
        self._round_started_s = time.monotonic()
        self.thread.start()

    def close(self, timeout_s: float) -> bool:
        """Write within `timeout_s` and end the thread; return False if something was not written."""
        deadline_s = time.monotonic() + timeout_s
        clean = self.flush(timeout_s)
        self.thread.closing.set()
        self._wake.set()
        # The thread ends with the process even if a transaction hangs.
        self.thread.close(max(0.0, deadline_s - time.monotonic()) + self._waits.busy_s)
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
                self._round_done.wait(min(left_s, self._waits.round_s))
        return True

    def _is_replaced(self) -> bool:
        return any(failure.cause is FailureCause.GONE for failure in list(self._failures.values()))

    def is_alive(self) -> bool:
        """Return whether the thread runs."""
        return self.thread.is_alive()

    def stats(self) -> JournalStats:
        """Return how far history is behind."""
        queued = self._history.queued_rows
        oldest_s = self._history.oldest_s() if queued else None
        return JournalStats(
            queued=queued,
            written=self._history.written_rows,
            dropped=self._history.dropped_rows + self._history.rejected_rows + self._projection.rejected_rows,
            lag_s=0.0 if oldest_s is None else max(0.0, time.monotonic() - oldest_s),
        )

    def degraded(self) -> list[str]:
        """Return why rows are not written, or are mixed with those of another process, for `/readyz`. Never waits.

        The death of the thread is not among it: `thread` reports that.
        """
        if not self.is_alive():
            return []
        now_s = time.monotonic()
        since_s: dict[str, float] = {}
        for name, failure in list(self._failures.items()):
            text = failure.text
            if failure.cause is FailureCause.INTERNAL:
                text = f"the journal failed at {name}: {text}"
            since_s[text] = min(failure.since_s, since_s.get(text, now_s))
        reasons = [f"{text} (for {now_s - start_s:.0f} s)" for text, start_s in since_s.items()]
        # The latest whole one counts until the next has ended, so that a slow database shows all the time.
        took_s = max(self._round_took_s, now_s - self._round_started_s)
        if took_s > SLOW_WRITE_S:
            reasons.append(f"the journal: one write has taken {took_s:.0f} s")
        conflict = self._name_conflict
        if conflict is not None:
            reasons.append(conflict)
        return reasons

    def _run(self) -> None:
        if self._source is None:
            return
        steps: list[_Step] = [
            ("connection", self._database.check),
            ("engine name", self._keep_name),
            ("history", self._history.prepare),
            ("slots", partial(self._projection.prepare, self._source)),
            ("writing", self._write),
            ("trimming", self._trim),
        ]
        backoff_s = self._waits.round_s
        while not self.thread.closing.is_set():
            more, failed = self._round(steps)
            backoff_s = min(backoff_s * 2, self._waits.max_backoff_s) if failed else self._waits.round_s
            if not more and not failed:
                with self._round_done:
                    self._clean_rounds += 1
                    self._round_done.notify_all()
            if failed:
                # Neither a flush nor a full queue shortens the pause.
                self.thread.closing.wait(backoff_s)
            elif not more and self._wake.wait(self._waits.round_s):
                self._wake.clear()
        if not self._failures:
            self._round([("registration", self._write_end)])

    def _round(self, steps: Sequence[_Step]) -> tuple[bool, bool]:
        """Run each step once; return whether more work waits, and whether a step failed."""
        self._round_started_s = time.monotonic()
        more = failed = False
        for name, step in steps:
            try:
                more |= bool(step())
            except Exception as error:  # noqa: BLE001  the journal must outlive every error
                failed = True
                if self._fail(name, error):
                    break
            else:
                self._note_success(name)
        self._round_took_s = time.monotonic() - self._round_started_s
        return more, failed

    def _write(self) -> bool:
        """Write what was prepared in one transaction, so that an engine sends few; return whether more waits."""
        is_due = self._registration.is_due
        if not (is_due or self._history.is_ready or not self._projection.is_up_to_date):
            return False

        def write(connection: Connection) -> tuple[int, WrittenSlots]:
            if is_due:
                self._registration.write(self._clock(), connection)
            return self._history.write(connection), self._projection.write(connection)

        num_rejected, slots = self._database.write(write)
        if is_due:
            self._registration.confirm()
        has_history = self._history.confirm(num_rejected)
        return self._projection.confirm(slots) or has_history

    def _fail(self, name: str, error: BaseException) -> bool:
        """Record and log the failure of a step; return whether the steps after it would fail, too."""
        self.num_failures += 1
        failure, known = diagnose(error), self._failures.get(name)
        failure = replace(failure, since_s=known.since_s if known else time.monotonic())
        self._failures[name] = failure
        message = "journal: step failed, will retry: %s: %s"
        key, text = f"{name}: {failure.text}", f"{failure.text} ({explain(error, self._database.name)})"
        trace = error if failure.cause is FailureCause.INTERNAL else None
        if self._limited_log.log(logging.WARNING, key, message, name, text, exc_info=trace):
            self._logged.add(name)
        if failure.cause in (FailureCause.FULL, FailureCause.INTERNAL):
            return False
        # Earlier failures of the steps after it are outdated.
        since_s = min(other.since_s for other in self._failures.values())
        self._failures = {name: replace(failure, since_s=since_s)}
        if failure.cause not in (FailureCause.LOCKED, FailureCause.GONE):
            # A connection that was opened read-only, or lost its server, does not recover.
            self._database.drop_connections()
            # A server that ended connections has released the name, too.
            self._claimed_s = float("-inf")
        return True

    def _note_success(self, name: str) -> None:
        self._failures.pop(name, None)
        if name in self._logged:
            self._logged.discard(name)
            _log.info("journal: step works again: %s", name)

    def _write_end(self) -> None:
        self._database.write(partial(self._registration.write_end, self._clock()))

    def _keep_name(self) -> None:
        """Keep the claim of the engine's name, which may be lost with the database and taken by another process."""
        if self._claim is None or time.monotonic() - self._claimed_s < self._claim.check_interval_s:
            return
        conflict: str | None = None
        if not self._claim.keep():
            conflict = (
                "another process writes to the database under this engine's name, so that their rows are mixed; give "
                "one of them another KVFERRY_ENGINE_NAME"
            )
            if self._name_conflict is None:
                _log.warning("journal: %s: %s (%s)", conflict, self._database.name, self._claim.holder())
        self._name_conflict = conflict
        self._claimed_s = time.monotonic()

    def _trim(self) -> bool:
        return self._trimmer.step(self._database, self._clock())
