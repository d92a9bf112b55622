"""Blocks in the pool: lists, drops and pins, and a map of all slots."""

from __future__ import annotations

import base64
import re
import time
from typing import Annotated, Any

import numpy as np
from fastapi import Body, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from kvferry.app.api.calls import admin_router
from kvferry.app.api.context import Context
from kvferry.app.api.errors import Problem, busy
from kvferry.app.api.pagination import DEFAULT_LIMIT, Limit, PositionCursor, page_response
from kvferry.app.api.routes.reset import Wait, drain, wait_until_written
from kvferry.app.api.slot_cells import CellsBy, count_cells
from kvferry.app.common.times import rfc3339, rfc3339_or_none
from kvferry.app.operations.policy_json import DEFAULT_TTL_S, Ttl
from kvferry.app.store import Page
from kvferry.core.keys import GROUP_BYTES, Key, group_of
from kvferry.core.policy import PRIORITY_CLASS, Priority
from kvferry.core.pool.inventory import BlockState, Inventory
from kvferry.core.pool.pins import PinOutcome
from kvferry.core.pool.records import SlotRows
from kvferry.core.pool.slots import SlotState
from kvferry.core.scheduler.scheduler import OffloadScheduler
from kvferry.core.tiers.base import HOST

MAX_KEY_HEX = 512
MAX_SLOT = 2**31 - 1
MAX_CELLS = 8192
DEFAULT_CELLS = 4096
WRITE_TIMEOUT_S = 30.0
TIER_TIMEOUT_S = 5.0
"""Longest wait for tiers to remove a block; one that cannot be reached does it later."""
MAX_OPEN_DROPS = 1000
"""Blocks that a tier has not removed yet: if it fails, one step of the engine submits all of them again."""
_PRIORITIES = {number: priority for priority, number in PRIORITY_CLASS.items()}
_NUMBERS = ("size", "position", "stored_s", "hit_s", "hits", "generation", "priority_class")
"""Fields of a slot's record, in the order in which `_rows_to_blocks` reads them."""
_HEX = re.compile(r"(?:[0-9a-fA-F]{2})+", re.ASCII)

BlockHash = Annotated[
    str,
    Path(
        alias="hash",
        max_length=MAX_KEY_HEX,
        description="hex of the key, group included",
        examples=["9f86d081884c7d659a2feaa0c55ad01500"],
    ),
]


class Block(BaseModel):
    """A loadable block. `hash` is its key in paths, `size` in bytes, `position` its index within its request."""

    hash: str
    key: str
    group: int
    slot: int
    size: int
    state: BlockState = Field(description="`ready`; `pinned` by a request or an operator; `loading` by a request")
    position: int
    request: str = Field(description="the request that stored it")
    tenant: str | None = Field(description="digest of that request's tenant")
    lora: str | None
    session: str | None
    stored_at: str
    last_hit: str | None
    hits: int
    generation: int = Field(description="raised on each reuse of the slot")
    priority: Priority = Field(description="eviction class: the highest in which it was offered")
    pinned_until: str | None = Field(description="when an operator's pin ends; null without one")
    tiers: list[str] = Field(
        examples=[["host", "disk"]],
        description="where it is held: the pool, and the tiers that stored it or gave it since it is in the pool",
    )


class PinBody(BaseModel):
    """Duration of a pin."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": [{"ttl_s": 600}]})
    ttl_s: Ttl = DEFAULT_TTL_S


class PinAnswer(BaseModel):
    """A pin by an operator."""

    hash: str
    pinned_until: str


class SlotMap(BaseModel):
    """Every slot's state, one byte per slot by number, base64-encoded."""

    slots: int
    encoding: str = Field(default="base64", examples=["base64"])
    legend: dict[str, int] = Field(examples=[{state.name.lower(): state.value for state in SlotState}])
    states: str
    epoch: int


class SlotCells(BaseModel):
    """The slots, with neighbors counted together in cells."""

    slots: int
    slots_per_cell: int = Field(description="the last cell may have fewer")
    by: CellsBy
    classes: list[str] = Field(
        examples=[["free", "storing", "ready", "held", "retired"]],
        description="by `state`, `age` since the block was stored, `hits`, or the digests of the largest tenants",
    )
    counts: list[list[int]] = Field(
        examples=[[[0, 4], [0, 0], [4, 0], [0, 0], [0, 0]]],
        description="for each class the number of slots in each cell",
    )
    epoch: int


def _rows_to_blocks(scheduler: OffloadScheduler, rows: SlotRows) -> list[dict[str, Any]]:
    """Return the blocks of these rows, except those that have left the pool."""
    records = rows.records
    columns = zip(
        Inventory(scheduler.manager).holds(rows),
        scheduler.tiers.holders(rows),
        rows.keys,
        rows.slots.tolist(),
        rows.origins,
        # Columns of numbers: reading a field of each record takes ten times as long.
        *(records[name].tolist() for name in _NUMBERS),
        strict=True,
    )
    return [
        {
            "hash": key.hex(),
            "key": key.hex(),
            "group": group_of(key),
            "slot": slot,
            "size": size,
            "state": hold.state,
            "position": position,
            "request": origin.request_id,
            "tenant": origin.tenant,
            "lora": origin.lora,
            "session": origin.session,
            "stored_at": rfc3339(stored_s),
            "last_hit": rfc3339_or_none(hit_s),
            "hits": hits,
            "generation": generation,
            "priority": _PRIORITIES[priority],
            "pinned_until": rfc3339_or_none(hold.pinned_until_s),
            "tiers": [HOST, *held_by],
        }
        for hold, held_by, key, slot, origin, size, position, stored_s, hit_s, hits, generation, priority in columns
        if hold is not None
    ]


def _key_of(block_hash: str) -> Key:
    """Return the key of a hash in a path; 404 for an invalid one."""
    if not _HEX.fullmatch(block_hash) or len(block_hash) <= 2 * GROUP_BYTES:
        raise _unknown(block_hash)
    return bytes.fromhex(block_hash)


def _unknown(block_hash: str) -> Problem:
    return Problem(404, f"no block {block_hash[:100]!r} is in the pool")


router = admin_router(tags=["blocks"])


@router.get("/blocks", summary="The blocks in the pool, by slot", response_model=Page[Block])
def list_blocks(
    context: Context,
    limit: Limit = DEFAULT_LIMIT,
    cursor: PositionCursor = None,
    first_slot: Annotated[int, Query(ge=0, le=MAX_SLOT, description="only from this slot on")] = 0,
    last_slot: Annotated[int, Query(ge=0, le=MAX_SLOT, description="only up to this slot")] = MAX_SLOT,
) -> Response:
    """A block that stays in its slot is listed exactly once; those that come or go meanwhile may be missed."""
    scheduler = context.scheduler
    start = max(first_slot, int(cursor or 0))
    items: list[dict[str, Any]] = []
    more = True
    while more and len(items) < limit:
        # Found blocks may have left before they are read, so that a short result is not the end.
        rows = Inventory(scheduler.manager).list_blocks(start, limit - len(items), last_slot + 1)
        items += _rows_to_blocks(scheduler, rows)
        more = len(rows.slots) > 0
        start = int(rows.slots[-1]) + 1 if more else start
    return page_response(items, str(start) if more else None)


@router.get("/blocks/{hash}", summary="One block", response_model=Block)
def get_block(context: Context, block_hash: BlockHash) -> dict[str, Any]:
    """404 if the pool does not hold it."""
    scheduler = context.scheduler
    rows = Inventory(scheduler.manager).find_block(_key_of(block_hash))
    blocks = [] if rows is None else _rows_to_blocks(scheduler, rows)
    if not blocks:
        raise _unknown(block_hash)
    return blocks[0]


@router.delete(
    "/blocks/{hash}",
    summary="Drop one block",
    status_code=204,
    responses={
        202: {
            "description": f"The block is dropped, but a tier has not removed it within {TIER_TIMEOUT_S:g} s, "
            "which a restart continues, or the headers of a pool that outlives the process were not written within "
            f"{WRITE_TIMEOUT_S:g} s, so that a restart may bring it back"
        },
        429: {"description": f"A tier has not removed {MAX_OPEN_DROPS:,} blocks yet: nothing is dropped"},
    },
)
async def drop_block(context: Context, request: Request, block_hash: BlockHash) -> Response:
    """Dropped from pool and tiers at once; its slot is free when the last transfer or pin of it ends.

    The response (404, too) is sent once no restart can bring the block back, into the pool or a tier.
    """
    key = _key_of(block_hash)
    scheduler = context.scheduler
    if await run_in_threadpool(scheduler.tiers.count_most_open) >= MAX_OPEN_DROPS:
        raise busy(f"a tier has not removed {MAX_OPEN_DROPS:,} blocks yet: try again later, or reset the tier")
    with context.guard.guarding("drop of a block"):
        ticket = await run_in_threadpool(scheduler.resets.drop_block, key, time.time())
    context.wake()
    closing = context.closing
    pending = await drain(context, Wait(request, closing, TIER_TIMEOUT_S), ticket)
    # An earlier copy of the block may have been evicted just before.
    is_written = await wait_until_written(Wait(request, closing, WRITE_TIMEOUT_S), scheduler.manager)
    if not ticket.dropped_blocks and not pending:
        raise _unknown(block_hash)
    return Response(status_code=204 if is_written and not pending else 202)


@router.put(
    "/blocks/{hash}/pin",
    summary="Keep one block from eviction",
    response_model=PinAnswer,
    responses={409: {"description": "The limit of pins is reached, or the block is about to leave the pool"}},
)
def pin_block(context: Context, block_hash: BlockHash, body: Annotated[PinBody | None, Body()] = None) -> PinAnswer:
    """Pinning again changes the expiry. At most `KVFERRY_MAX_PINNED_FRACTION` of the pool may be pinned: 409."""
    now_s = time.time()
    expires_s = now_s + (body or PinBody()).ttl_s
    key = _key_of(block_hash)
    pins = context.scheduler.manager.operator_pins
    with context.guard.guarding("pin of a block"):
        outcome = pins.pin(key, expires_s, now_s)
    if outcome is PinOutcome.NOT_FOUND:
        raise _unknown(block_hash)
    if outcome is PinOutcome.LEAVING:
        raise Problem(
            409,
            "the block is in a part of the pool that is being removed, and is about to be evicted",
            slug="leaving",
            title="The block is leaving",
        )
    if outcome is PinOutcome.LIMIT:
        share = f"{100 * pins.max_fraction:g}% of the pool (KVFERRY_MAX_PINNED_FRACTION)"
        detail = f"operators may pin {share}, and that is reached: unpin a block first"
        raise Problem(409, detail, slug="pin-limit", title="Too many pins")
    return PinAnswer(hash=block_hash.lower(), pinned_until=rfc3339(expires_s))


@router.delete("/blocks/{hash}/pin", summary="Delete a pin", status_code=204)
def unpin_block(context: Context, block_hash: BlockHash) -> None:
    """404 without an operator's pin on this block."""
    key = _key_of(block_hash)
    with context.guard.guarding("unpin of a block"):
        is_unpinned = context.scheduler.manager.operator_pins.unpin(key)
    if not is_unpinned:
        raise Problem(404, f"block {block_hash[:100]!r} has no pin")
    context.wake()


@router.get("/slots/map", summary="The state of every slot", response_model=SlotMap | SlotCells, tags=["slots"])
def slot_map(
    context: Context,
    cells: Annotated[
        int | None,
        Query(
            ge=1,
            le=MAX_CELLS,
            description=f"count neighbors together, in at most this number of cells ({DEFAULT_CELLS} with `by`)",
        ),
    ] = None,
    by: Annotated[CellsBy | None, Query(description="class of slots to count (`state` with `cells`)")] = None,
) -> Response:
    """For drawing. Read in batches, so not of one moment. With `cells` or `by` the slots are counted in cells."""
    answer: SlotMap | SlotCells
    scheduler = context.scheduler
    inventory, epoch = Inventory(scheduler.manager), scheduler.snapshot().epoch
    if cells is not None or by is not None:
        by = by or CellsBy.STATE
        counted = count_cells(inventory, by, cells or DEFAULT_CELLS, time.time())
        counts = counted.counts.tolist()
        answer = SlotCells(
            slots=int(counted.counts.sum()),
            slots_per_cell=counted.slots_per_cell,
            by=by,
            classes=list(counted.classes),
            counts=counts,
            epoch=epoch,
        )
    else:
        states = np.ascontiguousarray(inventory.slot_states())
        answer = SlotMap(
            slots=len(states),
            legend={state.name.lower(): state.value for state in SlotState},
            states=base64.b64encode(states.tobytes()).decode("ascii"),
            epoch=epoch,
        )
    return Response(answer.model_dump_json(), media_type="application/json")
