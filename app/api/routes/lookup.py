"""Look-up and prefetch of a prompt, for routers and operators: how much of it is held, and into the pool with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Self, TypeVar

import anyio
from fastapi import Body, Request
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from kvferry.app.api.calls import admin_router, from_app
from kvferry.app.api.context import AdminContext, Context
from kvferry.app.api.errors import Problem, Responses, busy
from kvferry.app.api.routes.reset import FIRST_POLL_S, LAST_POLL_S, check_places
from kvferry.app.operations.policy_json import whole_items
from kvferry.core.engine_api import UnknownAdapter
from kvferry.core.scheduler.prefix_query import PrefixHeld, PrefixQuery

T = TypeVar("T")

MAX_TOKENS = 131_072
MAX_HASHES = 8192
MAX_QUERIES = 2
"""Queries that run at once; others wait for them."""
MAX_WAITING = 8
"""Most queries that wait, each of which holds its prompt in memory."""
_TIMEOUT_S = 1.0

BlockHash = Annotated[str, Field(pattern=r"^([0-9a-f]{2}){1,128}$", max_length=256)]


class LookupBody(BaseModel):
    """A prompt: its token ids, or the hashes of its blocks as the engine publishes them in KV events."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [{"token_ids": [1, 2, 3, 4]}],
            "oneOf": [
                {
                    "required": ["token_ids"],
                    "properties": {"token_ids": {"type": "array"}, "hashes": {"type": "null"}},
                },
                {
                    "required": ["hashes"],
                    "properties": {
                        "hashes": {"type": "array"},
                        "token_ids": {"type": "null"},
                        "cache_salt": {"type": "null"},
                        "lora": {"type": "null"},
                    },
                },
            ],
        },
    )
    token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]] | None, BeforeValidator(whole_items)] = Field(
        default=None, min_length=1, max_length=MAX_TOKENS, fail_fast=True
    )
    hashes: list[BlockHash] | None = Field(default=None, min_length=1, max_length=MAX_HASHES, fail_fast=True)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=4096, description="of the request's tenant")
    lora: str | None = Field(default=None, min_length=1, max_length=1024, description="name of the request's adapter")

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.token_ids is None) == (self.hashes is None):
            raise ValueError("give token_ids or hashes, one of them")
        if self.hashes is not None and not self.cache_salt is self.lora is None:
            raise ValueError("cache_salt and lora go with token_ids only: hashes depend on them already")
        return self


class PrefetchBody(LookupBody):
    """A prompt, and the tiers that its blocks may come from, all of them by default."""

    tiers: list[str] | None = Field(default=None, min_length=1, max_length=64, examples=[["disk"]])


class PrefetchAnswer(BaseModel):
    """Number of blocks that are being loaded into the pool."""

    num_blocks: int


class LookupAnswer(BaseModel):
    """Tokens of the longest prefix that each place holds in blocks that the engine could load."""

    num_tokens: int = Field(description="tokens of the prompt; of hashes, those that they cover")
    device: int = Field(description="in the engine's own cache")
    pool: int
    tiers: dict[str, int | None] = Field(
        examples=[{"disk": 4096}], description=f"by tier; null if it did not answer within {_TIMEOUT_S:g} s"
    )
    anywhere: int = Field(description="block by block in any of these places")


class QueryThreads:
    """Threads for the lookups and prefetches of one service. Thread: event loop."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(MAX_QUERIES)
        self._num_open = 0

    async def run(self, call: Callable[[], T]) -> T:
        """Run a call on a thread, and return its result. Raises `Problem` if too many calls wait."""
        if self._num_open >= MAX_QUERIES + MAX_WAITING:
            raise busy(f"{MAX_WAITING} lookups and prefetches wait already: try again later")
        self._num_open += 1
        try:
            # All in one call: beside a busy engine thread, each return to the event loop may take longer than that.
            return await anyio.to_thread.run_sync(call, limiter=self._limiter)
        finally:
            self._num_open -= 1


def _hash_prompt(context: AdminContext, body: LookupBody, token_ids: Sequence[int]) -> Sequence[bytes]:
    """Return the hashes of a prompt's blocks. Raises `Problem` if the engine cannot make them."""
    if context.hash_prompt is None:
        raise Problem(409, "this process has no engine to hash token_ids: send hashes")
    try:
        return context.hash_prompt(token_ids, body.cache_salt, body.lora)
    except UnknownAdapter as unknown:
        raise Problem(404, f"lora={body.lora}: {unknown}") from None


def _find(context: AdminContext, body: LookupBody) -> tuple[int, tuple[PrefixQuery, PrefixHeld]]:
    scheduler = context.scheduler
    if body.token_ids is None:
        hashes: Sequence[bytes] = [bytes.fromhex(text) for text in body.hashes or ()]
        num_tokens = len(hashes) * scheduler.layout.hash_block_size
    else:
        hashes, num_tokens = _hash_prompt(context, body, body.token_ids), len(body.token_ids)
    return num_tokens, find_prefix(context, hashes)


def find_prefix(context: AdminContext, block_hashes: Sequence[bytes]) -> tuple[PrefixQuery, PrefixHeld]:
    """Find how much of a prompt is held; waits for the tiers for a second."""
    query = context.scheduler.query_prefix(block_hashes)
    query.ask_tiers(time.time())
    deadline_s, poll_s = time.monotonic() + _TIMEOUT_S, FIRST_POLL_S
    while not query.has_answers() and time.monotonic() < deadline_s and not context.closing():
        # An idle engine would read a tier's answer only once a second.
        with context.guard.guarding("expire"):
            context.scheduler.expire(time.time())
        if not query.has_answers():
            time.sleep(poll_s)
            poll_s = min(poll_s * 2, LAST_POLL_S)
    return query, query.close()


def load_prefix(context: AdminContext, query: PrefixQuery, tiers: list[str] | None) -> PrefetchAnswer:
    """Load what the pool lacks of a prompt from these tiers, all by default. Raises `Problem` for too many blocks."""
    scheduler = context.scheduler
    names = scheduler.tiers.names if tiers is None else tiers
    with context.guard.guarding("prefetch"):
        num_blocks = scheduler.tiers.prefetches.begin(query, names, time.time())
    if num_blocks is None:
        limit = scheduler.tiers.prefetches.max_blocks
        detail = f"at most {limit} blocks, an eighth of the pool, are prefetched at a time: try later, or ask for less"
        raise busy(detail)
    context.wake()
    return PrefetchAnswer(num_blocks=num_blocks)


def _find_and_load(context: AdminContext, body: PrefetchBody) -> PrefetchAnswer:
    _, (query, _) = _find(context, body)
    return load_prefix(context, query, body.tiers)


AppThreads = Annotated[QueryThreads, from_app("query_threads")]
_REFUSALS: Responses = {
    404: {"description": "The engine does not know the adapter, or does not offload its blocks"},
    409: {"description": "The process has no engine to hash token ids"},
}

router = admin_router(tags=["blocks"])


@router.post(
    "/lookup",
    summary="How much of a prompt is held",
    responses={429: {"description": f"{MAX_WAITING} lookups wait already"}, **_REFUSALS},
)
async def look_up(context: Context, threads: AppThreads, body: Annotated[LookupBody, Body()]) -> LookupAnswer:
    """Changes nothing, pins nothing and counts as no use of a block: what it names may be gone a moment later.

    The read token suffices.
    """
    num_tokens, (_, held) = await threads.run(partial(_find, context, body))
    return LookupAnswer(num_tokens=num_tokens, **asdict(held))


@router.post(
    "/prefetch",
    summary="Load a prompt's blocks into the pool",
    status_code=202,
    responses={
        429: {"description": "More than an eighth of the pool would be prefetched, or too many calls wait"},
        **_REFUSALS,
    },
)
async def prefetch(
    context: Context, threads: AppThreads, request: Request, body: Annotated[PrefetchBody, Body()]
) -> PrefetchAnswer:
    """Loads what the pool lacks of the longest prefix that the tiers complete, for a request that is to come.

    The blocks are not pinned. A tier that does not answer within a second counts as empty. The audit has one record
    a minute for all calls of one token and address.
    """
    check_places(body.tiers, context.scheduler.tiers.names)
    answer = await threads.run(partial(_find_and_load, context, body))
    context.prefetch_audit.record(request, answer.num_blocks)
    return answer
