"""What this version does not offer yet: settings with fewer choices than they will have. To lift one, edit its line."""

from __future__ import annotations

from collections.abc import Mapping

from kvferry.core.pool.eviction.evictor import EVICTION_POLICIES

OFFERED: Mapping[str, tuple[object, ...]] = {
    "eviction_policy": tuple(EVICTION_POLICIES),
}


def not_offered(name: str, value: object) -> str | None:
    """What is offered instead, when this version does not offer that value."""
    choices = OFFERED.get(name)
    if choices is None or value in choices:
        return None
    words = ", ".join(str(choice) for choice in choices)
    return f"this version offers only {words}"
