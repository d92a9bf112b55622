"""Counts of what each tenant's requests stored, and of what served their prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvferry.core.counters import copy_counts
from kvferry.core.stats import PromptTokens

MAX_TENANTS = 10_000
"""Tenants with counts; those that were not active for longest lose theirs to others."""


@dataclass(slots=True)
class TenantCounts:
    """Counts of the requests of one tenant since the start, or since it was last active among so many."""

    prompt_tokens: PromptTokens = field(default_factory=PromptTokens)
    stored_blocks: int = 0
    stored_bytes: int = 0


class TenantUsage:
    """Counts by tenant; None stands for requests without one. Requires: manager lock held."""

    def __init__(self) -> None:
        self._counts: dict[str | None, TenantCounts] = {}

    def of(self, tenant: str | None) -> TenantCounts:
        """Return the counts of a tenant that is active now."""
        counts = self._counts.pop(tenant, None)
        if counts is None:
            counts = TenantCounts()
            if len(self._counts) >= MAX_TENANTS:
                del self._counts[next(iter(self._counts))]
        self._counts[tenant] = counts
        return counts

    def tenants(self) -> list[str | None]:
        """Return the tenants that have counts."""
        return list(self._counts)

    def copies(self, tenants: Iterable[str | None]) -> list[TenantCounts]:
        """Return copies of the counts of these tenants."""
        return [copy_counts(self._counts.get(tenant) or TenantCounts()) for tenant in tenants]
