"""What caches of other sizes would have served."""

from __future__ import annotations

from kvferry.app.api.calls import admin_router
from kvferry.app.api.context import Context
from kvferry.app.telemetry.curve import WhatIfAnswer

router = admin_router(prefix="/what-if", tags=["stats"])


@router.get("", summary="Hit rates at other cache sizes")
def get_what_if(context: Context) -> WhatIfAnswer:
    """The share of the prompt tokens that one LRU cache of each size would have served since `since`.

    From the reuse distances of the keys of requests, with `what_if=true`, the default. `notes` says what is left out.
    """
    with context.prompts.lock:
        return context.what_if.answer(context.prompts.num_dropped)
