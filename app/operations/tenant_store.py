"""Limits of tenants in the pool: written to the database first, applied once they are there, and at the next start.

The default of all tenants is the setting `KVFERRY_TENANT_MAX_BYTES`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from sqlalchemy import Connection

from kvferry.app.common.call_errors import NamedConflict
from kvferry.app.store import MetadataStore
from kvferry.core.keys import is_tenant_digest
from kvferry.core.pool.tenant_limits import TenantLimits

_log = logging.getLogger(__name__)

MAX_LIMITS = 10_000
"""Tenants with limits of their own."""
MAX_BYTES = 2**53 - 1
CHECK_S = 0.2
"""Time in which one check evicts what tenants have beyond their limits; the next one continues."""
BETWEEN_STEPS_S = 0.0001
"""Pause between steps, so that other threads can acquire the manager lock."""


class TenantStore:
    """The only way in which limits of tenants change: by changes for `Database.change`, on the writer thread."""

    def __init__(
        self,
        store: MetadataStore,
        limits: TenantLimits,
        guarding: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        """`guarding` is the context in which the pool's blocks are evicted."""
        self.limits = limits
        self._store = store
        self._guarding = guarding

    def load(self) -> None:
        """Apply the limits that an earlier process left, before the engine starts."""
        for tenant, max_bytes in list(self._store.reader.load_tenant_limits().items())[:MAX_LIMITS]:
            is_valid = max_bytes is None or (type(max_bytes) is int and 0 <= max_bytes <= MAX_BYTES)
            if is_tenant_digest(tenant) and is_valid:
                self.limits.set_limit(tenant, max_bytes)
            else:
                _log.warning("stored record not valid, skipped: limit of tenant %r", tenant)

    def set_limit(self, tenant: str, max_bytes: int | None, connection: Connection) -> Callable[[], bool]:
        """Set the limit of a tenant, None for no limit; the result is whether it had one. Raises `NamedConflict`."""
        own = self.limits.own_limits()
        if tenant not in own and len(own) >= MAX_LIMITS:
            raise NamedConflict(
                "too-many", f"{MAX_LIMITS:,} tenants have limits already: delete one, or change the default"
            )
        self._store.writer.save_tenant_limit(tenant, max_bytes, connection)

        def apply() -> bool:
            self.limits.set_limit(tenant, max_bytes)
            return tenant in own

        return apply

    def unset_limit(self, tenant: str, connection: Connection) -> Callable[[], bool]:
        """Delete the limit of a tenant, so that the default applies; the result is False without one."""
        was_stored = self._store.writer.delete_tenant_limit(tenant, connection)

        def apply() -> bool:
            was_set = self.limits.unset_limit(tenant)
            return was_stored or was_set

        return apply

    def check(self) -> None:
        """Evict what tenants have beyond their limits, for a bounded time."""
        end_s = time.monotonic() + CHECK_S
        has_more = True
        while has_more and time.monotonic() < end_s:
            with self._guarding("limits of tenants"):
                has_more = self.limits.step(time.time())
            time.sleep(BETWEEN_STEPS_S if has_more else 0)
