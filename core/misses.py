"""Why prompt tokens had to be computed: what a look-up found of each block behind its hit, and how that adds up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import groupby
from typing import NamedTuple

from kvferry.core.reasons import EvictionReason, NotStored


class MissCause(StrEnum):
    """Why a block was not loaded, where neither an eviction nor a skipped offer tells."""

    NEW = "new"
    """Nobody has offered it here, as far as that is remembered."""
    OTHER_FINGERPRINT = "other_fingerprint"
    """An earlier process had it, made by another model or in another layout, so that it was dropped at start."""
    GAP = "gap"
    """It is in the pool or on the device, and cannot be used without another block that is in neither."""
    PIN_LIMIT = "pin_limit"
    """It is in the pool, and waiting requests held as much of that as they may."""
    IN_FLIGHT = "in_flight"
    """It is being stored, or brought from a tier, and cannot be loaded before that has ended."""
    TAIL = "tail"
    """Too little for a block, or the last token, which is computed in any case."""
    LOAD_FAILED = "load_failed"
    """It was found, and its load failed."""
    DECLINED = "declined"
    """It was found, and computing it again was quicker."""
    LOAD_DISABLED = "load_disabled"
    """The request's policy does not let it load."""
    UNEXAMINED = "unexamined"
    """So many blocks were missing that no more of them were looked at, or none could be."""


MissReason = MissCause | EvictionReason | NotStored


class FoundMisses(NamedTuple):
    """Why each of some keys cannot be loaded, and between which Unix seconds those that were evicted left the pool."""

    causes: list[MissReason]
    evicted_between_s: tuple[float, float] | None


@dataclass(slots=True)
class MissedTokens:
    """Prompt tokens that were computed, by cause; together as many as `PromptTokens.recomputed`.

    `evicted` counts by `EvictionReason`, `not_stored` by `NotStored`, and `causes` by `MissCause`.
    """

    causes: dict[str, int] = field(default_factory=lambda: {cause.value: 0 for cause in MissCause})
    evicted: dict[str, int] = field(default_factory=dict)
    not_stored: dict[str, int] = field(default_factory=dict)

    def add(self, cause: MissReason, num_tokens: int) -> None:
        """Count tokens that were missed for a cause."""
        if isinstance(cause, EvictionReason):
            counts = self.evicted
        elif isinstance(cause, NotStored):
            counts = self.not_stored
        else:
            counts = self.causes
        counts[cause.value] = counts.get(cause.value, 0) + num_tokens

    def flat(self) -> dict[str, int]:
        """The counts of all causes in one, such as `evicted:capacity`, `not_stored:prompt_only` and `new`."""
        evicted = {f"evicted:{reason}": tokens for reason, tokens in self.evicted.items()}
        not_stored = {f"not_stored:{reason}": tokens for reason, tokens in self.not_stored.items()}
        return self.causes | evicted | not_stored

    def copy(self) -> MissedTokens:
        """The counts of this moment."""
        return MissedTokens(dict(self.causes), dict(self.evicted), dict(self.not_stored))


@dataclass(frozen=True, slots=True)
class MissRun:
    """Tokens up to `end_token`, from where the run before ends, were missed for one cause."""

    end_token: int
    cause: MissReason


@dataclass(slots=True)
class Misses:
    """What the latest look-up of a request found: its hit, which ends at `hit_end`, and runs of causes from there on.

    What was evicted left the pool between these Unix seconds; None where nothing was.
    """

    hit_end: int
    runs: list[MissRun] = field(default_factory=list)
    evicted_between_s: tuple[float, float] | None = None

    @classmethod
    def unexamined(cls, num_tokens: int) -> Misses:
        """The misses of a prompt that was never looked up."""
        return cls(0, [MissRun(num_tokens, MissCause.UNEXAMINED)])

    @property
    def end_token(self) -> int:
        """The first token behind the hit and all runs."""
        return self.runs[-1].end_token if self.runs else self.hit_end

    def extend(self, causes: Iterable[MissReason], first_token: int, tokens_each: int) -> None:
        """Add the causes of slots of so many tokens each, the first of which begins at `first_token`."""
        end = first_token
        # By identity: causes of different kinds may be equal as strings.
        for _, run in groupby(causes, key=id):
            same = list(run)
            cause = same[0]
            end += len(same) * tokens_each
            if self.runs and self.runs[-1].cause is cause:
                self.runs.pop()
            self.runs.append(MissRun(end, cause))

    def end_at(self, limit_token: int) -> None:
        """Count the tokens behind `limit_token`, where no hit can end, as the tail."""
        self.runs = [MissRun(min(run.end_token, limit_token), run.cause) for run in self.runs]

    def spans(self, served: int, total: int, lost_hit: MissCause) -> Iterator[tuple[int, int, MissReason]]:
        """Yield first token, end and cause of each run of the prompt's tokens from `served` to `total`.

        Those within the hit were lost for `lost_hit`, those behind the last run are the tail.
        """
        start = served
        for end, cause in ((self.hit_end, lost_hit), *((run.end_token, run.cause) for run in self.runs)):
            end = min(end, total)
            if end > start:
                yield start, end, cause
                start = end
        if total > start:
            yield start, total, MissCause.TAIL

    def count(self, served: int, total: int, lost_hit: MissCause, missed: Iterable[MissedTokens]) -> None:
        """Count the prompt's tokens from `served` to `total` by cause; see `spans`."""
        for start, end, cause in self.spans(served, total, lost_hit):
            for counts in missed:
                counts.add(cause, end - start)
