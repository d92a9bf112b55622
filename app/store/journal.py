"""The journal: a thread that writes behind the engine, and goes on when the database does not.

Whoever appends never waits. History beyond the bound of the queue is dropped and counted; the projection of the slots
is never dropped. Whatever fails is told by `health`, logged once a while, and tried again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.app.seldom import SeldomLogger
from kvferry.app.store.database import Database
from kvferry.app.store.errors import DatabaseReplaced, Diagnosis, Trouble, diagnose
from kvferry.app.store.history import HistoryWriter
from kvferry.app.store.models import EngineRow
from kvferry.app.store.name_claim import NameClaim
from kvferry.app.store.projection import DirtySource, SlotProjection
from kvferry.app.store.queue import HistoryItem, HistoryQueue, Regrets
from kvferry.app.store.trim import HistoryLimits, HistoryTrimmer
from kvferry.app.store.upsert import upsert
from kvferry.core.keys import Key
from kvferry.core.pool.events import EvictionBatch, NullSink, ResetEvent

_log = logging.getLogger(__name__)

MAX_QUEUED_ROWS = 100_000
INTERVAL_S = 0.25
PROBE_INTERVAL_S = 1.0
SEEN_INTERVAL_S = 60.0
MAX_BACKOFF_S = 2.0
STUCK_S = 30.0
LOG_INTERVAL_S = 60.0
REPLACEMENT_GRACE_S = 1.0
"""Whoever moves a database away and another in needs a moment between the two; opening at once would create a third."""


class JournalStats(NamedTuple):
    """Rows of history waiting, written and dropped so far, and the age of the oldest that waits."""

    queued: int
    written: int
    dropped: int
    lag_s: float


@dataclass(frozen=True, slots=True)
class _Ailment:
    """A trouble of one part of the journal, and since when by the monotonic clock."""

    diagnosis: Diagnosis
    since_s: float


class Journal(NullSink):
    """An `EventSink` with a thread behind it, which lets pass what history does not keep.

    One thread at a time may append: the manager's lock sees to that.
    """

    def __init__(
        self,
        database: Database,
        engine: str,
        pool_kind: str,
        limits: HistoryLimits | None = None,
        num_kept_slots: int = 0,
        max_queued_rows: int = MAX_QUEUED_ROWS,
        clock: Callable[[], float] = time.time,
        on_replaced: Callable[[], None] | None = None,
        claim: NameClaim | None = None,
    ) -> None:
        """`engine` names the rows, and `claim` is this process's claim of that name.

        Of a pool that outlived its process, `num_kept_slots` are the slots there are.

        `on_replaced` is called on the journal's thread once another database was opened, to write again what memory
        knows besides slots: overrides and rules. What it raises has it called again.
        """
        self._database = database
        self._engine = engine
        self._pool_kind = pool_kind
        self._limits = limits or HistoryLimits()
        self._clock = clock
        self._on_replaced = on_replaced
        self._claim = claim
        self._queue = HistoryQueue(max_queued_rows)
        self._history = HistoryWriter(engine, self._queue)
        self._projection = SlotProjection(engine, num_kept_slots)
        self._trimmer = HistoryTrimmer(engine, self._limits)
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._round_done = threading.Condition()
        self._clean_rounds = 0
        self._started_at_s = 0.0
        self._seen_s = float("-inf")
        self._claimed_s = float("-inf")
        self._rival: str | None = None
        self._beat_s = 0.0
        self._lost = False
        self._restoring = False
        self._ailments: dict[str, _Ailment] = {}
        self._seldom = SeldomLogger(_log, interval_s=LOG_INTERVAL_S)
        self._complained: set[str] = set()
        self.failures = 0

    # --- the sink: called under the manager's lock ---------------------------------------------------------------

    def evicted(self, batch: EvictionBatch) -> None:
        """Queue a batch of evictions, or drop and count it."""
        self._append(batch, len(batch.rows.slots))

    def was_reset(self, event: ResetEvent) -> None:
        """Have the rows of older epochs removed; this is never dropped."""
        self._projection.forget_before(event.epoch)
        self._append(event, 1)

    def regretted(self, keys: Sequence[Key], time_s: float) -> None:
        """Queue that evicted keys were asked for again."""
        self._append(Regrets(keys, time_s), len(keys))

    def _append(self, item: HistoryItem, rows: int) -> None:
        self._queue.append(item, rows)

    # --- steering ------------------------------------------------------------------------------------------------

    def set_limits(self, limits: HistoryLimits) -> None:
        """Hold history to other limits, soon. Any thread."""
        self._limits = limits
        self._trimmer.set_limits(limits)
        self._seen_s = float("-inf")

    # --- running -------------------------------------------------------------------------------------------------

    def start(self, source: DirtySource) -> None:
        """Start the thread, or start it again should it have died."""
        if self.is_alive():
            return
        self._started_at_s = self._clock()
        self._beat_s = time.monotonic()
        self._closing.clear()
        self._thread = threading.Thread(target=self._run, args=(source,), name="kvferry-journal", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> bool:
        """Write what can be written within `timeout_s` and end the thread; False if something was left."""
        deadline_s = time.monotonic() + timeout_s
        clean = self.flush(timeout_s)
        self._closing.set()
        self._wake.set()
        if self._thread is not None:
            # A transaction under way ends by itself; the thread cannot outlive the process.
            self._thread.join(max(0.0, deadline_s - time.monotonic()) + self._database.busy_timeout_s)
        return clean and not self._queue.queued_rows

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was appended or dirty before this call is written; False if that took too long."""
        if not self.is_alive():
            return not self._queue.queued_rows
        with self._round_done:
            # The round under way may have looked too early; the one after it has not.
            wanted = self._clean_rounds + 2
            deadline_s = time.monotonic() + timeout_s
            while self._clean_rounds < wanted:
                self._wake.set()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self.is_alive():
                    return False
                self._round_done.wait(min(left_s, INTERVAL_S))
        return True

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def stats(self) -> JournalStats:
        """How far history is behind."""
        queued = self._queue.queued_rows
        oldest_s = self._queue.oldest_s() if queued else None
        return JournalStats(
            queued=queued,
            written=self._history.written_rows,
            dropped=self._queue.dropped_rows + self._history.refused_rows,
            lag_s=0.0 if oldest_s is None else max(0.0, time.monotonic() - oldest_s),
        )

    def health(self) -> list[str]:
        """Why the store does not keep up, empty when it does. Reads memory only."""
        if not self.is_alive():
            return ["the journal's thread does not run: history and slots are not written"]
        now_s = time.monotonic()
        since_s: dict[str, float] = {}
        for name, ailment in list(self._ailments.items()):
            text = ailment.diagnosis.text
            if ailment.diagnosis.trouble is Trouble.INTERNAL:
                text = f"the journal fails at {name}: {text}"
            since_s[text] = min(ailment.since_s, since_s.get(text, now_s))
        told = [f"{text} (for {now_s - start_s:.0f} s)" for text, start_s in since_s.items()]
        if now_s - self._beat_s > STUCK_S:
            told.append(f"the journal has been at one write for {now_s - self._beat_s:.0f} s")
        return told

    def degraded(self) -> list[str]:
        """What is amiss though all is written. Reads memory only."""
        rival = self._rival
        return [] if rival is None else [rival]

    # --- the thread ----------------------------------------------------------------------------------------------

    def _run(self, source: DirtySource) -> None:
        backoff_s = INTERVAL_S
        while not self._closing.is_set():
            more, failed = self._round(source)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S) if failed else INTERVAL_S
            if not more and not failed:
                with self._round_done:
                    self._clean_rounds += 1
                    self._round_done.notify_all()
            if failed:
                # Neither a flush nor a full queue makes a database well.
                self._closing.wait(backoff_s)
            elif not more and self._wake.wait(INTERVAL_S):
                self._wake.clear()

    def _round(self, source: DirtySource) -> tuple[bool, bool]:
        """One look at everything: whether there is more to do at once, and whether something failed."""
        self._beat_s = time.monotonic()
        steps: tuple[tuple[str, Callable[[], bool]], ...] = (
            ("connection", lambda: self._reconnect(source)),
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
                more |= step()
            except Exception as error:  # noqa: BLE001  whatever it is, the journal goes on and says so
                failed = True
                diagnosis = diagnose(error, self._database.name)
                self._note(name, diagnosis, error)
                if diagnosis.trouble not in (Trouble.FULL, Trouble.INTERNAL):
                    self._lost |= diagnosis.trouble is not Trouble.LOCKED
                    break
            else:
                self._ailments.pop(name, None)
                if name in self._complained:
                    self._complained.discard(name)
                    _log.info("journal: %s works again", name)
        return more, failed

    def _reconnect(self, source: DirtySource) -> bool:
        try:
            self._database.check()
        except DatabaseReplaced:
            ailment = self._ailments.get("connection")
            if ailment is None or time.monotonic() - ailment.since_s < REPLACEMENT_GRACE_S:
                raise
            self._lost = True
        if self._lost:
            self._restoring |= self._database.reopen()
            self._lost = False
        if self._restoring:
            self._projection.start_over(source)
            self._seen_s = float("-inf")
            if self._on_replaced is not None:
                self._on_replaced()
            self._restoring = False
            _log.warning("journal: opened another database at %s; slots are written to it anew", self._database.name)
        return False

    def _register(self) -> bool:
        now_s = self._clock()
        if time.monotonic() - self._seen_s < SEEN_INTERVAL_S:
            return False
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
            upsert(connection, EngineRow, [row])
        self._seen_s = time.monotonic()
        return False

    def _keep_name(self) -> bool:
        """Look after the claim of the engine's name, which may be lost with the database and taken by another."""
        if self._claim is None or time.monotonic() - self._claimed_s < PROBE_INTERVAL_S:
            return False
        rival: str | None = None
        if not self._claim.keep():
            rival = (
                f"another process ({self._claim.holder()}) writes into {self._database.name} under the name "
                f"{self._engine}, too, so that slots, history, overrides and rules of both are mixed there: give one "
                "of them another KVFERRY_ENGINE_NAME"
            )
            if self._rival is None:
                _log.warning("%s", rival)
        self._rival = rival
        self._claimed_s = time.monotonic()
        return False

    def _trim(self) -> bool:
        return self._trimmer.step(self._database, self._clock(), self._history.written_rows)

    def _probe(self) -> bool:
        """Take the lock for a moment when there was nothing to write, to notice a database that cannot be written."""
        if time.monotonic() - self._database.written_s > PROBE_INTERVAL_S:
            with self._database.write():
                pass
        return False

    def _note(self, name: str, diagnosis: Diagnosis, error: Exception) -> None:
        self.failures += 1
        known = self._ailments.get(name)
        self._ailments[name] = _Ailment(diagnosis, known.since_s if known else time.monotonic())
        trace = error if diagnosis.trouble is Trouble.INTERNAL else None
        message = "journal: %s failed, and will be tried again: %s"
        key = f"{name}: {diagnosis.trouble}"
        if self._seldom.log(logging.WARNING, key, message, name, diagnosis.text, exc_info=trace):
            self._complained.add(name)
