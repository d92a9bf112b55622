"""Live and recent requests: effective policies with their sources, overrides, and counts of tokens and blocks.

An override may be set before its request arrives or while it runs, and survives a restart.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from functools import partial
from typing import Annotated, Any

from fastapi import Body, Query
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from kvferry.app.api.audit import Audited
from kvferry.app.api.calls import RequestId, admin_router
from kvferry.app.api.context import AdminContext, Context
from kvferry.app.api.errors import Problem
from kvferry.app.api.leases import LeaseView, check_retain_s, lease_to_json
from kvferry.app.api.pagination import PageQuery, PositionCursor, page_response
from kvferry.app.common.times import Moment, rfc3339, rfc3339_or_none
from kvferry.app.operations.policy_json import OverrideBody, PolicyView, policy_to_json
from kvferry.app.store import Page
from kvferry.core.partings import PrefixOutcome, PrefixStory
from kvferry.core.policy import Override
from kvferry.core.scheduler.requests import RequestPhase, RequestView
from kvferry.core.stats import MissedTokens, PromptTokens, StoreCounts

EXPECTED = "expected"
_REQUESTS: list[str | Enum] = ["requests"]
_POLICIES: list[str | Enum] = ["policies"]


class OverrideState(BaseModel):
    """An override and its expiry."""

    fields: list[str] = Field(examples=[["offload_prompt_only"]])
    expires_at: str


@dataclass(frozen=True, slots=True)
class PrefixView(PrefixStory):
    """The longest prefix of the prompt that an earlier request had, stored or not."""

    text: str = field(metadata={"description": "the same, in a sentence"})


class RequestModel(BaseModel):
    """A request: live, recent, or `expected` if only an override of it is known."""

    model_config = ConfigDict(json_schema_serialization_defaults_required=True)
    id: str
    aliases: list[str] = Field(default=[], description="other ids that match it")
    state: str = Field(examples=["running"], description="`expected`, `waiting`, `loading`, `running` or `finished`")
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    tenant: str | None = Field(default=None, description="digest of the tenant's name")
    lora: str | None = None
    session: str | None = Field(default=None, description="id of the session that the client named")
    policy: PolicyView
    override: OverrideState | None
    prompt_tokens: PromptTokens = Field(
        default=PromptTokens(), description="as in stats, for this request; zero until its prefill is done"
    )
    missed_tokens: MissedTokens = Field(default=MissedTokens(), description="as in stats, for this request")
    evicted_between: tuple[str, str] | None = Field(
        default=None,
        description="`since` and `until` that find the evictions of its missed blocks, to the second; null without any",
    )
    prefix: PrefixView | None = Field(
        default=None, description="null before its end, without a whole slot, and where it is not known any more"
    )
    shortest_hit_tokens: int | None = Field(default=None, description="length of the shortest prompt that can hit")
    store: StoreCounts = Field(default=StoreCounts(), description="as in stats, for this request")
    lease: LeaseView | None = Field(
        default=None, description="what `retain_s` kept of it when it ended; null before, if it was aborted, and with 0"
    )
    arrived_at: str | None = Field(default=None, description="null if it is `expected`")
    wait_s: float | None = Field(default=None, description="from its arrival until it was scheduled first")
    tier_wait_s: float | None = Field(
        default=None,
        description="the part of `wait_s` for which it waited for tiers; null if it waited for none",
    )
    load_s: float = Field(default=0.0, description="time for which it waited for loads that have ended")
    first_token_s: float | None = Field(
        default=None, description="from its arrival to its first token: the step after its prompt was computed"
    )
    finished_at: str | None = None
    error: str | None = Field(
        default=None,
        description="hook and type of an unexpected error, or `in another call`, after which it is computed without "
        "offloading; see the log",
        examples=["match: KeyError"],
    )


def _override_to_json(override: Override | None) -> dict[str, Any] | None:
    """Return an override in the form of `OverrideState`."""
    if override is None:
        return None
    return {"fields": list(override.patch), "expires_at": rfc3339(override.expires_s)}


def _ids_of(view: RequestView) -> tuple[str, ...]:
    """Return a request's ids, the exact one first. The first one with an override has the one that applies."""
    return (view.request_id, *view.aliases)


def _window(seconds: tuple[float, float] | None) -> tuple[str, str] | None:
    """Return the times between which something happened in these whole seconds; the second time is exclusive."""
    return None if seconds is None else (rfc3339(seconds[0]), rfc3339(seconds[1] + 1))


def _prefix_to_json(story: PrefixStory | None, slot_tokens: int) -> dict[str, Any] | None:
    """Return a story in the form of `PrefixView`."""
    if story is None:
        return None
    earlier = "an earlier request" if story.earlier is None else f"request {story.earlier}"
    shared = f"first {story.shared_tokens:,} tokens"
    match story.outcome:
        case PrefixOutcome.NEW:
            text = f"No earlier request begins with its first {slot_tokens:,} tokens."
        case PrefixOutcome.REPEATED:
            text = f"Its {shared}, all of its whole blocks, are those of {earlier}."
        case PrefixOutcome.CONTINUED:
            text = f"It continues {earlier}, which has its {shared} and ended there."
        case PrefixOutcome.PARTED:
            text = (
                f"Its {shared} are those of {earlier}, which it left in the {slot_tokens:,} tokens after them; in the "
                f"last hour, prompts went on from there in {story.ways:,} ways."
            )
    return {**asdict(story), "text": text}


def _to_json(context: AdminContext, view: RequestView, override: Override | None) -> dict[str, Any]:
    times, layout = view.times, context.scheduler.layout
    return {
        "id": view.request_id,
        "aliases": list(view.aliases),
        "state": view.phase.value,
        "num_prompt_tokens": view.num_prompt_tokens,
        "num_output_tokens": view.num_output_tokens,
        "tenant": view.tenant,
        "lora": view.lora,
        "session": view.session,
        "policy": policy_to_json(view.policy),
        "override": _override_to_json(override),
        "prompt_tokens": view.prompt_tokens,
        "missed_tokens": view.missed_tokens,
        "evicted_between": _window(view.evicted_between_s),
        "prefix": _prefix_to_json(context.partings.story(view.sequence), layout.prefix_group.slot_tokens),
        "shortest_hit_tokens": layout.slot_alignment_tokens + layout.skipped_tokens + 1,
        "store": view.store,
        "lease": lease_to_json(view.lease),
        "arrived_at": rfc3339(times.arrived_s),
        "wait_s": _since(times.arrived_s, times.scheduled_s),
        "tier_wait_s": times.tier_s,
        "load_s": times.load_s,
        "first_token_s": _since(times.arrived_s, times.computed_s),
        "finished_at": rfc3339_or_none(times.finished_s),
        "error": view.error,
    }


def _since(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else max(0.0, end_s - start_s)


class OverrideView(PolicyView):
    """The effective policy of a request id, and the override in it."""

    id: str
    override: OverrideState | None = Field(description="null if the request is known and nothing is overridden")


class RequestQuery(PageQuery):
    """Filter of requests."""

    cursor: PositionCursor = None
    state: RequestPhase | None = Field(default=None, description="only those in this state")
    tenant: str | None = Field(default=None, min_length=1, max_length=512, description="digest of the tenant's name")
    session: str | None = Field(
        default=None, min_length=1, max_length=512, description="id of the session, or a glob of it; `*` is any"
    )
    missed: bool = Field(default=False, description="only those that missed more than the tail")
    since: Moment | None = Field(default=None, description="only those that arrived at this time or later, RFC 3339")

    def fits(self, view: RequestView) -> bool:
        """Return whether a request meets all conditions."""
        return (
            (self.state is None or view.phase == self.state)
            and (self.tenant is None or view.tenant == self.tenant)
            and (self.session is None or view.session == self.session or self._has_session(view))
            and (not self.missed or view.missed_tokens.num_avoidable() > 0)
            and (self.since is None or view.times.arrived_s >= self.since.timestamp())
        )

    def _has_session(self, view: RequestView) -> bool:
        return view.session is not None and fnmatchcase(view.session, self.session or "")


router = admin_router(prefix="/requests")


@router.get("", summary="Live and recent requests, newest first", response_model=Page[RequestModel], tags=_REQUESTS)
def list_requests(context: Context, query: Annotated[RequestQuery, Query()]) -> Response:
    """Every live request, and the last 1,000 that finished."""
    now_s = time.time()
    after = None if query.cursor is None else int(query.cursor)
    scheduler = context.scheduler
    views = scheduler.requests.page(after, query.limit, now_s, query.fits)
    items = [_to_json(context, view, scheduler.policies.override(_ids_of(view), now_s)) for view in views]
    next_cursor = str(views[-1].sequence) if len(views) == query.limit else None
    return page_response(items, next_cursor)


def _find(context: AdminContext, request_id: str, now_s: float) -> tuple[RequestView | None, Override | None]:
    """Return a request and its override; 404 without either."""
    scheduler = context.scheduler
    request = scheduler.requests.find(request_id, now_s)
    override = scheduler.policies.override((request_id,) if request is None else _ids_of(request), now_s)
    if request is None and override is None:
        raise Problem(404, f"no request {request_id[:200]!r} is known, and there is no override for it")
    return request, override


def _override_view(context: AdminContext, request_id: str, now_s: float) -> dict[str, Any]:
    request, override = _find(context, request_id, now_s)
    if request is None or (override is not None and request.phase is RequestPhase.FINISHED):
        # The policy if the request came now: a finished request's own policy no longer applies.
        policies = context.scheduler.policies
        effective = policies.expected((request_id,) if request is None else _ids_of(request), now_s)
    else:
        effective = request.policy
    return {**policy_to_json(effective), "id": request_id, "override": _override_to_json(override)}


@router.get("/{id:path}/policy", summary="The policy of a request id", response_model=OverrideView, tags=_POLICIES)
def get_override(context: Context, request_id: RequestId) -> dict[str, Any]:
    """Field by field with its source. 404 if neither a request nor an override of this id is known."""
    return _override_view(context, request_id, time.time())


@router.put(
    "/{id:path}/policy", summary="Override the policy of one request", response_model=OverrideView, tags=_POLICIES
)
async def put_override(
    context: Context, audit: Audited, request_id: RequestId, body: Annotated[OverrideBody, Body()]
) -> dict[str, Any]:
    """Before the request arrives or while it runs; replaces its earlier override. Expires after `ttl_s`."""
    check_retain_s(context, body.retain_s)
    now_s = time.time()
    override = Override(request_id, body.patch(), now_s + body.ttl_s)
    await audit.apply(partial(context.policies.set_override, override, now_s))
    context.wake()
    return _override_view(context, request_id, now_s)


@router.delete("/{id:path}/policy", summary="Delete an override", status_code=204, tags=_POLICIES)
async def delete_override(context: Context, audit: Audited, request_id: RequestId) -> None:
    """404 if there is none for exactly this id."""
    if not await audit.apply(partial(context.policies.drop_override, request_id, time.time())):
        raise Problem(404, f"request {request_id[:200]!r} has no override")
    context.wake()


# Last, because its path also matches the paths of the routes above.
@router.get("/{id:path}", summary="One request", response_model=RequestModel, tags=_REQUESTS)
def get_request(context: Context, request_id: RequestId) -> dict[str, Any]:
    """By the id that the client sent, or the engine's. 404 if neither a request nor an override is known."""
    now_s = time.time()
    request, override = _find(context, request_id, now_s)
    if request is not None:
        return _to_json(context, request, override)
    # One that has not arrived; the policy is that of its id alone, without rules.
    effective = context.scheduler.policies.expected((request_id,), now_s)
    override_json, policy_json = _override_to_json(override), policy_to_json(effective)
    return {"id": request_id, "state": EXPECTED, "policy": policy_json, "override": override_json}
