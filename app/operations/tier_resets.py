"""Resets that tiers have not completed, in the metadata store, so that the next process repeats them.

A tier whose server cannot be reached keeps a reset open, in memory. The rows of the database follow the open resets:
within a second, and before a response says that a reset is pending. A reset that ends in between is never written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from pydantic import TypeAdapter

from kvferry.app.store import DatabaseUnavailable, MetadataStore, StoredReset
from kvferry.core.keys import Key, RequestFilter
from kvferry.core.scheduler.resets import Resets, TierReset

_log = logging.getLogger(__name__)

_GLOBS = TypeAdapter(dict[str, str | None])


class TierResets:
    """The rows of open resets. Thread: any; calls wait for the database, for a bounded time."""

    def __init__(self, store: MetadataStore, resets: Resets, write_timeout_s: float = 3.0) -> None:
        self._write_timeout_s = write_timeout_s
        self._store = store
        self._resets = resets
        self._lock = threading.Lock()
        self._ids: dict[int, int] = {}
        """Row of each recorded reset, by its ticket."""
        self._problem: str | None = None

    def load(self, now_s: float) -> None:
        """Repeat the resets that an earlier process left open, before the engine starts.

        Raises `DatabaseUnavailable`.
        """
        self._repeat(self._read(), now_s)

    def prepare(self, tier: str) -> Callable[[float], None]:
        """Read the resets of one tier that an earlier process left open; the result repeats them at a time.

        Raises `DatabaseUnavailable`.
        """
        rows = self._read(tier)
        return lambda now_s: self._repeat(rows, now_s)

    def sync(self) -> None:
        """Make the rows agree with the open resets. Raises `DatabaseUnavailable`; then nothing was written.

        Without a change since the last call this does not touch the database.
        """
        with self._lock:
            is_open = {reset.ticket: reset for reset in self._resets.open_in_tiers()}
            opened = [reset for ticket, reset in is_open.items() if ticket not in self._ids]
            ended = [ticket for ticket in self._ids if ticket not in is_open]
            if not opened and not ended:
                self._problem = None
                return
            try:
                rows, ended_ids = [_to_stored(reset) for reset in opened], [self._ids[ticket] for ticket in ended]
                ids = self._store.database.write(
                    partial(self._store.writer.change_tier_resets, rows, ended_ids), self._write_timeout_s
                )
            except DatabaseUnavailable as error:
                self._problem = f"{len(opened)} open resets of tiers are lost if this process ends: {error}"
                raise
            self._problem = None
            for ticket in ended:
                del self._ids[ticket]
            self._ids.update(zip((reset.ticket for reset in opened), ids, strict=True))

    def check(self) -> None:
        """Call `sync`; a failure shows in `degraded`."""
        try:
            self.sync()
        except DatabaseUnavailable:
            return

    def degraded(self) -> list[str]:
        """Return what the next process would not know."""
        problem = self._problem
        return [] if problem is None else [problem]

    def _read(self, tier: str | None = None) -> list[tuple[int, StoredReset]]:
        """Return the rows that this process has not repeated, of one tier or of all. Raises `DatabaseUnavailable`."""
        with self._lock:
            repeated = set(self._ids.values())
        rows = self._store.reader.load_tier_resets()
        return [(number, row) for number, row in rows if number not in repeated and tier in (None, row.tier)]

    def _repeat(self, rows: Sequence[tuple[int, StoredReset]], now_s: float) -> None:
        """Submit the resets of rows again. Rows of tiers that are not attached stay, until those are."""
        num_repeated = 0
        with self._lock:
            for reset_id, stored in rows:
                match, key = _to_core(stored)
                try:
                    reset = self._resets.repeat(stored.tier, match, key, now_s)
                except ValueError:
                    _log.warning("reset of a tier that is not configured stays open: %s", stored.tier)
                    continue
                self._ids[reset.ticket] = reset_id
                num_repeated += 1
        if num_repeated:
            _log.warning("tiers: repeating %d resets that an earlier process left open", num_repeated)


def _to_stored(reset: TierReset) -> StoredReset:
    match = None if reset.match is None else asdict(reset.match)
    return StoredReset(reset.tier, match, None if reset.key is None else reset.key.hex())


def _to_core(stored: StoredReset) -> tuple[RequestFilter | None, Key | None]:
    """Return origins and key of a stored reset; one that cannot be read is a reset of all blocks."""
    try:
        key = None if stored.key is None else bytes.fromhex(stored.key)
        match = None if stored.match is None else RequestFilter(**_GLOBS.validate_python(stored.match))
    except (TypeError, ValueError):
        return None, None
    return match, key
