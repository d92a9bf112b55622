"""One export or import: what was asked for, how far it is, and how it ended."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from kvferry.app.call_errors import Conflict, NotFound
from kvferry.app.exports.places import Place
from kvferry.core.keys import RequestFilter

MAX_NOTES = 20
"""Notes of a task, apart from why it failed."""


class TaskKind(StrEnum):
    """What a task does; the values are also parts of texts."""

    EXPORT = "export"
    IMPORT = "import"


class TaskStatus(StrEnum):
    """Status of a task."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELED = "canceled"


class TaskError(Exception):
    """Reason why a task cannot begin or go on. The message names the problem and what to do."""


class TaskFailed(TaskError):
    """The task cannot go on."""


class PlaceRefused(TaskError):
    """The place cannot be used for this task."""


class NoExport(TaskError, NotFound):
    """There is nothing to import."""


class TaskConflict(TaskError, Conflict):
    """The task cannot be begun now, or not in this place."""

    slug = "task-conflict"


class Canceled(Exception):
    """A caller has canceled the task, or the process stops."""


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """What a task copies: blocks of matching origins, at most so many bytes, and whether an import may evict others."""

    match: RequestFilter
    max_bytes: int | None = None
    may_evict: bool = False


@dataclass(slots=True, eq=False)
class Progress:
    """Blocks and bytes of a task so far. Totals are None until they are known, and of an import by match.

    `copied_blocks` were copied by this task, or are in an export that it continues. `present_blocks` of an import were
    in the pool already, `damaged_blocks` are missing in the export or did not verify. All others that were not copied
    are `left_blocks`: they have left the pool since, a reset concerns them, they are beyond the limit of their tenant,
    or there was no space.
    """

    total_blocks: int | None = None
    total_bytes: int | None = None
    copied_blocks: int = 0
    copied_bytes: int = 0
    present_blocks: int = 0
    damaged_blocks: int = 0
    left_blocks: int = 0

    def num_uncounted(self) -> int:
        """Return how many blocks of a known total have no outcome yet."""
        counted = self.copied_blocks + self.present_blocks + self.damaged_blocks + self.left_blocks
        return max((self.total_blocks or 0) - counted, 0)


@dataclass(slots=True, eq=False)
class Task:
    """A task. Its thread alone changes it, apart from `stop`; others may read it at any time."""

    kind: TaskKind
    place: Place
    options: TaskOptions
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    status: TaskStatus = TaskStatus.RUNNING
    progress: Progress = field(default_factory=Progress)
    notes: list[str] = field(default_factory=list)
    """What a caller should know of the result, one sentence an item; the last says why the task failed."""
    began_s: float = field(default_factory=time.time)
    ended_s: float | None = None
    stop: threading.Event = field(default_factory=threading.Event)
    """Set to cancel the task."""
    changed: threading.Event = field(default_factory=threading.Event)
    """Set when the store has a result."""
    is_listed: bool = False
    """Whether it is listed after its end, as a caller knows its id."""
    opened: Future[None] = field(default_factory=Future)
    """Done once the place is open and fits, with an exception if it cannot be used."""

    def describe(self) -> Mapping[str, Any]:
        """Return the JSON values of the task's event, without secrets."""
        counts = {name: count for name, count in asdict(self.progress).items() if not name.startswith("total")}
        return {"id": self.id, "kind": self.kind.value, "status": self.status.value, **counts}

    def add_note(self, text: str) -> None:
        """Add a sentence, one of a limited number."""
        if len(self.notes) < MAX_NOTES:
            self.notes.append(text)

    def cancel(self) -> None:
        """Have it end soon."""
        self.stop.set()
        self.changed.set()
