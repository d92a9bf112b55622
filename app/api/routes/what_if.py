"""What other pool sizes, eviction policies and store modes would have found."""

from __future__ import annotations

from dataclasses import replace

from kvferry.app.api.calls import admin_router
from kvferry.app.api.context import Context
from kvferry.app.what_if import WhatIfAnswer

router = admin_router(prefix="/what-if", tags=["stats"])


@router.get("", summary="What other pools would have found")
def get_what_if(context: Context) -> WhatIfAnswer:
    """Simulated with the keys of the requests of the last day, since the start or the last change of the size.

    Empty `curves` before the first request, and where nothing is simulated: with `what_if=false`, and neither
    eviction policy nor store mode `auto`.
    """
    return replace(context.process.what_if.answer(), auto=context.process.auto.state())
