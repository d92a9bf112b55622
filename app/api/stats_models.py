"""The answer of `GET /admin/v1/stats`, field by field."""

from __future__ import annotations

from pydantic import BaseModel, Field


class EngineStats(BaseModel):
    """The engine that hosts the cache."""

    name: str = Field(examples=["embedded"])
    model: str = Field(examples=["tiny"])
    device: str = Field(examples=["cpu"])
    block_size: int = Field(examples=[16], description="tokens a block")
    groups: int = Field(examples=[1], description="KV-cache groups of the model")
    workers: int = Field(examples=[1], description="ranks that move bytes")


class PoolStats(BaseModel):
    """Slots by state: `slots = free + ready + storing`; `loading`, `pinned` and `unverified` count among `ready`."""

    kind: str = Field(examples=["pinned"])
    slots: int
    wanted_slots: int = Field(description="what `slots` will be: another number while the pool changes its size")
    slot_bytes: int
    free: int
    ready: int
    storing: int = Field(description="neither free nor loadable: being stored, promoted, or held by a disowned job")
    loading: int
    pinned: int
    unverified: int
    bytes: int
    eviction_policy: str = Field(examples=["lru"])


class RequestStats(BaseModel):
    """Requests by what became of them."""

    seen: int
    running: int
    waiting_for_load: int
    finished: int
    preempted: int


class PromptTokenStats(BaseModel):
    """Prompt tokens by what served them; `total` is the sum of the rest."""

    total: int
    device_hit: int
    host_hit: int
    tier_hit: dict[str, int]
    recomputed: int


class MissedTokenStats(BaseModel):
    """Prompt tokens that had to be computed, by why they were not in the pool: together `prompt_tokens.recomputed`."""

    causes: dict[str, int] = Field(
        description="`new`: never offered; `other_fingerprint`: held by an earlier process whose pool was dropped at "
        "start, since its model, layout or sizes were others; `tail`: too little for a block, or the last token; "
        "`gap`: in the pool, and of no use without a block that is not; `load_failed`; `declined`: computing was "
        "quicker; `load_disabled`: by the request's policy; `pin_limit`: waiting requests hold too much; "
        "`in_flight`: being stored, or brought from a tier; `unexamined`: too many to look at",
        examples=[{"new": 0, "tail": 0}],
    )
    evicted: dict[str, int] = Field(description="by the reason of the eviction", examples=[{"capacity": 0}])
    not_stored: dict[str, int] = Field(
        description="by why it was not stored when it was considered; `in_flight`: one of its blocks was being stored "
        "as part of another slot; `part_of_slot`: computed without the rest of its slot; `reset`: one came meanwhile",
        examples=[{"prompt_only": 0}],
    )


class StoreStats(BaseModel):
    """Offered blocks by their answer: `offered = stored + sum(skipped) + failed + in_flight`."""

    offered: int
    stored: int
    bytes: int
    failed: int
    in_flight: int
    seconds: float = Field(
        description="what the store jobs took that have ended; of a request, its share of each of its jobs by number "
        "of blocks, so that all requests add up to the total"
    )
    skipped: dict[str, int] = Field(examples=[{"prompt_only": 0, "token_cap": 0, "already_stored": 0, "in_flight": 0}])


class LoadStats(BaseModel):
    """Blocks loaded from the pool."""

    blocks: int
    bytes: int
    failed: int
    corrupt: int
    declined: int
    in_flight: int
    seconds: float


class EvictionStats(BaseModel):
    """Blocks that left the pool, and those of them that were asked for again."""

    total: int
    by_reason: dict[str, int]
    regretted: int


class TierStats(BaseModel):
    """A tier below the pool, in blocks: what it holds, what became of what it was given, and what it was used for."""

    blocks: int
    bytes: int
    max_bytes: int
    stored: int
    stored_bytes: int
    present: int = Field(description="given to it, and there already")
    dropped: int = Field(description="not kept: it was busy, full or out of order")
    loaded: int
    loaded_bytes: int
    missing: int
    corrupt: int
    failed: int
    evicted: int
    cascaded: int = Field(description="given to it")
    cascades_dropped: int = Field(description="not even given to it: cascades held enough of the pool")
    looked_up: int
    found: int
    promoted: int = Field(description="brought into the pool for a request that waited")
    promotions_failed: int
    declined: int = Field(description="found, and not asked for: recomputing was faster")
    gave_up: int = Field(description="requests that stopped waiting for it")
    timed_out: int = Field(description="jobs that it gave no answer to in time")
    errors: int = Field(description="calls that failed")
    open_jobs: int


class RecoveryStats(BaseModel):
    """What this process found of the one before it. `known` of the `recovered` slots had a row in the database."""

    recovered: int
    known: int
    dropped: dict[str, int] = Field(description="slots that did not come back, by reason", examples=[{"unsealed": 0}])
    foreign: str | None = Field(
        description="in which field a pool that was dropped as a whole was not the one wanted; null if it was kept"
    )
    seconds: float


class JournalStats(BaseModel):
    """How far history is behind, in rows and seconds; `dropped` rows were never written."""

    queued: int
    written: int
    dropped: int
    lag_s: float


class OffloadingStats(BaseModel):
    """Whether offloading is on, and unexpected errors in kvferry's own code, which requests survive."""

    is_on: bool = Field(description="false after repeated errors, until a whole reset")
    reason: str | None = Field(description="why offloading is off; null while it is on")
    num_errors: int = Field(description="unexpected errors so far; the log has each place once, with its traceback")
    last_error: str | None


class Stats(BaseModel):
    """One consistent snapshot."""

    time: str = Field(examples=["2026-01-31T12:00:00.000Z"])
    uptime_s: float
    epoch: int = Field(
        description="resets of the whole pool since it was made; a kept pool's goes on after a restart of its engine"
    )
    engine: EngineStats
    pool: PoolStats
    requests: RequestStats
    prompt_tokens: PromptTokenStats
    missed_tokens: MissedTokenStats
    store: StoreStats
    load: LoadStats
    evictions: EvictionStats
    tiers: dict[str, TierStats]
    offloading: OffloadingStats
    journal: JournalStats
    recovery: RecoveryStats | None = Field(description="null where the pool does not outlive its process")
