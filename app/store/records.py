"""What is read from the store: one frozen record a row. Instants are Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class EvictionRecord:
    """A block that left the pool. `regretted_at_s` is when it was asked for again, None if it was not."""

    id: int
    time_s: float
    key: str
    group: int
    reason: str
    policy: str
    age_s: float
    idle_s: float
    hits: int
    position: int
    size_bytes: int
    request: str
    tenant: str | None
    needed_by: str | None
    regretted_at_s: float | None


@dataclass(frozen=True, slots=True)
class EvictionFilter:
    """Which evictions: all conditions given hold together; `since_s` is inclusive, `until_s` exclusive."""

    since_s: float | None = None
    until_s: float | None = None
    reason: str | None = None
    request: str | None = None
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class AgeBucket:
    """Evictions of blocks at most `upto_s` old, and older than the bucket before; None is without end."""

    upto_s: float | None
    count: int


@dataclass(frozen=True, slots=True)
class EvictionSummary:
    """Evictions within a window. Ages are those since the block was stored; None when there were no evictions.

    `resets` whole resets dropped `reset_blocks` more, which have no rows of their own.
    """

    count: int
    by_reason: Mapping[str, int]
    regretted: int
    regret_rate: float
    regretted_by_reason: Mapping[str, int]
    ages: list[AgeBucket]
    age_min_s: float | None
    age_mean_s: float | None
    age_max_s: float | None
    never_hit: int
    resets: int
    reset_blocks: int


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """A call that changes something, as it is recorded. `token` is its name, `what` the body with secrets masked."""

    time_s: float
    token: str
    client: str
    request_id: str
    method: str
    path: str
    what: Mapping[str, Any] | None = None
    status: int | None = None
    outcome: str | None = None


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """A recorded call; `status` is None while it is under way, or if it never ended."""

    id: int
    entry: AuditEntry


@dataclass(frozen=True, slots=True)
class OverrideRecord:
    """Policy fields set for one request id until `expires_s`, as the JSON values that the API writes."""

    request: str
    policy: Mapping[str, Any]
    set_s: float
    expires_s: float


@dataclass(frozen=True, slots=True)
class RuleRecord:
    """A named policy rule, what it matches and what it sets, as the JSON values that the API writes."""

    name: str
    order: int
    match: Mapping[str, Any]
    policy: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SlotRecord:
    """A slot's row. `last_hit_s` is None for a block never hit."""

    slot: int
    key: str
    group: int
    generation: int
    epoch: int
    size_bytes: int
    position: int
    request: str
    tenant: str | None
    lora: str | None
    stored_s: float
    last_hit_s: float | None
    hits: int
