"""The metadata store: slots, history and what operators want, in SQLite, written behind the engine."""

from app.store.cursors import Page
from app.store.database import Database, check_database, downgrade, upgrade
from app.store.errors import StoreError, StoreUnavailable
from app.store.intents import Intents
from app.store.journal import Journal, JournalStats
from app.store.migrate import Upgrade
from app.store.name_claim import NameClaim, check_name, claim_name
from app.store.projection import DirtySource
from app.store.queries import StoreReader
from app.store.records import (
    AgeBucket,
    AuditEntry,
    AuditRecord,
    EvictionFilter,
    EvictionRecord,
    EvictionSummary,
    OverrideRecord,
    RuleRecord,
    SlotRecord,
)
from app.store.store import Store
from app.store.trim import HistoryLimits

__all__ = [
    "AgeBucket",
    "AuditEntry",
    "AuditRecord",
    "Database",
    "DirtySource",
    "EvictionFilter",
    "EvictionRecord",
    "EvictionSummary",
    "HistoryLimits",
    "Intents",
    "Journal",
    "JournalStats",
    "NameClaim",
    "OverrideRecord",
    "Page",
    "RuleRecord",
    "SlotRecord",
    "Store",
    "StoreError",
    "StoreReader",
    "StoreUnavailable",
    "Upgrade",
    "check_database",
    "check_name",
    "claim_name",
    "downgrade",
    "upgrade",
]
