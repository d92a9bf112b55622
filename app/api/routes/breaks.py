"""Where prompts break off from earlier ones although they are equal again behind."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import Query
from pydantic import BaseModel, Field

from kvferry.app.api.auth import Caller, TokenKind
from kvferry.app.api.calls import admin_router
from kvferry.app.api.context import Context
from kvferry.app.common.times import rfc3339
from kvferry.core.breaks import TOKENS_BEFORE, WINDOW_S, Break


class BreakView(BaseModel):
    """A span that differs between prompts, with what it costs."""

    position: int = Field(description="first token that differs, the smallest of its prompts")
    exact: bool = Field(description="false where the token ids are equal: then it is the first token of the block")
    estimated: bool = Field(description="whether only a sample of the prompts was compared")
    shared_tokens: int = Field(description="tokens of the prefix that the prompts share, in whole blocks")
    requests: int
    tokens: int = Field(description="computed prompt tokens, in whole blocks that are equal again behind the span")
    share: float = Field(description="of all prompt tokens computed in the window, 0 to 1")
    texts: list[str] | None = Field(
        description="the span in an earlier prompt and in a later one, or their beginnings; null for the read token "
        "and where no tokenizer is at hand"
    )
    text_before: str | None = Field(description=f"the last {TOKENS_BEFORE} tokens before the span; null as `texts`")
    token_ids: list[list[int]] | None = Field(description="the same; null for the read token, and where ids are equal")
    token_ids_before: list[int] | None = Field(description="as `text_before`; null as `token_ids`")
    examples: list[str] = Field(description="ids of those two requests")
    advice: str


class BreaksAnswer(BaseModel):
    """The breaks of a window, the most expensive first."""

    since: str
    computed_tokens: int = Field(description="prompt tokens that were computed in the window")
    explained_bytes: int = Field(description="memory that token ids and spans take, at most KVFERRY_EXPLAIN_BYTES")
    next_cursor: str | None = None
    items: list[BreakView]


router = admin_router(prefix="/breaks", tags=["stats"])


@router.get("", summary="What makes prompts miss near their front")
def get_breaks(
    context: Context,
    token: Caller,
    window_s: Annotated[float, Query(ge=1, le=WINDOW_S, description="seconds until now")] = WINDOW_S,
) -> BreaksAnswer:
    """The spans that differ between prompts which are equal before and behind, such as a date or an id.

    With `explain_bytes` above 0, requests that end are compared by their token ids. Texts and ids of spans need the
    admin token, if there is one.
    """
    now_s = time.time()
    with context.prompts.lock:
        computed, found = context.partings.breaks.find(now_s, window_s)
        num_bytes = context.partings.breaks.num_bytes
    may_read = token.kind is not TokenKind.READ
    return BreaksAnswer(
        since=rfc3339(now_s - window_s),
        computed_tokens=computed,
        explained_bytes=num_bytes,
        items=[
            BreakView(
                position=one.position,
                exact=one.is_exact,
                estimated=one.is_estimated,
                shared_tokens=one.shared_tokens,
                requests=one.num_requests,
                tokens=one.num_tokens,
                share=min(one.num_tokens / computed, 1.0) if computed else 0.0,
                **_contents(context, one if may_read and one.is_exact else None),
                examples=list(one.examples),
                advice=advise(one),
            )
            for one in found
        ],
    )


def _contents(context: Context, shown: Break | None) -> dict[str, Any]:
    """Return the fields that have a part of a prompt; null where none is shown."""
    if shown is None:
        return dict.fromkeys(("texts", "text_before", "token_ids", "token_ids_before"))
    decode = context.decode
    return {
        "texts": None if decode is None else [decode(ids) for ids in shown.token_ids],
        "text_before": None if decode is None else decode(shown.ids_before),
        "token_ids": [list(ids) for ids in shown.token_ids],
        "token_ids_before": list(shown.ids_before),
    }


def advise(one: Break) -> str:
    """Return what makes these prompts hit."""
    if not one.is_exact:
        return (
            "The tokens are equal: an image, an adapter or embeddings differ here. Put what stays before them, or give "
            "what stays the same id."
        )
    earlier, later = one.num_spanned
    if not later:
        return (
            "Later prompts leave out what earlier ones have here: keep it (reasoning, old turns), or drop whole blocks "
            "from the end of a conversation, not from its front."
        )
    if not earlier:
        return "Later prompts have something new here: append it behind what stays."
    return (
        "This span changes from prompt to prompt: move it behind what stays (a date or an id into the last message), "
        "or keep one order (tools)."
    )
